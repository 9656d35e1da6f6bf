"""trainer.eval_every=auto: a few evaluations, a small share of the run."""

from __future__ import annotations

from typing import Any

import pytest

from kt_ray.config.interval import evaluation_interval
from tests.placement.configs import make_config


def interval(steps: int, held_out: int, data: dict[str, Any] | None = None, **trainer: Any) -> int:
    return evaluation_interval(
        make_config(trainer={"batch_size": 8, **trainer}, data=data or {}), steps, held_out
    )


def test_a_few_times_in_a_long_run() -> None:
    assert interval(1200, 128) == 300
    assert interval(1202, 128) == 301  # never a fifth one just before the end


def test_an_evaluation_is_a_twentieth_of_the_steps_before_it() -> None:
    every = interval(119, 50)  # 1,000 rows once
    assert every == 42 and every / 20 >= 50 / 3 / 8


def test_only_where_both_ends_fit_or_something_asks() -> None:
    assert interval(20, 128) == 0
    for asked in ({"early_stopping": 2}, {"save_best": True}):
        assert interval(20, 128, **asked) == 107, asked
    assert interval(20, 128, data={"eval_fraction": 128.0}) == 107
    assert interval(20, 128, data={"eval_path": "held.jsonl"}) == 107


@pytest.mark.parametrize("every", [0, 7])
def test_a_number_is_obeyed(every: int) -> None:
    assert interval(20, 128, eval_every=every) == every
    assert interval(20, 0, eval_every=every) == 0  # nothing to evaluate
