"""The LoRA dropout mask in torch: the hash of docs/numerics.md, element by element.

Legend: N rows, F features of a projection's input.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kt_ray.native.tensors import DropoutSpec

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9
_EXPERT_TAG = 0x45585054
GATE, UP, DOWN = 0, 1, 2


def _multiply(h: Tensor, factor: int) -> Tensor:
    """h * factor modulo 2**32 of int64 tensors holding 32-bit values; in halves, as int64 would overflow."""
    high = (h * (factor >> 16)) & _MASK
    return ((high << 16) + h * (factor & 0xFFFF)) & _MASK


def fmix(h: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finaliser of int64 tensors holding unsigned 32-bit values."""
    h = h ^ (h >> 16)
    h = _multiply(h, 0x85EBCA6B)
    h = h ^ (h >> 13)
    h = _multiply(h, 0xC2B2AE35)
    return h ^ (h >> 16)


def combine(h: Tensor, v: Tensor | int) -> Tensor:
    """Fold one 32-bit value into a hash."""
    return fmix((h * 31 + v + _GOLDEN) & _MASK)


def dropout_hash(
    spec: DropoutSpec, layer: int, expert: int, projection: int, keys_N: Tensor, features: int
) -> Tensor:
    """The 32-bit hash of every element of an expert projection's input.

    Args:
        spec: seed and step.
        layer: index of the layer in the model.
        expert: global number of the expert.
        projection: GATE, UP or DOWN.
        keys_N: int64, sample * 2**32 + position.
        features: number of input features of the projection.

    Returns:
        int64 [N, F] in [0, 2**32); an element is kept iff its hash is >= floor(p * 2**32).
    """
    stream = torch.tensor(_EXPERT_TAG)
    for v in (layer, expert, projection):
        stream = combine(stream, v & _MASK)
    row_N = torch.zeros_like(keys_N)
    seed = spec.seed & (2**64 - 1)
    for word in (
        seed & _MASK,
        seed >> 32,
        spec.step & _MASK,
        int(stream),
        (keys_N >> 32) & _MASK,
        0,
        keys_N & _MASK,
    ):
        row_N = combine(row_N, word)
    element_F = torch.arange(1, features + 1, dtype=torch.int64, device=keys_N.device)
    return fmix((row_N[:, None] + _multiply(element_F, _GOLDEN)) & _MASK)
