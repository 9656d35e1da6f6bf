"""Weights & Biases behind a guard: whatever it does, training does not notice.

All calls run on one thread of their own, behind a bounded queue. An exception, a full queue, an
init that takes too long: one warning, and W&B is off for the rest of the run. metrics.jsonl still
has every figure, and an offline or interrupted run can be sent later with `wandb sync`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from kt_ray.config.schema import TrackingConfig
from kt_ray.disk import write_atomic
from kt_ray.tracking.metrics import Value

log = logging.getLogger(__name__)

ID_FILE = "wandb_id"

_QUEUE = 4096  # calls waiting; a run that logs once a second is then more than an hour behind
_STEP = "step"  # the x axis of every chart; W&B's own counter refuses to go back on resume


class WandbTracker:
    """One W&B run. `enabled`, `mode` ("online" or "offline") and `url` tell how it went.

    Args:
        config: project, entity, mode and tags.
        init_timeout: seconds for `wandb.init`, in which training waits.
        finish_timeout: seconds for the last uploads, in which the driver waits.
    """

    def __init__(
        self,
        config: TrackingConfig,
        *,
        init_timeout: float = 60.0,
        finish_timeout: float = 120.0,
    ) -> None:
        self.config = config
        self._name = ""
        self.init_timeout = init_timeout
        self.finish_timeout = finish_timeout
        self.enabled = False
        self.mode: str | None = None
        self.url: str | None = None
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(_QUEUE)
        self._thread: threading.Thread | None = None
        self._wandb: Any = None
        self._run: Any = None
        self._lock = threading.Lock()

    def start(self, run_dir: Path, config: Mapping[str, Any], *, first_step: int = 0) -> None:
        """Open a W&B run, or resume the one whose id the file wandb_id in `run_dir` holds.

        W&B cannot take figures back: steps that run again after a crash have two points there, equal ones,
        since a replay is exact.
        """
        self.enabled = True
        ready = threading.Event()
        self._name, id_file = run_dir.name, run_dir / ID_FILE
        known_id = id_file.read_text(encoding="utf-8").strip() if id_file.exists() else ""
        run_id = known_id or uuid.uuid4().hex[:12]

        def init() -> None:
            self._init(run_dir, config, run_id)
            ready.set()

        self._thread = threading.Thread(target=self._work, name="kt_ray-wandb", daemon=True)
        self._calls.put_nowait(init)
        self._thread.start()
        if not self._wait(ready, self.init_timeout):
            self._disable(f"wandb.init took longer than {self.init_timeout:g} s")

    def log(self, step: int, metrics: Mapping[str, Value]) -> None:
        record = {**metrics, _STEP: step}
        self._submit(lambda: self._run.log(record))

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A table (base against adapter, samples), its rows with one entry per column; None is empty."""
        data = [list(row) for row in rows]
        self._submit(lambda: self._run.log({name: self._wandb.Table(columns=list(columns), data=data)}))

    def artifact(self, path: Path) -> None:
        """Upload a directory (or file) as an artifact of type "model"."""
        if not self.config.upload_adapter:
            return

        def upload() -> None:
            artifact = self._wandb.Artifact(f"{path.name}-{self._name}", type="model")
            for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
                if file.is_file():
                    artifact.add_file(
                        str(file), name=str(file.relative_to(path if path.is_dir() else path.parent))
                    )
            self._run.log_artifact(artifact)

        self._submit(upload)

    def finish(self, status: str) -> None:
        """Wait for what is queued, then close the run; "finished" gives exit code 0."""
        done = threading.Event()

        def close() -> None:
            self._run.finish(exit_code=0 if status == "finished" else 1)
            done.set()

        self._submit(close)
        if self.enabled and not self._wait(done, self.finish_timeout):
            self._disable(
                f"wandb did not finish within {self.finish_timeout:g} s; send the rest with `wandb sync`"
            )
        with self._lock:
            self.enabled = False
        # Full: the thread is stuck in W&B; it is a daemon and ends with the process.
        with contextlib.suppress(queue.Full):
            self._calls.put_nowait(None)

    def _init(self, run_dir: Path, config: Mapping[str, Any], run_id: str) -> None:
        import wandb

        has_key = bool(os.environ.get("WANDB_API_KEY") or wandb.api.api_key)
        online = self.config.mode == "online" or (self.config.mode == "auto" and has_key)
        mode: Literal["online", "offline"] = "online" if online else "offline"
        # console="off": W&B would otherwise take over standard output, which the progress bar draws on.
        settings: dict[str, Any] = {"console": "off", "silent": True, "init_timeout": self.init_timeout}
        if "finish_timeout" in getattr(wandb.Settings, "model_fields", ()):  # absent from older releases
            settings["finish_timeout"] = self.finish_timeout
        run = wandb.init(
            project=self.config.project,
            entity=self.config.entity,
            name=self._name,
            id=run_id,
            resume="allow",
            mode=mode,
            tags=list(self.config.tags),
            dir=str(run_dir),
            config=dict(config),
            settings=wandb.Settings(**settings),
        )
        run.define_metric(_STEP)
        run.define_metric("*", step_metric=_STEP)
        self._wandb, self._run, self.mode, self.url = wandb, run, mode, run.url
        # Written once the run exists: a failed start leaves no id behind to resume.
        write_atomic(run_dir / ID_FILE, run_id + "\n")
        log.info("wandb run %s, %s %s", run_id, mode, run.url or f"in {run_dir / 'wandb'}")

    def _submit(self, call: Callable[[], None]) -> None:
        if not self.enabled:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._disable(f"{_QUEUE} figures wait to be sent")

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            if not self.enabled:
                return  # W&B itself closes a late init when the process ends
            try:
                call()
            except BaseException as error:  # SystemExit included: W&B's own code may raise it
                self._disable(f"{type(error).__name__}: {' '.join(str(error).split())}")
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
            log.warning("W&B is switched off for this run, training goes on: %s", reason)
            self.enabled = False
