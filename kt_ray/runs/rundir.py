"""The directory of one run: its name, its files, and which run and checkpoint a resume continues.

runs/<name>/  config.yaml  plan.json  env.json  metrics.jsonl  train.log  loss.png  wandb_id
              checkpoints/step_000300/...  adapter/  timelines/step_000010.json
              predictions.jsonl  predictions.json  predictions_base.jsonl  losses.json  eval.json  eval.md
              report.html
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kt_ray.checkpoint_dirs import MANIFEST, SUPERSEDED, list_checkpoints
from kt_ray.config.faults import value_of
from kt_ray.config.mapping import dated_name, with_keys
from kt_ray.config.resume_line import resume_line
from kt_ray.config.schema import Config
from kt_ray.config.secret_values import without_secrets
from kt_ray.disk import half_written, only_warned, write_atomic
from kt_ray.errors import UserError
from kt_ray.parse import check_shape, read_yaml
from kt_ray.runs.run_lock import FILE as LOCK
from kt_ray.runs.run_lock import RunLock, require_free
from kt_ray.tracking.jsonl import FILE, read_jsonl

log = logging.getLogger(__name__)

# All that a run writes at its top level: what run.overwrite removes, and nothing else.
_RESULTS = (
    *("predictions.jsonl", "predictions.json", "predictions_base.jsonl", "losses.json"),
    *("eval.json", "eval.md", "report.html"),
)
_FILES = (
    *("plan.json", "env.json", "metrics.jsonl", "rollouts.jsonl", "train.log", "supervisor.log", "loss.png"),
    *("wandb_id", "mlflow_id", "swanlab_id", "trackio_run"),
    *_RESULTS,
)
_DIRECTORIES = ("checkpoints", "adapter", "timelines", "profile", "wandb", "tensorboard", "swanlab")
# Keys of files and directories that a run reads, and which an earlier run may have written
_INPUTS = (
    "lora.adapter",
    "rule.experts.load",
    "model.tokenizer",
    "model.chat_template",
    "data.path",
    "data.eval_path",
)
_CONFIG = "config.yaml"  # written first: a directory that holds it is a run
# What only the holder of the lock writes: those half written are left by a process that died.
_LOCKED = (_CONFIG, "plan.json", "env.json", "metrics.jsonl", "rollouts.jsonl")


@dataclass(frozen=True)
class RunDir:
    """One run's directory."""

    path: Path  # absolute; exists
    checkpoint: Path | None = None  # the checkpoint that the run resumes from; None = it starts afresh
    continued: bool = False  # whether the directory already held this run (its curve and logs go on)
    lock: RunLock | None = None  # held until `close`
    settings: str = ""  # its config.yaml

    @classmethod
    def create(cls, config: Config, checkpoint: Path | None = None) -> RunDir:
        """Make or find the directory that `run` and `trainer.resume` ask for, and write its config.yaml.

        Args:
            checkpoint: the result of `checkpoint_to_resume`, if it is known already.

        Raises:
            UserError: the place cannot be written, another process writes it, the directory already holds a
                run, or there is nothing to resume from.
        """
        checkpoint = checkpoint or checkpoint_to_resume(config)
        root, named = _root_and_named(config)
        try:
            if checkpoint is None:
                path, lock = _fresh(root, named, config)
                run = cls(path, lock=lock)
            else:
                run = _resumed(checkpoint, root, named, config)
            text = yaml.safe_dump(without_secrets(plain(config)), sort_keys=False, allow_unicode=True)
            run = dataclasses.replace(run, settings=text)
            try:
                for name in _LOCKED:
                    for half in run.path.glob(half_written(name)):
                        half.unlink()
                write_atomic(run.path / _CONFIG, text)
                _require_renaming(run.checkpoints if run.checkpoints.is_dir() else run.path)
            except (OSError, UserError):
                run.close()
                raise
        except OSError as error:
            raise _not_writable(named or root, error.strerror or str(error)) from error
        return run

    def close(self) -> None:
        """Let another process write the directory."""
        if self.lock is not None:
            self.lock.release()

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def checkpoints(self) -> Path:
        """Made by whoever writes the first checkpoint."""
        return self.path / "checkpoints"

    @property
    def adapter(self) -> Path:
        """Made by whoever writes the adapter."""
        return self.path / "adapter"

    def regain(self) -> None:
        """Before something is written that nobody may lose: the directory is made again if it was removed.

        Raises:
            UserError: it is another run's now.
            OSError: it cannot be written.
        """
        if self.lock is not None:
            self.lock.regain()
        if self.settings and not is_run(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path / _CONFIG, self.settings)
            log.warning("%s was removed and is made again, without what it held", self.path)

    def write_plan(self, plan: Any) -> None:
        """plan.json: a `kt_ray.placement` plan, or any tree of dataclasses, mappings and lists."""
        self._note("plan.json", json.dumps(plain(plan), indent=1) + "\n")

    def write_env(self, environment: Mapping[str, Any]) -> None:
        """env.json: see `kt_ray.runs.environment`, and what the cluster adds to it."""
        text = json.dumps(without_secrets(plain(environment)), indent=2)
        self._note("env.json", text + "\n")

    def _note(self, name: str, text: str) -> None:
        """A file that people read: a full disk is no reason to end a run."""
        with only_warned(f"{self.path / name} cannot be written"):
            write_atomic(self.path / name, text)

    def remove_results(self) -> list[Path]:
        """Remove answers, losses, scores and the report: the adapter that they are about will change.

        Returns:
            The files removed.
        """
        files = [path for name in _RESULTS if (path := self.path / name).is_file()]
        for file in files:
            file.unlink()
        return files


