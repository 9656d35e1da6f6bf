"""Dimensions from config.json: against transformers' own parameter counts and published totals."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

from kt_ray.checkpoint.index import CheckpointIndex
from kt_ray.checkpoint.names import zero_experts
from kt_ray.dims.config_json import dims_from_config, dims_from_dir
from kt_ray.dims.config_keys import ALIASES, EXACT
from kt_ray.dims.layer_params import UNDISPATCHED
from kt_ray.errors import UserError
from tests.helpers.families import tiny_config
from tests.placement.configs import DEEPSEEK_V3, SMALL, small_dims, text_model

# Every released config: parameters as its authors or its name state them, in billions (without
# multi-token prediction and vision), format of the experts, MoE layers, experts per token.
RELEASED = {
    "DeepSeek-R1": (671.0, "fp8_block", 58, 8),
    "DeepSeek-V2-Lite": (15.7, "bf16", 26, 6),
    "DeepSeek-V3": (671.0, "fp8_block", 58, 8),
    "DeepSeek-V3.2": (671.9, "fp8_block", 58, 8),  # V3 and the indexer
    "DeepSeek-V4-Flash": (284.0, "mxfp4", 43, 6),
    "DeepSeek-V4-Flash-FP8": (284.0, "fp8_block", 43, 6),
    "DeepSeek-V4-Pro": (1600.0, "mxfp4", 61, 6),
    "GLM-4.5-355B-A32B.pre-release": (355.0, "bf16", 89, 8),
    "GLM-4.5-Air-106B-A12B.pre-release": (106.0, "bf16", 45, 8),
    "GLM-5": (744.0, "bf16", 75, 8),
    "Kimi-K2-Instruct": (1030.0, "fp8_block", 60, 8),
    "Kimi-K2.5": (1030.0, "int4", 60, 8),
    "Kimi-K3": (2780.0, "mxfp4", 92, 16),  # its name states no size: the count of its keys
    "MiniMax-M2.5": (229.0, "fp8_block", 62, 8),
    "MiniMax-M2.7": (229.0, "fp8_block", 62, 8),
    "MiniMax-M3": (426.2, "bf16", 57, 4),  # likewise; equal to transformers' minimax_m3_vl
    "Mixtral-8x7B-v0.1": (46.7, "bf16", 32, 2),
    "OLMoE-1B-7B-0125-Instruct": (6.92, "bf16", 16, 8),
    "Qwen3-235B-A22B": (235.0, "bf16", 94, 8),
    "Qwen3-30B-A3B": (30.5, "bf16", 48, 8),
    "Qwen3-30B-A3B-FP8": (30.5, "fp8_block", 48, 8),
    "Qwen3-VL-30B-A3B-Instruct": (30.5, "bf16", 48, 8),
    "Qwen3.5-35B-A3B": (35.0, "bf16", 40, 8),
    "Qwen3.5-397B-A17B": (397.0, "bf16", 60, 10),
    "gpt-oss-120b": (116.8, "mxfp4", 36, 4),
    "gpt-oss-20b": (20.9, "mxfp4", 24, 4),
}
MULTIMODAL = ("Kimi-K2.5", "Kimi-K3", "Qwen3-VL-30B-A3B-Instruct", "Qwen3.5-35B-A3B", "Qwen3.5-397B-A17B")
# Names under which transformers knows what these releases hold.
KNOWN_AS = {
    "kimi_k2": "deepseek_v3",
    "deepseek_ref": "deepseek_v4",
    "minimax_m3": "minimax_m3_vl_text",
    "qwen3_vl_moe_text": "qwen3_moe",
}


@pytest.fixture(scope="module")
def released() -> dict[str, dict[str, Any]]:
    folder = os.environ.get("KT_RAY_TEST_DATA")
    if not folder or not (Path(folder) / "model_configs").is_dir():
        pytest.skip("KT_RAY_TEST_DATA names no folder with model_configs/")
    return {
        f.stem: json.loads(f.read_text()) for f in sorted((Path(folder) / "model_configs").glob("*.json"))
    }


def test_exact_families_are_all_tested() -> None:
    assert {ALIASES.get(family, family) for family in SMALL} == EXACT


@pytest.mark.parametrize("family", sorted(SMALL))
def test_counts_equal_transformers(family: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from kt_ray.checkpoint.mapped_table import is_mapped_table
    from kt_ray.model.lora import is_gate, linear_names

    config = transformers.AutoConfig.for_model(**SMALL[family])
    with torch.device("meta"):
        model, alone = text_model(config)
    dims = small_dims(family)
    for module in model.modules():
        if dims.zero_experts and hasattr(module, "gate_up_proj"):  # of LongCat-Flash's zero experts, too
            module.gate_up_proj = torch.nn.Parameter(module.gate_up_proj[: dims.num_experts])
    head, mapped = dims.embedding_params if alone else 0, 0
    assert dims.total_params == sum(p.numel() for p in model.parameters()) + head
    for i, layer in enumerate((model if alone else model.model).layers):
        routed = sum(p.numel() for n, p in layer.named_parameters() if ".experts." in f".{n}")
        assert (i in dims.moe_layers) == (routed > 0)
        assert routed == (dims.num_experts * dims.expert_params if routed else 0)
        tables = sum(p.numel() for n, p in layer.named_parameters() if is_mapped_table(f".{n}"))
        mapped += tables
        rest = sum(p.numel() for p in layer.parameters()) - routed - tables
        assert dims.attention_params[i] + dims.dense_params[i] == rest
        adapted = linear_names({"layer": layer}, family)
        linear = {
            (name, module.in_features, module.out_features)
            for name, module in layer.named_modules()
            if f"layer.{name}" in adapted and not is_gate(name)
        }
        assert set(dims.lora_in_out[i]) == linear
        modules = dict(layer.named_modules())
        for name, n_in, n_out in dims.mixers:
            assert (modules[name].in_features, modules[name].out_features) == (n_in, n_out)
            assert is_gate(name) and f"layer.{name}" in adapted
    assert sum(dims.mapped_params) == mapped


@pytest.mark.parametrize(
    ("family", "mixer", "told"),
    [
        ("afmoe", "self_attn", {}),
        ("bailing_hybrid", "self_attn", {"layer_group_size": 2}),
        ("bailing_hybrid", "self_attn", {"layer_group_size": 3}),
        ("granitemoehybrid", "mamba", {"layer_types": ["mamba"] * 4}),
        ("jamba", "mamba", {"attn_layer_period": 4, "attn_layer_offset": 3}),
        ("lfm2_moe", "conv", {"layer_types": ["conv"] * 4}),
        ("minimax", "self_attn", {"layer_types": ["linear_attention"] * 4}),
    ],
)
def test_mixers_of_estimated_families_equal_transformers(
    family: str, mixer: str, told: dict[str, Any]
) -> None:
    """A state's projections have up to three times the parameters of attention over keys."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from kt_ray.model.lora import is_gate, linear_names

    config = tiny_config(family, **told)
    with torch.device("meta"):
        whole = transformers.AutoConfig.for_model(**config)
        layer = transformers.AutoModelForCausalLM.from_config(whole).model.layers[1]
    dims = dims_from_config(config, family)
    own = layer.get_submodule(mixer)
    norms = own.q_norm.weight.numel() + own.k_norm.weight.numel() if family == "afmoe" else 0
    assert dims.attention_params[1] == sum(p.numel() for p in own.parameters()) - norms
    keyed = family == "afmoe" or hasattr(own, "kv_b_proj")
    assert bool(dims.states and dims.states[1]) != keyed
    adapted = linear_names({"layer": layer}, family)
    linear = {
        (f"{mixer}.{name}", module.in_features, module.out_features)
        for name, module in own.named_modules()
        if f"layer.{mixer}.{name}" in adapted and not is_gate(f"{mixer}.{name}")
    }
    assert {module for module in dims.lora_in_out[1] if module[0].startswith(f"{mixer}.")} == linear


