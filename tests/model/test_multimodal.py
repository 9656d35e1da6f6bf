"""Multimodal checkpoints: the text part trains, the other towers are passed over and reported."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from kt_ray.checkpoint import CheckpointIndex, ExpertLayout, check_non_experts, load_non_experts
from kt_ray.config.schema import LoraConfig
from kt_ray.errors import UserError
from kt_ray.model.build import build_on_meta
from kt_ray.model.family import build_causal, read_family
from kt_ray.model.stage import Stage
from kt_ray.model.stage_spec import StageSpec
from tests.helpers.eager_experts import Eager, EagerExchange
from tests.helpers.families import LAYERS, randomise, tiny_config, write_config
from tests.helpers.hf_reference import random_rows
from tests.helpers.stages import backward, forward, pass_spec

ROWS = random_rows(3)
LORA = LoraConfig(rank=2, alpha=4.0)


def spec_of(path: Path, layers: tuple[int, int] = (0, LAYERS)) -> StageSpec:
    return StageSpec(str(path), layers, LAYERS, dtype="float32", attn_implementation="eager", lora=LORA)


def save(model: torch.nn.Module, path: Path) -> None:
    randomise(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(path)  # type: ignore[operator]


def edit(path: Path, rename: Callable[[str], str], extra: dict[str, torch.Tensor]) -> None:
    tensors = {rename(k): v for k, v in load_file(path / "model.safetensors").items()} | extra
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def assert_trains(path: Path, reference_path: Path) -> Stage:
    stage = Stage(spec_of(path))
    reference = Eager(reference_path, stage.model)
    spec = pass_spec(ROWS, groups=2, micro=2)
    loops = forward([stage], spec, EagerExchange(reference.experts))  # type: ignore[arg-type]
    loss = loops[-1].loss_sum / spec.loss_tokens
    backward([stage], loops)
    want, grads = reference.run(ROWS, dict(stage.parameters), 2.0)
    assert loss == pytest.approx(want, rel=2e-5)
    for name, grad in grads.items():
        got = stage.parameters[name].grad
        assert got is not None and float((got - grad).norm()) <= 2e-4 * float(grad.norm()) + 1e-7, name
    return stage


def report_of(path: Path) -> tuple[list[str], list[str]]:
    index = CheckpointIndex.open(path)
    model = build_on_meta(spec_of(path))
    check_non_experts(index, model.causal)
    report = load_non_experts(index, model.causal, layers=(0, LAYERS), dtype=torch.float32, device="cpu")
    return report.ignored, report.unexpected


def check_expert_names(path: Path, stage: Stage) -> None:
    """Experts are named after the module that holds them, as attention is."""
    layout = ExpertLayout.detect(CheckpointIndex.open(path))
    modules = {name for name, _ in stage.model.causal.named_modules()}
    for layer in layout.moe_layers:
        for name in layout.names(layer, 3, stage.model.root).values():
            assert re.sub(r"\.3\.\w+$", "", name) in modules, name


def test_with_a_text_class(tmp_path: Path) -> None:
    """Qwen3.5-MoE: the ForConditionalGeneration's files, vision and prediction layers included."""
    path = write_config(tmp_path, "qwen3_5_moe")
    save(AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(path)), path)
    edit(path, lambda k: k, {"mtp.norm.weight": torch.ones(32), "mtp.layers.0.x": torch.ones(2)})
    keys = CheckpointIndex.open(path).names
    assert any(k.startswith("model.language_model.layers.") for k in keys)
    stage = assert_trains(path, path)
    assert type(stage.model.causal).__name__ == "Qwen3_5MoeForCausalLM"
    assert all(name.startswith("model.layers.") for name in stage.parameters)
    check_expert_names(path, stage)
    ignored, unexpected = report_of(path)
    assert unexpected == []
    assert set(ignored) == {k for k in keys if k.startswith(("model.visual.", "mtp."))}


@pytest.mark.parametrize("model_type", ["qwen3_vl_moe", "glm4v_moe"])
def test_without_a_text_class(tmp_path: Path, model_type: str) -> None:
    """The language model inside the multimodal class, whose names the adapter then has."""
    path = write_config(tmp_path, model_type)
    save(AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(path)), path)
    stage = assert_trains(path, path)
    assert stage.model.root == "model.language_model"
    assert all(name.startswith("model.language_model.layers.") for name in stage.parameters)
    check_expert_names(path, stage)
    held = [*stage.model.causal.parameters(), *stage.model.causal.buffers()]
    assert not any(t.is_meta for t in held)
    ignored, unexpected = report_of(path)
    visual = {k for k in CheckpointIndex.open(path).names if k.startswith("model.visual.")}
    assert unexpected == [] and set(ignored) == visual and visual


