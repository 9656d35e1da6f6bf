"""The engine's function in torch: differentiable, in the precision of its inputs, without its roundings.

Slow and plain. Tests compare every instruction set with it, in float64 as a yardstick, and users can
read in it what the engine computes. Legend: as in engine.py; N rows of one expert, F features of a
projection's input.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from kt_ray.native.dropout_hash import DOWN, GATE, UP, dropout_hash
from kt_ray.native.tensors import (
    DropoutSpec,
    ExpertFormula,
    ExpertLora,
    ExpertWeights,
    Projection,
    gate_limit,
)

__all__ = ["DOWN", "GATE", "UP", "activate", "dense", "dropout_hash", "moe_reference"]


def dense(projection: Projection, dtype: torch.dtype) -> Tensor:
    """A projection's weights [E, N, K] as plain numbers: its format's float32 values in `dtype`."""
    return projection.to(dtype) if isinstance(projection, Tensor) else projection.dequantize().to(dtype)


def activate(weights: ExpertWeights | ExpertFormula, gate: Tensor | None, up: Tensor) -> Tensor:
    """What goes into down, from the outputs of gate and up: the table of `ExpertWeights`."""
    if gate is None:
        return relu(up).square()
    if weights.limit is not None:
        gate = gate.clamp(max=gate_limit(weights))
        up = up.clamp(-weights.limit, weights.limit)
    if weights.activation == "swiglu_oai":
        return (up + 1) * gate * torch.sigmoid(weights.alpha * gate)
    if weights.activation == "gelu_tanh":
        return gelu(gate, approximate="tanh") * up
    return silu(gate) * up


def moe_reference(
    weights: ExpertWeights,
    x_TH: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    *,
    lora: ExpertLora | Sequence[ExpertLora] | None = None,
    adapter_of_token: Tensor | None = None,
    dropout: DropoutSpec | None = None,
    keys: Tensor | None = None,
) -> Tensor:
    """y [T, H] of `Engine.forward`, in x's dtype; weights, biases and adapters are converted to it.

    Differentiable in x, weights_TK and the adapters' tensors; in plain weights and biases too, which the
    engine keeps frozen.
    """
    adapters = [] if lora is None else [lora] if isinstance(lora, ExpertLora) else list(lora)
    if adapter_of_token is None:
        adapter_of_token = torch.full((x_TH.shape[0],), 0 if adapters else -1)
    # By projection number; without a gate its place is empty.
    frozen = [None if p is None else dense(p, x_TH.dtype) for p in (weights.gate, weights.up, weights.down)]
    biases = weights.gate_bias, weights.up_bias, weights.down_bias
    y_TH = torch.zeros_like(x_TH)
    for expert, global_expert in enumerate(weights.expert_ids):
        token, slot = torch.where(ids_TK == expert)
        for index in [-1, *range(len(adapters))]:
            chosen = adapter_of_token[token] == index
            t, k = token[chosen], slot[chosen]
            if len(t) == 0:
                continue
            adapter = adapters[index] if index >= 0 else None
            keys_N = None if keys is None else keys[t]

            def linear(
                z_NF: Tensor,
                projection: int,
                expert: int = expert,
                global_expert: int = global_expert,
                adapter: ExpertLora | None = adapter,
                keys_N: Tensor | None = keys_N,
            ) -> Tensor:
                w, bias = frozen[projection], biases[projection]
                assert w is not None
                out = z_NF @ w[expert].T
                if bias is not None:
                    out = out + bias[expert].to(z_NF.dtype)
                if adapter is None:
                    return out
                a, b = adapter.pair(projection)
                if dropout is not None and dropout.p > 0:
                    assert keys_N is not None, "dropout needs keys"
                    u = dropout_hash(dropout, weights.layer, global_expert, projection, keys_N, z_NF.shape[1])
                    keep = u >= int(dropout.p * 2**32)
                    z_NF = z_NF * keep.to(z_NF.dtype) / (1 - dropout.p)
                return out + adapter.scale * (z_NF @ a[expert].to(z_NF.dtype).T) @ b[expert].to(z_NF.dtype).T

            act = activate(
                weights, None if weights.gate is None else linear(x_TH[t], GATE), linear(x_TH[t], UP)
            )
            y_TH = y_TH.index_add(0, t, linear(act, DOWN) * weights_TK[t, k, None].to(x_TH.dtype))
    return y_TH
