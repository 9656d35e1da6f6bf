"""Conversations to rows of token ids, cut to data.max_length and counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kt_ray.config.schema import DataConfig
from kt_ray.data.bad_rows import BadRows
from kt_ray.data.cache import TokenCache, encoder_key, rows_key
from kt_ray.data.row_types import Conversation, Pair, Row
from kt_ray.data.template import ChatEncoder
from kt_ray.data.token_counts import SplitReport
from kt_ray.errors import UserError

Samples = Sequence[tuple[Conversation, int]]  # rows and the sample ids that they are trained under
Tokens = tuple[np.ndarray, np.ndarray]  # ids and labels, int64 [s] each
_REFUSED: Tokens = (np.empty(0, np.int64), np.empty(0, np.int64))  # in the cache
_SIGNS = {None: 0, True: 1, False: -1}  # of Row, by the verdict


class Encoded:
    """The tokens of every conversation, from the cache where it has them, or why it has none."""

    def __init__(self, rows: Sequence[Conversation], encoder: ChatEncoder, cache: TokenCache) -> None:
        sides = [side for row in rows for side in _sides(row)]
        key = ""
        entry: tuple[list[Tokens], list[str]] | None = None
        if cache.limit and len(sides) >= cache.worth:
            key = rows_key(sides, encoder_key(encoder))
            entry = cache.read(key, len(sides))
        self.cached = entry is not None  # whether they came from the cache
        if entry is None:
            before = len(encoder.notes)
            results = [_encoded(encoder, side) for side in sides]
            if key:
                kept = [_REFUSED if isinstance(result, UserError) else result for result in results]
                cache.write(key, kept, encoder.notes[before:])
        else:
            # What was refused is encoded again, for the reason.
            results = [
                tokens if len(tokens[0]) else _encoded(encoder, side)
                for side, tokens in zip(sides, entry[0], strict=True)
            ]
            encoder.notes += [note for note in entry[1] if note not in encoder.notes]
        for side, result in zip(sides, results, strict=True):
            if not isinstance(result, UserError):
                encoder.note_marks(side)
        each = iter(results)
        # by identity: equal rows of two sources may have other system prompts
        self._results = {id(row): [next(each) for _ in _sides(row)] for row in rows}
        self._rows = list(rows)  # keeps the identities alive

    def __call__(self, row: Conversation) -> list[Tokens]:
        """(ids, labels) of a row; of a pair, chosen and rejected.

        Raises:
            UserError: the encoder refused it.
        """
        tokens: list[Tokens] = []
        for result in self._results[id(row)]:
            if isinstance(result, UserError):
                raise result
            tokens.append(result)
        return tokens


def _encoded(encoder: ChatEncoder, side: Conversation) -> Tokens | UserError:
    try:
        return encoder.encode(side)
    except UserError as fault:
        fault.__cause__ = fault.__context__ = None  # their frames hold the template's whole state
        return fault.with_traceback(None)


def _sides(row: Conversation) -> list[Conversation]:
    if row.rejected is None:
        return [row]
    return [row, replace(row, messages=row.rejected, rejected=row.messages)]


def encode_rows(
    samples: Samples,
    encoded: Encoded,
    data: DataConfig,
    report: SplitReport,
    spare: Iterator[int],
    every_token: bool,
) -> list[Any]:
    """Rows of at most data.max_length tokens, or pairs of such rows, counted into `report`.

    Rows are cut at the end; a pair that loses an answer, or what its answers differ in, is dropped. Raw text
    is cut into rows instead: it loses nothing but what overflow=drop says.

    Args:
        spare: sample ids that no row has, for the second row on that a text is cut into.
        every_token: train all of a row, not its answers only.

    Raises:
        UserError: rows that the encoder refused, without a trained token or pairs of the same tokens before
            cutting, unless data.bad_rows=skip; nothing left.
    """
    kept: list[Row | Pair] = []
    faults: dict[str, UserError] = {}  # by the row's place: a weight takes rows several times
    good: set[str] = set()  # places
    for conversation, sample in samples:
        try:
            tokens = encoded(conversation)
        except UserError as fault:
            faults.setdefault(conversation.where, fault)
            continue
        if every_token:
            tokens = [(ids, ids.copy()) for ids, _ in tokens]
        sides = [Row(*side, sample, sign=_SIGNS[conversation.label]) for side in tokens]
        if conversation.rejected is not None:
            # Sample ids of their own, so that the sides' dropout differs.
            sides = [replace(row, sample_id=2 * sample + i, sign=1 - 2 * i) for i, row in enumerate(sides)]
        masked = next((row for row in sides if row.trained == 0), None)
        if masked is not None:  # computed for nothing: its mask is a mistake, or its answer is empty
            faults[conversation.where] = UserError(
                "no token of the row is trained",
                where=conversation.where,
                observed=f"{len(masked.input_ids)} tokens, all masked",
                required="an answer of at least one token",
                remedy="fill or delete that row, or check the chat template with mode=preview",
            )
            continue
        if _alike(sides):
            faults[conversation.where] = UserError(
                "chosen and rejected are the same as the chat template writes them",
                where=conversation.where,
                observed=f"{len(sides[0].input_ids)} tokens, the same in both",
                required="two different answers",
                remedy="correct or delete that row, or give model.chat_template or data.template one that "
                "writes what they differ in",
            )
            continue
        good.add(conversation.where)
        report.source_rows += 1
        report.longest = max(report.longest, *(len(row.input_ids) for row in sides))
        units = [sides]
        if conversation.text is not None and data.overflow == "truncate":
            units = [[piece] for piece in _pieces(sides[0], data.max_length, spare)]
            report.cut_texts += len(units) > 1
            lost_end = len(sides[0].input_ids) - sum(len(piece.input_ids) for (piece,) in units)
            report.tokens_lost += lost_end
            report.trained_lost += lost_end
        for unit in units:
            rows = [_cut(row, 0, data.max_length) for row in unit]
            too_long = any(len(row.input_ids) > data.max_length for row in unit)
            dropped = too_long and data.overflow == "drop"
            if dropped or not all(row.trained for row in rows) or _alike(rows):
                report.dropped_long += dropped
                report.dropped_no_answer += not dropped
                rows = [_cut(row, 0, 0) for row in unit]  # all is lost
            else:
                report.rows += 1
                report.longest_kept = max(report.longest_kept, *(len(row.input_ids) for row in rows))
                report.truncated += sum(len(row.input_ids) > data.max_length for row in unit)
                kept.append(Pair(rows[0], rows[1]) if len(rows) == 2 else rows[0])
            for whole, row in zip(unit, rows, strict=True):
                report.tokens += len(row.input_ids)
                report.trained += row.trained
                report.tokens_lost += len(whole.input_ids) - len(row.input_ids)
                report.trained_lost += whole.trained - row.trained
    bad = BadRows(data.bad_rows == "skip")
    for refused in faults.values():
        bad.add(refused)
    if left_out := bad.settle(len(good), "the data"):
        report.notes.append(left_out)
    if samples and not kept:
        raise UserError(
            "no row is left after cutting",
            where="data.max_length",
            observed=f"{data.max_length} tokens; all {report.source_rows} rows dropped",
            required=f"{report.longest} tokens for the longest row",
            remedy=f"set data.max_length={report.longest}",
        )
    return kept


def _alike(sides: Sequence[Row]) -> bool:
    """Whether they are a pair of which nothing can be learned."""
    return len(sides) == 2 and np.array_equal(sides[0].input_ids, sides[1].input_ids)


def _pieces(row: Row, length: int, spare: Iterator[int]) -> list[Row]:
    pieces = [
        replace(_cut(row, start, start + length), sample_id=next(spare) if start else row.sample_id)
        for start in range(0, len(row.input_ids), length)
    ]
    if len(pieces) > 1 and len(pieces[-1].input_ids) < 2:
        pieces.pop()  # one token has nothing to be predicted from
    return pieces


def _cut(row: Row, start: int, stop: int) -> Row:
    return replace(row, input_ids=row.input_ids[start:stop], labels=row.labels[start:stop])
