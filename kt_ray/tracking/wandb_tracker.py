"""Weights & Biases. An offline or interrupted run can be sent later with `wandb sync`."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kt_ray.disk import write_atomic
from kt_ray.tracking.library_tracker import LibraryTracker, kept_id
from kt_ray.tracking.metrics import Value

log = logging.getLogger(__name__)

ID_FILE = "wandb_id"

_STEP = "step"  # the x axis of every chart; W&B's own counter refuses to go back on resume


class WandbTracker(LibraryTracker):
    """One W&B run; the file wandb_id has its id. `mode` (of wandb.init) and `url` say how it went."""

    title = "W&B"
    late = "; send the rest with `wandb sync`"
    mode: str | None = None
    url: str | None = None

    def _open(self, run_dir: Path, config: Mapping[str, Any], first_step: int) -> None:
        import wandb

        id_file = run_dir / ID_FILE
        run_id = kept_id(id_file) or uuid.uuid4().hex[:12]
        mode: Any = self.config.mode
        if mode == "auto":
            has_key = bool(os.environ.get("WANDB_API_KEY") or wandb.api.api_key)
            mode = os.environ.get("WANDB_MODE") or ("online" if has_key else "offline")
        online = mode not in ("offline", "disabled", "dryrun")
        # console="off": W&B would otherwise take over standard output, which the progress bar draws on.
        settings: dict[str, Any] = {"console": "off", "silent": True, "init_timeout": self.init_timeout}
        known = getattr(wandb.Settings, "model_fields", {})
        if "finish_timeout" in known:  # absent from older releases
            settings["finish_timeout"] = self.finish_timeout
        if "create_new" in str(known.get("reinit")):  # likewise; W&B's default is the run that is still open
            settings["reinit"] = "create_new"
        run = wandb.init(
            project=self.config.project,
            entity=self.config.entity,
            name=run_dir.name,
            id=run_id,
            resume="allow",
            mode=mode,
            tags=list(self.config.tags),
            dir=str(run_dir),
            config=dict(config),
            settings=wandb.Settings(**settings),
        )
        if run.id != run_id:
            raise RuntimeError(f"wandb.init returned run {run.id}, which another job has not finished")
        self._run: Any = run
        run.define_metric(_STEP)
        run.define_metric("*", step_metric=_STEP)
        self._name = run_dir.name
        self._wandb: Any = wandb
        self.mode, self.url = mode, run.url if online else None  # offline W&B prints that there is none
        # Written once the run exists: a failed start leaves no id behind to resume.
        write_atomic(id_file, run_id + "\n")
        log.info("wandb run %s, %s %s", run_id, mode, self.url or f"in {run_dir / 'wandb'}")

    def _log(self, step: int, metrics: Mapping[str, Value]) -> None:
        self._run.log({**metrics, _STEP: step})

    def _table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self._run.log({name: self._wandb.Table(columns=columns, data=rows)})

    def _artifact(self, path: Path) -> None:
        """Upload a directory (or file) as an artifact of type "model"."""
        artifact = self._wandb.Artifact(f"{path.name}-{self._name}", type="model")
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                artifact.add_file(
                    str(file), name=str(file.relative_to(path if path.is_dir() else path.parent))
                )
        self._run.log_artifact(artifact)

    def _close(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)
