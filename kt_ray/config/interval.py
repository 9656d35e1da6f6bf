"""Intervals of trainer.save_every and eval_every, in steps, epochs or time: 50, 0.5epoch, 30min, 2h."""

from __future__ import annotations

import math
import re
from fractions import Fraction

from kt_ray.config.schema import Config

EPOCHS_FORM = "a number of steps, or epochs such as 1epoch or 0.5epoch"
FORM = f"{EPOCHS_FORM}, or a time such as 90s, 30min or 2h"
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_TIME = re.compile(r"(\d+(?:\.\d+)?) ?(s|min|h)")
_EPOCHS = re.compile(r"(\d+(?:\.\d+)?)? ?epochs?")


def seconds_of(text: str) -> float | None:
    """Seconds of an interval in time; None = the text is none."""
    match = _TIME.fullmatch(text.strip())
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    return seconds if seconds > 0 else None


SPANS = 4  # that trainer.eval_every=auto cuts a run into, at the most
_COST = 1 / 3  # of evaluating a row, a forward pass, over that of training on it
_ANSWERED = 1.0  # the same with trainer.stage=grpo, where both draw an answer
_SHARE = 1 / 20  # of the steps between two evaluations that one may take
_ENDS = 1 / 4  # of a run that the evaluations at its start and end may take


def evaluation_interval(config: Config, total_steps: int, held_out: int) -> int | str:
    """Steps or epochs between evaluations of `held_out` rows (pairs) in a run of `total_steps`; 0 = never.

    A run that is too short for an evaluation at start and end has none, unless an option asks for it.
    """
    trainer, data = config.trainer, config.data
    if not held_out:
        return 0
    if trainer.eval_every != "auto":
        return trainer.eval_every
    cost = _ANSWERED if trainer.stage == "grpo" else _COST
    steps = cost * held_out / trainer.batch_size  # that one takes the time of
    asked = trainer.early_stopping or trainer.save_best or data.eval_path or data.eval_fraction != "auto"
    if not asked and 2 * steps > _ENDS * total_steps:
        return 0
    return max(1, math.ceil(total_steps / SPANS), math.ceil(steps / _SHARE))


def steps_of_epochs(epochs: float, steps_per_epoch: int) -> int:
    """Steps of a run of so many epochs (trainer.epochs), the last one whole; exact as it is written."""
    return max(1, math.ceil(Fraction(str(epochs)) * steps_per_epoch))


def epochs_of(text: str) -> Fraction | None:
    """Epochs of an interval in epochs; None = the text is none."""
    match = _EPOCHS.fullmatch(text.strip())
    return (Fraction(match[1] or "1") or None) if match else None


def ends_until(every: int | str, steps: int, steps_per_epoch: int) -> int:
    """How many intervals in steps or epochs end within so many steps; 0 for 0 and for a time.

    One that ends within a step counts at that step's end; an interval below a step is one step.
    """
    length = (epochs_of(every) or 0) * steps_per_epoch if isinstance(every, str) else every
    return int(steps // max(length, 1)) if length else 0


def ends_after(every: int | str, step: int, steps_per_epoch: int) -> bool:
    """Whether an interval in steps or epochs ends with this step (1 is the first)."""
    return ends_until(every, step, steps_per_epoch) > ends_until(every, step - 1, steps_per_epoch)
