"""transformers' ExpertsInterface: calls of experts modules come here.

transformers calls the registered function in the place of every experts module's forward:
`fn(module, hidden_states [N, H], top_k_index [N, K], top_k_weights [N, K]) -> [N, H]`. Under a
stage the call goes to the layer loop; without one it is the simple integration of
`kt_ray.model.autograd`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

NAME = "kt_ray"
Handler = Callable[[Tensor, Tensor, Tensor], Tensor]


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
