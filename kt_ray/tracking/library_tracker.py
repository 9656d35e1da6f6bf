"""A tracker by its own library, behind a guard: whatever that does, training does not notice.

All calls run on one thread of their own, behind a bounded queue. An exception, a full queue, a start that
takes too long: one warning, and the tracker is off for the rest of the run. metrics.jsonl still has every
figure.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from kt_ray.config.schema import TrackingConfig
from kt_ray.tracking.metrics import Value

log = logging.getLogger(__name__)

_QUEUE = 4096  # calls waiting; a run that logs once a second is then more than an hour behind


def kept_id(file: Path) -> str:
    """The id of the run that an earlier process began; "" = none did."""
    return file.read_text(encoding="utf-8").strip() if file.exists() else ""


class LibraryTracker(ABC):
    """One run of a tracker. `enabled` tells whether it still is one.

    Subclasses call their library in `_open`, `_log`, `_table`, `_artifact` and `_close`: on the thread.

    Args:
        config: project, entity, mode and tags.
        init_timeout: seconds for the library's start, in which training waits.
        finish_timeout: seconds for the last uploads, in which the driver waits.
    """

    title: ClassVar[str]  # in messages
    late: ClassVar[str] = ""  # how to send what did not get out in time

    def __init__(
        self, config: TrackingConfig, *, init_timeout: float = 60.0, finish_timeout: float = 120.0
    ) -> None:
        self.config = config
        self.init_timeout = init_timeout
        self.finish_timeout = finish_timeout
        self.enabled = False
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(_QUEUE)
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    @abstractmethod
    def _open(self, run_dir: Path, config: Mapping[str, Any], first_step: int) -> None:
        """Start the run, or go on with the one that `run_dir` says it has."""

    @abstractmethod
    def _log(self, step: int, metrics: Mapping[str, Value]) -> None: ...

    @abstractmethod
    def _table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None: ...

    @abstractmethod
    def _close(self, status: str) -> None: ...

    def _artifact(self, path: Path) -> None:  # noqa: B027
        """Nothing, where the tracker takes no files."""

    def start(self, run_dir: Path, config: Mapping[str, Any], *, first_step: int = 0) -> None:
        """Open a run, or resume the one that `run_dir` has.

        Most trackers cannot take figures back: steps that run again after a crash have two points there,
        equal ones, since a replay is exact.
        """
        self.enabled = True
        ready = threading.Event()

        def init() -> None:
            self._open(run_dir, config, first_step)
            if not self.enabled:  # too late: a server would call the run a running one for ever
                self._close("interrupted")
            ready.set()

        self._thread = threading.Thread(target=self._work, name=f"kt_ray-{self.title}", daemon=True)
        self._calls.put_nowait(init)
        self._thread.start()
        if not self._wait(ready, self.init_timeout):
            self._disable(f"its start took longer than {self.init_timeout:g} s")

    def log(self, step: int, metrics: Mapping[str, Value]) -> None:
        record = dict(metrics)
        self._submit(lambda: self._log(step, record))

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A table (base against adapter, samples), its rows with one entry per column; None is empty."""
        copied = [list(row) for row in rows]
        self._submit(lambda: self._table(name, list(columns), copied))

    def artifact(self, path: Path) -> None:
        """Hand over a directory (or file), with tracking.upload_adapter."""
        if self.config.upload_adapter:
            self._submit(lambda: self._artifact(path))

    def finish(self, status: str) -> None:
        """Wait for what is queued, then close the run."""
        done = threading.Event()

        def close() -> None:
            self._close(status)
            done.set()

        self._submit(close)
        if self.enabled and not self._wait(done, self.finish_timeout):
            self._disable(f"it did not finish within {self.finish_timeout:g} s{self.late}")
        with self._lock:
            self.enabled = False
        # Full: the thread is stuck in the library; it is a daemon and ends with the process.
        with contextlib.suppress(queue.Full):
            self._calls.put_nowait(None)

    def _submit(self, call: Callable[[], None]) -> None:
        if not self.enabled:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._disable(f"{_QUEUE} figures wait to be sent")

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                if self.enabled:
                    call()
                    continue
            except BaseException as error:  # SystemExit included: a library's own code may raise it
                self._disable(f"{type(error).__name__}: {' '.join(str(error).split())}")
            # Else a server calls the run a running one for ever, and W&B hands it to the next job.
            with contextlib.suppress(BaseException):
                self._close("failed")
            return

    def _wait(self, event: threading.Event, timeout: float) -> bool:
        """Whether the event came; at once when the thread has given up (then `enabled` is off already)."""
        deadline = time.monotonic() + timeout
        while self.enabled and time.monotonic() < deadline:
            if event.wait(0.05):
                return True
        return event.is_set() or not self.enabled

    def _disable(self, reason: str) -> None:
        with self._lock:
            if not self.enabled:
                return
            # Before `enabled` changes, so that the warning is out when the waiting driver continues.
            log.warning("%s is switched off for this run, training goes on: %s", self.title, reason)
            self.enabled = False
