"""Where the figures of a run go: metrics.jsonl always, other trackers on request, a plot, the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from kt_ray.config.schema import TrackingConfig
from kt_ray.tracking.jsonl import JsonlTracker, read_jsonl, series
from kt_ray.tracking.library_tracker import LibraryTracker
from kt_ray.tracking.metrics import StepMetrics
from kt_ray.tracking.optional_trackers import (
    MlflowTracker,
    SwanLabTracker,
    TensorBoardTracker,
    TrackioTracker,
)
from kt_ray.tracking.tracker import MultiTracker, Tracker
from kt_ray.tracking.wandb_tracker import WandbTracker

__all__ = [
    "JsonlTracker",
    "MlflowTracker",
    "MultiTracker",
    "StepMetrics",
    "WandbTracker",
    "library_trackers",
    "make_tracker",
    "read_jsonl",
    "series",
]


_LIBRARIES: dict[str, type[LibraryTracker]] = {
    "wandb": WandbTracker,
    "tensorboard": TensorBoardTracker,
    "mlflow": MlflowTracker,
    "swanlab": SwanLabTracker,
    "trackio": TrackioTracker,
}


def library_trackers(config: TrackingConfig) -> list[Tracker]:
    """Those of tracking.name beside metrics.jsonl."""
    return [_LIBRARIES[name](config) for name in config.names if name in _LIBRARIES]


def make_tracker(config: TrackingConfig, extra: Sequence[Tracker] = ()) -> MultiTracker:
    """The trackers of a run: metrics.jsonl, those of tracking.name, and `extra` (the Ray exporter)."""
    return MultiTracker([JsonlTracker(), *library_trackers(config), *extra])
