"""transformers' ExpertsInterface, and which experts modules the engine can stand in for.

transformers calls the registered function in the place of every experts module's forward:
`fn(module, hidden_states [N, H], top_k_index [N, K], top_k_weights [N, K]) -> [N, H]`. Under a
stage the call goes to the layer loop; without one it is the simple integration of
`kt_ray.model.autograd`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kt_ray.errors import UserError

NAME = "kt_ray"
Handler = Callable[[Tensor, Tensor, Tensor], Tensor]
_EXPERT_PARAMETERS = frozenset({"gate_up_proj", "down_proj"})


class LayerContext:
    """Ties an experts module to the stage that owns its layer.

    The loop sets `handler` around each call of the layer; a call without one is a programming error.
    """

    def __init__(self, layer: int, num_experts: int) -> None:
        self.layer = layer
        self.num_experts = num_experts
        self.handler: Handler | None = None
        self.calls = 0

    def __call__(self, hidden_NH: Tensor, ids_NK: Tensor, weights_NK: Tensor) -> Tensor:
        if self.handler is None:
            raise RuntimeError(f"the experts of layer {self.layer} were called outside the layer loop")
        self.calls += 1
        return self.handler(hidden_NH, ids_NK, weights_NK)

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerContext:
        return self  # the probe's float32 copy of a layer keeps its context


def experts_forward(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The function transformers dispatches to under `experts_implementation="kt_ray"`."""
    context = getattr(module, "_kt_stage", None)
    if context is not None:
        return context(hidden_states, top_k_index, top_k_weights)
    from kt_ray.model.autograd import native_experts

    return native_experts(module, hidden_states, top_k_index, top_k_weights)


def register() -> None:
    """Make `experts_implementation="kt_ray"` known to transformers (idempotent)."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def is_experts(module: nn.Module) -> bool:
    """Whether transformers dispatches this module through its experts interface."""
    return all(
        hasattr(module, flag)
        for flag in ("has_gate", "has_bias", "is_transposed", "is_concatenated", "_apply_gate")
    )


def check_experts(module: Any, model_type: str) -> None:
    """Refuse experts whose formula is not down(silu(gate(x)) * up(x)).

    Raises:
        UserError: names the family, the module and what the engine lacks.
    """
    from transformers.integrations.moe import _default_apply_gate

    faults = []
    if not module.has_gate:
        faults.append("experts without a gate projection")
    if module.has_bias:
        faults.append("biases in the experts")
    if getattr(module, "has_post_expert_norm", False):
        faults.append("a norm after each expert")
    if module.has_gate and getattr(type(module), "_apply_gate", None) is not _default_apply_gate:
        faults.append("a gate of its own (clamped or scaled)")
    activation = getattr(module, "act_fn", None)
    if module.has_gate and not _is_silu(activation):
        faults.append(f"the activation {type(activation).__name__}")
    extra = sorted(
        name for name, _ in module.named_parameters(recurse=False) if name not in _EXPERT_PARAMETERS
    )
    if extra and not (module.has_bias or not module.has_gate):
        faults.append("the expert parameters " + ", ".join(extra))
    if faults:
        raise UserError(
            f"the experts of {model_type} cannot be computed yet",
            where=type(module).__name__,
            observed=" and ".join(faults),
            required="experts of the form down(silu(gate(x)) * up(x)) without biases",
            remedy="choose a model with such experts (DeepSeek-V3, Qwen3-MoE, Mixtral, GLM-4-MoE, ...)",
        )


def _is_silu(activation: Any) -> bool:
    if activation is None:
        return False
    x = torch.linspace(-4.0, 4.0, 17, device="cpu")
    with torch.device("cpu"), torch.no_grad():
        return bool(torch.equal(activation(x), torch.nn.functional.silu(x)))