def test_ling_as_released() -> None:
    """Its context has another name, and heads are as wide as transformers makes them where it is silent."""
    config = tiny_config("bailing_hybrid", layer_group_size=2)
    context = config.pop("max_position_embeddings")
    del config["head_dim"]
    dims = dims_from_config({**config, "model_max_length": context}, "ling")
    assert dims.context == context
    assert ("self_attn.q_proj", 32, 4 * 128) in dims.lora_in_out[0]


def test_heads_are_tied_as_in_transformers(tmp_path: Path) -> None:
    """Where config.json does not say, the family decides; LFM2's releases say tie_embedding."""
    pytest.importorskip("transformers")
    from kt_ray.model.family import read_family
    from tests.helpers.families import dispatched, tiny_config

    wrong = []
    for model_type in dispatched():
        config = tiny_config(model_type)
        for key in (None, "tie_word_embeddings", "tie_embedding"):
            for value in (True, False) if key else (None,):
                # of both levels: which of them counts depends on the class
                text = (
                    {"text_config": config["text_config"] | {key: value}} if "text_config" in config else {}
                )
                said = config | text | {key: value} if key else config
                (tmp_path / "config.json").write_text(json.dumps(said))
                family = read_family(tmp_path)
                theirs = getattr(family.whole or family.config, "tie_word_embeddings", False)
                if dims_from_config(said).tie_embeddings != bool(theirs):
                    wrong.append((model_type, key, value))
    assert not wrong, wrong


