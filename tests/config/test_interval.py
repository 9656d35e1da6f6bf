"""Intervals in steps, epochs and time; trainer.eval_every=auto: a few evaluations, little of the run."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from kt_ray.config.compose import compose
from kt_ray.config.interval import (
    ends_after,
    ends_until,
    epochs_of,
    evaluation_interval,
    seconds_of,
    steps_of_epochs,
)
from kt_ray.errors import UserError
from tests.placement.configs import make_config


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30min", 1800), ("1.5h", 5400), ("2 h", 7200), ("5", None), ("0s", None), ("1d", None)],
)
def test_times(text: str, seconds: float | None) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize(
    ("text", "epochs"),
    [
        *(("epoch", 1), ("1epoch", 1), ("2 epochs", 2), ("0.1epoch", Fraction(1, 10))),
        *(("0epoch", None), ("1", None), ("1e", None), ("-1epoch", None)),
    ],
)
def test_epochs(text: str, epochs: Fraction | None) -> None:
    assert epochs_of(text) == epochs


@pytest.mark.parametrize(
    ("epochs", "of_epoch", "steps"),
    [(1.0, 35, 35), (0.1, 35, 4), (1e-5, 35, 1), (0.07, 100, 7), (1.1, 10, 11), (1e-2, 300, 3)],
)
def test_steps_of_epochs_are_those_of_the_number_as_written(epochs: float, of_epoch: int, steps: int) -> None:
    """0.07 * 100 and 1.1 * 10 are a little more in floating point."""
    assert steps_of_epochs(epochs, of_epoch) == steps


@pytest.mark.parametrize(
    ("every", "after"),
    [
        (3, [3, 6, 9]),
        (0, []),
        ("1h", []),
        ("1epoch", [4, 8]),
        ("0.5epoch", [2, 4, 6, 8, 10]),
        ("1.5epochs", [6]),
        ("0.3epoch", [2, 3, 4, 5, 6, 8, 9, 10]),  # at 1.2, 2.4, 3.6, 4.8, 6, 7.2, 8.4, 9.6
        ("0.1epoch", list(range(1, 11))),
    ],
)
def test_an_interval_ends_with_the_step_that_it_ends_in(every: int | str, after: list[int]) -> None:
    assert [step for step in range(1, 11) if ends_after(every, step, 4)] == after
    assert ends_until(every, 10, 4) == len(after)


def test_what_is_no_interval_is_refused() -> None:
    for text in ("0.5epoch", "2epochs", "20min", "7"):
        compose([f"trainer.save_every={text}"])
    compose(["trainer.eval_every=1epoch"])
    for key, text in (("save_every", "0epoch"), ("save_every", "daily"), ("eval_every", "20min")):
        with pytest.raises(UserError, match=rf"trainer\.{key}={text} is no interval; .*1epoch or 0.5epoch"):
            compose([f"trainer.{key}={text}"])


def interval(steps: int, held_out: int, data: dict[str, Any] | None = None, **trainer: Any) -> int | str:
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


@pytest.mark.parametrize("every", [0, 7, "0.5epoch"])
def test_a_number_is_obeyed(every: int | str) -> None:
    assert interval(20, 128, eval_every=every) == every
    assert interval(20, 0, eval_every=every) == 0  # nothing to evaluate
