"""Which experts modules of transformers the engine stands in for, and as what."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kt_ray.errors import UserError
from kt_ray.model import step3p7
from kt_ray.model.autograd import expert_weights
from kt_ray.model.formula import ExpertFormula, check_trainable, formula_of
from kt_ray.native.tensors import gate_limit

SIZES = {
    **dict.fromkeys(("hidden_size", "moe_latent_size"), 6),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), 5),
    **dict.fromkeys(
        ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok"), 3
    ),
    "hidden_act": "silu",
    "hidden_activation": "gelu_pytorch_tanh",
    "mlp_hidden_act": "relu2",
    "swiglu_limit": 7.0,
    "swiglu_alpha": 1.702,
    "model_type": "family",
}


def module_of(family: str, name: str, **changes: Any) -> Any:
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    module = getattr(modeling, name)(SimpleNamespace(**(SIZES | changes)))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


@pytest.mark.parametrize(
    ("family", "name", "formula"),
    [
        ("deepseek_v3", "DeepseekV3Experts", ExpertFormula("silu")),
        ("aria", "AriaExperts", ExpertFormula("silu")),
        ("beam", "BeamExperts", ExpertFormula("silu")),
        ("deepseek_v4", "DeepseekV4Experts", ExpertFormula("silu", limit=7.0)),
        ("hy_v4", "HYV4Experts", ExpertFormula("silu", limit=7.0)),
        ("glm5_next", "Glm5NextTextExperts", ExpertFormula("silu", limit=7.0)),
        ("gemma4", "Gemma4TextExperts", ExpertFormula("gelu_tanh")),
        ("gpt_oss", "GptOssExperts", ExpertFormula("swiglu_oai", 1.702, 7.0)),
        ("minimax_m3_vl", "MiniMaxM3VLExperts", ExpertFormula("swiglu_oai", 1.702, 7.0)),
        ("openai_privacy_filter", "OpenAIPrivacyFilterExperts", ExpertFormula("swiglu_oai", 1.702, 7.0)),
        ("nemotron_h", "NemotronHExperts", ExpertFormula("relu2")),
    ],
)
def test_families(family: str, name: str, formula: ExpertFormula) -> None:
    module = module_of(family, name)
    assert formula_of(module, family) == formula
    weights = expert_weights(module)
    assert (weights.activation, weights.limit) == (formula.activation, formula.limit)
    storages = {p.untyped_storage().data_ptr() for p in module.parameters()}
    for view in (weights.gate, weights.up, weights.down):
        assert view is None or view.untyped_storage().data_ptr() in storages, "not a copy"
    assert check_trainable(module, family) == formula
    assert check_trainable(module, family, SIZES["hidden_size"]) == formula


@pytest.mark.parametrize("limit", [0.01, 0.25, 7.0])
def test_step_bounds_what_silu_gives(limit: float) -> None:
    """A bound of gate gives the same, values and gradients."""
    formula = ExpertFormula("capped_silu", limit=limit)
    bound = torch.tensor(gate_limit(formula), dtype=torch.float64)
    assert float(torch.nn.functional.silu(bound)) == pytest.approx(limit, rel=1e-14)
    experts = module_of("step3p7", "Step3p7Experts")
    experts.limit = limit
    step3p7.dispatch(experts, SimpleNamespace())
    assert formula_of(experts, "step3p7") == formula
    experts.limit = float("inf")  # as in its other layers
    assert formula_of(experts, "step3p7") == ExpertFormula("silu")


def test_projected_width_is_refused() -> None:
    """Experts between projections of their own (Nemotron-H's latent experts)."""
    module = module_of("nemotron_h", "NemotronHExperts")
    with pytest.raises(UserError, match=r"experts of nemotron_h.*projected width.*found experts of width 6"):
        check_trainable(module, "nemotron_h", 48)


@pytest.mark.parametrize(
    ("family", "name", "changes", "match"),
    [
        ("gemma4", "Gemma4TextExperts", {"hidden_activation": "gelu"}, "activation GELU"),
        ("deepseek_v3", "DeepseekV3Experts", {"hidden_act": "relu2"}, "activation ReLUSquared"),
        ("nemotron_h", "NemotronHExperts", {"mlp_hidden_act": "silu"}, "without a gate"),
    ],
)
def test_refused(family: str, name: str, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(UserError, match=f"experts of {family} cannot be computed yet.*{match}"):
        formula_of(module_of(family, name, **changes), family)
