"""Intervals: trainer.save_every, in steps or in time (50, 30min, 2h), and trainer.eval_every, in steps."""

from __future__ import annotations

import math
import re

from kt_ray.config.schema import Config

FORM = "a number of steps, or a time such as 90s, 30min or 2h"
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_TIME = re.compile(r"(\d+(?:\.\d+)?) ?(s|min|h)")


def seconds_of(text: str) -> float | None:
    """Seconds of an interval in time; None = the text is none."""
    match = _TIME.fullmatch(text.strip())
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    return seconds if seconds > 0 else None


SPANS = 4  # that trainer.eval_every=auto cuts a run into, at the most
_COST = 1 / 3  # of evaluating a row, a forward pass, over that of training on it
_SHARE = 1 / 20  # of the steps between two evaluations that one may take
_ENDS = 1 / 4  # of a run that the evaluations at its start and end may take


def evaluation_interval(config: Config, total_steps: int, held_out: int) -> int:
    """Steps between evaluations of `held_out` rows (pairs) in a run of `total_steps`; 0 = never.

    A run that is too short for an evaluation at start and end has none, unless an option asks for it.
    """
    trainer, data = config.trainer, config.data
    if not held_out:
        return 0
    if isinstance(trainer.eval_every, int):
        return trainer.eval_every
    steps = _COST * held_out / trainer.batch_size  # that one takes the time of
    asked = trainer.early_stopping or trainer.save_best or data.eval_path or data.eval_fraction != "auto"
    if not asked and 2 * steps > _ENDS * total_steps:
        return 0
    return max(1, math.ceil(total_steps / SPANS), math.ceil(steps / _SHARE))
