"""The engine's function in torch: differentiable, in the precision of its inputs, without its roundings.

Slow and plain. Tests compare every instruction set with it, in float64 as a yardstick, and users can
read in it what the engine computes. Shapes as in engine.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from kt_ray.native.dropout_hash import DOWN, GATE, UP, dropout_hash
from kt_ray.native.tensors import DropoutSpec, ExpertFormula, ExpertLora, ExpertWeights, Projection

__all__ = ["DOWN", "GATE", "UP", "activate", "dense", "dropout_hash", "moe_reference"]


def dense(projection: Projection, dtype: torch.dtype) -> Tensor:
    """A projection's weights [E, N, K] as plain numbers: its format's float32 values in `dtype`."""
    return projection.to(dtype) if isinstance(projection, Tensor) else projection.dequantize().to(dtype)


def activate(weights: ExpertWeights | ExpertFormula, gate: Tensor | None, up: Tensor) -> Tensor:
    """What goes into down, from the outputs of gate and up: the table of `ExpertWeights`."""
    if gate is None:
        return relu(up).square()
    if weights.limit is not None:
        gate = gate.clamp(max=weights.limit)
        up = up.clamp(-weights.limit, weights.limit)
    if weights.activation == "swiglu_oai":
        return (up + 1) * gate * torch.sigmoid(weights.alpha * gate)
    if weights.activation == "gelu_tanh":
        return gelu(gate, approximate="tanh") * up
    return silu(gate) * up


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
    """y [T, H] of `Engine.forward`, in x's dtype; weights, biases and adapters are converted to it.

    Differentiable in x, weights_TK and the adapters' tensors; in plain weights and in biases too, though
    the engine holds these frozen.
    """
    adapters = [] if lora is None else [lora] if isinstance(lora, ExpertLora) else list(lora)
    if adapter_of_token is None:
        adapter_of_token = torch.full((x.shape[0],), 0 if adapters else -1)
    # By projection number; without a gate its place is empty.
    frozen = [None if p is None else dense(p, x.dtype) for p in (weights.gate, weights.up, weights.down)]
    biases = weights.gate_bias, weights.up_bias, weights.down_bias
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
                z: Tensor,
                projection: int,
                expert: int = expert,
                global_expert: int = global_expert,
                adapter: ExpertLora | None = adapter,
                row_keys: Tensor | None = row_keys,
            ) -> Tensor:
                w, bias = frozen[projection], biases[projection]
                assert w is not None
                out = z @ w[expert].T
                if bias is not None:
                    out = out + bias[expert].to(z.dtype)
                if adapter is None:
                    return out
                a, b = adapter.pair(projection)
                if dropout is not None and dropout.p > 0:
                    assert row_keys is not None, "dropout needs keys"
                    u = dropout_hash(dropout, weights.layer, global_expert, projection, row_keys, z.shape[1])
                    keep = u >= int(dropout.p * 2**32)
                    z = z * keep.to(z.dtype) / (1 - dropout.p)
                return out + adapter.scale * (z @ a[expert].to(z.dtype).T) @ b[expert].to(z.dtype).T

            act = activate(weights, None if weights.gate is None else linear(x[t], GATE), linear(x[t], UP))
            y = y.index_add(0, t, linear(act, DOWN) * weights_TK[t, k, None].to(x.dtype))
    return y
