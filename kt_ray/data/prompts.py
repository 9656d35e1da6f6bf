"""Prompts that the model itself answers (trainer.stage=grpo): tokens up to the answer, and the whole row."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kt_ray.batch import IGNORE
from kt_ray.config.schema import DataConfig
from kt_ray.data.bad_rows import BadRows
from kt_ray.data.row_types import Conversation, Row, Turn
from kt_ray.data.template import ChatEncoder
from kt_ray.data.token_counts import SplitReport
from kt_ray.errors import UserError

# Refuses a row (its columns, file and line) whose answers cannot be rewarded: `Reward.check_row`.
RowCheck = Callable[[Mapping[str, Any], str], None]


@dataclass(frozen=True)
class Prompt:
    """One prompt."""

    row: Row  # its tokens, with the header of the answer to come; none of them is trained
    text: str | list[dict[str, Any]]  # as the row has it: a string, or else the turns
    columns: Mapping[str, Any]  # the row
    where: str  # file and line
    opened: bool = False  # whether the template ends with `<think>`: answers begin amid reasoning


def as_prompts(data: DataConfig) -> DataConfig:
    """The same rows read as prompts."""
    sources = data.sources and [{**source, "format": "prompts"} for source in data.sources]
    return replace(data, format="prompts", sources=sources)


def with_answer(prompt: Conversation) -> Conversation:
    """A conversation that ends with the row's `answer`, "" where it has none; of several the first."""
    given = (prompt.columns or {}).get("answer")
    answer: Turn = {"role": "assistant", "content": _as_text(given)}
    return replace(prompt, messages=(*prompt.messages, answer), columns=None)


def _as_text(answer: Any) -> str:
    if isinstance(answer, list):
        return _as_text(answer[0] if answer else None)
    if isinstance(answer, float) and answer.is_integer():  # as a column of numbers that lacks one has them
        answer = int(answer)
    if isinstance(answer, dict):
        return json.dumps(answer, ensure_ascii=False)
    return "" if answer is None else str(answer)


def encode_prompts(
    samples: Sequence[tuple[Conversation, int]],
    encoder: ChatEncoder,
    longest: int,
    report: SplitReport,
    skip_bad: bool,
    check: RowCheck | None = None,
) -> dict[int, Prompt]:
    """Sample id -> prompt, counted into `report`. Those of more than `longest` tokens are left out.

    Raises:
        UserError: a row that the template or `check` refuses, unless `skip_bad`; nothing left.
    """
    prompts: dict[int, Prompt] = {}
    faults: dict[str, UserError] = {}  # by the row's place: a weight takes rows several times
    for conversation, sample in samples:
        try:
            turns, where = conversation.messages, conversation.where
            ids = encoder.prompt_ids(turns, tools=conversation.tools, where=where)
            if check is not None and len(ids) <= longest:
                check(conversation.columns or {}, where)
        except UserError as fault:
            faults.setdefault(where, fault)
            continue
        encoder.note_marks(conversation)
        report.source_rows += 1
        report.longest = max(report.longest, len(ids))
        if len(ids) > longest:
            report.dropped_long += 1
            continue
        report.rows += 1
        report.tokens += len(ids)
        text = conversation.asked or [dict(turn) for turn in turns]
        row = Row(np.array(ids, dtype=np.int64), np.full(len(ids), IGNORE, dtype=np.int64), sample)
        opened = encoder.opens_thought(ids)
        prompts[sample] = Prompt(row, text, conversation.columns or {}, where, opened)
    bad = BadRows(skip_bad)
    for refused in faults.values():
        bad.add(refused)
    if left_out := bad.settle(report.source_rows, "the data"):
        report.notes.append(left_out)
    if samples and not prompts:
        raise UserError(
            "no prompt leaves room for an answer",
            where="data.max_length",
            observed=f"the longest of {report.source_rows} prompts has {report.longest} tokens",
            required=f"at most {longest} (data.max_length less generate.max_new_tokens)",
            remedy="raise data.max_length, or lower generate.max_new_tokens",
        )
    return prompts
