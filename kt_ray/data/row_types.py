"""What the data pipeline hands on: tokenised rows and conversations. numpy only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

import numpy as np

from kt_ray.batch import IGNORE

# What a row is for: answers (or text) to learn, a better and a worse answer, an answer with a verdict, or a
# prompt that the model itself answers.
KINDS = ("sft", "pairs", "kto", "prompts")


class Turn(TypedDict):
    """One turn.

    role is "system", "user", "assistant" or "tool". tool_calls (assistant), name and tool_call_id (tool)
    are as OpenAI's API has them, arguments decoded. reasoning_content (assistant) is what the model thought
    before it answered. weight 0 = do not train this answer.
    """

    role: str
    content: str
    tool_calls: NotRequired[list[dict[str, Any]]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]
    reasoning_content: NotRequired[str]
    weight: NotRequired[int]


@dataclass(frozen=True)
class Conversation:
    """One source row."""

    messages: tuple[Turn, ...]  # [system,] user, assistant, user, assistant, …; empty for raw text
    sample_id: int  # index of the row in source order, counted over all files
    where: str  # file and line (or row) for error messages
    # functions the model may call, as OpenAI's API has them; None = none
    tools: tuple[dict[str, Any], ...] | None = None
    # the same conversation with the worse answer; None = the row is no preference pair
    rejected: tuple[Turn, ...] | None = None
    label: bool | None = None  # whether the answer is wanted (KTO); None = the row has no verdict
    text: str | None = None  # raw text of a row without turns; None = a conversation
    # the whole row of a prompt, whose messages end before the answer; None = the row is none
    columns: Mapping[str, Any] | None = None
    asked: str = ""  # its prompt where that is one text

    @property
    def prompt_key(self) -> str:
        """What must not straddle a split: the first question, or the whole raw text.

        The first one and not the whole prompt, because a longer conversation that opens with the same
        question holds the shorter one's answer.
        """
        if self.text is not None:
            return self.text.strip()
        return next(m["content"].strip() for m in self.messages if m["role"] == "user")

    @property
    def kind(self) -> str:
        """One of KINDS."""
        if self.columns is not None:
            return "prompts"
        if self.rejected is not None:
            return "pairs"
        return "sft" if self.label is None else "kto"


@dataclass(frozen=True)
class Row:
    """One tokenised row, or several packed into one."""

    input_ids: np.ndarray  # int64 [s]
    labels: np.ndarray  # int64 [s], the token itself where it is trained, IGNORE elsewhere (not shifted)
    sample_id: int  # index of the row in source order: stable across runs, the key of dropout
    # (sample_id, tokens) of each row that was packed into this one, in order; empty = this is one row. The
    # first token of a document is never trained: the one before it is another's
    documents: tuple[tuple[int, int], ...] = ()
    # +1 a wanted answer, -1 an unwanted one (KTO; inside pairs), 0 where there is no such thing
    sign: int = 0

    @property
    def trained(self) -> int:
        """Tokens that contribute to the loss (position 0 has no predecessor and never does)."""
        return int((self.labels[1:] != IGNORE).sum())


@dataclass(frozen=True)
class Pair:
    """A chosen and a rejected answer to one prompt (DPO, ORPO): never parted."""

    chosen: Row  # its sign is +1
    rejected: Row  # its sign is -1, its sample_id another than chosen's

    @property
    def trained(self) -> int:
        """Answer tokens of both."""
        return self.chosen.trained + self.rejected.trained