def checkpoint_to_resume(config: Config) -> Path | None:
    """The checkpoint that `trainer.resume` names; None = start afresh. Only looks: nothing is written.

    Raises:
        UserError: as `RunDir.create`.
    """
    root, named = _root_and_named(config)
    if config.trainer.resume is None:
        return None
    if config.trainer.resume == "latest":
        return _latest_checkpoint(root, named, config.model.name)
    checkpoint = _named_checkpoint(Path(config.trainer.resume))
    if checkpoint.name.startswith(SUPERSEDED) and _continues(checkpoint, named, config):
        raise UserError(
            "the run went back to before this checkpoint",
            where=str(checkpoint),
            observed="a directory whose figures and other checkpoints are of the steps taken since",
            required="another directory for what goes on from it",
            remedy="add run.name=NEW",
        )
    return checkpoint


def resumed_step(config: Config) -> int:
    """The step that the run goes on from; 0 = from the beginning, or the checkpoint's name does not say.

    A link, such as `best`, says what it points at.
    """
    checkpoint = checkpoint_to_resume(config)
    found = None if checkpoint is None else re.search(r"step_(\d+)", checkpoint.resolve().name)
    return int(found[1]) if found else 0  # also of superseded_step_000300_2


def directory_of(config: Config) -> Path:
    """The directory that `RunDir.create` would choose; one without a name is made, empty."""
    root, named = _root_and_named(config)
    if named is not None:
        return named
    checkpoint = checkpoint_to_resume(config)
    if checkpoint is not None and _continues(checkpoint, named, config):
        return checkpoint.parent.parent
    return _new_directory(root, config)


def job_of_multirun(config: Config) -> Config:
    """The configuration of a job: with trainer.resume=latest one that has nothing to go on from begins."""
    if config.trainer.resume != "latest":
        return config
    run = _root_and_named(config)[1]
    if run is None or any(run.glob("checkpoints/[!.]*")) or (run / "adapter").exists():
        return config
    return with_keys(config, {"trainer.resume": None, "run.overwrite": is_run(run)})


