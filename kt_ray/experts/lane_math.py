"""Forward and backward of several experts' rows at once in torch, on any device, with the engine's roundings.

What docs/numerics.md says of the engine holds here: x, g, u, act, dy, dg and du are rounded to bfloat16 (with
float32 weights nothing is), frozen products multiply the stored values and accumulate in float32, adapters
and everything else are float32. As on the instruction sets that multiply bfloat16, quantised weights are
rounded to bfloat16 first. Sums run in the order of the device's library, so results agree with the engine's
to rounding, not to the bit. With `float8` both operands of frozen products, and nothing else, are rounded
once more (`kt_ray.experts.lane_float8`).

The experts of a batch have as many places each, no less than the longest has rows. Where there is no row, x,
dy and the router's weight are zeros. Gate, up and act are not (biases), but every gradient has dy, or what
comes of it, as a factor: there they are zeros, too, and add nothing to the adapters' gradients.

Legend: B experts, n places of each, H hidden size, I intermediate size, r LoRA rank, P
projections of x: gate and up, or up alone. What has the rank is held as [..., r, n], so that gate's and up's
lie together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from kt_ray.experts.lane_float8 import Rounded, multiplies, product8, rounded
from kt_ray.gpu import product
from kt_ray.native import ExpertFormula
from kt_ray.native.dropout_hash import DOWN, GATE, UP
from kt_ray.native.reference import activate
from kt_ray.native.tensors import gate_limit

PROJECTIONS = {GATE: "gate", UP: "up", DOWN: "down"}
Masks = Callable[[int, int], Tensor]  # (projection, input features) -> [B, n, features]: 0 or 1 / (1 - p)


class BatchLora(NamedTuple):
    """Adapters of a batch's experts, float32.

    in_a: [B, P r, H] and in_b: [P, B, I, r], of the projections of x. down_a: [B, r, I]. down_b: [B, H, r].
    """

    in_a: Tensor
    in_b: Tensor
    down_a: Tensor
    down_b: Tensor
    scale: float


@dataclass(frozen=True)
class DeviceExperts:
    """The experts of a batch, ready to multiply."""

    # projection -> [B, N, K] in bfloat16 or float32; without a gate there is none
    matrices: Mapping[int, Tensor]
    biases: Mapping[int, Tensor]  # projection -> [B, N] float32, where there are any
    formula: ExpertFormula  # between up and down
    lora: BatchLora | None = None
    float8: bool = False  # whether frozen products are computed in FP8
    joined: Tensor | None = None  # [B, 2 I, H], gate and up, where they are multiplied as one matrix
    # (projection, whether transposed) -> matrix in FP8, made when it is first needed
    _rounded: dict[tuple[int, bool], Rounded] = field(default_factory=dict)

    @property
    def stored(self) -> torch.dtype:
        """The type that activations are rounded to."""
        return self.matrices[UP].dtype

    @property
    def inputs(self) -> tuple[int, ...]:
        """The P projections of x."""
        return (GATE, UP) if GATE in self.matrices else (UP,)


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


def _times(out: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
    """out = scale a b, whatever is in it; all [B, ...]."""
    out.baddbmm_(a, b, beta=0, alpha=scale)


def _biased(out: Tensor, experts: DeviceExperts, projection: int) -> Tensor:
    if projection in experts.biases:
        out += experts.biases[projection].unsqueeze(1)
    return out


class Projected(NamedTuple):
    """Of x, as `backward` wants it.

    pair: [B, n, P I] as stored, gate and up side by side. wide: x in float32; None with masks. inner:
    [B, P r, n], s A m(x) of both. Without an adapter, or where they are still to be computed, both are None.
    """

    pair: Tensor
    wide: Tensor | None = None
    inner: Tensor | None = None


def _inner(experts: DeviceExperts, x: Tensor, masks: Masks | None) -> tuple[Tensor | None, Tensor | None]:
    """wide and inner of `Projected`."""
    lora = experts.lora
    if lora is None:
        return None, None
    inner = torch.empty((*lora.in_a.shape[:2], x.shape[1]), dtype=torch.float32, device=x.device)
    if masks is None:
        wide = x.float()
        _times(inner, lora.in_a, wide.mT, lora.scale)
        return wide, inner
    parts = zip(experts.inputs, _halves(inner, experts), _halves(lora.in_a, experts), strict=True)
    for projection, part, a in parts:
        _times(part, a, _masked(x, masks, projection).mT, lora.scale)
    return None, inner


def _halves(values: Tensor, experts: DeviceExperts) -> tuple[Tensor, ...]:
    """[B, r, ...] of each of the P projections of x."""
    return values.chunk(len(experts.inputs), 1)


def project_in(experts: DeviceExperts, x: Tensor, masks: Masks | None) -> Projected:
    """g and u of x [B, n, H] as stored."""
    wide, inner = _inner(experts, x, masks)
    if experts.joined is not None:
        parts: tuple[Tensor, ...] = (product(x, experts.joined.mT),)
        outs = parts[0].chunk(2, -1)
    else:
        frozen = _Frozen(experts, x)
        outs = parts = tuple(frozen.by(projection) for projection in experts.inputs)
    for number, (projection, out) in enumerate(zip(experts.inputs, outs, strict=True)):
        if experts.lora is not None and inner is not None:
            out.baddbmm_(_halves(inner, experts)[number].mT, experts.lora.in_b[number].mT)
        _biased(out, experts, projection)
    return Projected(_side_by_side(parts, experts.stored), wide, inner)


def _side_by_side(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Parts [B, n, I] as one tensor [B, n, P I] of that type."""
    if len(parts) == 1:
        return parts[0].to(dtype)
    width = sum(part.shape[-1] for part in parts)
    made = torch.empty((*parts[0].shape[:-1], width), dtype=dtype, device=parts[0].device)
    for to, part in zip(made.chunk(len(parts), -1), parts, strict=True):
        to.copy_(part)
    return made


