"""Tests that `make test` leaves out and `make exhaustive` runs: variations of others, and some of minutes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def spread(
    values: Sequence[Any], every: int = 3, start: int = 0, places: Sequence[Any] | None = None
) -> list[Any]:
    """Parameters of a test: one in `every` is always tested, the others are exhaustive.

    Args:
        start: the first that is always tested; three tests of the same values have each of them in one.
        places: values are counted by their places there; None = in `values`.
    """
    order = values if places is None else places
    return [value if order.index(value) % every == start else exhaustive(value) for value in values]


def exhaustive(value: Any) -> Any:
    """A parameter, or a tuple of them, of an exhaustive test."""
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.exhaustive)
