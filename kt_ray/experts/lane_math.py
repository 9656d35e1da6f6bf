"""Forward and backward of several experts' rows at once in torch, on any device, with the engine's roundings.

What docs/numerics.md says of the engine holds here: x, g, u, act, dy, dg and du are rounded to bfloat16 (with
float32 weights nothing is), frozen products multiply the stored values and accumulate in float32, adapters
and everything else are float32. As on the instruction sets that multiply bfloat16, quantised weights are
rounded to bfloat16 first. Sums run in the order of the device's library, so results agree with the engine's
to rounding, not to the bit. With `float8` both operands of frozen products, and nothing else, are rounded
once more (`kt_ray.experts.lane_float8`).

The experts of a batch have as many places as the longest has rows. Where there is no row, x, dy and the
router's weight are zeros. Gate, up and act are not (biases), but every gradient has dy, or what comes of it,
as a factor: there they are zeros, too, and add nothing to the adapters' gradients.

Legend: B experts, n places (rows of the longest), H hidden size, I intermediate size, r LoRA rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kt_ray.experts.lane_float8 import Rounded, multiplies, product8, rounded
from kt_ray.gpu import product
from kt_ray.native import ExpertFormula
from kt_ray.native.dropout_hash import DOWN, GATE, UP
from kt_ray.native.reference import activate

PROJECTIONS = {GATE: "gate", UP: "up", DOWN: "down"}
Masks = Callable[[int, int], Tensor]  # (projection, input features) -> [B, n, features]: 0 or 1 / (1 - p)


@dataclass(frozen=True)
class DeviceExperts:
    """The experts of a batch, ready to multiply."""

    # projection -> [B, N, K] in bfloat16 or float32; without a gate there is none
    matrices: Mapping[int, Tensor]
    biases: Mapping[int, Tensor]  # projection -> [B, N] float32, where there are any
    formula: ExpertFormula  # between up and down
    # "gate_a" [B, r, H], "gate_b" [B, I, r], ... float32; empty without an adapter
    lora: Mapping[str, Tensor] = field(default_factory=dict)
    scale: float = 1.0  # of the adapter
    float8: bool = False  # whether frozen products are computed in FP8
    # (projection, whether transposed) -> matrix in FP8, made when it is first needed
    _rounded: dict[tuple[int, bool], Rounded] = field(default_factory=dict)

    @property
    def stored(self) -> torch.dtype:
        """The type that activations are rounded to."""
        return self.matrices[UP].dtype

    def adapter(self, projection: int) -> tuple[Tensor, Tensor]:
        """A [B, r, K] and B [B, N, r]."""
        name = PROJECTIONS[projection]
        return self.lora[f"{name}_a"], self.lora[f"{name}_b"]


class _Frozen:
    """Rows that are multiplied by frozen matrices: in FP8 rounded once, whatever they are multiplied by."""

    def __init__(self, experts: DeviceExperts, rows: Tensor) -> None:
        """rows: [B, n, K or N] as stored."""
        self._experts, self._rows = experts, rows
        self._rounded: Rounded | None = None

    def by(self, projection: int, *, back: bool = False) -> Tensor:
        """rows Wᵀ [B, n, N], or back: rows W [B, n, K]; float32."""
        experts, matrix = self._experts, self._experts.matrices[projection]
        matrix = matrix if back else matrix.mT
        if not experts.float8 or not multiplies(*matrix.shape[-2:]):
            return product(self._rows, matrix)
        if self._rounded is None:
            self._rounded = rounded(self._rows)
        key = projection, back
        if key not in experts._rounded:
            experts._rounded[key] = rounded(matrix.mT)
        return product8(self._rounded, experts._rounded[key])


def _masked(z: Tensor, masks: Masks | None, projection: int) -> Tensor:
    return z.float() if masks is None else z * masks(projection, z.shape[-1])


def _linear(
    experts: DeviceExperts, projection: int, z: Tensor, frozen: _Frozen, masks: Masks | None
) -> Tensor:
    """W z + s B A m(z) + b in float32. frozen: of z."""
    out = frozen.by(projection)
    if experts.lora:
        a, b = experts.adapter(projection)
        out.baddbmm_(_masked(z, masks, projection) @ a.mT, b.mT, alpha=experts.scale)
    if projection in experts.biases:
        out += experts.biases[projection].unsqueeze(1)
    return out


def project_in(experts: DeviceExperts, x: Tensor, masks: Masks | None) -> tuple[Tensor | None, Tensor]:
    """g and u [B, n, I] as stored, of x [B, n, H] as stored."""
    frozen = _Frozen(experts, x)

    def linear(projection: int) -> Tensor:
        return _linear(experts, projection, x, frozen, masks).to(experts.stored)

    return linear(GATE) if GATE in experts.matrices else None, linear(UP)


def _activated(experts: DeviceExperts, gate: Tensor | None, up: Tensor) -> Tensor:
    made = activate(experts.formula, None if gate is None else gate.float(), up.float())
    return made.to(experts.stored)


def project_out(experts: DeviceExperts, gate: Tensor | None, up: Tensor, masks: Masks | None) -> Tensor:
    """o [B, n, H] float32, not yet weighted, of g and u as stored."""
    act = _activated(experts, gate, up)
    return _linear(experts, DOWN, act, _Frozen(experts, act), masks)


@dataclass(frozen=True)
class RowGradients:
    """dx [B, n, H] and dw [B, n] float32; lora: gradients by the adapter's names, float32. dx None = not
    wanted."""

    dx: Tensor | None
    dw: Tensor
    lora: Mapping[str, Tensor]


def backward(
    experts: DeviceExperts,
    x: Tensor,
    gate: Tensor | None,
    up: Tensor,
    dy: Tensor,
    weight: Tensor,
    masks: Masks | None,
    *,
    input_grad: bool = True,
) -> RowGradients:
    """Gradients of `weight` * o.

    Args:
        x: [B, n, H], gate and up: [B, n, I], as stored in forward.
        dy: [B, n, H] float32, of the weighted sum. weight: [B, n] float32, the router's. Both are zeros
            where there is no row.
        masks: forward's. input_grad: whether dx is wanted.
    """
    act = _activated(experts, gate, up)
    stored_dy, w = dy.to(experts.stored), weight.unsqueeze(-1)
    dact = _Frozen(experts, stored_dy).by(DOWN, back=True)
    grads: dict[str, Tensor] = {}
    if experts.lora:
        grads |= _through_adapter(experts, DOWN, act, stored_dy, dact, masks, w)
    dw = (act * dact).sum(-1)
    if DOWN in experts.biases:
        # the only place that takes dy as it came
        dw += (dy @ experts.biases[DOWN].unsqueeze(-1)).squeeze(-1)
    d_gate, d_up = slopes(experts.formula, None if gate is None else gate.float(), up.float(), w * dact)
    dx: Tensor | None = None
    for projection, wide in ((GATE, d_gate), (UP, d_up)):
        if wide is None:
            continue
        d = wide.to(experts.stored)
        if input_grad:
            own = _Frozen(experts, d).by(projection, back=True)
            dx = own if dx is None else dx.add_(own)
        if experts.lora:
            grads |= _through_adapter(experts, projection, x, d, dx, masks, None)
    return RowGradients(dx, dw, grads)


def _through_adapter(
    experts: DeviceExperts,
    projection: int,
    z: Tensor,
    d: Tensor,
    dz: Tensor | None,
    masks: Masks | None,
    weight: Tensor | None,
) -> dict[str, Tensor]:
    """The adapter's part of a projection's backward: adds to dz if it is wanted, returns the gradients
    of A and B.

    Args:
        z: [B, n, K] and d: [B, n, N], the projection's input and the gradient of its output, as stored.
        weight: [B, n, 1], by which `d`, but not `dz`, is still to be multiplied; None = 1.
    """
    a, b = experts.adapter(projection)
    inside, wide = _masked(z, masks, projection), d.float()
    v = experts.scale * (wide @ b)
    if dz is not None and masks is None:
        dz.baddbmm_(v, a)
    elif dz is not None and masks is not None:
        dz.addcmul_(v @ a, masks(projection, z.shape[-1]))
    h = experts.scale * (inside @ a.mT)
    if weight is not None:
        v, h = weight * v, weight * h
    name = PROJECTIONS[projection]
    return {f"{name}_b": wide.mT @ h, f"{name}_a": v.mT @ inside}


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
