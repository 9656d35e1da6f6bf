"""Tests that vary what others test already: `make exhaustive` runs them too, `make test` does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def spread(values: Sequence[Any], every: int = 3, start: int = 0) -> list[Any]:
    """Parameters of a test, all but every third of them exhaustive. start: the first of those that are not;
    tests of the same families begin at different ones, so that `make test` has all of them somewhere."""
    return [value if n % every == start else exhaustive(value) for n, value in enumerate(values)]


def exhaustive(value: Any) -> Any:
    """A parameter, or a tuple of them, of an exhaustive test."""
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.exhaustive)
