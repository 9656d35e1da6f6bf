"""The Ray exporter against a stand-in for ray.util.metrics that is as strict as the real one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import ray.util.metrics

from kt_ray.actors.ray.ray_metrics import RayMetrics
from kt_ray.tracking.metrics import METRICS, StepMetrics


class Recorder:
    made: ClassVar[dict[str, Recorder]] = {}

    def __init__(self, name: str, description: str = "", tag_keys: tuple[str, ...] = ()) -> None:
        assert description
        self.tag_keys, self.values = tag_keys, {}
        Recorder.made[name] = self

    def _key(self, tags: dict[str, str]) -> tuple[Any, ...]:
        assert set(tags) == set(self.tag_keys)
        return tuple(tags[k] for k in self.tag_keys)


class Gauge(Recorder):
    def set(self, value: float, tags: dict[str, str]) -> None:
        self.values[self._key(tags)] = value


class Counter(Recorder):
    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert value > 0
        key = self._key(tags)
        self.values[key] = self.values.get(key, 0.0) + value


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr(ray.util.metrics, "Gauge", Gauge)
    monkeypatch.setattr(ray.util.metrics, "Counter", Counter)
    monkeypatch.setattr(Recorder, "made", {})
    return Recorder.made


def record(step: int, **more: Any) -> dict[str, Any]:
    base = {"epoch": 0.1, "grad_norm": 1.0, "lr": 0.1, "tokens": 40, "tokens_per_s": 20.0, "seconds": 2.0}
    return StepMetrics(step=step, loss=3.0 - step, **(base | more)).to_dict()


def test_gauges_keep_the_last_value_and_counters_add(made):
    exporter = RayMetrics()
    assert made == {}
    exporter.start(Path("/runs/a"), {})
    assert set(made) == {spec.name for spec in METRICS}
    exporter.log(0, {"eval_loss": 9.0})
    exporter.log(1, record(1, host_rss_bytes={"driver": 7}))
    exporter.log(2, record(2, seconds_experts=0.5, tokens=0))
    exporter.artifact(Path("/runs/a/adapter"))
    exporter.finish("finished")
    assert made["kt_ray_loss"].values == {("a",): 1.0}
    assert made["kt_ray_step"].values == {("a",): 2.0}
    assert made["kt_ray_eval_loss"].values == {("a",): 9.0}
    assert made["kt_ray_tokens_total"].values == {("a",): 40.0}
    assert made["kt_ray_seconds"].values == {("a", "total"): 2.0, ("a", "experts"): 0.5}
    assert made["kt_ray_host_rss_bytes"].values == {("a", "driver"): 7.0}


def test_gauges_are_set_again_while_a_step_lasts(made, monkeypatch):
    """Ray forgets a gauge that nobody set for twenty seconds."""
    sets = []
    monkeypatch.setattr(Gauge, "set", lambda self, value, tags: sets.append((value, tags)))
    exporter = RayMetrics(refresh=0.01)
    exporter.start(Path("/runs/a"), {})
    exporter.log(1, {"eval_loss": 9.0})
    once = 2  # eval_loss and step; the thread may have set them again already
    deadline = time.monotonic() + 10
    while len(sets) < 3 * once and time.monotonic() < deadline:
        time.sleep(0.01)
    exporter.finish("finished")
    assert sets[once : 2 * once] == sets[:once] == sets[-once:]
    ended = len(sets)
    time.sleep(0.05)
    assert len(sets) == ended
    assert made["kt_ray_tokens_total"].values == {}
