"""A part of the LoRA: what one of several trainings of different ranks and modules changes of it."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from kt_ray.batch import LoraPart

_MLP = re.compile(
    r"(^|\.)(mlp|feed_forward|block_sparse_moe|shared_mlp|shared_experts?|experts|mixer\.(up|down)_proj)(\.|$)"
)


def changes(part: LoraPart, name: str) -> bool:
    """Whether a training of this part changes a LoRA parameter, or its module, by its name."""
    return part.mlp if _MLP.search(name.rpartition("layers.")[2]) else part.attn


@torch.no_grad()
def limit(part: LoraPart, name: str, value: Tensor) -> None:
    """Make initial LoRA that of a part, in place: A [rank, in] is zero outside of it, as B is everywhere.

    There both gradients are zero, dB = dyᵀ (x Aᵀ) and dA = (dy B)ᵀ x, and AdamW leaves a zero without a
    gradient where it is. So such a training needs no shapes of its own.
    """
    if not changes(part, name):
        value.zero_()
    elif part.rank is not None and name.endswith(".lora_A.weight"):
        value[part.rank :].zero_()


def shape_in(part: LoraPart, name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """What a training of this part changes of a parameter: its first so many rows (A) or columns (B)."""
    if part.rank is None:
        return tuple(shape)
    return (part.rank, shape[1]) if name.endswith(".lora_A.weight") else (shape[0], part.rank)
