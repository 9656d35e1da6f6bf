"""The simple integration: one differentiable node around a native engine, in this process.

    register()
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="kt_ray")
    model.requires_grad_(False)          # the experts stay frozen; adapters elsewhere train as usual

Differentiable once in the hidden states and in the routing weights. What the engine keeps for backward goes
with autograd's own saved tensors: after backward, and at once where gradient checkpointing runs the experts
again. Training through stages and actors does not come this way: a blocking node would stall autograd's
thread.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kt_ray.errors import UserError
from kt_ray.model.formula import formula_of
from kt_ray.native import Engine, ExpertWeights

_engine: Engine | None = None
_lock = threading.Lock()  # two threads that come first would make two engines, on the same cores


def default_engine() -> Engine:
    """The engine this process shares among modules that belong to no stage."""
    global _engine
    with _lock:
        if _engine is None:
            _engine = Engine()
        return _engine


def _after_fork() -> None:
    """A child has none of the parent's threads, and whoever held the lock."""
    global _engine, _lock
    _engine, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


class NativeExperts(torch.autograd.Function):
    """y = Σ_k w_k · expert_k(x) on an engine, with gradients for x and w.

    Shapes: x [T, H], ids [T, K], weights [T, K], y [T, H].
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, ids: Tensor, engine: Engine, experts: ExpertWeights
    ) -> Tensor:
        needs = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        x_TH = x.detach().to("cpu").contiguous()
        y_TH, saved = engine.forward(
            experts,
            x_TH if x_TH.dtype in (torch.float32, torch.bfloat16) else x_TH.float(),
            ids.detach().to("cpu", torch.int64).contiguous(),
            weights.detach().to("cpu", torch.float32).contiguous(),
            save=needs,
        )
        carrier = torch.empty(0, dtype=torch.uint8, device="cpu")
        storage: Any = carrier.untyped_storage()
        storage.saved = saved  # detached tensors share it
        ctx.save_for_backward(carrier)
        ctx.engine, ctx.experts = engine, experts
        ctx.x_as, ctx.w_as = (x.device, x.dtype), (weights.device, weights.dtype)
        return y_TH.to(x.device, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (carrier,) = ctx.saved_tensors
        dy_TH = dy.detach().to("cpu", torch.float32).contiguous()
        storage: Any = carrier.untyped_storage()
        dx, dw = ctx.engine.backward(ctx.experts, storage.saved, dy_TH)
        return dx.to(*ctx.x_as), dw.to(*ctx.w_as), None, None, None


def native_experts(module: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Compute an experts module from its own parameters (frozen; on the CPU).

    Raises:
        UserError: the experts have another formula than the engine's, or are meant to be trained.
    """
    experts = expert_weights(module)
    if torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters(recurse=False)):
        raise UserError(
            'experts_implementation="kt_ray" does not train the expert weights themselves',
            where=type(module).__name__,
            observed="expert parameters that require a gradient",
            required="frozen experts",
            remedy="call requires_grad_(False) on the model before adding adapters",
        )
    return NativeExperts.apply(hidden, weights, ids, default_engine(), experts)


def expert_weights(module: Any) -> ExpertWeights:
    """The module's parameters as the engine wants them; kept on the module while they do not change.

    The weights are views of the parameters, in any of transformers' layouts: nothing is copied but what
    lies on another device, and biases, which become float32.

    Raises:
        UserError: a formula the engine does not have, or weights of another type.
    """
    parameters = dict(module.named_parameters(recurse=False))
    # Tensors of inference mode count no versions.
    key = tuple((n, p.data_ptr(), 0 if p.is_inference() else p._version) for n, p in parameters.items())
    cached = module.__dict__.get("_kt_weights")
    if cached is not None and cached[0] == key:
        return cached[1]
    formula = formula_of(module, getattr(module.config, "model_type", type(module).__name__))
    first = parameters["gate_up_proj" if module.has_gate else "up_proj"].detach().to("cpu")
    down = parameters["down_proj"].detach().to("cpu")
    first = first[: len(down)]  # LongCat-Flash has rows of zero experts, which nothing reads
    if first.dtype not in (torch.float32, torch.bfloat16):
        raise UserError(
            "the engine computes float32 and bfloat16 experts",
            where=type(module).__name__,
            observed=str(first.dtype).removeprefix("torch."),
            required="float32 or bfloat16",
            remedy="load the model with dtype=torch.bfloat16",
        )
    if module.is_transposed:  # [E, H, 2I], [E, I, H]
        first, down = first.transpose(1, 2), down.transpose(1, 2)
    gate, up = _gate_and_up(first, module)
    biases: list[Tensor | None] = [None] * 3
    if module.has_bias:
        both = parameters["gate_up_proj_bias" if module.has_gate else "up_proj_bias"]
        biases = [*_gate_and_up(both, module), parameters["down_proj_bias"]]
        biases = [None if b is None else b.detach().to("cpu", torch.float32).contiguous() for b in biases]
    weights = ExpertWeights(
        gate,
        up,
        down,
        activation=formula.activation,
        alpha=formula.alpha,
        limit=formula.limit,
        gate_bias=biases[0],
        up_bias=biases[1],
        down_bias=biases[2],
    )
    module.__dict__["_kt_weights"] = (key, weights)
    return weights


def _gate_and_up(first: Tensor, module: Any) -> tuple[Tensor | None, Tensor]:
    """Of a tensor [E, 2I, ...] that holds both, or [E, I, ...] of a module without a gate."""
    if not module.has_gate:
        return None, first
    if module.is_concatenated:
        gate, up = first.chunk(2, dim=1)
        return gate, up
    return first[:, 0::2], first[:, 1::2]
