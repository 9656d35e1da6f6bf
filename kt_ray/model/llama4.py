"""Llama 4's routed experts called as transformers calls other families'.

Its class multiplies each token by the router's score before the expert, and not the expert's output after
it. A token goes to one expert, so the expert gets the scaled token, with a routing weight of 1. Of several
experts each would get another multiple, and `dispatch` refuses them.

Shapes: N tokens, E experts, H hidden.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from kt_ray.errors import UserError
from kt_ray.model import layer_calls


def dispatch(model: nn.Module, config: Any) -> None:
    """Let the MoE blocks of a model call their experts by `experts_forward`.

    Raises:
        UserError: a token goes to several experts.
    """
    if config.num_experts_per_tok != 1:
        raise UserError(
            f"{config.model_type} is trained with one expert per token only",
            where="config.json, num_experts_per_tok",
            observed=config.num_experts_per_tok,
            required="1, as in all releases: the router multiplies what each expert reads",
            remedy="choose another model",
        )
    layer_calls.dispatch(model, _classes(), config)


@cache
def _classes() -> dict[type[nn.Module], type[nn.Module]]:
    """transformers' block and experts, and ours."""
    from transformers.integrations.moe import _default_apply_gate
    from transformers.models.llama4.modeling_llama4 import Llama4TextExperts, Llama4TextMoe

    class Experts(Llama4TextExperts):
        """With what transformers writes beside other families' experts."""

        has_gate, has_bias, is_transposed, is_concatenated = True, False, True, True
        _apply_gate = _default_apply_gate

        def forward(self, hidden_NH: Tensor, ids_N1: Tensor, weights_N1: Tensor) -> Tensor:  # type: ignore[override]
            return layer_calls.experts_forward(self, hidden_NH, ids_N1, weights_N1)

    class Moe(Llama4TextMoe):
        def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
            hidden_NH = hidden_states.reshape(-1, self.hidden_dim)
            scores_NE, logits_NE = self.router(hidden_NH)
            ids_N1 = logits_NE.topk(1, dim=1).indices
            scores_N1 = scores_NE.gather(1, ids_N1)
            routed_NH = self.experts(hidden_NH * scores_N1, ids_N1, torch.ones_like(scores_N1))
            return self.shared_expert(hidden_states).view_as(routed_NH) + routed_NH, logits_NE

    return {Llama4TextMoe: Moe, Llama4TextExperts: Experts}
