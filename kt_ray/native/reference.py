"""The engine's function in torch: differentiable, in the precision of its inputs, without its roundings.

Slow and plain. Tests compare every instruction set with it, in float64 as a yardstick, and users can
read in it what the engine computes. Shapes as in engine.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import silu

from kt_ray.native.types import DropoutSpec, ExpertLora, ExpertWeights

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
    spec: DropoutSpec, layer: int, expert: int, projection: int, keys: Tensor, features: int
) -> Tensor:
    """The 32-bit hash of every element of an expert projection's input.

    Args:
        spec: seed and step.
        layer: index of the layer in the model.
        expert: global number of the expert.
        projection: GATE, UP or DOWN.
        keys: [n] int64, sample * 2**32 + position.
        features: number of input features of the projection.

    Returns:
        [n, features] int64 in [0, 2**32); an element is kept iff its hash is >= floor(p * 2**32).
    """
    stream = torch.tensor(_EXPERT_TAG)
    for v in (layer, expert, projection):
        stream = combine(stream, v & _MASK)
    row = torch.zeros_like(keys)
    seed = spec.seed & (2**64 - 1)
    for word in (
        seed & _MASK,
        seed >> 32,
        spec.step & _MASK,
        int(stream),
        (keys >> 32) & _MASK,
        0,
        keys & _MASK,
    ):
        row = combine(row, word)
    element = torch.arange(1, features + 1, dtype=torch.int64)
    return fmix((row[:, None] + _multiply(element, _GOLDEN)) & _MASK)


def moe_reference(
    weights: ExpertWeights,
    x: Tensor,
    ids: Tensor,
    weights_TK: Tensor,
    *,
    lora: ExpertLora | Sequence[ExpertLora] | None = None,
    adapter_of_token: Tensor | None = None,
    dropout: DropoutSpec | None = None,
    keys: Tensor | None = None,
) -> Tensor:
    """y [T, H] of `Engine.forward`, in x's dtype; weights and adapters are converted to it.

    Differentiable in x, weights_TK and the adapters' tensors.
    """
    adapters = [] if lora is None else [lora] if isinstance(lora, ExpertLora) else list(lora)
    if adapter_of_token is None:
        adapter_of_token = torch.full((x.shape[0],), 0 if adapters else -1)
    y = torch.zeros_like(x)
    for expert, global_expert in enumerate(weights.expert_ids):
        token, slot = torch.where(ids == expert)
        for index in [-1, *range(len(adapters))]:
            chosen = adapter_of_token[token] == index
            t, k = token[chosen], slot[chosen]
            if len(t) == 0:
                continue
            adapter = adapters[index] if index >= 0 else None
            row_keys = None if keys is None else keys[t]

            def linear(
                w: Tensor,
                z: Tensor,
                projection: int,
                expert: int = expert,
                global_expert: int = global_expert,
                adapter: ExpertLora | None = adapter,
                row_keys: Tensor | None = row_keys,
            ) -> Tensor:
                out = z @ w[expert].to(z.dtype).T
                if adapter is None:
                    return out
                a, b = adapter.tensors()[2 * projection : 2 * projection + 2]
                if dropout is not None and dropout.p > 0:
                    assert row_keys is not None, "dropout needs keys"
                    u = dropout_hash(dropout, weights.layer, global_expert, projection, row_keys, z.shape[1])
                    keep = u >= int(dropout.p * 2**32)
                    z = z * keep.to(z.dtype) / (1 - dropout.p)
                return out + adapter.scale * (z @ a[expert].to(z.dtype).T) @ b[expert].to(z.dtype).T

            act = silu(linear(weights.gate, x[t], GATE)) * linear(weights.up, x[t], UP)
            y = y.index_add(0, t, linear(weights.down, act, DOWN) * weights_TK[t, k, None].to(x.dtype))
    return y
