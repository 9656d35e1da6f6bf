"""Step-3.7's routed experts called as transformers calls other families': its class leaves out what tells
how. Its last layers bound what silu gives (kt_ray/native/tensors.py, "capped_silu").
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn

from kt_ray.model import layer_calls


def dispatch(model: nn.Module, config: Any) -> None:
    """Let the MoE blocks of a model call their experts by `experts_forward`."""
    layer_calls.dispatch(model, _classes(), config)


@cache
def _classes() -> dict[type[nn.Module], type[nn.Module]]:
    """transformers' experts, and ours."""
    from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

    class Experts(Step3p7Experts):
        """With what transformers writes beside other families' experts."""

        has_gate, has_bias, is_transposed, is_concatenated = True, False, False, True
        forward = layer_calls.experts_forward

    return {Step3p7Experts: Experts}