@pytest.mark.slow
def test_layers_with_experts_are_as_in_transformers(tmp_path: Path) -> None:
    """Where config.json does not say, the family decides."""
    torch = pytest.importorskip("torch")
    from kt_ray.checkpoint.names import layer_of
    from kt_ray.model.family import build_causal, read_family
    from tests.helpers.families import dispatched, tiny_config

    wrong = []
    for model_type in dispatched():
        config = tiny_config(model_type, first_k_dense_replace=None, num_dense_layers=None)
        if model_type != "deepseek_v4":  # its class wants them listed
            config.get("text_config", config).pop("mlp_layer_types", None)
        (tmp_path / "config.json").write_text(json.dumps(config))
        try:
            causal, _, _ = build_causal(read_family(tmp_path), torch.float32, "eager")
        except UserError:  # a family that does not train
            continue
        theirs = {layer_of(name) for name, module in causal.named_modules() if hasattr(module, "_apply_gate")}
        if {*dims_from_config(config).moe_layers} != theirs:
            wrong.append((model_type, theirs))
    assert not wrong, wrong


def test_deepseek_v3() -> None:
    dims = dims_from_config(DEEPSEEK_V3)
    assert dims.total_params == 671_026_404_352
    assert dims.moe_layers == tuple(range(3, 61))
    assert (dims.expert_format, dims.refusal) == ("bf16", None)


def test_every_released_config_is_in_the_table(released: dict[str, dict[str, Any]]) -> None:
    assert set(released) == set(RELEASED)


@pytest.mark.parametrize("name", sorted(RELEASED))
def test_released_model(name: str, released: dict[str, dict[str, Any]]) -> None:
    billions, fmt, moe_layers, top_k = RELEASED[name]
    dims = dims_from_config(released[name], name)
    assert dims.total_params == pytest.approx(billions * 1e9, rel=0.02)
    assert (dims.expert_format, len(dims.moe_layers), dims.experts_per_token) == (fmt, moe_layers, top_k)
    notes = " ".join(dims.notes)
    assert ("only its text part (text_config) is planned and trained" in notes) == (name in MULTIMODAL)
    assert ("are estimates" in notes) == (name == "Kimi-K3")
    if name == "Kimi-K3":
        assert "'situ'" in (dims.refusal or "") and "projected width (3584 of 7168)" in (dims.refusal or "")
    else:
        assert dims.refusal is None


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(RELEASED) - {"Kimi-K3"}))
def test_released_count_equals_transformers(name: str, released: dict[str, dict[str, Any]]) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = released[name]
    text = {**config.get("text_config", config)}
    model_type = text.pop("model_type")
    for key in ("quantization_config", "auto_map", "architectures", "transformers_version"):
        text.pop(key, None)
    whole = transformers.AutoConfig.for_model(KNOWN_AS.get(model_type, model_type), **text)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(whole)
    assert dims_from_config(config, name).total_params == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("family", ["deepseek_v4", "kimi_linear", "nemotron_h", "minimax_m3_vl_text"])
