"""Which rows of a call the lane computes, in which order. Host tensors; pure functions.

Legend: T tokens of the call, K slots per token, R rows (slots) of the lane's experts, U tokens among them,
P places: rows as they are computed, every expert of a batch as long as its longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kt_ray.placement.lane_share import LANE_ROWS


class RowPart(NamedTuple):
    """Rows computed together, those of every expert of a batch.

    rows: of the R. places: of the P, as many for every expert. counts: rows of every expert, the first of its
    places. turns: of every expert None, or parts of its rows that name no token twice.
    """

    rows: slice
    places: slice
    counts: tuple[int, ...]
    turns: tuple[tuple[Tensor, ...] | None, ...]

    @property
    def full(self) -> bool:
        """Whether there is a row at every place."""
        return min(self.counts) == max(self.counts)


@dataclass(frozen=True)
class Routed:
    """The lane's rows, batch by batch and expert by expert."""

    # local ids in computing order; parts: of each batch, at most LANE_ROWS places each
    batches: tuple[tuple[int, ...], ...]
    parts: tuple[tuple[RowPart, ...], ...]
    slots: Tensor  # [R] t * K + k of every row, ascending within an expert
    tokens: Tensor  # [U] tokens with a row, ascending
    at: Tensor  # [P] token of each place; T where there is no row
    weight: Tensor  # [P] router weights; 0 where there is no row
    spread: Tensor  # [R] place of every row among those of its part

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.slots, self.tokens, self.at, self.weight, self.spread))


def route(ids: Tensor, weights: Tensor, batches: Sequence[Sequence[int]], none: int) -> Routed:
    """The rows of the experts of `batches`.

    Args:
        ids: [T, K] local ids, `none` and above meaning no expert. weights: [T, K] float32.
        batches: local ids, each with at least one row, in the order in which they are computed; of several
            at once at most LANE_ROWS rows, counted as many times the longest's.
    """
    experts = [e for batch in batches for e in batch]
    rank = torch.full((none + 1,), -1, dtype=torch.int64)
    rank[experts] = torch.arange(len(experts))
    order_of_slot = rank[ids.reshape(-1).clamp(max=none)]
    slots = torch.nonzero(order_of_slot >= 0).flatten()
    turn = order_of_slot[slots]
    slots = slots[torch.argsort(turn.to(torch.int16), stable=True)]
    counts = iter(torch.bincount(turn, minlength=len(experts)).tolist())
    token_of = slots // ids.shape[1]
    reached = torch.zeros(ids.shape[0], dtype=torch.bool)
    reached[token_of] = True
    turn = order_of_slot[slots]
    repeats = bool(((token_of[1:] == token_of[:-1]) & (turn[1:] == turn[:-1])).any())  # no router does that
    parts: list[tuple[RowPart, ...]] = []
    row = place = 0
    for batch in batches:
        made = []
        for own in _in_parts([next(counts) for _ in batch]):
            longest, first = max(own), row
            turns = []
            for count in own:
                turns.append(_without_repeats(token_of[row : row + count]) if repeats else None)
                row += count
            end = place + longest * len(own)
            made.append(RowPart(slice(first, row), slice(place, end), own, tuple(turns)))
            place = end
        parts.append(tuple(made))
    spread, starts = _spread([part for of_batch in parts for part in of_batch])
    at = torch.full((place,), ids.shape[0], dtype=torch.int64)
    weight = torch.zeros(place, dtype=weights.dtype)
    at[starts + spread] = token_of
    weight[starts + spread] = weights.reshape(-1)[slots]
    tokens = torch.nonzero(reached).flatten()
    return Routed(tuple(map(tuple, batches)), tuple(parts), slots, tokens, at, weight, spread)


def _in_parts(counts: Sequence[int]) -> list[tuple[int, ...]]:
    """A batch's rows; those of a single expert as few parts as they take."""
    if len(counts) > 1:
        return [tuple(counts)]
    return [(min(LANE_ROWS, counts[0] - first),) for first in range(0, counts[0], LANE_ROWS)]


def _spread(parts: Sequence[RowPart]) -> tuple[Tensor, Tensor]:
    """Of every row, its place in its part, and the first place of this part."""
    experts = [(n, b * max(p.counts), p.places.start) for p in parts for b, n in enumerate(p.counts)]
    counts, first, starts = torch.tensor(experts, dtype=torch.int64).reshape(-1, 3).unbind(1)
    shift = (first - (counts.cumsum(0) - counts)).repeat_interleave(counts)
    return torch.arange(len(shift)) + shift, starts.repeat_interleave(counts)


def _without_repeats(at: Tensor) -> tuple[Tensor, ...] | None:
    """Rows in parts that name no token twice; None = no row does. `at` ascends."""
    new = torch.ones_like(at, dtype=torch.bool)
    new[1:] = at[1:] != at[:-1]
    if bool(new.all()):
        return None
    position = torch.arange(len(at))
    occurrence = position - torch.where(new, position, 0).cummax(0).values
    return tuple(torch.nonzero(occurrence == n).flatten() for n in range(int(occurrence.max()) + 1))


def add_part(out: Tensor, at: Tensor, values: Tensor, part: RowPart) -> None:
    """out[at] += values [B, n, ...] of a part's rows, in an order that is the same every time: expert after
    expert, and no sum has two addends at once.

    GPUs add concurrently where an index repeats; with distinct ones every element has one addend. Experts of
    a batch share tokens, so each has a turn of its own.
    """
    for b, (count, turns) in enumerate(zip(part.counts, part.turns, strict=True)):
        add_rows(out, at[b, :count], values[b, :count], turns)


def add_rows(out: Tensor, at: Tensor, values: Tensor, turns: Sequence[Tensor] | None) -> None:
    """out[at] += values of one expert's rows."""
    if turns is None:
        out.index_add_(0, at, values)
        return
    for rows in turns:
        chosen = rows.to(out.device)
        out.index_add_(0, at[chosen], values[chosen])
