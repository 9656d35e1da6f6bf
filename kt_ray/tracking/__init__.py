"""Where the figures of a run go: metrics.jsonl always, W&B on request, a plot, the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from kt_ray.config.schema import TrackingConfig
from kt_ray.tracking.jsonl import JsonlTracker, read_jsonl, series
from kt_ray.tracking.metrics import METRICS, StepMetrics
from kt_ray.tracking.tracker import MultiTracker, Tracker
from kt_ray.tracking.wandb_tracker import WandbTracker

__all__ = [
    "METRICS",
    "JsonlTracker",
    "MultiTracker",
    "StepMetrics",
    "Tracker",
    "WandbTracker",
    "make_tracker",
    "read_jsonl",
    "series",
]


def make_tracker(config: TrackingConfig, extra: Sequence[Tracker] = ()) -> MultiTracker:
    """The trackers of a run: metrics.jsonl, W&B with `tracking=wandb`, and `extra` (the Ray exporter)."""
    trackers: list[Tracker] = [JsonlTracker()]
    if config.name == "wandb":
        trackers.append(WandbTracker(config))
    return MultiTracker([*trackers, *extra])
