"""Which rows of a call the lane computes, in which order. Host tensors; pure functions.

Legend: T tokens of the call, K slots per token, R rows (slots) of the lane's experts, U tokens among them,
P places: rows as they are computed, as many for every expert of a batch: its longest one's, rounded up
(`kt_ray.placement.lane_share.places`). G bags: of each part the rows that one token has there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kt_ray.placement.lane_share import LANE_ROWS, places


class RowPart(NamedTuple):
    """Rows computed together, those of every expert of a batch.

    rows: of the R. places: of the P, as many for every expert. counts: rows of every expert, the first of its
    places. bags: of the G.
    """

    rows: slice
    places: slice
    counts: tuple[int, ...]
    bags: slice

    @property
    def width(self) -> int:
        """Places of an expert."""
        return (self.places.stop - self.places.start) // len(self.counts)

    @property
    def full(self) -> bool:
        """Whether there is a row at every place."""
        return min(self.counts) == self.width


@dataclass(frozen=True)
class Routed:
    """The lane's rows, batch by batch and expert by expert."""

    # local ids in computing order; parts: of each batch, at most LANE_ROWS places each
    batches: tuple[tuple[int, ...], ...]
    parts: tuple[tuple[RowPart, ...], ...]
    slots: Tensor  # [R] int32, t * K + k of every row, ascending within an expert
    tokens: Tensor  # [U] tokens with a row, ascending
    at: Tensor  # [P] int32, token of each place; T where there is no row
    weight: Tensor  # [P] router weights; 0 where there is no row
    spread: Tensor  # [R] int32, place of every row among those of its part
    # The same rows, those of a part by ascending token:
    bag_places: Tensor  # [R] int32, as spread
    bag_starts: Tensor  # [G] int32, first row of each bag, from the first one of its part
    bag_tokens: Tensor  # [G] int32

    @property
    def nbytes(self) -> int:
        tensors = (self.slots, self.tokens, self.at, self.weight, self.spread)
        return sum(t.nbytes for t in (*tensors, self.bag_places, self.bag_starts, self.bag_tokens))


def route(ids: Tensor, weights: Tensor, batches: Sequence[Sequence[int]], none: int) -> Routed:
    """The rows of the experts of `batches`.

    Args:
        ids: [T, K] local ids, `none` and above meaning no expert. weights: [T, K] float32.
        batches: local ids, each with at least one row, in the order in which they are computed; of several
            at once at most LANE_ROWS places, as many for each as the longest has.
    """
    experts = [e for batch in batches for e in batch]
    rank = torch.full((none + 1,), -1, dtype=torch.int64)
    rank[experts] = torch.arange(len(experts))
    order_of_slot = rank.index_select(0, ids.reshape(-1).clamp(max=none).long())
    found = torch.nonzero(order_of_slot >= 0).flatten()
    turn = order_of_slot.index_select(0, found)
    by_expert = _sorted(turn)
    slots = found.index_select(0, by_expert)
    counts = iter(torch.bincount(turn, minlength=len(experts)).tolist())
    rows_of: list[list[tuple[int, ...]]] = [_in_parts([next(counts) for _ in batch]) for batch in batches]
    sizes = torch.tensor([sum(own) for of_batch in rows_of for own in of_batch], dtype=torch.int64)
    # Found slots ascend by token: so do they within a part when they are sorted by part.
    numbers = _repeated(torch.arange(len(sizes)), sizes).to(torch.int16)
    by_part = _sorted(torch.empty_like(numbers).scatter_(0, by_expert, numbers))
    token = found.index_select(0, by_part).int() // ids.shape[1]
    new = torch.ones(len(token), dtype=torch.bool)
    torch.ne(token[1:], token[:-1], out=new[1:])
    first_of = sizes.cumsum(0) - sizes
    new[first_of] = True
    bags = torch.nonzero(new).flatten()
    of_parts = iter(
        torch.searchsorted(bags, sizes.cumsum(0)).diff(prepend=torch.zeros(1, dtype=torch.int64)).tolist()
    )

    parts: list[tuple[RowPart, ...]] = []
    row = place = bag = 0
    for of_batch in rows_of:
        made = []
        for own in of_batch:
            ends = row + sum(own), place + places(max(own)) * len(own), bag + next(of_parts)
            made.append(RowPart(slice(row, ends[0]), slice(place, ends[1]), own, slice(bag, ends[2])))
            row, place, bag = ends
        parts.append(tuple(made))
    spread, starts = _spread([part for of_batch in parts for part in of_batch])
    at_places = starts + spread
    at = torch.full((place,), ids.shape[0], dtype=torch.int32)
    at.scatter_(0, at_places, slots.int() // ids.shape[1])
    weight = torch.zeros(place, dtype=weights.dtype)
    weight.scatter_(0, at_places, weights.reshape(-1).index_select(0, slots))
    spread = spread.int()
    bag_places = torch.empty_like(spread).scatter_(0, by_expert, spread).index_select(0, by_part)
    reached = torch.zeros(ids.shape[0], dtype=torch.bool).index_fill_(0, token.long(), True)
    return Routed(
        tuple(map(tuple, batches)),
        tuple(parts),
        slots.int(),
        torch.nonzero(reached).flatten(),
        at,
        weight,
        spread,
        bag_places,
        (bags - first_of.index_select(0, torch.bucketize(bags, first_of, right=True) - 1)).int(),
        token.index_select(0, bags),
    )


def _sorted(keys: Tensor) -> Tensor:
    """Order of ascending keys, less than 2^15 each; equal ones as they come."""
    return torch.argsort(keys.to(torch.int16), stable=True)


def _in_parts(counts: Sequence[int]) -> list[tuple[int, ...]]:
    """A batch's rows; those of a single expert as few parts as they take."""
    if len(counts) > 1:
        return [tuple(counts)]
    return [(min(LANE_ROWS, counts[0] - first),) for first in range(0, counts[0], LANE_ROWS)]


def _spread(parts: Sequence[RowPart]) -> tuple[Tensor, Tensor]:
    """Of every row, its place in its part, and the first place of this part."""
    experts = [(n, b * p.width, p.places.start) for p in parts for b, n in enumerate(p.counts)]
    counts, first, starts = torch.tensor(experts, dtype=torch.int64).reshape(-1, 3).unbind(1)
    shift = _repeated(first - (counts.cumsum(0) - counts), counts)
    return torch.arange(len(shift)) + shift, _repeated(starts, counts)


def _repeated(values: Tensor, counts: Tensor) -> Tensor:
    """values.repeat_interleave(counts), which took two thirds of `route` with 49,152 slots."""
    ends = counts.cumsum(0)
    steps = torch.zeros(int(ends[-1]) + 1, dtype=torch.int64)
    steps.index_add_(0, ends - counts, values.diff(prepend=torch.zeros(1, dtype=torch.int64)))
    return steps.cumsum(0)[:-1]


def add_part(out: Tensor, values: Tensor, bags: tuple[Tensor, Tensor, Tensor], weight: Tensor | None) -> None:
    """out[token] += its rows among `values` [B, n, H] of a part, each times its weight, in an order that is
    the same every time.

    GPUs add concurrently where an index repeats. So a bag's rows are summed one after the other, and no two
    bags have one token.

    Args:
        bags: places, starts and tokens of the part. weight: [B, n] float32; None = 1.
    """
    places, starts, tokens = bags
    scale = None if weight is None else weight.flatten().index_select(0, places)
    rows = values.flatten(0, 1)
    sums = torch.embedding_bag(rows, places, starts, False, 0, False, scale)[0]
    out.index_add_(0, tokens, sums)
