"""What a run directory holds, read for reports: figures, configuration, machine, expert load, answers.

A file that the run has not written (yet) is not an error: a report of a running run shows what exists. Only a
directory that is no run, or a damaged file, is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kt_ray.checkpoint_dirs import step_of
from kt_ray.config.fields import fields
from kt_ray.config.mapping import REMOVED
from kt_ray.config.secret_values import without_secrets
from kt_ray.errors import UserError
from kt_ray.parse import check_shape, read_json
from kt_ray.runs.rundir import find_checkpoints, flatten, is_run, plain, read_config
from kt_ray.tracking.jsonl import is_figure, read_jsonl, series
from kt_ray.tracking.metrics import loss_unit

Points = list[tuple[int, float]]
"""(step, value), in order of steps."""

_WHAT = "a file of the run"
_MOVE = "restore it, or move it away: the report then leaves it out"
_ENVIRONMENT = {"actors?": [{"layers?": (int, int)}], "argv?": [str]}
_SCORES = {"metrics?": {str: float}}
_EVALUATION = {"base?": _SCORES, "adapter?": _SCORES}
LAST = 10  # steps that a "final" figure is the mean of


@dataclass(frozen=True)
class RunData:
    """What is known of one run."""

    path: Path  # its directory
    config: dict[str, Any]  # config.yaml, nested
    records: list[dict[str, Any]]  # lines of metrics.jsonl
    environment: dict[str, Any] = field(default_factory=dict)  # env.json; empty = not written
    plan: dict[str, Any] = field(default_factory=dict)  # plan.json; empty = not written
    # MoE layer -> tokens of every expert [E], from the newest checkpoint; empty = none
    load: dict[int, list[int]] = field(default_factory=dict)
    load_step: int | None = None  # the step of that checkpoint
    evaluation: dict[str, Any] | None = None  # eval.json; None = not evaluated

    @property
    def name(self) -> str:
        return self.path.name

    def series(self, key: str) -> Points:
        """The finite values of one figure by step; the last of a step counts."""
        return series(self.records, key)

    def values(self, key: str) -> list[float]:
        """The same without steps."""
        return [value for _, value in self.series(key)]

    def keys(self, prefix: str) -> list[str]:
        """Names of the figures that begin with a prefix, sorted."""
        return sorted({key for record in self.records for key in record if key.startswith(prefix)})

    @property
    def steps(self) -> int:
        """Optimizer steps that the figures reach, skipped ones included."""
        return max((step for step, _ in self.series("loss") + self.series("skipped")), default=0)

    @property
    def loss_unit(self) -> str:
        """What the stage's loss is a mean over."""
        return loss_unit(str(self.settings().get("trainer.stage")))

    def settings(self) -> dict[str, Any]:
        """Every key of the configuration by its command-line name."""
        return flatten(self.config)

    def changed_settings(self) -> dict[str, Any]:
        """The settings that differ from the schema's default, without keys of earlier versions."""
        settings = {key: value for key, value in self.settings().items() if key not in REMOVED}
        defaults = {key: plain(known.default) for key, known in fields().items()}
        return {k: v for k, v in settings.items() if k not in defaults or v != defaults[k]}

    def figures(self) -> dict[str, float]:
        """The run in a few numbers, as far as it has them.

        loss: training loss, mean of the last steps; first_loss: of the first. eval_loss: the last held-out
        loss; eval_loss_best; eval_loss_before: at step 0. reward, first_reward, eval_reward and its like: the
        same of trainer.stage=grpo's rewards. steps: as `steps`. tokens, seconds: sums over the steps with
        figures; seconds_per_step: their mean. tokens_per_s: tokens over seconds, without the first step
        (caches, allocations) if there are others. host_bytes, gpu_bytes: peaks. recoveries, seconds_lost: of
        all processes. skipped: steps.
        """
        figures: dict[str, float] = {}
        for name, key, best in (("loss", "loss", min), ("reward", "policy_reward", max)):
            steps, held_out = self.values(key), self.series(f"eval_{name}")
            if steps:
                figures[f"first_{name}"] = steps[0]
                figures[name] = mean(steps[-LAST:])
            if held_out:
                figures[f"eval_{name}"] = held_out[-1][1]
                figures[f"eval_{name}_best"] = best(value for _, value in held_out)
                if held_out[0][0] == 0:
                    figures[f"eval_{name}_before"] = held_out[0][1]
        seconds, tokens = dict(self.series("seconds")), dict(self.series("tokens"))
        both = sorted(seconds.keys() & tokens.keys())
        if both:
            figures["steps"] = float(self.steps)
            figures["seconds"] = sum(seconds[step] for step in both)
            figures["seconds_per_step"] = figures["seconds"] / len(both)
            figures["tokens"] = sum(tokens[step] for step in both)
            warm = both[1:] or both
            time = sum(seconds[step] for step in warm)
            if time > 0:
                figures["tokens_per_s"] = sum(tokens[step] for step in warm) / time
        for key, prefix in (("host_bytes", "host_rss_bytes_"), ("gpu_bytes", "gpu_memory_bytes_")):
            peak = self._peak(prefix)
            if peak:
                figures[key] = peak
        if skipped := self.series("skipped"):
            figures["skipped"] = float(len(skipped))
        count, lost = self._recoveries()
        if count:
            figures["recoveries"], figures["seconds_lost"] = count, lost
        return figures

    def _recoveries(self) -> tuple[float, float]:
        """Lost actors and seconds: they grow within a process, and begin anew in the next one."""
        counts, seconds = dict(self.series("recoveries")), dict(self.series("seconds_lost"))
        count = lost = 0.0
        before = 0.0, 0.0
        for step, _ in self.series("loss"):
            now = counts.get(step, 0.0), seconds.get(step, 0.0)
            if now[0] < before[0] or now[1] < before[1]:
                count, lost = count + before[0], lost + before[1]
            before = now
        return count + before[0], lost + before[1]

    def _peak(self, prefix: str) -> float:
        """Largest sum over one record of the figures that begin with a prefix."""
        sums = (
            sum(float(v) for k, v in record.items() if k.startswith(prefix) and is_figure(v))
            for record in self.records
        )
        return max(sums, default=0.0)


