"""Which rows of a call the lane computes, in which order. Host tensors; pure functions.

Legend: T tokens of the call, K slots per token, R rows (slots) of the lane's experts, U tokens among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Routed:
    """The lane's rows, expert by expert."""

    # local ids in computing order; ends: for each, where its rows end in the tensors of rows
    experts: tuple[int, ...]
    ends: tuple[int, ...]
    slots: Tensor  # [R] t * K + k of every row, ascending within an expert
    tokens: Tensor  # [U] tokens with a row, ascending; at: [R] position of each row's token among them
    at: Tensor
    weight: Tensor  # [R] router weights
    # for each expert, None, or its rows in parts that name no token twice
    turns: tuple[tuple[Tensor, ...] | None, ...]

    def rows(self, i: int) -> slice:
        """Rows of the i-th expert."""
        return slice(self.ends[i - 1] if i else 0, self.ends[i])

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
    turns = tuple(_without_repeats(at[a:b]) for a, b in zip(begins, ends, strict=True))
    return Routed(tuple(experts), ends, slots, tokens, at, weights.reshape(-1)[slots], turns)


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