def _gate_and_up(pair: Tensor, experts: DeviceExperts) -> tuple[Tensor | None, Tensor]:
    """g (None without a gate) in float32 and u as stored, of both side by side."""
    if len(experts.inputs) == 1:
        return None, pair
    gate, up = pair.chunk(2, -1)
    return gate.float(), up


def _activated(experts: DeviceExperts, gate: Tensor | None, up: Tensor) -> Tensor:
    """act as stored, of g in float32 and u as stored."""
    if gate is not None and _is_silu(experts.formula):
        return torch.mul(silu(gate), up, out=torch.empty(up.shape, dtype=up.dtype, device=up.device))
    return activate(experts.formula, gate, up.float()).to(experts.stored)


def _is_silu(formula: ExpertFormula) -> bool:
    """Whether act is silu(g) u and no more."""
    return formula.activation in ("silu", "capped_silu") and formula.limit is None


def project_out(experts: DeviceExperts, pair: Tensor, masks: Masks | None) -> Tensor:
    """o [B, n, H] float32, not yet weighted, of g and u as in `Projected`."""
    act, lora = _activated(experts, *_gate_and_up(pair, experts)), experts.lora
    out = _Frozen(experts, act).by(DOWN)
    if lora is not None:
        inner = lora.down_a @ _masked(act, masks, DOWN).mT
        out.baddbmm_(inner.mT, lora.down_b.mT, alpha=lora.scale)
    return _biased(out, experts, DOWN)


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
    projected: Projected,
    dy: Tensor,
    weight: Tensor,
    masks: Masks | None,
    *,
    input_grad: bool = True,
) -> RowGradients:
    """Gradients of `weight` * o.

    Args:
        x: [B, n, H] as stored. projected: of it, in forward.
        dy: [B, n, H] float32, of the weighted sum. weight: [B, n] float32, the router's. Both are zeros
            where there is no row.
        masks: forward's. input_grad: whether dx is wanted.
    """
    gate, up = _gate_and_up(projected.pair, experts)
    act = _activated(experts, gate, up)
    stored_dy, w = dy.to(experts.stored), weight.unsqueeze(-1)
    dact = _Frozen(experts, stored_dy).by(DOWN, back=True)
    grads = _through_down(experts, act, stored_dy, dact, masks, weight)
    del stored_dy
    dw = (act * dact).sum(-1)
    if DOWN in experts.biases:
        # the only place that takes dy as it came
        dw += (dy @ experts.biases[DOWN].unsqueeze(-1)).squeeze(-1)
    upstream = w * dact
    del act, dact
    d = _pair_gradient(experts, gate, up, upstream)
    del upstream, gate
    dx: Tensor | None = None
    if input_grad and experts.joined is not None:
        dx = product(d, experts.joined)
    elif input_grad:
        for projection, part in zip(experts.inputs, d.chunk(len(experts.inputs), -1), strict=True):
            own = _Frozen(experts, part).by(projection, back=True)
            dx = own if dx is None else dx.add_(own)
    grads |= _through_in(experts, x, projected, d, dx, masks)
    return RowGradients(dx, dw, grads)


