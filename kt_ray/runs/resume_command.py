"""resume=runs/NAME on the command line: the run's own configuration, with what the command line changes.

With mode=chat, predict or serve it is the run's model and adapter that are used.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kt_ray.checkpoint_dirs import step_of
from kt_ray.config.compose import keys_given
from kt_ray.config.fields import fields, show
from kt_ray.config.secret_values import MASK, is_secret
from kt_ray.errors import UserError
from kt_ray.runs.rundir import find_checkpoints, flatten, is_run, read_config

# Where modes that answer take adapters from.
_ANSWERING = {
    "chat": ("generate", "adapter"),
    "predict": ("generate", "adapter"),
    "serve": ("serve", "adapters"),
}
_EXAMPLE = "write resume=runs/NAME, and behind it what is to change"


@dataclass(frozen=True)
class ResumeCommand:
    """A run to go on with."""

    run: Path
    checkpoint: Path | None  # one that was named; None = the newest intact one
    changes: tuple[str, ...]  # the other keys, KEY=VALUE

    @classmethod
    def of(cls, keys: Sequence[str]) -> ResumeCommand | None:
        """The one that resume=DIRECTORY among the keys asks for; None = there is none.

        Raises:
            UserError: it names no run, or stands beside what chooses everything itself.
        """
        named = [key for key in keys if key.startswith("resume=")]
        if strange := next((key for key in keys if key == "resume" or key.startswith("+resume")), None):
            raise UserError("resume names no run", observed=strange, remedy=_EXAMPLE)
        if not named:
            return None
        path = Path(named[-1].partition("=")[2].strip("'\"")).expanduser().absolute()
        changes = tuple(key for key in keys if key not in named)
        for key in changes:
            if key.startswith(("recipe", "experiment=")):
                observed = f"{named[-1]} {key}"
                raise UserError(
                    "two of these choose everything", observed=observed, remedy=f"leave out {key}"
                )
        run = path.parent.parent if path.parent.name == "checkpoints" else path
        if not is_run(run):
            meant = next(filter(is_run, (Path("runs", path.name), *path.parents)), None)
            raise UserError(
                "resume names no run",
                where=named[-1],
                observed="no config.yaml" if path.is_dir() else "no such directory",
                required="the directory of a run, or one of its checkpoints/step_...",
                remedy=_EXAMPLE if meant is None else f"write resume={meant}",
            )
        return cls(run, path if path != run else None, changes)

    def configuration(self, composed: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """The configuration to go on with, and lines that say what differs from the run's.

        Args:
            composed: the defaults with the changes, of which only these are taken.

        Raises:
            UserError: config.yaml cannot be read, or lacks what it does not show.
        """
        saved = read_config(self.run / "config.yaml")
        gone = [f"  {key}={_shown(key, value)} is no option any more" for key, value in _drop_unknown(saved)]
        before = flatten(saved)
        names = [name for change in self.changes for name in keys_given(change)]
        if "trainer.epochs" in names:
            names.append("trainer.max_steps")  # which epochs unset
        for name in names:
            _take(saved, composed, name.split("."))
        mode = saved.get("mode")
        if "train_server" in (mode, mode == "plan" and saved.get("plan", {}).get("mode")):
            path = before.get("model.path")
            model = f"model={before.get('model.name')}" if path is None else f"model.path={path}"
            raise UserError(
                "mode=train_server goes on with no run: its clients begin and load trainings of their own",
                where=f"resume={self.run}",
                remedy=f"write {shlex.quote(model)} in the place of resume=",
            )
        group, key = _ANSWERING.get(str(mode), ("", ""))
        own_adapter = bool(group) and not any(
            name == group or name.startswith(f"{group}.{key}") for name in names
        )
        if self.checkpoint is not None and (own_adapter or mode == "eval"):
            raise _no_adapter(self.checkpoint, self.run, str(mode), before.get("optim.warmup"))
        for field, value in flatten(saved).items():
            given = any(field == name or field.startswith(f"{name}.") for name in names)
            if MASK in show(value) and before.get(field) == value and not given:
                _unmask(saved, field, self.run)
        run = saved.setdefault("run", {})
        rooted = any(name == "run" or name.startswith("run.root") for name in names)
        elsewhere = rooted or any(name.startswith("run.name") for name in names)
        if not any(name.startswith("run.overwrite") for name in names):
            run["overwrite"] = False
        if not rooted:  # the directory may have moved
            run["root"] = str(self.run.parent)
        if not elsewhere:
            run["name"] = self.run.name
        if own_adapter:  # that the run has made
            own = str(self._adapter())
            saved.setdefault(group, {})[key] = {self.run.name: own} if mode == "serve" else own
        elif not group and "trainer.resume" not in names:
            newest = find_checkpoints(self.run)[-1:] if elsewhere else []
            checkpoint = self.checkpoint or next(iter(newest), None)
            saved.setdefault("trainer", {})["resume"] = str(checkpoint or "latest")
        after = flatten(saved)
        differ = {key for key in {*before, *after} if before.get(key) != after.get(key)}
        lines = [
            f"  {name}: {_shown(name, before.get(name))} → {_shown(name, after.get(name))}"
            for name in sorted(differ - {"run.root", "run.overwrite", "trainer.resume", "generate.adapter"})
            if not name.startswith("serve.adapters")
        ]
        lines = gone + lines
        return saved, [f"goes on as {self.run} began" + (", but for" if lines else ""), *lines]

    def _adapter(self) -> Path:
        if not (self.run / "adapter" / "adapter_config.json").is_file():
            raise UserError(
                "the run has written no adapter yet",
                where=str(self.run),
                remedy=f"finish it with resume={self.run}, or ask the base model with generate.adapter=null",
            )
        return self.run


def _no_adapter(checkpoint: Path, run: Path, mode: str, warmup: Any) -> UserError:
    """The adapter in the run's directory is that of its end, not of a checkpoint. warmup: optim.warmup of the
    run, which may be more than the checkpoint's steps."""
    step = step_of(checkpoint.resolve().name)
    written = f"resume={checkpoint} run.name=NEW trainer.max_steps={step or 'STEP'}"
    if isinstance(warmup, int | float) and step is not None and warmup > step:
        written += " optim.warmup=0"
    remedy = f"write resume={run} for the run's own adapter; {written} writes the checkpoint's into a new run"
    return UserError(
        "a checkpoint holds the state of a training, and no adapter that answers",
        where=f"resume={checkpoint}",
        observed=f"mode={mode}",
        required="a run with an adapter",
        remedy=remedy,
    )