def test_config_as_transformers_saves_it(family: str) -> None:
    """Saved configurations name layer kinds where released ones count and list."""
    transformers = pytest.importorskip("transformers")
    saved = json.loads(transformers.AutoConfig.for_model(**SMALL[family]).to_json_string(use_diff=False))
    again, plain = dims_from_config(saved), small_dims(family)
    assert (again.total_params, again.moe_layers) == (plain.total_params, plain.moe_layers)
    assert again.attention_params == plain.attention_params and again.lora_in_out == plain.lora_in_out


def test_undispatched_families() -> None:
    """The table against transformers: experts without its experts interface."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        pytest.skip("transformers is not installed")
    folder = Path(spec.origin).parent / "models"
    for family in UNDISPATCHED:
        source = folder / family.removesuffix("_text") / f"modeling_{family.removesuffix('_text')}.py"
        assert "use_experts_implementation" not in source.read_text(encoding="utf-8")
    refused = small_dims("mixtral", model_type="dbrx").refusal or ""
    assert "transformers does not dispatch the routed experts of dbrx" in refused


def test_multimodal_config_plans_its_text_part() -> None:
    text = {k: v for k, v in SMALL["qwen3_moe"].items() if k != "tie_word_embeddings"}
    whole = {"model_type": "qwen3_vl_moe", "text_config": text, "tie_word_embeddings": True}
    plain = small_dims("qwen3_moe")
    for config, part in (
        (whole, "text_config"),
        (
            {"model_type": "omni", "thinker_config": whole, "tie_word_embeddings": True},
            "thinker_config.text_config",
        ),
        ({**whole, "text_config": {k: v for k, v in text.items() if k != "model_type"}}, "text_config"),
    ):
        dims = dims_from_config(config)
        assert dims.attention_params == plain.attention_params and dims.tie_embeddings
        assert f"multimodal model: only its text part ({part}) is planned and trained" in dims.notes
        assert dims.refusal is None


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *(("mixtral", {"hidden_act": name}) for name in ("silu", "swish", "gelu_pytorch_tanh")),
        ("deepseek_v3", {"swiglu_limit": 7.0}),
        ("gpt_oss", {}),
        ("minimax_m3_vl_text", {"hidden_act": "swigluoai"}),
        ("nemotron_h", {}),
        ("nemotron_h", {"mlp_hidden_act": None}),
    ],
)
def test_activations_that_are_trained(family: str, changes: dict[str, Any]) -> None:
    assert small_dims(family, **changes).refusal is None


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("mixtral", {"hidden_act": "gelu"}, "the activation 'gelu' are not computed"),
        ("mixtral", {"hidden_act": "relu2"}, "the activation 'relu2' are not computed"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "'silu' without a gate are not computed (known: relu2)"),
        ("nemotron_h", {"moe_latent_size": 32}, "on a projected width (32 of 64)"),
        ("deepseek_v3", {"routed_expert_hidden_size": 32}, "on a projected width (32 of 64)"),
        ("mixtral", {"model_type": "muse_spark_text"}, "with a norm after each of them"),
        ("llama4_text", {"num_experts_per_tok": 2}, "with num_experts_per_tok 1 only"),
        ("longcat_flash", {"zero_expert_type": "copy"}, "with zero_expert_type 'copy' is not computed"),
        ("longcat_flash", {"zero_expert_type": None}, "with zero_expert_type None is not computed"),
        ("longcat_flash", {"mla_scale_q_lora": False}, "with mla_scale_q_lora False is not computed"),
    ],
)
def test_experts_that_are_refused(family: str, changes: dict[str, Any], reason: str) -> None:
    refusal = small_dims(family, **changes).refusal or ""
    assert reason in refusal and "use another family" in refusal


@pytest.mark.parametrize("said", [{"norm_topk_prob": None}, {"zero_expert_num": 0, "zero_expert_type": None}])
def test_keys_of_longcat_flash_that_ask_for_nothing(said: dict[str, Any]) -> None:
    assert small_dims("longcat_flash", **said).refusal is None


def test_step_is_trained_beside_its_vision_tower_only() -> None:
    inside = {"model_type": "step3p7", "text_config": SMALL["step3p5"]}
    assert dims_from_config(inside).refusal is None
    assert "no class for Step-3.5 without a vision tower" in (small_dims("step3p5").refusal or "")


@pytest.mark.parametrize(
    "spelling",
    [
        {"moe_layers_enum": "1, 2, 3"},
        {"moe_layers_enum": ["1", "2", "3", "4"]},
        {"attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 3, "head_dim": 8}},
        {"attention_other_setting": None, "num_sliding_attention_heads": 6},
        {"model_type": None},
    ],
    ids=str,
)
def test_step_is_read_as_transformers_reads_it(spelling: dict[str, Any]) -> None:
    """Of attention_other_setting heads alone; text_config needs no model_type."""
    plain, other = (
        dims_from_config({"model_type": "step3p7", "text_config": {**SMALL["step3p5"], **changes}})
        for changes in ({}, spelling)
    )
    assert plain == other


def test_ungated_experts_have_two_matrices() -> None:
    dims = small_dims("nemotron_h")
    assert not dims.gated and dims.expert_params == 2 * 64 * 40
    assert dims.num_layers == 5 and dims.moe_layers == (1, 4)
    letters = {k: v for k, v in SMALL["nemotron_h"].items() if k != "layers_block_type"}
    assert dims_from_config({**letters, "hybrid_override_pattern": "ME*-E"}).total_params == dims.total_params


def test_layers_of_longcat_flash(tmp_path: Path) -> None:
    """transformers halves num_hidden_layers, which in other programs' files counts layers."""
    from kt_ray.model.family import read_family

    without = {key: value for key, value in SMALL["longcat_flash"].items() if key != "num_layers"}
    for said in ({"num_layers": 4, "num_hidden_layers": 4}, {"num_layers": 4}, {"num_hidden_layers": 8}):
        config = {**without, **said}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert dims_from_dir(tmp_path).num_layers == 4
        assert read_family(tmp_path).config.num_layers == 4
        assert CheckpointIndex(tmp_path, config, {}, ()).layer_count == 4


