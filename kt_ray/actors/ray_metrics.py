"""The figures of a run as Ray metrics: on the Ray dashboard, in Prometheus, in Grafana.

Ray exports each under the prefix "ray_", about ten seconds after it was set.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kt_ray.tracking.metrics import METRICS, MetricSpec, Value, samples


class RayMetrics:
    """A `kt_ray.tracking.Tracker` that sets gauges and counters in this process.

    They are made in `start`, by which time the process has to be connected to Ray: metrics made
    before would be dropped.
    """

    def __init__(self) -> None:
        self._metrics: dict[str, Any] = {}
        self._run = ""

    def start(
        self, run_dir: Path, config: Mapping[str, Any], run_id: str | None = None, *, first_step: int = 0
    ) -> None:
        self._run = run_dir.name
        self._metrics = {spec.name: _make(spec) for spec in METRICS}

    def log(self, step: int, metrics: Mapping[str, Value]) -> None:
        for spec, value, tags in samples({**metrics, "step": step}):
            metric = self._metrics[spec.name]
            tags = {"run": self._run, **tags}
            if spec.kind == "gauge":
                metric.set(value, tags=tags)
            elif value > 0:  # Ray refuses to count nothing
                metric.inc(value, tags=tags)

    def artifact(self, path: Path) -> None:
        """Nothing: metrics hold figures only."""

    def finish(self, status: str) -> None:
        """Nothing: Ray keeps the last values until the process ends."""


def _make(spec: MetricSpec) -> Any:
    from ray.util.metrics import Counter, Gauge

    return (Gauge if spec.kind == "gauge" else Counter)(
        spec.name, description=spec.description, tag_keys=spec.tags
    )