def _shown(key: str, value: Any) -> str:
    return MASK if value is not None and is_secret(key) else show(value)


def _drop_unknown(saved: dict[str, Any]) -> list[tuple[str, Any]]:
    """Takes out what is no option of this version, and returns it."""
    gone = []
    for key, value in flatten(saved).items():
        if not any(key == known or key.startswith(f"{known}.") for known in fields()):
            *path, last = key.split(".")
            group = saved
            for name in path:
                group = group[name]
            gone.append((key, group.pop(last, value)))
    return gone


def _take(saved: dict[str, Any], composed: Mapping[str, Any], path: list[str]) -> None:
    """The value at `path` from `composed` instead; gone where it is not there."""
    name, *rest = path
    if name not in composed:
        saved.pop(name, None)
    elif rest and isinstance(composed[name], Mapping):
        inner = saved.get(name)
        saved[name] = inner = inner if isinstance(inner, dict) else {}
        _take(inner, composed[name], rest)
    else:
        saved[name] = composed[name]


def _unmask(saved: dict[str, Any], key: str, run: Path) -> None:
    """A secret goes back to its default; what only holds one must be given again."""
    *path, last = key.split(".")
    if not is_secret(last):
        raise UserError(
            "the run's config.yaml does not show a secret that it was given",
            where=f"{run / 'config.yaml'}, {key}",
            observed=show(flatten(saved)[key]),
            remedy=f"add {key}=<value> to the command",
        )
    for name in path:
        saved = saved[name]
    del saved[last]
