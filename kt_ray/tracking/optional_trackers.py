"""TensorBoard, MLflow, SwanLab and Trackio. Their libraries are imported only when they are chosen."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kt_ray.config.fields import fields
from kt_ray.disk import write_atomic
from kt_ray.tracking.library_tracker import LibraryTracker, kept_id
from kt_ray.tracking.metrics import Value

log = logging.getLogger(__name__)


def _numbers(metrics: Mapping[str, Value]) -> dict[str, float]:
    """The figures that a chart can show."""
    return {k: float(v) for k, v in metrics.items() if isinstance(v, int | float) and math.isfinite(v)}


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value. An option that is a mapping stays whole: MLflow refuses patterns as names."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        key = prefix + name
        within = isinstance(value, Mapping) and value and key not in fields()
        flat |= _flat(value, f"{key}.") if within else {key: value}
    return flat


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    def line(cells: Sequence[Any]) -> str:
        texts = ("" if cell is None else str(cell) for cell in cells)
        return "| " + " | ".join(" ".join(t.replace("|", "\\|").split()) for t in texts) + " |"

    return "\n".join([line(columns), line(["---"] * len(columns)), *map(line, rows)]) + "\n"


class TensorBoardTracker(LibraryTracker):
    """Event files in the run's directory `tensorboard`."""

    title = "TensorBoard"

    def _open(self, run_dir: Path, config: Mapping[str, Any], first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run_dir / "tensorboard"
        # purge_step: what TensorBoard has of these steps, which run again, is no longer shown
        self._writer: Any = SummaryWriter(str(folder), purge_step=first_step or None, flush_secs=10)
        lines = (f"    {key}: {value}" for key, value in _flat(config).items())
        self._writer.add_text("config", "\n".join(lines), first_step)
        log.info("tensorboard --logdir %s", folder)

    def _log(self, step: int, metrics: Mapping[str, Value]) -> None:
        for key, value in _numbers(metrics).items():
            self._writer.add_scalar(key, value, step)

    def _table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self._writer.add_text(name, _markdown(columns, rows))

    def _close(self, status: str) -> None:
        self._writer.close()


class MlflowTracker(LibraryTracker):
    """A run of the experiment tracking.project, on the server of MLFLOW_TRACKING_URI. The file mlflow_id
    has its id."""

    title = "MLflow"

    def _open(self, run_dir: Path, config: Mapping[str, Any], first_step: int) -> None:
        import mlflow
        from mlflow.entities import Metric, Param

        self._metric: Any = Metric
        self._client: Any = mlflow.MlflowClient()
        id_file = run_dir / "mlflow_id"
        self._id = kept_id(id_file)
        if self._id:
            self._client.update_run(self._id, status="RUNNING")
        else:
            project = self.config.project
            known = self._client.get_experiment_by_name(project)
            number = known.experiment_id if known else self._client.create_experiment(project)
            tags = dict.fromkeys(self.config.tags, "true")
            self._id = self._client.create_run(number, tags=tags, run_name=run_dir.name).info.run_id
            # MLflow's limits: 100 parameters per call, of 6,000 characters each; they cannot be changed later
            parameters = [Param(key, str(value)[:6000]) for key, value in _flat(config).items()]
            for at in range(0, len(parameters), 100):
                self._client.log_batch(self._id, params=parameters[at : at + 100])
            write_atomic(id_file, self._id + "\n")
        log.info("mlflow run %s at %s", self._id, mlflow.get_tracking_uri())

    def _log(self, step: int, metrics: Mapping[str, Value]) -> None:
        now = int(time.time() * 1000)
        figures = [self._metric(key, value, now, step) for key, value in _numbers(metrics).items()]
        self._client.log_batch(self._id, metrics=figures)

    def _table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self._client.log_text(self._id, _markdown(columns, rows), f"{name}.md")

    def _artifact(self, path: Path) -> None:
        if path.is_dir():
            self._client.log_artifacts(self._id, str(path), path.name)
        else:
            self._client.log_artifact(self._id, str(path))

    def _close(self, status: str) -> None:
        ends = {"finished": "FINISHED", "interrupted": "KILLED"}
        self._client.set_terminated(self._id, ends.get(status, "FAILED"))


class SwanLabTracker(LibraryTracker):
    """A run of the project tracking.project in the workspace tracking.entity. Its id: file swanlab_id."""

    title = "SwanLab"
    late = "; send the rest with `swanlab sync`"

    def _open(self, run_dir: Path, config: Mapping[str, Any], first_step: int) -> None:
        import swanlab

        # Neither questions nor standard output, which the progress bar draws on.
        settings = swanlab.Settings(interactive=False, terminal={"proxy_type": "none"})
        id_file = run_dir / "swanlab_id"
        mode = self.config.mode
        if mode == "auto":
            # SWANLAB_MODE, or what `swanlab offline` and the like wrote
            chosen = "mode" in settings.model_fields_set
            mode = settings.mode if chosen else "online" if settings.api_key else "offline"
        online = mode == "online"
        known = kept_id(id_file) if online else ""  # only the cloud goes on with a run
        self._swanlab: Any = swanlab
        self._run: Any = swanlab.init(
            project=self.config.project,
            workspace=self.config.entity,
            name=run_dir.name,
            tags=list(self.config.tags),
            mode=mode,
            log_dir=str(run_dir / "swanlab"),
            config=dict(config),
            settings=settings,
            **({"id": known, "resume": "allow"} if known else {}),
        )
        if mode == "disabled":
            return
        write_atomic(id_file, self._run.id + "\n")
        place = self._run.url if online else f"{mode} in {self._run.dir}"
        log.info("swanlab run %s, %s", self._run.id, place)

    def _log(self, step: int, metrics: Mapping[str, Value]) -> None:
        self._run.log(_numbers(metrics), step=step)

    def _table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self._run.log({name: self._swanlab.Text(_markdown(columns, rows))})

    def _close(self, status: str) -> None:
        ends = {"finished": "success", "interrupted": "aborted"}
        self._run.finish(ends.get(status, "crashed"))


class TrackioTracker(LibraryTracker):
    """A run of the project tracking.project, in Trackio's own directory or in the Space that TRACKIO_SPACE_ID
    names."""

    title = "Trackio"

    def _open(self, run_dir: Path, config: Mapping[str, Any], first_step: int) -> None:
        import trackio

        self._trackio: Any = trackio
        id_file = run_dir / "trackio_run"
        name = kept_id(id_file)
        self._run: Any = trackio.init(
            project=self.config.project,
            name=name or run_dir.name,
            config=_flat(config),
            resume="allow" if name else "never",
            embed=False,
        )
        write_atomic(id_file, self._run.name + "\n")
        log.info("trackio show --project %s, run %s", self.config.project, self._run.name)

    def _log(self, step: int, metrics: Mapping[str, Value]) -> None:
        self._run.log(_numbers(metrics), step=step)

    def _table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self._run.log({name: self._trackio.Markdown(_markdown(columns, rows))})

    def _close(self, status: str) -> None:
        self._run.finish()