def read_run(path: Path) -> RunData:
    """Read all files of a run directory.

    Raises:
        UserError: no run directory, or a file of it is damaged.
    """
    config_file = path / "config.yaml"
    if not is_run(path):
        raise UserError(
            "this is no run directory",
            where=str(path),
            observed="no config.yaml" if path.is_dir() else "no such directory",
            required="a directory that mode=train wrote",
            remedy="name one below run.root, for example run.name=<name>",
        )
    config = read_config(config_file)
    load_file, load_step = _newest_load(path)
    load = _json(load_file, {"slots?": {str: [int]}}).get("slots", {}) if load_file else {}
    if not all(layer.isdecimal() and len(layer) < 9 for layer in load):
        raise _damaged(load_file, "slots of something that is no layer")
    evaluation = path / "eval.json"
    return RunData(
        path=path,
        config=without_secrets(config),
        records=read_jsonl(path / "metrics.jsonl"),
        environment=without_secrets(_json(path / "env.json", _ENVIRONMENT)),
        plan=_json(path / "plan.json"),
        load={int(layer): list(load[layer]) for layer in sorted(load, key=int)},
        load_step=load_step,
        evaluation=_json(evaluation, _EVALUATION) if evaluation.is_file() else None,
    )


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean of at least one value."""
    return sum(values) / len(values)


def _newest_load(path: Path) -> tuple[Path | None, int | None]:
    for checkpoint in reversed(find_checkpoints(path)):
        file = checkpoint / "expert_load.json"
        if file.is_file():
            return file, step_of(checkpoint.name)
    return None, None


def _json(file: Path, shape: dict[str, Any] | None = None) -> dict[str, Any]:
    """A JSON object of a shape; {} when the file is not there."""
    if not file.exists():
        return {}
    value = read_json(file, _WHAT, _MOVE)
    return check_shape(value, shape or {}, file, _WHAT, _MOVE)


def _damaged(file: Path | None, reason: object) -> UserError:
    return UserError(f"{_WHAT} cannot be read", where=str(file), observed=reason, remedy=_MOVE)
