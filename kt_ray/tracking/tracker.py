"""The tracker protocol, and several trackers behind one that cannot stop training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from kt_ray.tracking.metrics import Value

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """Takes the figures of a run somewhere."""

    def start(self, run_dir: Path, config: Mapping[str, Any], *, first_step: int = 0) -> None:
        """Called once, before any figure.

        Args:
            first_step: the smallest step that will be logged. Greater than 0 on resume: what was
                logged for this step or later is replaced.
        """

    def log(self, step: int, metrics: Mapping[str, Value]) -> None:
        """Figures of one step, in the order of steps. A step may come twice (an evaluation of its own)."""

    def artifact(self, path: Path) -> None:
        """A result: a file, or a directory with all its files."""

    def finish(self, status: str) -> None:
        """Called once, last. `status` is "finished", "interrupted" or "failed"."""


class MultiTracker:
    """Passes everything on to several trackers; one that raises is reported once and left out thereafter."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = list(trackers)

    def start(self, run_dir: Path, config: Mapping[str, Any], *, first_step: int = 0) -> None:
        self._each("start", lambda t: t.start(run_dir, config, first_step=first_step))

    def log(self, step: int, metrics: Mapping[str, Value]) -> None:
        self._each("log", lambda t: t.log(step, metrics))

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A table, to those that take tables; `rows` have one entry per column, None is empty."""
        for tracker in [t for t in self.trackers if hasattr(t, "table")]:
            self._one(tracker, "table", lambda t: t.table(name, columns, rows))

    def artifact(self, path: Path) -> None:
        self._each("artifact", lambda t: t.artifact(path))

    def finish(self, status: str) -> None:
        self._each("finish", lambda t: t.finish(status))

    def _each(self, what: str, call: Callable[[Tracker], None]) -> None:
        for tracker in list(self.trackers):
            self._one(tracker, what, call)

    def _one(self, tracker: Any, what: str, call: Callable[[Any], None]) -> None:
        try:
            call(tracker)
        except Exception as error:
            name = type(tracker).__name__
            log.warning("%s failed in %s and is switched off; training goes on: %r", name, what, error)
            self.trackers.remove(tracker)
