"""What a stage asks of whoever carries tokens to the routed experts.

Shapes: T valid tokens of one group of micro-batches on one replica, H hidden, K experts per token.
Tensors to submit are on the CPU, in memory from `alloc`. A stage submits and joins in the order of its
program; `submit_*` returns at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Exchange(Protocol):
    """Tokens out, results back. Implemented by the actors' transports, and in-process by tests."""

    def alloc(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """CPU memory to fill and submit once, page-locked where the stage computes on CUDA.

        Filled in place, a tensor gets to experts in shared memory without another copy. It belongs to the
        exchange once it was submitted.
        """

    def submit_forward(
        self,
        layer: int,
        group: int,
        x_TH: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        keys_T: Tensor,
        keep: bool,
    ) -> None:
        """Send a group's tokens.

        Args:
            layer: decoder layer.
            group: group of micro-batches.
            x_TH: float32 or bfloat16 [T, H] input of the experts.
            ids_TK: int32 [T, K] global expert ids.
            weights_TK: float32 [T, K] routing weights.
            keys_T: int64 [T] sample id · 2³² + position: the counters of dropout.
            keep: whether a backward will follow.
        """

    def join_forward(self, layer: int, group: int) -> Tensor:
        """Wait for y float32 [T, H], summed over all experts; on the CPU or on the stage's device."""

    def submit_backward(self, layer: int, group: int, dy_TH: Tensor) -> None:
        """Send dy float32 [T, H]."""

    def join_backward(self, layer: int, group: int) -> tuple[Tensor, Tensor]:
        """Wait for (dx float32 [T, H], dw float32 [T, K]); on the CPU or on the stage's device."""
