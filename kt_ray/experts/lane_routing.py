"""Which rows of a call the lane computes, in which order. Host tensors; pure functions.

Legend: T tokens of the call, K slots per token, R rows (slots) of the lane's experts, U tokens among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kt_ray.placement.lane_share import LANE_ROWS


class RowPart(NamedTuple):
    """Rows of one expert, computed together. turns: None, or parts of them that name no token twice."""

    rows: slice
    turns: tuple[Tensor, ...] | None


@dataclass(frozen=True)
class Routed:
    """The lane's rows, expert by expert."""

    # local ids in computing order; parts: of each, at most LANE_ROWS rows each
    experts: tuple[int, ...]
    parts: tuple[tuple[RowPart, ...], ...]
    slots: Tensor  # [R] t * K + k of every row, ascending within an expert
    tokens: Tensor  # [U] tokens with a row, ascending; at: [R] position of each row's token among them
    at: Tensor
    weight: Tensor  # [R] router weights

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.slots, self.tokens, self.at, self.weight))


def route(ids: Tensor, weights: Tensor, experts: Sequence[int], none: int) -> Routed:
    """The rows of `experts`.

    Args:
        ids: [T, K] local ids, `none` and above meaning no expert. weights: [T, K] float32.
        experts: local ids, each with at least one row, in the order in which they are computed.
    """
    rank = torch.full((none + 1,), -1, dtype=torch.int64)
    rank[list(experts)] = torch.arange(len(experts))
    order_of_slot = rank[ids.reshape(-1).clamp(max=none)]
    slots = torch.nonzero(order_of_slot >= 0).flatten()
    turn = order_of_slot[slots]
    slots = slots[torch.argsort(turn, stable=True)]
    ends = tuple(torch.bincount(turn, minlength=len(experts)).cumsum(0).tolist())
    tokens, at = torch.unique(slots // ids.shape[1], return_inverse=True)
    begins = (0, *ends[:-1])
    parts = tuple(_parts(at, first, end) for first, end in zip(begins, ends, strict=True))
    return Routed(tuple(experts), parts, slots, tokens, at, weights.reshape(-1)[slots])


def _parts(at: Tensor, first: int, end: int) -> tuple[RowPart, ...]:
    """An expert's rows [first, end), as few parts as they take."""
    begins = range(first, end, LANE_ROWS)
    rows = [slice(begin, min(begin + LANE_ROWS, end)) for begin in begins]
    return tuple(RowPart(own, _without_repeats(at[own])) for own in rows)


def _without_repeats(at: Tensor) -> tuple[Tensor, ...] | None:
    """Rows in parts that name no token twice; None = no row does. `at` ascends."""
    new = torch.ones_like(at, dtype=torch.bool)
    new[1:] = at[1:] != at[:-1]
    if bool(new.all()):
        return None
    position = torch.arange(len(at))
    occurrence = position - torch.where(new, position, 0).cummax(0).values
    return tuple(torch.nonzero(occurrence == n).flatten() for n in range(int(occurrence.max()) + 1))


def add_rows(out: Tensor, at: Tensor, values: Tensor, turns: Sequence[Tensor] | None) -> None:
    """out[at] += values, in an order that is the same every time: no sum has two addends at once.

    GPUs add concurrently where an index repeats; with distinct ones every element has one addend.
    """
    if turns is None:
        out.index_add_(0, at, values)
        return
    for rows in turns:
        chosen = rows.to(out.device)
        out.index_add_(0, at[chosen], values[chosen])
