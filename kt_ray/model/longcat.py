"""LongCat-Flash's routed experts called as transformers calls other families'.

Its router chooses among routed experts and zero experts, whose output is their input. Those have no weights:
what they give is computed here, x times the sum of their routing weights, and in the place of their ids the
experts get "no expert", the number of routed experts.

Shapes: N tokens, K experts per token, E routed experts, H hidden.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from kt_ray.model import layer_calls


def dispatch(model: nn.Module, config: Any) -> None:
    """Let the MoE blocks of a model call their experts by `experts_forward`.

    Routers stay in float32, in which they compute; transformers rounds them to the model's type, and of
    nearly equal scores another is chosen.
    """
    model._keep_in_fp32_modules_strict = {"router.classifier.weight", "e_score_correction_bias"}  # type: ignore[assignment]
    layer_calls.dispatch(model, _classes(), config)


@cache
def _classes() -> dict[type[nn.Module], type[nn.Module]]:
    """transformers' block and experts, and ours."""
    from transformers.integrations.moe import _default_apply_gate
    from transformers.models.longcat_flash.modeling_longcat_flash import (
        LongcatFlashExperts,
        LongcatFlashMoE,
    )

    class Experts(LongcatFlashExperts):
        """With what transformers writes beside other families' experts."""

        has_gate, has_bias, is_transposed, is_concatenated = True, False, False, True
        _apply_gate = _default_apply_gate

        @property
        def num_experts(self) -> int:
            return int(self.num_routed_experts)

        def forward(self, hidden_NH: Tensor, ids_NK: Tensor, weights_NK: Tensor) -> Tensor:
            return layer_calls.experts_forward(self, hidden_NH, ids_NK, weights_NK)

    class Moe(LongcatFlashMoE):
        def forward(self, hidden_states: Tensor) -> Tensor:
            hidden_NH = hidden_states.reshape(-1, hidden_states.shape[-1])
            _, weights_NK, ids_NK = self.router(hidden_states)
            none = self.experts.num_experts
            zero_N1 = torch.where(ids_NK >= none, weights_NK, 0.0).sum(1, keepdim=True)
            routed_NH = self.experts(hidden_NH, ids_NK.clamp(max=none), weights_NK)
            return (routed_NH + (hidden_NH * zero_N1).to(hidden_NH.dtype)).view_as(hidden_states)

    return {LongcatFlashMoE: Moe, LongcatFlashExperts: Experts}
