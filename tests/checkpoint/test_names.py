"""Names as checkpoints release them, and transformers' names for the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from kt_ray.checkpoint.names import (
    ALIASES,
    apart_name,
    expert_name,
    family,
    fused_release,
    gguf_expert_name,
    is_interleaved,
    is_linear,
    is_mtp,
    is_unknown_expert_tensor,
    one_expert,
    part_of,
)

LAYER = "model.layers.3"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (f"{LAYER}.mlp.experts.5.gate_proj.weight", (5, "gate", False)),
        (f"{LAYER}.block_sparse_moe.experts.15.w2.weight", (15, "down", False)),
        ("layers.3.ffn.experts.7.w3.weight", (7, "up", False)),
        ("model.language_model.layers.3.mlp.experts.gate_up_proj", (None, "gate_up", False)),
        (f"{LAYER}.mlp.experts.down_proj_bias", (None, "down", True)),
        (f"{LAYER}.mlp.experts.2.up_proj.bias", (2, "up", True)),
        (f"{LAYER}.mlp.experts.2.up_proj", (2, "up", False)),  # a module, as adapters name it
        (f"{LAYER}.mlp.experts.fc1.weight", (None, "gate_up", False)),
        (f"{LAYER}.block_sparse_moe.input_linear.weight", (None, "gate_up", False)),
        (f"{LAYER}.block_sparse_moe.output_linear.weight", (None, "down", False)),
        (f"{LAYER}.moe.gate_proj.weight", (None, "gate", False)),
    ],
)
def test_experts(name: str, expected: tuple[int | None, str, bool]) -> None:
    parts = expert_name(name)
    assert parts is not None and (parts.expert, parts.role, parts.bias) == expected
    assert parts.prefix.endswith("experts") and parts.layer == 3 and part_of(name, 61) == "routed experts"
    assert one_expert(name) == (None if expected[0] is None else parts) and not is_unknown_expert_tensor(name)
    assert part_of(name, 3) == "multi-token prediction"


@pytest.mark.parametrize(
    "name",
    [
        f"{LAYER}.mlp.shared_experts.gate_proj.weight",
        f"{LAYER}.mlp.gate_proj.weight",
        f"{LAYER}.moe.router_bias",
        f"{LAYER}.mlp.experts.5.gate_proj.input_scale",
        f"{LAYER}.mlp.experts.e_score_correction_bias",
        f"{LAYER}.shared_mlp.input_linear.weight",
        f"{LAYER}.mlp.experts.5.gate_up_proj.weight",
    ],
)
def test_not_routed_experts(name: str) -> None:
    assert expert_name(name) is None
    unknown = name.endswith((".input_scale", ".gate_up_proj.weight")) and ".experts." in name
    assert is_unknown_expert_tensor(name) == unknown


def test_gguf_names() -> None:
    parts = gguf_expert_name("blk.12.ffn_gate_up_exps.weight")
    assert parts is not None
    assert (parts.layer, parts.expert, parts.role, parts.bias) == (12, None, "gate_up", False)
    bias = gguf_expert_name("blk.0.ffn_down_exps.bias")
    assert bias is not None and bias.bias
    assert gguf_expert_name("blk.0.ffn_down_shexp.weight") is None
    with pytest.raises(ValueError, match=r"ffn_down_exps\.scale"):
        gguf_expert_name("blk.0.ffn_down_exps.scale")


def test_interleaved_families_are_those_of_transformers() -> None:
    """As its experts modules state it."""
    models = Path(transformers.__file__).parent / "models"
    sources = {path.parent.name: path.read_text() for path in models.glob("*/modeling_*.py")}
    stated = {name for name, text in sources.items() if "is_concatenated=False" in text}
    assert stated == {name for name in sources if is_interleaved(name)} and "gpt_oss" in stated
    assert not is_interleaved("qwen3_vl_moe_text") and fused_release("qwen3_moe") is None


@pytest.mark.parametrize("block", ["moe", "moe.experts.5"])
def test_stacks_of_step_have_their_names(block: str) -> None:
    parts = expert_name(f"{LAYER}.{block}.up_proj.weight")
    assert parts is not None and apart_name(parts.prefix, parts.role) == f"{LAYER}.moe.up_proj.weight"


def test_families_have_transformers_names() -> None:
    assert family({"model_type": "kimi_k2"}) == "deepseek_v3"
    assert family({"model_type": "kimi_k25", "text_config": {"model_type": "kimi_k2"}}) == "deepseek_v3"
    assert family({"model_type": "qwen3_moe"}) == "qwen3_moe" and family({}) == "unknown"
    assert not any(name in transformers.CONFIG_MAPPING for name in ALIASES)
    assert all(name in transformers.CONFIG_MAPPING for name in ALIASES.values())


@pytest.mark.parametrize(
    ("name", "part", "linear"),
    [
        (f"{LAYER}.self_attn.kv_a_proj_with_mqa.weight", "attention", True),
        ("layers.3.attn.wq_a.weight", "attention", True),
        (f"{LAYER}.linear_attn.in_proj_qkvz.weight", "attention", True),
        (f"{LAYER}.mlp.shared_experts.up_proj.weight", "shared experts", True),
        (f"{LAYER}.mlp.shared_expert_gate.weight", "shared experts", False),
        (f"{LAYER}.share_expert.up_proj.weight", "shared experts", True),
        (f"{LAYER}.moe.router_bias", "router", False),
        ("vit_large_projector.weight", "other modalities", False),
        (f"{LAYER}.mlp.up_proj.weight", "dense MLP", True),
        (f"{LAYER}.mlps.1.up_proj.weight", "dense MLP", True),
        (f"{LAYER}.mlp.router.classifier.weight", "router", False),
        (f"{LAYER}.input_layernorm.0.weight", "norms", False),
        (f"{LAYER}.mlp.gate.weight", "router", False),
        (f"{LAYER}.mlp.router.weight", "router", False),
        (f"{LAYER}.mlp.gate.e_score_correction_bias", "router", False),
        (f"{LAYER}.post_attention_layernorm.weight", "norms", False),
        ("model.norm.weight", "norms", False),
        ("model.embed_tokens.weight", "embedding", False),
        (f"{LAYER}.ple.ple_embedding.ngram_embedding.shard_12.weight", "embedding", False),
        ("lm_head.weight", "head", False),
        ("model.visual.blocks.0.attn.qkv_proj.weight", "other modalities", False),
        ("mtp.layers.0.self_attn.q_proj.weight", "multi-token prediction", True),
        # plain in DeepSeek's own quantised releases
        ("model.layers.61.eh_proj.weight", "multi-token prediction", False),
        (f"{LAYER}.self_attn.indexer.weights_proj.weight", "attention", False),
        (f"{LAYER}.self_attn.indexer.wq_b.weight", "attention", True),
    ],
)
def test_parts(name: str, part: str, linear: bool) -> None:
    assert part_of(name, 61) == part and is_linear(name, (4, 4)) == linear
    assert not is_linear(name, (4, 4, 4))
    assert is_mtp(name, 61) == (part == "multi-token prediction")
