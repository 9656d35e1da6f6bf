"""The example recipes train on the demo checkpoint after only their paths were changed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kt_ray import cli
from kt_ray.demo.builder import ensure_demo_model
from kt_ray.demo.recipes import RECIPES, persona_path
from kt_ray.demo.tokenizer import train_tokenizer

HERE = Path(__file__).resolve().parent
LOCAL = (
    "cluster=local",
    "rule.worker_threads=1",
    "tracking.progress=false",
    "tracking.plot=false",
    "trainer.max_steps=2",
)
DEEPSEEK = ["<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"]


def with_paths(name: str, folder: Path, **paths: str) -> Path:
    """The example with these fields, and only fields that are there or name the data set's directory."""
    text = (HERE / f"{name}.yaml").read_text(encoding="utf-8")
    paths |= {"output_dir": str(folder / "run")}
    for field, path in paths.items():
        text, count = re.subn(rf"(?m)^{field}: .*$", f"{field}: {path}", text)
        assert count == 1, field
    file = folder / f"{name}.yaml"
    file.write_text(f"{text}dataset_dir: {HERE / 'data'}\n", encoding="utf-8")
    return file


def losses(folder: Path) -> list[float]:
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    return [row["loss"] for row in found if "loss" in row]


def test_qwen3_moe_sft(tmp_path: Path) -> None:
    path = with_paths("qwen3moe_lora_sft_kt", tmp_path, model_name_or_path=ensure_demo_model())
    assert cli.main([f"recipe={path}", *LOCAL]) == 0
    first, second = losses(tmp_path)
    assert second < first
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").is_file()


def test_qwen3_moe_dpo_with_kt_config(tmp_path: Path) -> None:
    path = with_paths("qwen3moe_lora_dpo_kt_config", tmp_path, model_name_or_path=ensure_demo_model())
    assert cli.main([f"recipe={path}", *LOCAL]) == 0
    first, second = losses(tmp_path)
    assert first == pytest.approx(0.6931, abs=1e-3) and second < first  # both answers as likely at first


def test_deepseek_dpo(tmp_path: Path) -> None:
    path = with_paths("deepseek2_lora_dpo_kt", tmp_path, model_name_or_path=ensure_demo_model())
    assert cli.main([f"recipe={path}", *LOCAL]) == 0
    assert len(losses(tmp_path)) == 2


def test_deepseek_sft_with_an_optimize_rule(tmp_path: Path) -> None:
    rule = str(HERE / "rules" / "two_gpus.yaml")
    model = ensure_demo_model()
    path = with_paths("deepseek3_lora_sft_kt", tmp_path, model_name_or_path=model, kt_optimize_rule=rule)
    assert cli.main([f"recipe={path}", *LOCAL]) == 0
    assert len(losses(tmp_path)) == 2


def test_deepseek_sft_with_kt_config(tmp_path: Path) -> None:
    """Its template needs DeepSeek's tokens: a demo model with a tokenizer that has them."""
    tokenizer = train_tokenizer(persona_path(), RECIPES["demo"].vocab)
    tokenizer.add_special_tokens({"additional_special_tokens": DEEPSEEK})
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    model = ensure_demo_model(cache_dir=tmp_path, tokenizer_dir=tmp_path / "tokenizer")
    path = with_paths("deepseek_v3_lora_sft_kt_config", tmp_path, model_name_or_path=model)
    assert cli.main([f"recipe={path}", *LOCAL]) == 0
    assert len(losses(tmp_path)) == 2
