"""Conversations to rows of token ids, cut to data.max_length and counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from kt_ray.config.schema import DataConfig
from kt_ray.data.cache import TokenCache, encoder_key, rows_key
from kt_ray.data.row_types import Conversation, Dataset, Pair, Row
from kt_ray.data.template import ChatEncoder
from kt_ray.data.token_counts import SplitReport
from kt_ray.errors import UserError

Samples = Sequence[tuple[Conversation, int]]  # rows and the sample ids that they are trained under
Tokens = tuple[np.ndarray, np.ndarray]  # ids and labels, int64 [s] each


class Encoded:
    """The tokens of every conversation, from the cache where it has them.

    Args:
        rows: every conversation that will be asked for. encoder, cache: to make or find their tokens.

    Attributes:
        cached: whether they came from the cache.
    """

    def __init__(self, rows: Sequence[Conversation], encoder: ChatEncoder, cache: TokenCache) -> None:
        sides = [side for row in rows for side in _sides(row)]
        key = ""
        entry: tuple[list[Tokens], list[str]] | None = None
        if cache.limit and len(sides) >= cache.worth:
            key = rows_key(sides, encoder_key(encoder))
            entry = cache.read(key, len(sides))
        self.cached = entry is not None
        if entry is None:
            before = len(encoder.notes)
            entry = [encoder.encode(side) for side in sides], []
            if key:
                cache.write(key, entry[0], encoder.notes[before:])
        encoder.notes += [note for note in entry[1] if note not in encoder.notes]
        tokens = iter(entry[0])
        # by identity: equal rows of two sources may have other system prompts
        self._tokens = {id(row): [next(tokens) for _ in _sides(row)] for row in rows}
        self._rows = list(rows)  # keeps the identities alive

    def __call__(self, row: Conversation) -> list[Tokens]:
        """(ids, labels) of a row; of a pair, chosen and rejected."""
        return self._tokens[id(row)]


def _sides(row: Conversation) -> list[Conversation]:
    if row.rejected is None:
        return [row]
    return [row, replace(row, messages=row.rejected, rejected=row.messages)]


def encode_rows(
    samples: Samples, encoded: Encoded, data: DataConfig, report: SplitReport, spare: Iterator[int]
) -> Dataset:
    """Rows of at most data.max_length tokens, counted into `report`.

    Raw text is cut into rows instead of at the end: it loses nothing but what overflow=drop says.

    Args:
        spare: sample ids that no row has, for the second row on that a text is cut into.

    Raises:
        UserError: a row without a trained token before cutting, or nothing left after it.
    """
    rows: Dataset = []
    for conversation, sample in samples:
        ((ids, labels),) = encoded(conversation)
        sign = 0 if conversation.label is None else 1 if conversation.label else -1
        full = Row(ids, labels, sample, sign=sign)
        _check_trained(full, conversation)
        report.source_rows += 1
        report.longest = max(report.longest, len(ids))
        if conversation.text is not None and data.overflow == "truncate":
            pieces = _pieces(full, data.max_length, spare)
            report.cut_texts += len(pieces) > 1
            lost_end = len(ids) - sum(len(piece.input_ids) for piece in pieces)
            report.tokens_lost += lost_end
            report.trained_lost += lost_end
        else:
            pieces = [full]
        for piece in pieces:
            row = _cut(piece, data.max_length)
            lost = len(piece.input_ids) > data.max_length and data.overflow == "drop"
            if lost or row.trained == 0:
                report.dropped_long += lost
                report.dropped_no_answer += not lost
                report.tokens_lost += len(piece.input_ids)
                report.trained_lost += piece.trained
                continue
            _count(report, piece, row)
            report.rows += 1
            rows.append(row)
    _check_left(bool(samples), bool(rows), data, report)
    return rows


def encode_pairs(samples: Samples, encoded: Encoded, data: DataConfig, report: SplitReport) -> list[Pair]:
    """Preference pairs; both sides are cut at the end, and a pair that loses an answer is dropped.

    Raises:
        UserError: as `encode_rows`.
    """
    pairs: list[Pair] = []
    for conversation, sample in samples:
        # Sample ids of their own, so that the sides' dropout differs.
        sides = [
            Row(ids, labels, 2 * sample + i, sign=1 - 2 * i)
            for i, (ids, labels) in enumerate(encoded(conversation))
        ]
        for side in sides:
            _check_trained(side, conversation)
        report.source_rows += 1
        longest = max(len(side.input_ids) for side in sides)
        report.longest = max(report.longest, longest)
        rows = [_cut(side, data.max_length) for side in sides]
        lost = longest > data.max_length and data.overflow == "drop"
        if lost or not all(row.trained for row in rows):
            report.dropped_long += lost
            report.dropped_no_answer += not lost
            report.tokens_lost += sum(len(side.input_ids) for side in sides)
            report.trained_lost += sum(side.trained for side in sides)
            continue
        for side, row in zip(sides, rows, strict=True):
            _count(report, side, row)
        report.rows += 1
        pairs.append(Pair(rows[0], rows[1]))
    _check_left(bool(samples), bool(pairs), data, report)
    return pairs


def _pieces(row: Row, length: int, spare: Iterator[int]) -> list[Row]:
    starts = range(0, len(row.input_ids), length)
    pieces = []
    for start in starts:
        stop = start + length
        sample = row.sample_id if start == 0 else next(spare)
        pieces.append(Row(row.input_ids[start:stop], row.labels[start:stop], sample, sign=row.sign))
    if len(pieces) > 1 and len(pieces[-1].input_ids) < 2:
        pieces.pop()  # one token has nothing to be predicted from
    return pieces


def _cut(row: Row, length: int) -> Row:
    return replace(row, input_ids=row.input_ids[:length], labels=row.labels[:length])


def _count(report: SplitReport, whole: Row, row: Row) -> None:
    report.truncated += len(row.input_ids) < len(whole.input_ids)
    report.tokens += len(row.input_ids)
    report.trained += row.trained
    report.tokens_lost += len(whole.input_ids) - len(row.input_ids)
    report.trained_lost += whole.trained - row.trained


def _check_trained(row: Row, conversation: Conversation) -> None:
    """Refuse a row that would be computed for nothing: its mask is a mistake, or its answer is empty."""
    if row.trained == 0:
        raise UserError(
            "no token of the row is trained",
            where=conversation.where,
            observed=f"{len(row.input_ids)} tokens, all masked",
            required="an answer of at least one token",
            remedy="fill or delete that row, or check the chat template with mode=preview",
        )


def _check_left(given: bool, kept: bool, data: DataConfig, report: SplitReport) -> None:
    if given and not kept:
        raise UserError(
            "no row is left after cutting",
            where="data.max_length",
            observed=f"{data.max_length} tokens; all {report.source_rows} rows dropped",
            required=f"{report.longest} tokens for the longest row",
            remedy=f"set data.max_length={report.longest}",
        )