def test_numbers_beside_the_language_model_on_two_stages(tmp_path: Path) -> None:
    """DeepSeek-OCR's separator of pictures belongs to no tower; only the last stage reads it."""
    path = write_config(tmp_path, "deepseek_ocr2")
    save(AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(path)), path)
    spec = pass_spec(ROWS, groups=2, micro=2)

    def loss(*layers: tuple[int, int]) -> float:
        stages = [Stage(spec_of(path, each)) for each in layers]
        experts = Eager(path, Stage(spec_of(path)).model).experts
        return forward(stages, spec, EagerExchange(experts))[-1].loss_sum  # type: ignore[arg-type]

    assert loss((0, 2), (2, LAYERS)) == pytest.approx(loss((0, LAYERS)), rel=1e-6)


def test_unknown_around_a_known_text_model(tmp_path: Path) -> None:
    """As Kimi-K2.5 is: kimi_k2 inside, "language_model.model." before every key."""
    text = tiny_config("deepseek_v3")
    plain = write_config(tmp_path / "plain", "deepseek_v3")
    causal, _, _ = build_causal(read_family(plain), torch.float32, "eager", device="cpu")
    save(causal, plain)
    path = tmp_path / "kimi"
    path.mkdir()
    (path / "model.safetensors").write_bytes((plain / "model.safetensors").read_bytes())
    nested = text | {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_x.X"}}
    (path / "config.json").write_text(json.dumps({"model_type": "kimi_k99", "text_config": nested}))
    tower = {
        "vision_tower.encoder.blocks.0.wo.weight": torch.ones(4, 4),
        "mm_projector.pre_norm.bias": torch.ones(4),
    }
    edit(path, lambda k: "language_model." + k, tower)
    assert read_family(path).label == "kimi_k99 (deepseek_v3)"
    stage = assert_trains(path, plain)
    assert all(name.startswith("model.layers.") for name in stage.parameters)
    assert report_of(path) == (sorted(tower), [])


def test_surprises_inside_the_language_model_are_still_unexpected(tmp_path: Path) -> None:
    path = write_config(tmp_path, "qwen3_vl_moe")
    save(AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(path)), path)
    extra = "model.language_model.layers.1.self_attn.surprise"
    edit(path, lambda k: k, {extra: torch.ones(2)})
    with pytest.raises(UserError, match=rf"no place for.*unexpected: {re.escape(extra)}"):
        report_of(path)


def test_missing_text_weights_are_named(tmp_path: Path) -> None:
    path = write_config(tmp_path, "qwen3_5_moe")
    save(AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(path)), path)
    tensors = load_file(path / "model.safetensors")
    del tensors["model.language_model.norm.weight"]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"lacks weights of the model.*missing: model\.norm\.weight"):
        Stage(spec_of(path))


RELEASED = {
    "DeepSeek-V2-Lite": "DeepseekV2ForCausalLM",
    "DeepSeek-V4-Flash-FP8": "DeepseekV4ForCausalLM",
    "Kimi-K2-Instruct": "DeepseekV3ForCausalLM",
    "Kimi-K2.5": "Kimi_K25ForConditionalGeneration",
    "MiniMax-M3": "MiniMaxM3VLForCausalLM",
    "Qwen3-VL-30B-A3B-Instruct": "Qwen3VLMoeForConditionalGeneration",
    "Qwen3.5-35B-A3B": "Qwen3_5MoeForCausalLM",
    "GLM-5": "GlmMoeDsaForCausalLM",
    "Kimi-K3": None,
}


@pytest.mark.parametrize("name", RELEASED)
def test_released_configurations(tmp_path: Path, name: str) -> None:
    """Released config.json files, names unknown to transformers among them, read without remote code."""
    folder = os.environ.get("KT_RAY_TEST_DATA", "")
    if not folder or not (Path(folder) / "model_configs").is_dir():
        pytest.skip("KT_RAY_TEST_DATA names no folder with model_configs/")
    text = (Path(folder) / "model_configs" / f"{name}.json").read_text()
    (tmp_path / "config.json").write_text(text)
    config = json.loads(text)
    config = config.get("text_config", config)
    count = config["num_hidden_layers"]
    spec = StageSpec(str(tmp_path), (0, count), count, attn_implementation="eager")
    if RELEASED[name] is None:
        with pytest.raises(UserError, match=r"cannot build kimi_k3 \(kimi_linear\).*situ"):
            build_on_meta(spec)
        return
    model = build_on_meta(spec)
    assert type(model.causal).__name__ == RELEASED[name]
    assert model.hidden_size == config["hidden_size"] and len(model.formulas) >= count - 3
    assert model.top_k == config["num_experts_per_tok"]
