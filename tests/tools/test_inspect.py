"""inspect: what a directory holds, in figures that follow from how it was made."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from kt_ray.errors import UserError
from kt_ray.tools.__main__ import main
from kt_ray.tools.inspect import inspect
from tests.helpers.tiny_moe import (
    E,
    H,
    I,
    encoded,
    expert_modules,
    fused,
    lora,
    per_expert,
    save,
    save_adapter,
)


def test_a_plain_checkpoint(tmp_path: Path) -> None:
    path = save(tmp_path / "m", per_expert())
    report = inspect(path)
    parts = report["parts"]
    assert parts["routed experts"] == {
        "BF16": {"parameters": 2 * E * 3 * H * I, "tensors": 2 * E * 3, "bytes": 2 * 2 * E * 3 * H * I}
    }
    assert parts["attention"]["BF16"]["parameters"] == 2 * H * H
    assert parts["router"]["BF16"]["parameters"] == 2 * E * H and "embedding" in parts and "norms" in parts
    assert report["parameters"] == sum(r["parameters"] for rows in parts.values() for r in rows.values())
    assert report["experts"]["count"] == E and report["experts"]["layout"] == "per_expert"
    assert (report["experts"]["hidden"], report["experts"]["intermediate"]) == (H, I)
    assert report["takes"]["kt_ray"] == "yes" and report["takes"]["transformers"] == "yes"


def test_formats_and_layouts(tmp_path: Path) -> None:
    tensors = encoded(fused(interleaved=True, biases=True), "mxfp4-blocks")
    config = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    report = inspect(save(tmp_path / "oss", tensors, config))
    assert report["experts"] | {"layout": "fused", "interleaved": True, "biased": True} == report["experts"]
    values = report["parts"]["routed experts"]["mxfp4 (blocks and scales)"]
    assert values["parameters"] == 2 * E * 3 * H * I and values["bytes"] == 2 * E * 3 * H * I * 17 // 32
    report = inspect(save(tmp_path / "fp8", encoded(per_expert(layers=3), "fp8")))
    assert report["skipped_layers"] == ["model.layers.2.mlp.experts"]
    assert "fp8 (F32 scale per block)" in report["parts"]["multi-token prediction"]
    assert "without a quantization_config" in report["takes"]["vLLM"]
    odd = {"quantization_config": {"quant_method": ["fp8"]}}
    assert "not known" in inspect(save(tmp_path / "odd", per_expert(), odd))["takes"]["vLLM"]


def test_adapters(tmp_path: Path) -> None:
    base = save(tmp_path / "base", per_expert())
    tensors = lora(expert_modules())
    name = "model.layers.0.self_attn.q_proj.lora_B.weight"
    tensors[name] = torch.zeros_like(tensors[name])
    path = save_adapter(tmp_path / "adapter", tensors, base_model_name_or_path=str(base))
    report = inspect(path)
    assert report["kind"] == "adapter" and report["experts"] == "per_expert" and report["zero_b"] == 1
    assert report["pairs"] == {"linear": 2, "expert": 2 * E * 3, "fused": 0}
    assert report["ranks"] == [4] and report["scales"] == [1.5] and report["model_type"] == "qwen3_moe"
    ups = [v for n, v in tensors.items() if "up_proj.lora_B" in n]
    expected = float(torch.stack([v.square().sum() for v in ups]).sum().sqrt())
    assert report["norms"]["up_proj"]["b"] == pytest.approx(expected)
    assert report["takes"]["PEFT"] == "yes"
    tensors[name][0, 0] = torch.nan
    report = inspect(save_adapter(tmp_path / "nan", tensors, base_model_name_or_path=str(base)))
    json.dumps(report, allow_nan=False)
    assert report["norms"]["q_proj"]["b"] is None
    assert {answer[:2] for answer in report["takes"].values()} == {"no"}


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(tmp_path / "m", per_expert())
    assert main(["inspect", str(path)]) == 0
    assert "routed experts" in capsys.readouterr().out
    assert main(["inspect", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["family"] == "qwen3_moe"
    adapter = save_adapter(tmp_path / "a", lora(expert_modules()))
    assert main(["inspect", str(adapter)]) == 0
    assert "LoRA for nowhere (base not here)" in capsys.readouterr().out


def test_a_full_disk_behind_its_output_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save(tmp_path / "m", per_expert())
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["inspect", str(path), "--json"]) == 2
    assert "error: a disk is full; at standard output" in capsys.readouterr().err


def test_neither(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config.json"):
        inspect(tmp_path)
    with pytest.raises(UserError, match="no such checkpoint"):
        inspect(tmp_path / "nowhere")
    save_adapter(tmp_path / "adapter", lora({"q_proj": (4, 4)}))
    with pytest.raises(UserError, match=r"not an adapter directory.*name the adapter in it: .*/adapter"):
        inspect(tmp_path)
