"""Is a layer's output affine in the experts' output? Found out numerically, never assumed.

Where h_out = h_partial + c·y with a constant c, a recomputed layer does not need y, and the experts'
backward can start before it. A norm after the experts, or hyper-connections, make it non-affine.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from kt_ray.errors import UserError
from kt_ray.model.hook import LayerContext
from kt_ray.model.recording import RecordedCall

_TOLERANCE = 1e-5  # of float32 layers at the probe's magnitudes; a norm or a gate is off by orders more


def probe_layer(
    layer: nn.Module,
    call: RecordedCall,
    context: LayerContext,
    shape: tuple[int, ...],
    constants: tuple[float, ...] = (),
    seed: int = 0,
) -> float | None:
    """c of h_out = h_partial + c·y, or None when there is no such constant.

    Args:
        layer: a decoder layer with routed experts, on its device.
        call: arguments recorded for [b, s] tokens.
        context: of its experts.
        shape: (b, s, H), or (b, s, streams, H) of hyper-connections, which are never affine.
        constants: numbers c may equal exactly (a family's residual multiplier); 1 always is among them.
        seed: of the random h and y.

    Raises:
        UserError: the layer does not call its experts exactly once.
    """
    if any(p.dtype != torch.float32 for p in layer.parameters()):
        layer = copy.deepcopy(layer).float()
    device = next(layer.parameters()).device
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return (torch.randn(shape, generator=generator, dtype=torch.float32) * scale).to(device)

    call = RecordedCall(as_float(call.args), as_float(call.kwargs), call.keyword, call.carried)
    if len(shape) > 3:  # y goes to several streams by gates computed from h
        try:
            with torch.no_grad():
                _run(layer, call, context, normal(1.0), torch.zeros(*shape[:2], shape[-1], device=device))
        finally:
            context.handler = None
        return None
    estimates: list[float] = []
    try:
        with torch.no_grad():
            for scale_h, scale_y in ((1.0, 1.0), (0.3, 5.0), (3.0, 0.5)):
                h, y = normal(scale_h), normal(scale_y)
                partial = _run(layer, call, context, h, torch.zeros_like(h))
                full = _run(layer, call, context, h, y)
                delta = (full - partial).double()
                c = float((delta * y.double()).sum() / y.double().square().sum())
                residual = float((delta - c * y.double()).norm())
                # rounding of the two outputs, not of their difference, bounds what can be asked
                size = float(full.double().norm() + partial.double().norm() + y.double().norm())
                if not residual <= _TOLERANCE * size:
                    return None
                estimates.append(c)
    finally:
        context.handler = None
    # the largest y relative to h gives the best estimate
    c = estimates[1]
    if any(abs(other - c) > 20 * _TOLERANCE * max(1.0, abs(c)) for other in estimates):
        return None
    exact = [value for value in (1.0, *constants) if abs(value - c) <= _TOLERANCE * max(1.0, abs(value))]
    return min(exact, key=lambda value: abs(value - c)) if exact else c


def _run(layer: nn.Module, call: RecordedCall, context: LayerContext, h: Tensor, y: Tensor) -> Tensor:
    calls = context.calls
    context.handler = lambda hidden, ids, weights: y.reshape(hidden.shape)
    out = call.run(layer, h)
    if context.calls != calls + 1:
        raise UserError(
            "a layer with routed experts does not call them exactly once",
            where=f"layer {context.layer}",
            observed=f"{context.calls - calls} calls",
            required="1",
            remedy="choose another model family",
        )
    return out


def as_float(value: Any) -> Any:
    """The same arguments with floating tensors in float32."""
    if isinstance(value, Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(as_float(v) for v in value)
    if isinstance(value, list):
        return [as_float(v) for v in value]
    if isinstance(value, dict):
        return {k: as_float(v) for k, v in value.items()}
    return value
