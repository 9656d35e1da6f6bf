"""Dimensions from config.json: against transformers' own parameter counts and published totals."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kt_ray.errors import UserError
from kt_ray.placement.dims import dims_from_config, dims_from_dir
from kt_ray.placement.families import EXACT
from tests.placement.configs import DEEPSEEK_V3, SMALL, small_dims

# Parameters as their authors state them (multi-token-prediction layers left out), in billions.
PUBLISHED = {
    "DeepSeek-V3.json": 671.0,
    "DeepSeek-R1.json": 671.0,
    "DeepSeek-V2-Lite.json": 15.7,
    "Qwen3-30B-A3B.json": 30.5,
    "Qwen3-235B-A22B.json": 235.0,
    "Mixtral-8x7B-v0.1.json": 46.7,
    "Kimi-K2-Instruct.json": 1030.0,
    "gpt-oss-120b.json": 117.0,
    "gpt-oss-20b.json": 21.0,
    "OLMoE-1B-7B-0125-Instruct.json": 6.92,
}


@pytest.fixture(scope="module")
def released() -> dict[str, dict[str, Any]]:
    folder = os.environ.get("KT_RAY_TEST_DATA")
    if not folder or not (Path(folder) / "model_configs").is_dir():
        pytest.skip("KT_RAY_TEST_DATA names no folder with model_configs/")
    return {
        f.name: json.loads(f.read_text()) for f in sorted((Path(folder) / "model_configs").glob("*.json"))
    }


def test_exact_families_are_all_tested() -> None:
    assert {"qwen3_5_moe" if f == "qwen3_5_moe_text" else f for f in SMALL} == EXACT


@pytest.mark.parametrize("family", sorted(SMALL))
def test_counts_equal_transformers(family: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from kt_ray.model.lora import is_gate

    config = transformers.AutoConfig.for_model(**SMALL[family])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    dims = small_dims(family)
    assert dims.total_params == sum(p.numel() for p in model.parameters())
    for i, layer in enumerate(model.model.layers):
        routed = sum(p.numel() for n, p in layer.named_parameters() if ".experts." in f".{n}")
        assert (i in dims.moe_layers) == (routed > 0)
        assert routed == (dims.num_experts * dims.expert_params if routed else 0)
        rest = sum(p.numel() for p in layer.parameters()) - routed
        assert dims.attention_params[i] + dims.dense_params[i] == rest
        linear = {
            (name, module.in_features, module.out_features)
            for name, module in layer.named_modules()
            if type(module) is torch.nn.Linear and not is_gate(name)
        }
        assert set(dims.lora_in_out[i]) == linear


def test_deepseek_v3() -> None:
    dims = dims_from_config(DEEPSEEK_V3)
    assert dims.total_params == 671_026_404_352
    assert dims.moe_layers == tuple(range(3, 61))
    assert (dims.expert_format, dims.refusal) == ("bf16", None)


def test_every_released_config_is_understood(released: dict[str, dict[str, Any]]) -> None:
    assert len(released) >= 26
    for name, config in released.items():
        try:
            dims = dims_from_config(config, name)
        except UserError as error:
            assert error.remedy and name in error.where
            continue
        assert (
            len(dims.attention_params) == len(dims.dense_params) == len(dims.lora_in_out) == dims.num_layers
        )
        assert dims.refusal or dims.expert_format in ("bf16", "f32")


def test_totals_of_released_models(released: dict[str, dict[str, Any]]) -> None:
    for name, billions in PUBLISHED.items():
        assert dims_from_config(released[name], name).total_params == pytest.approx(billions * 1e9, rel=0.01)


def test_formats_of_released_models(released: dict[str, dict[str, Any]]) -> None:
    formats = {name: dims_from_config(config, name).expert_format for name, config in released.items()}
    assert formats["DeepSeek-V3.json"] == "fp8_block"
    assert formats["gpt-oss-20b.json"] == "mxfp4"
    assert formats["DeepSeek-V4-Pro.json"] == "mxfp4"
    assert formats["Kimi-K2.5.json"] == "int4"
    assert formats["Qwen3-30B-A3B.json"] == "bf16"


def packed(**weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


@pytest.mark.parametrize(
    ("quantization", "expected", "computed"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_block", True),
        ({"quant_method": "mxfp4"}, "mxfp4", True),
        ({"quant_method": "gptq", "bits": 4}, "int4", False),
        ({"quant_method": "gptq", "bits": 8}, "int8", False),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "nf4", False),
        (packed(num_bits=4, type="int", symmetric=True), "int4", True),
        (packed(num_bits=4, type="int", symmetric=False), "int4", False),
        ({"quant_method": "quanto"}, "quanto", False),
    ],
)
def test_quantised_experts_are_planned_but_refused(
    quantization: dict[str, Any], expected: str, computed: bool
) -> None:
    dims = small_dims(quantization_config=quantization)
    assert dims.expert_format == expected
    assert dims.refusal and expected in dims.refusal and "BF16" in dims.refusal
    assert ("the engine computes them, expert actors do not read them" in dims.refusal) == computed


def test_float32_and_float16() -> None:
    assert small_dims(torch_dtype="float32").expert_format == "f32"
    assert small_dims(torch_dtype="float32").refusal is None
    assert "f16" in (small_dims(torch_dtype="float16").refusal or "")


def test_multimodal_config_plans_its_text_part() -> None:
    text = {k: v for k, v in SMALL["qwen3_moe"].items() if k != "tie_word_embeddings"}
    dims = dims_from_config({"model_type": "qwen3_vl_moe", "text_config": text, "tie_word_embeddings": True})
    plain = small_dims("qwen3_moe")
    assert dims.attention_params == plain.attention_params and dims.tie_embeddings
    assert any("text_config" in note for note in dims.notes)
    assert "multimodal" in (dims.refusal or "")


def test_activation_other_than_silu_is_refused() -> None:
    assert "'gelu'" in (small_dims("mixtral", hidden_act="gelu").refusal or "")
    assert "gpt_oss" in (small_dims("gpt_oss").refusal or "")


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
    ],
)
def test_unusable_configs(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        dims_from_config({**SMALL["deepseek_v3"], **change}, name="some/config.json")
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
