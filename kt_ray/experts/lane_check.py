"""Before a run trusts a GPU with experts: one of them, forward and backward, beside torch on the CPU.

The kernels, the copies and the driver are those of somebody else's machine. An answer that is wrong there
would train for a night without a word; here it costs a second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kt_ray.errors import UserError
from kt_ray.experts.device_lane import DeviceLane, LaneInput
from kt_ray.native import ExpertLora, ExpertMatrix, ExpertWeights
from kt_ray.native.reference import moe_reference

ROWS, RANK = 16, 4
# Relative error in norm, far above what rounding explains (docs/numerics.md: 0.5 % in bfloat16, 7 % in FP8)
# and far below what a wrong product leaves.
MOST = {False: 0.05, True: 0.2}
_OFF = "set rule.experts.stream=off rule.experts.gpu_resident=0 (experts stay on the CPU)"


def check_lane(device: str, weights: ExpertWeights, name: str = "", *, float8: bool = False) -> None:
    """Compute the first of some experts on a device and on the CPU.

    Args:
        device: "cuda:i" as this process numbers it, or "cpu". weights: of any layer, in host memory.
        name: of the device in messages; "" = `device`. float8: as for `DeviceLane`.

    Raises:
        UserError: the device fails, or its results are another function's.
    """
    one = _first(weights)
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float32)

    plain = isinstance(one.up, Tensor) and one.up.dtype == torch.float32
    x, dy = normal(ROWS, one.H).to(torch.float32 if plain else torch.bfloat16), normal(ROWS, one.H)
    router = torch.rand(ROWS, 1, generator=g, dtype=torch.float32) + 0.5
    # As large as the frozen part of a layer as it is initialised: its gradients are about as exact as any.
    inside = (normal(1, RANK, one.H) / math.sqrt(one.H), normal(1, one.I, RANK) / math.sqrt(RANK))
    outside = (normal(1, RANK, one.I) / math.sqrt(one.I), normal(1, one.H, RANK) / math.sqrt(RANK))
    gate_a, gate_b = (None, None) if one.gate is None else inside
    lora = ExpertLora(gate_a, gate_b, *inside, *outside, scale=1.0)
    try:
        found = _on_device(device, one, x, router, lora, dy, float8)
    except UserError:
        raise
    except Exception as error:  # of any type: a driver's, or a check's of this torch
        raise UserError(
            "a GPU fails where it is to compute experts",
            where=name or device,
            observed=str(error).partition("\n")[0],
            remedy=_OFF,
        ) from error
    wanted = _on_cpu(one, x.float(), router, lora, dy)
    if not all(bool(value.isfinite().all()) for value in wanted.values()):
        return  # the weights are such: there is nothing to compare
    errors = {name: _error(found[name], value) for name, value in wanted.items()}
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    if not errors[worst] <= MOST[float8]:
        raise UserError(
            "a GPU computes experts wrongly",
            where=f"{name or device}, {worst} of {ROWS} tokens of one expert",
            observed=f"a relative error of {errors[worst]:.1%} beside the CPU",
            required=f"at most {MOST[float8]:.0%}",
            remedy=f"{_OFF}, and report this with the output of mode=doctor",
        )


def _first(weights: ExpertWeights) -> ExpertWeights:
    """The first expert alone, its clamp out of reach: at its kink a rounding changes a whole gradient."""

    def first(value: Tensor | ExpertMatrix) -> Tensor | ExpertMatrix:
        if isinstance(value, Tensor):
            return value[:1]
        scales = None if value.scales is None else value.scales[:1]
        return replace(value, data=value.data[:1], scales=scales, shape=(1, *value.shape[1:]))

    limit = None if weights.limit is None else 1e6
    changed: dict[str, Any] = {"expert_ids": weights.expert_ids[:1], "limit": limit}
    for name in ("gate", "up", "down", "gate_bias", "up_bias", "down_bias"):
        value = getattr(weights, name)
        changed[name] = None if value is None else first(value)
    return replace(weights, **changed)


def _on_device(
    device: str, one: ExpertWeights, x: Tensor, router: Tensor, lora: ExpertLora, dy: Tensor, float8: bool
) -> dict[str, Tensor]:
    lane = DeviceLane(0, device, 1, recompute=False, float8=float8)
    ids, keys = torch.zeros(ROWS, 1, dtype=torch.int64), torch.zeros(ROWS, dtype=torch.int64)
    try:
        lane.add_layer(0, one.expert_ids, [one], None, ())
        call = LaneInput([x], ids, router, lora, None, keys, kept=x, counts=[ROWS])
        forward = lane.forward(0, [0], call).result()
        assert forward.saved is not None, "it is kept"
        back = lane.backward(0, forward.saved, [dy], lora).result()
    finally:
        lane.close()
    _give_back(lane)
    found = {"y": forward.y, "dx": back.dx, "dw": torch.empty(ROWS, dtype=torch.float32)}
    found["dw"][back.slots] = back.dw
    for _, gradients in back.lora:
        found |= {f"gradient of {name}": value for name, value in gradients.items()}
    return found


def _give_back(lane: DeviceLane) -> None:
    """Memory of the check's own streams, which torch would keep from the lane's and from other processes."""
    if lane.device.is_cuda:
        torch.cuda.empty_cache()


def _on_cpu(
    one: ExpertWeights, x: Tensor, router: Tensor, lora: ExpertLora, dy: Tensor
) -> Mapping[str, Tensor]:
    with torch.enable_grad():
        leaves = [x.requires_grad_(), router.clone().requires_grad_()]
        adapter = lora.map(lambda t: t.clone().requires_grad_())
        y = moe_reference(one, leaves[0], torch.zeros(ROWS, 1, dtype=torch.int64), leaves[1], lora=adapter)
        dx, dw, *grads = torch.autograd.grad((y * dy).sum(), [*leaves, *adapter.tensors()])
    named = {f"gradient of {name}": g for name, g in zip(adapter.named(), grads, strict=True)}
    return {"y": y.detach(), "dx": dx, "dw": dw.flatten(), **named}


def _error(found: Tensor, wanted: Tensor) -> float:
    """Relative in norm; NaN where either has one."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())
