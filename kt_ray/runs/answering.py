"""mode=eval where there are no answers yet: loss and answers of base and adapter, one base model in memory.

The order is what lets one model serve both: the base's loss is measured before the actors read the adapter
(LoRA without effect), the adapter's after it, and then each row is answered by both in one session, which
switches the adapter on and off. What is done is kept, so the same command goes on where it stopped.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from kt_ray.config.fields import show
from kt_ray.config.mapping import to_dict
from kt_ray.config.schema import Config
from kt_ray.adapter.from_peft import adapter_directory
from kt_ray.modes import predict
from kt_ray.runs.generation import Setup, generator_on, setup, started, take_adapter
from kt_ray.runs.held_out_loss import HeldOut, measure, open_held_out
from kt_ray.runs.rundata import flatten

# Keys of `data` that change what a row's tokens are, not which rows are held out.
_SAME_ROWS = frozenset(
    "data." + name
    for name in (
        *("max_length", "overflow", "shuffle", "pad_to_multiple_of", "packing", "group_by_length"),
        *("cache_gb", "template", "train_on", "system"),
    )
)


@dataclass(frozen=True)
class Answered:
    """Where the answers and losses lie, and what should be said about them."""

    directory: Path
    notes: tuple[str, ...] = ()


def answer(config: Config) -> Answered:
    """Measure the losses and answer the rows, as far as that has not been done.

    Args:
        config: as kt_ray.runs.wanted.to_answer gives it.

    Raises:
        UserError: any fault in model, adapter, data or plan, or answers made with other settings.
    """
    directory = _directory(config)
    made = setup(config)
    questions = predict.questions_of(made)
    work = predict.open_work(made, questions, directory, config.run.overwrite)
    held_out = open_held_out(made, [question.id for question in questions], directory)
    if work.left or held_out.left:
        _compute(made, work, held_out)
    notes = _other_rows(config, Path(made.adapter).parent) if made.adapter is not None else ()
    return Answered(directory, notes)


def _compute(made: Setup, work: predict.Work, held_out: HeldOut) -> None:
    numbers = count(1)
    with started(made, f"{work.directory.name}-eval") as cluster:
        if "base" in held_out.left:
            measure(held_out, "base", cluster, numbers)
        take_adapter(made, cluster)
        if "adapter" in held_out.left:
            measure(held_out, "adapter", cluster, numbers)
        if work.left:
            with generator_on(made, cluster) as generator:
                predict.answer(work, generator)


def _directory(config: Config) -> Path:
    """run.name below run.root; else the adapter's own run, where mode=report looks; else MODEL-eval."""
    root = Path(config.run.root)
    if config.run.name:
        return root / config.run.name
    if config.generate.adapter is not None:
        run = Path(adapter_directory(config.generate.adapter)).parent
        if (run / "config.yaml").is_file():
            return run
    return root / f"{config.model.name}-eval"


def _other_rows(config: Config, run: Path) -> tuple[str, ...]:
    """A note when the adapter's run held out other rows, so that these may be among those it learnt."""
    own = config.generate.split == "eval" and config.data.eval_path is None
    if not own or not (run / "config.yaml").is_file():
        return ()
    try:
        then: Any = flatten(yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8")))
    except (OSError, yaml.YAMLError, AttributeError):
        return ()
    now = flatten(to_dict(config))
    keys = [key for key in now if key == "seed" or (key.startswith("data.") and key not in _SAME_ROWS)]
    other = [key for key in keys if key in then and then[key] != now[key]]
    if not other:
        return ()
    was = ", ".join(f"{key}={show(then[key])}, here {show(now[key])}" for key in other)
    return (f"the adapter was trained with {was}: it may have learnt from some of these rows",)