def test_zero_experts_of_longcat_flash() -> None:
    """The checkpoint's are the plan's, however config.json says them."""
    small = SMALL["longcat_flash"]
    others = {
        key: value for key, value in small.items() if key not in ("n_routed_experts", "zero_expert_num")
    }
    for said in ({}, {"zero_expert_num": 0}, {"zero_expert_num": None}, {"zero_expert_num": 4}):
        for config in ({**others, "num_local_experts": 8, **said}, {**others, "n_routed_experts": 8, **said}):
            dims = dims_from_config(config)
            assert zero_experts(config) == range(dims.num_experts, dims.choices)
    assert not zero_experts({**SMALL["deepseek_v3"], "zero_expert_num": 4})


def test_dense_layers_of_flint() -> None:
    """Two where config.json lists none; a list, also an empty one, is taken as it is."""
    small = {**SMALL["qwen3_moe"], "model_type": "flint"}
    listed: Any
    for listed, moe in ((None, (2, 3)), ([], (0, 1, 2, 3)), ([3], (0, 1, 2))):
        assert dims_from_config({**small, "mlp_only_layers": listed}).moe_layers == moe


def test_long_rows_of_phimoe(tmp_path: Path) -> None:
    """LongRoPE's short factors are taken for every length; rows that need the others are refused."""
    import torch

    from kt_ray.model.family import build_causal, read_family

    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "short_mscale": 1.2, "long_mscale": 1.2}
    rope = {"type": "longrope", **factors, "original_max_position_embeddings": 32}
    config = {
        **SMALL["phimoe"],
        "num_attention_heads": 8,
        "max_position_embeddings": 128,
        "rope_scaling": rope,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    causal, base, _ = build_causal(read_family(tmp_path), torch.float32, "eager", "cpu")
    assert causal.config.rope_parameters["original_max_position_embeddings"] == 32
    short, long = (base.rotary_emb(torch.zeros(1), torch.arange(n)[None])[0][:, :30] for n in (30, 60))
    assert torch.equal(short, long)  # once transformers tells them apart, longer rows need not be refused

    dims = dims_from_dir(tmp_path)
    assert dims.longest_row == dims.context == 32
    assert small_dims("phimoe").longest_row == 0
    rope["rope_type"] = rope.pop("type")
    assert small_dims("phimoe", rope_parameters=rope, rope_scaling=None).longest_row == 32
    assert small_dims("qwen3_moe", rope_parameters=rope).longest_row == 32
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    assert small_dims("qwen3_moe", rope_parameters=dynamic).longest_row == 128
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert small_dims("qwen3_moe").context == 128
    assert small_dims("qwen3_moe", rope_scaling=yarn).context == 256  # as Qwen's cards describe it
    assert small_dims("qwen3_moe", rope_scaling=yarn | {"factor": 1.5}).context == 128
    assert small_dims("hunyuan_v1_moe", rope_parameters=dynamic | {"alpha": 1000.0}).longest_row == 0


def test_unknown_family_is_read_by_its_keys_and_says_so() -> None:
    dims = small_dims("qwen3_moe", model_type="newcomer_moe")
    assert dims.num_experts == 8 and any("newcomer_moe" in note for note in dims.notes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_routed_experts": None}, "no routed experts"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"hidden_size": -3}, "hidden_size"),
        ({"num_hidden_layers": "61"}, "num_hidden_layers"),
        ({"num_experts_per_tok": 9}, "larger than the number of experts"),
        ({"first_k_dense_replace": 4}, "no layer of the model"),
        ({"torch_dtype": "int7"}, "torch_dtype"),
        ({**SMALL["llama4_text"], "attention_chunk_size": None}, "attention_chunk_size null; required a num"),
    ],
)
def test_unusable_configs(change: dict[str, Any], message: str) -> None:
    family = change.get("model_type", "deepseek_v3")
    with pytest.raises(UserError, match=message) as caught:
        dims_from_config({**SMALL[family], **change}, name="some/config.json")
    assert caught.value.remedy and "some/config.json" in caught.value.line()