def dated_as_before(config: Config) -> Config:
    """The configuration with data.date set: as given, else as in the run to resume, else today."""
    if config.data.date is not None:
        return config
    checkpoint = checkpoint_to_resume(config)
    before = None
    if checkpoint is not None:
        run = checkpoint.parent.parent
        settings = settings_of(run)
        if is_run(run) and not settings:
            raise UserError(
                "the configuration of the run to resume cannot be read",
                where=str(run / _CONFIG),
                required="the date that the run's rows were rendered with (data.date)",
                remedy="restore the file, or set data.date=<the day the run began>",
            )
        before = settings.get("data.date")
    day = str(before or datetime.date.today().isoformat())
    return dataclasses.replace(config, data=dataclasses.replace(config.data, date=day))


def place_to_write(config: Config) -> tuple[Path, int]:
    """The directory that the run, or mode=train, will write, and bytes of files there that make room.

    Raises:
        UserError: as `RunDir.create` of trainer.resume.
    """
    root, named = _root_and_named(config)
    checkpoint = checkpoint_to_resume(config)
    if checkpoint is not None and _continues(checkpoint, named, config):
        path, own = checkpoint.parent.parent, True
        going = find_checkpoints(path)
        # Those after it are set aside and stay, as all do with trainer.keep_checkpoints=0.
        pushed_out = checkpoint in going and config.trainer.keep_checkpoints
        going = going[: going.index(checkpoint) + 1] if pushed_out else []
    else:
        path, own = named or root, named is not None and config.run.overwrite
        going = [*path.glob("checkpoints/step_*")] if own else []
    # hidden: what a process that died was writing; the next checkpoint, or adapter, removes it
    hidden = ("checkpoints/.step_*/*", "adapter/.adapter_model.safetensors.partial*")
    files = [file for pattern in hidden if own for file in path.glob(pattern)]
    files += [file for directory in going for file in directory.glob("*")]
    return path, sum(file.stat().st_size for file in files)


def refuse_taken(config: Config) -> None:
    """The cheap look at the run directory that will be written, before the model is looked at.

    Raises:
        UserError: another process writes it, nobody may, or as `RunDir.create`.
    """
    root, named = _root_and_named(config)
    try:
        checkpoint = checkpoint_to_resume(config)
    except UserError:
        _require_writable(named or root)  # which says why there is none
        raise
    continues = checkpoint is not None and _continues(checkpoint, named, config)
    _require_writable(checkpoint.parent.parent if checkpoint and continues else named or root)
    for run in (named, checkpoint.parent.parent if checkpoint and named is None else None):
        if run is not None:
            require_free(run)
            _refuse_directories(run)
    if named is not None and not continues:
        _refuse_other_files(named)
        _refuse_trained(named, config)


def _require_writable(place: Path) -> None:
    """Refuses a directory that cannot be made or written, or a link to nothing on the way to it."""
    there = next((path for path in (place, *place.parents) if os.path.lexists(path)), Path("/"))
    if not os.path.isdir(there):
        raise _not_writable(place, f"{there} is no directory")
    if not os.access(there, os.W_OK | os.X_OK):
        raise _not_writable(place, f"{there} may not be written to")


def _not_writable(place: Path, observed: str) -> UserError:
    # Not Path's own, which raise where a name is too long or a directory may not be looked into.
    links = (p for p in (place, *place.parents) if os.path.islink(p) and not os.path.exists(p))
    if (link := next(links, None)) is not None:
        observed = f"{link}, a link to {link.readlink()}, which is not there (a disk not mounted?)"
    return UserError(
        "the run directory cannot be written",
        where=str(place),
        observed=observed,
        remedy="set run.root to a directory that you may write to",
    )


def plain(value: Any) -> Any:
    """Dataclasses, mappings and sequences as dicts and lists, paths as strings: what JSON and YAML hold."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(entry) for entry in value]
    return str(value) if isinstance(value, Path) else value


def is_run(path: Path) -> bool:
    """Whether a directory is a run's."""
    return (path / _CONFIG).is_file()


def runs_in(root: Path) -> list[Path]:
    """The run directories directly below `root`."""
    return [file.parent for file in root.glob(f"*/{_CONFIG}")]


