"""The figures of a run as Ray metrics: on the Ray dashboard, in Prometheus, in Grafana.

Ray exports each under the prefix "ray_", about ten seconds after it was set, and once more when the
process disconnects. A gauge that is not set again is exported once and forgotten after twenty
seconds, so gauges are set again while the run goes on; counters stay as long as the cluster.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kt_ray.tracking.metrics import METRICS, MetricSpec, Value, samples


class RayMetrics:
    """A `kt_ray.tracking.Tracker` that sets gauges and counters in this process.

    They are made in `start`, by which time the process has to be connected to Ray: metrics made
    before would be dropped.

    Args:
        refresh: seconds between two settings of the same gauge value; Ray collects every ten.
    """

    def __init__(self, refresh: float = 5.0) -> None:
        self._refresh = refresh
        self._metrics: dict[str, Any] = {}
        self._run = ""
        # (metric, its tags) -> last value; the thread below and `log` share it.
        self._gauges: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, run_dir: Path, config: Mapping[str, Any], *, first_step: int = 0) -> None:
        self._run = run_dir.name
        self._metrics = {spec.name: _make(spec) for spec in METRICS}
        self._thread = threading.Thread(target=self._keep, name="kt_ray-ray-metrics", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, Value]) -> None:
        with self._lock:
            for spec, value, tags in samples({**metrics, "step": step}):
                metric = self._metrics[spec.name]
                tags = {"run": self._run, **tags}
                if spec.kind == "gauge":
                    metric.set(value, tags=tags)
                    self._gauges[spec.name, tuple(tags.items())] = value
                elif value > 0:  # Ray refuses to count nothing
                    metric.inc(value, tags=tags)

    def artifact(self, path: Path) -> None:
        """Nothing: metrics hold figures only."""

    def finish(self, status: str) -> None:
        """Set the last values once more, for the export that follows when the process disconnects."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._set_again()

    def _keep(self) -> None:
        while not self._ended.wait(self._refresh):
            self._set_again()

    def _set_again(self) -> None:
        with self._lock:
            for (name, tags), value in self._gauges.items():
                self._metrics[name].set(value, tags=dict(tags))


def _make(spec: MetricSpec) -> Any:
    from ray.util.metrics import Counter, Gauge

    return (Gauge if spec.kind == "gauge" else Counter)(
        spec.name, description=spec.description, tag_keys=spec.tags
    )
