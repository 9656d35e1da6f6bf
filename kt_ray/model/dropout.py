"""LoRA's dropout outside the experts, with the counter-based mask of kt_ray.native.dropout_hash."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kt_ray.native.dropout_hash import keep_mask, row_hash


def module_stream(name: str) -> int:
    """Stream of a module outside the routed experts, from its Hugging Face name."""
    return zlib.crc32(name.encode("utf-8"))


@dataclass
class DropoutContext:
    """What a stage's dropout modules read: which rows the next layer call holds."""

    seed: int = 0  # the run's seed
    step: int = 0  # optimizer step
    enabled: bool = False  # False in evaluation
    # int64 [N] sample id of each row of the layer's input (b·s rows, padding included)
    samples_N: Tensor | None = None
    positions_N: Tensor | None = None  # int64 [N] position of each row

    def __deepcopy__(self, memo: dict[int, Any]) -> DropoutContext:
        return self  # a copied layer keeps reading its stage's context


class CounterDropout(nn.Module):
    """Replaces a LoRA layer's `lora_dropout`. Stateless: the rows come from the stage's context.

    Args:
        p: drop probability, 0 < p < 1.
        name: Hugging Face name of the adapted module; selects the stream.
    """

    def __init__(self, p: float, name: str, context: DropoutContext) -> None:
        super().__init__()
        self.p = p
        self.name = name
        self.stream = module_stream(name)
        self.context = context

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements of x [..., features], whose leading axes flatten to the context's N rows."""
        context = self.context
        if not context.enabled:
            return x
        if context.samples_N is None or context.positions_N is None:
            raise RuntimeError(f"dropout of {self.name} ran outside a layer call of its stage")
        rows, features = x.numel() // x.shape[-1], x.shape[-1]
        if rows != context.samples_N.numel():
            raise RuntimeError(
                f"dropout of {self.name} saw {rows} rows instead of {context.samples_N.numel()}: "
                "this module does not act on one row per token, so it cannot be a LoRA target with dropout"
            )
        row_N = row_hash(context.seed, context.step, self.stream, context.samples_N, context.positions_N)
        keep = keep_mask(row_N, features, self.p).view(x.shape)
        # `where` saves only the bool mask for backward
        return torch.where(keep, x * (1.0 / (1.0 - self.p)), torch.zeros((), dtype=x.dtype, device=x.device))
