"""Forward and backward of one expert's rows in torch, on any device, with the engine's roundings.

What docs/numerics.md says of the engine holds here: x, g, u, act, dy, dg and du are rounded to bfloat16 (with
float32 weights nothing is), frozen products multiply the stored values and accumulate in float32, adapters
and everything else are float32. As on the instruction sets that multiply bfloat16, quantised weights are
rounded to bfloat16 first. Sums run in the order of the device's library, so results agree with the engine's
to rounding, not to the bit.

Legend: n rows (tokens at this expert), H hidden size, I intermediate size, r LoRA rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kt_ray.gpu import product
from kt_ray.native import ExpertFormula
from kt_ray.native.dropout_hash import DOWN, GATE, UP
from kt_ray.native.reference import activate

PROJECTIONS = {GATE: "gate", UP: "up", DOWN: "down"}
Masks = Callable[[int, int], Tensor]  # (projection, input features) -> [n, features]: 0 or 1 / (1 - p)


@dataclass(frozen=True)
class DeviceExpert:
    """One expert, ready to multiply."""

    # projection -> [N, K] in bfloat16 or float32; without a gate there is none
    matrices: Mapping[int, Tensor]
    biases: Mapping[int, Tensor]  # projection -> [N] float32, where there are any
    formula: ExpertFormula  # between up and down
    # "gate_a" [r, H], "gate_b" [I, r], ... float32; empty without an adapter
    lora: Mapping[str, Tensor] = field(default_factory=dict)
    scale: float = 1.0  # of the adapter

    @property
    def stored(self) -> torch.dtype:
        """The type that activations are rounded to."""
        return self.matrices[UP].dtype

    def adapter(self, projection: int) -> tuple[Tensor, Tensor]:
        """A [r, K] and B [N, r]."""
        name = PROJECTIONS[projection]
        return self.lora[f"{name}_a"], self.lora[f"{name}_b"]


def _masked(z: Tensor, masks: Masks | None, projection: int) -> Tensor:
    wide = z.float()
    return wide if masks is None else wide * masks(projection, z.shape[1])


def _linear(expert: DeviceExpert, projection: int, z: Tensor, masks: Masks | None) -> Tensor:
    """W z + s B A m(z) + b in float32."""
    out = product(z, expert.matrices[projection].T)
    if expert.lora:
        a, b = expert.adapter(projection)
        out += (expert.scale * (_masked(z, masks, projection) @ a.T)) @ b.T
    if projection in expert.biases:
        out += expert.biases[projection]
    return out


def project_in(expert: DeviceExpert, x: Tensor, masks: Masks | None) -> tuple[Tensor | None, Tensor]:
    """g and u [n, I] as stored, of x [n, H] as stored."""
    gate = _linear(expert, GATE, x, masks).to(expert.stored) if GATE in expert.matrices else None
    return gate, _linear(expert, UP, x, masks).to(expert.stored)


def _activated(expert: DeviceExpert, gate: Tensor | None, up: Tensor) -> Tensor:
    made = activate(expert.formula, None if gate is None else gate.float(), up.float())
    return made.to(expert.stored)


def project_out(expert: DeviceExpert, gate: Tensor | None, up: Tensor, masks: Masks | None) -> Tensor:
    """o [n, H] float32, not yet weighted, of g and u as stored."""
    return _linear(expert, DOWN, _activated(expert, gate, up), masks)


@dataclass(frozen=True)
class RowGradients:
    """dx [n, H] and dw [n] float32; lora: gradients by the adapter's names, float32."""

    dx: Tensor
    dw: Tensor
    lora: Mapping[str, Tensor]


def backward(
    expert: DeviceExpert,
    x: Tensor,
    gate: Tensor | None,
    up: Tensor,
    dy: Tensor,
    weight: Tensor,
    masks: Masks | None,
) -> RowGradients:
    """Gradients of `weight` * o.

    Args:
        x: [n, H], gate and up: [n, I], as stored in forward.
        dy: [n, H] float32, of the weighted sum. weight: [n] float32, the router's.
        masks: forward's.
    """
    act = _activated(expert, gate, up)
    stored_dy, w = dy.to(expert.stored), weight.unsqueeze(1)
    dact = product(stored_dy, expert.matrices[DOWN])
    grads: dict[str, Tensor] = {}
    if expert.lora:
        a, b = expert.adapter(DOWN)
        inside = _masked(act, masks, DOWN)
        t = expert.scale * (stored_dy.float() @ b)
        back = t @ a
        dact += back if masks is None else back * masks(DOWN, act.shape[1])
        grads["down_b"] = (w * stored_dy).T @ (expert.scale * (inside @ a.T))
        grads["down_a"] = (w * t).T @ inside
    dw = (act.float() * dact).sum(1)
    if DOWN in expert.biases:
        dw += dy @ expert.biases[DOWN]  # the only place that takes dy as it came
    d_gate, d_up = slopes(expert.formula, None if gate is None else gate.float(), up.float(), w * dact)
    dx = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for projection, wide in ((GATE, d_gate), (UP, d_up)):
        if wide is None:
            continue
        d = wide.to(expert.stored)
        dx += product(d, expert.matrices[projection])
        if expert.lora:
            a, b = expert.adapter(projection)
            inside = _masked(x, masks, projection)
            v = expert.scale * (d.float() @ b)
            back = v @ a
            dx += back if masks is None else back * masks(projection, x.shape[1])
            name = PROJECTIONS[projection]
            grads[f"{name}_b"] = d.float().T @ (expert.scale * (inside @ a.T))
            grads[f"{name}_a"] = v.T @ inside
    return RowGradients(dx, dw, grads)


def slopes(
    formula: ExpertFormula, gate: Tensor | None, up: Tensor, upstream: Tensor
) -> tuple[Tensor | None, Tensor]:
    """Gradients of g (None without a gate) and u, from that of act: the table of docs/numerics.md."""
    if gate is None:
        return None, upstream * 2 * up.clamp(min=0)
    inside_g = inside_u = None
    if formula.limit is not None:
        inside_g, inside_u = gate <= formula.limit, up.abs() <= formula.limit
        gate, up = gate.clamp(max=formula.limit), up.clamp(-formula.limit, formula.limit)
    if formula.activation == "gelu_tanh":
        z = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        s, slope = torch.sigmoid(2 * z), math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * gate**2)
        d_gate, d_up = up * (s + gate * s * (1 - s) * 2 * slope), gate * s
    elif formula.activation == "swiglu_oai":
        s = torch.sigmoid(formula.alpha * gate)
        d_gate, d_up = (up + 1) * s * (1 + formula.alpha * gate * (1 - s)), gate * s
    else:
        s = torch.sigmoid(gate)
        d_gate, d_up = up * s * (1 + gate * (1 - s)), gate * s
    d_gate, d_up = upstream * d_gate, upstream * d_up
    if inside_g is not None and inside_u is not None:
        d_gate, d_up = d_gate.masked_fill(~inside_g, 0), d_up.masked_fill(~inside_u, 0)
    return d_gate, d_up
