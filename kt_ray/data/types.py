"""What the data pipeline hands on: tokenised rows and conversations. numpy only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import numpy as np

from kt_ray.batch import IGNORE


class Message(TypedDict):
    """One turn: role is "system", "user" or "assistant"."""

    role: str
    content: str


@dataclass(frozen=True)
class Conversation:
    """One source row as chat messages.

    Attributes:
        messages: [system,] user, assistant, user, assistant, …
        sample_id: index of the row in source order, counted over all files.
        where: file and line (or row) for error messages.
    """

    messages: tuple[Message, ...]
    sample_id: int
    where: str

    @property
    def prompt_key(self) -> str:
        """What must not straddle a split: the first question.

        The first one and not the whole prompt, because a longer conversation that opens with the same
        question holds the shorter one's answer.
        """
        return next(m["content"].strip() for m in self.messages if m["role"] == "user")


@dataclass(frozen=True)
class Row:
    """One tokenised row.

    Attributes:
        input_ids: int64 [s].
        labels: int64 [s], the token itself where it is trained, IGNORE elsewhere (not shifted).
        sample_id: index of the row in source order: stable across runs, the key of dropout.
        sign: +1 a wanted answer, -1 an unwanted one (KTO; inside pairs), 0 where there is no such thing.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    sample_id: int
    sign: int = 0

    @property
    def trained(self) -> int:
        """Tokens that contribute to the loss (position 0 has no predecessor and never does)."""
        return int((self.labels[1:] != IGNORE).sum())


@dataclass(frozen=True)
class Pair:
    """A chosen and a rejected answer to one prompt (DPO, ORPO): never parted.

    Attributes:
        chosen: its sign is +1. rejected: its sign is -1, its sample_id another than chosen's.
    """

    chosen: Row
    rejected: Row

    @property
    def trained(self) -> int:
        """Answer tokens of both."""
        return self.chosen.trained + self.rejected.trained


Dataset = list[Row]