def test_from_directory(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        dims_from_dir(tmp_path / "absent")
    with pytest.raises(UserError, match=r"no config\.json"):
        dims_from_dir(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        dims_from_dir(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(UserError, match="not a JSON object"):
        dims_from_dir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SMALL["mixtral"]))
    assert dims_from_dir(tmp_path).model_type == "mixtral"


def test_quantisation_in_a_file_of_its_own(tmp_path: Path) -> None:
    """ModelOpt's older releases have no quantization_config."""
    config = SMALL["mixtral"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    own = tmp_path / "hf_quant_config.json"
    said = {"quant_algo": "NVFP4", "exclude_modules": ["lm_head", "model.layers.1*"]}
    for text, kind, plain in (
        ({"quantization": said}, "nvfp4", (1,)),
        ({"quantization": {**said, "quant_algo": "MIXED_PRECISION"}}, "bf16", ()),
        ({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}, "bf16", ()),
        ({}, "bf16", ()),
    ):
        own.write_text(json.dumps(text))
        dims = dims_from_dir(tmp_path)
        assert (dims.refusal, dims.expert_format, dims.plain_expert_layers) == (None, kind, plain)
    own.write_text(json.dumps({"quantization": said}))
    stated = {**config, "quantization_config": {"quant_method": "fbgemm_fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    assert dims_from_dir(tmp_path).expert_format == "fp8"