def settings_of(run: Path) -> dict[str, Any]:
    """The run's configuration by command-line key; {} = it has none that can be read."""
    try:
        return flatten(read_config(run / _CONFIG))
    except UserError:
        return {}  # some other tool's file


def read_config(file: Path) -> dict[str, Any]:
    """A run's config.yaml, nested.

    Raises:
        UserError: it is damaged.
    """
    remedy = "restore it from train.log or the command line in env.json"
    config = read_yaml(file, "a file of the run", remedy)
    return check_shape(config, {str: object}, file, "a file of the run", remedy)


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, keys joined by dots. model.config, a model's own config.json, stays whole."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and name != "model.config":
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def find_checkpoints(run: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest step first."""
    return list_checkpoints(run / "checkpoints")


def _root_and_named(config: Config) -> tuple[Path, Path | None]:
    """run.root, and the run directory when it is named."""
    root = Path(config.run.root).absolute()
    return root, None if config.run.name is None else root / config.run.name


def _new_directory(root: Path, config: Config) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    base = path = root / dated_name(config.model.name)
    number = 1
    while True:
        try:
            path.mkdir()  # decides between two runs that start in the same second
            return path
        except FileExistsError:
            number += 1
            path = root / f"{base.name}-{number}"


def _fresh(root: Path, named: Path | None, config: Config) -> tuple[Path, RunLock]:
    """A new or emptied run directory, and this process's lock on it."""
    if named is None:
        path = _new_directory(root, config)
        return path, RunLock(path)
    _refuse_other_files(named)
    named.mkdir(parents=True, exist_ok=True)
    lock = RunLock(named)
    try:
        _refuse_trained(named, config)
        if is_run(named):
            _clear(named)
    except BaseException:
        lock.release()
        raise
    return named, lock


def _require_renaming(place: Path) -> None:
    """Checkpoints are made whole by renaming their directory, which object stores mounted as disks may
    refuse: that is to show before the first step, not after the night."""
    before, after = place / ".rename_test.partial", place / ".rename_test"
    try:
        for left in (before, after):  # by a process that was killed here
            shutil.rmtree(left, ignore_errors=True)
        before.mkdir()
        (before / "file").touch()
        try:
            before.rename(after)
        except OSError as error:
            raise UserError(
                "the file system does not rename directories, by which a checkpoint is made whole",
                where=str(place),
                observed=error.strerror,
                remedy="set run.root to a directory on another one",
            ) from error
    finally:
        for left in (before, after):
            shutil.rmtree(left, ignore_errors=True)


def _refuse_directories(run: Path) -> None:
    if taken := next((run / name for name in _FILES if (run / name).is_dir()), None):
        raise UserError(
            "a directory lies where the run has a file",
            where=str(taken),
            required=f"a file, or nothing of the name {taken.name}",
            remedy=f"move it away: mv {taken} {taken}.moved",
        )


def _refuse_other_files(named: Path) -> None:
    mine = (LOCK, half_written(_CONFIG))  # of a run that died as it began
    taken = named.is_dir() and any(not any(map(path.match, mine)) for path in named.iterdir())
    if taken and not is_run(named):
        raise UserError(
            "run.name names a directory that holds other files",
            where=str(named),
            required="a new or empty directory",
            remedy="choose another run.name",
        )


def _refuse_trained(named: Path, config: Config) -> None:
    if is_run(named) and config.run.overwrite:
        _refuse_own_inputs(named, config)
    if is_run(named) and _trained(named) and not config.run.overwrite:
        on = f"to continue it, {resume_line(named)}; else " if find_checkpoints(named) else ""
        raise UserError(
            "this directory already holds a run",
            where=str(named),
            remedy=f"{on}choose another run.name, or set run.overwrite=true to delete that run",
        )


def _refuse_own_inputs(named: Path, config: Config) -> None:
    """What the new run reads must not be deleted with the old one."""
    removed = [(named / name).resolve() for name in (*_DIRECTORIES, *_FILES)]
    inputs = [("data.sources", source.get("path")) for source in config.data.sources or ()]
    inputs += [(key, value_of(config, key)) for key in _INPUTS]
    for key, value in inputs:
        for given in [value] if isinstance(value, str) else value or []:
            path = Path(given).resolve()
            if path == named.resolve() or any(path.is_relative_to(gone) for gone in removed):
                raise UserError(
                    "run.overwrite=true would delete what the run is to read",
                    where=str(named),
                    observed=f"{key}={given}",
                    required="a place that run.overwrite leaves alone",
                    remedy="choose another run.name",
                )


def _trained(run: Path) -> bool:
    """Whether a run has anything to lose. One that ended before its first step may be started again, also
    where the untrained model was evaluated."""
    metrics = run / FILE
    figures = metrics.exists() and metrics.stat().st_size > 0
    steps = {record.get("step") for record in read_jsonl(metrics)} if figures else {0}
    return steps != {0} or any((run / d).exists() for d in ("checkpoints", "adapter"))


def _clear(run: Path) -> None:
    for name in _DIRECTORIES:
        if (run / name).is_symlink():
            (run / name).unlink()
        elif (run / name).is_dir():
            shutil.rmtree(run / name)
    # The mark of a run goes last: an interrupted clearing can be repeated.
    for name in (*_FILES, _CONFIG):
        (run / name).unlink(missing_ok=True)


def _latest_checkpoint(root: Path, named: Path | None, model: str) -> Path:
    if named is not None:
        checkpoints = find_checkpoints(named)
        if not checkpoints:
            raise UserError(
                "there is nothing to resume",
                where=str(named),
                observed="no checkpoint" if named.is_dir() else "no such directory",
                required="a run with a complete checkpoint under checkpoints/",
                remedy="check run.name and run.root, or begin anew: trainer.resume=null run.overwrite=true",
            )
        return checkpoints[-1]
    newest = [
        checkpoints[-1]
        for run in runs_in(root)
        if (checkpoints := find_checkpoints(run)) and settings_of(run).get("model.name") == model
    ]
    if not newest:
        raise UserError(
            f"trainer.resume=latest: no run of model {model!r} has a checkpoint",
            where=str(root),
            remedy="give run.name or run.root, or leave out trainer.resume to start afresh",
        )
    return max(newest, key=lambda checkpoint: (checkpoint / MANIFEST).stat().st_mtime_ns)


def _named_checkpoint(checkpoint: Path) -> Path:
    if not (checkpoint / MANIFEST).exists():
        raise UserError(
            "trainer.resume names no complete checkpoint",
            where=str(checkpoint),
            observed=f"no {MANIFEST}" if checkpoint.is_dir() else "no such directory",
            required="'latest', or a directory runs/<name>/checkpoints/step_...",
            remedy="see runs/<name>/checkpoints for the existing ones",
        )
    # "latest" is a link to the step's directory; checkpoints/ itself may be one to another disk.
    aim = checkpoint.resolve()
    beside = Path(os.path.abspath(checkpoint)).parent / aim.name
    return beside if is_run(beside.parent.parent) and beside.resolve() == aim else aim


def _continues(checkpoint: Path, named: Path | None, config: Config) -> bool:
    """Whether the run goes on in the directory that holds its checkpoint."""
    holder = checkpoint.parent.parent
    in_run = checkpoint.parent.name == "checkpoints" and is_run(holder)
    own = named is None or named.resolve() == holder.resolve()
    return config.trainer.resume == "latest" or (in_run and own)


def _resumed(checkpoint: Path, root: Path, named: Path | None, config: Config) -> RunDir:
    """The checkpoint's own run, or a new one that begins with it."""
    if _continues(checkpoint, named, config):
        holder = checkpoint.parent.parent
        return RunDir(holder, checkpoint, continued=True, lock=RunLock(holder))
    path, lock = _fresh(root, named, config)
    return RunDir(path, checkpoint, lock=lock)
