"""What is rewarded, and what a reward is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True)
class Completion:
    """One sampled answer.

    Attributes:
        prompt: as in the data: a text, or chat messages.
        text: the answer's text, special tokens removed.
        ids: its tokens.
        finished: False: cut at generate.max_new_tokens.
        row: the data row's columns.
        opened: whether the prompt ends with `<think>`, so that the text begins with reasoning.
    """

    prompt: str | list[dict[str, Any]]
    text: str
    ids: Sequence[int]
    finished: bool
    row: Mapping[str, Any]
    opened: bool = False

    @property
    def judged(self) -> str:
        """The text, after the `<think>` that the prompt ends with, if it does."""
        return f"<think>{self.text}" if self.opened else self.text


def go_on() -> None:
    """The default of `waiting`: nothing ends."""


class Reward(Protocol):
    """Gives answers their rewards."""

    @property
    def name(self) -> str:
        """The verifier's name, or the function's."""

    def check_row(self, row: Mapping[str, Any], where: str) -> None:
        """Checks a row of the data before anything runs.

        Args:
            where: file and line of the row, for the message.

        Raises:
            UserError: its answers could not be rewarded.
        """

    def __call__(self, completions: Sequence[Completion], waiting: Callable[[], None] = go_on) -> np.ndarray:
        """float64 [n], finite; nan = no reward: leave this sample out.

        Args:
            waiting: called now and then between answers or while programs run; what it raises ends them.

        Raises:
            UserError: a user's function failed.
        """

    def close(self) -> None:
        """Ends what the reward keeps running."""