def _pair_gradient(experts: DeviceExperts, gate: Tensor | None, up: Tensor, upstream: Tensor) -> Tensor:
    """Of g and u side by side, as stored, from that of act."""
    if gate is None or not _is_silu(experts.formula):
        d_gate, d_up = slopes(experts.formula, gate, up.float(), upstream)
        return _side_by_side([d for d in (d_gate, d_up) if d is not None], experts.stored)
    made = torch.empty((*up.shape[:-1], 2 * up.shape[-1]), dtype=experts.stored, device=up.device)
    d_gate, d_up = made.chunk(2, -1)
    # With an `out` of another type, CUDA's kernel would round what it reads.
    d_gate.copy_(torch.ops.aten.silu_backward(upstream * up, gate))
    torch.mul(upstream, silu(gate), out=d_up)
    return made


def _through_down(
    experts: DeviceExperts, act: Tensor, dy: Tensor, dact: Tensor, masks: Masks | None, weight: Tensor
) -> dict[str, Tensor]:
    """The adapter's part of down's backward: adds to dact, returns the gradients of A and B.

    Args:
        act: [B, n, I] and dy: [B, n, H], as stored. weight: [B, n], by which dy, but not dact, is still to be
            multiplied.
    """
    lora = experts.lora
    if lora is None:
        return {}
    count, rank, _ = lora.down_a.shape
    inside, wide = _masked(act, masks, DOWN), dy.float()
    both = torch.empty((count, 2 * rank, dy.shape[1]), dtype=torch.float32, device=dy.device)
    v, h = both.chunk(2, 1)
    _times(v, lora.down_b.mT, wide.mT, lora.scale)
    _times(h, lora.down_a, inside.mT, lora.scale)
    _add_through(dact, v, lora.down_a, masks, DOWN)
    both *= weight.unsqueeze(1)
    return {"down_b": wide.mT @ h.mT, "down_a": v @ inside}


def _through_in(
    experts: DeviceExperts,
    x: Tensor,
    projected: Projected,
    d: Tensor,
    dx: Tensor | None,
    masks: Masks | None,
) -> dict[str, Tensor]:
    """The same of gate and up: adds to dx if it is wanted. d: [B, n, P I], of g and u, as stored."""
    lora = experts.lora
    if lora is None:
        return {}
    wide_x, inner = projected[1:] if projected.inner is not None else _inner(experts, x, masks)
    assert inner is not None, "there is an adapter"
    made, back = dict[str, Tensor](), torch.empty_like(inner)
    wides = d.float().chunk(len(experts.inputs), -1)
    parts = (_halves(values, experts) for values in (back, inner, lora.in_a))
    for projection, wide, b, v, h, a in zip(experts.inputs, wides, lora.in_b, *parts, strict=True):
        _times(v, b.mT, wide.mT, lora.scale)
        name = PROJECTIONS[projection]
        made[f"{name}_b"] = wide.mT @ h.mT
        made[f"{name}_a"] = v @ (_masked(x, masks, projection) if wide_x is None else wide_x)
        if dx is not None and masks is not None:
            _add_through(dx, v, a, masks, projection)
    if dx is not None and masks is None:
        _add_through(dx, back, lora.in_a, None, UP)
    return made


def _add_through(dz: Tensor, v: Tensor, a: Tensor, masks: Masks | None, projection: int) -> None:
    """dz [B, n, K] += Aᵀ v, masked. v: [B, r, n]. a: [B, r, K]."""
    if masks is None:
        dz.baddbmm_(v.mT, a)
    else:
        dz.addcmul_(v.mT @ a, masks(projection, dz.shape[-1]))


def slopes(
    formula: ExpertFormula, gate: Tensor | None, up: Tensor, upstream: Tensor
) -> tuple[Tensor | None, Tensor]:
    """Gradients of g (None without a gate) and u, from that of act: the table of docs/numerics.md."""
    if gate is None:
        return None, upstream * 2 * up.clamp(min=0)
    inside_g = inside_u = None
    if formula.limit is not None:
        bound = gate_limit(formula)
        inside_g, inside_u = gate <= bound, up.abs() <= formula.limit
        gate, up = gate.clamp(max=bound), up.clamp(-formula.limit, formula.limit)
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
