"""export: the same update in every form, and what PEFT makes of it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kt_ray.adapter.peft_config import TEMPLATE, AdapterInfo, adapter_config
from kt_ray.checkpoint import CheckpointIndex
from kt_ray.checkpoint.expert_groups import expert_groups
from kt_ray.errors import UserError
from kt_ray.tools.__main__ import main
from kt_ray.tools.export import export
from kt_ray.tools.inspect import inspect
from kt_ray.tools.merge import merge
from tests.helpers.tiny_families import tiny_family
from tests.helpers.tiny_moe import E, H, I, expert_modules, fused, lora, per_expert, save, save_adapter
from tests.tools.test_merge import fused_adapter

BASES = {
    "per expert": (per_expert(torch.float32), {}),
    "interleaved": (fused(torch.float32, transposed=True, interleaved=True), {"model_type": "gpt_oss"}),
}


def merged(base: Path, adapter: Path, out: Path) -> dict[str, torch.Tensor]:
    merge(base, adapter, out)
    index = CheckpointIndex.open(out)
    result = {n: index.read(n) for n in index.names if ".experts." not in n}
    for prefix, group in expert_groups(index).items():
        result |= {f"{prefix}.{e}.{p}": group.read(e, p) for e in range(E) for p in ("gate", "up", "down")}
    return result


def check_same(base: Path, tmp_path: Path, one: Path, two: Path) -> None:
    first, second = merged(base, one, tmp_path / "m1"), merged(base, two, tmp_path / "m2")
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("layout", BASES)
def test_together_and_apart_again(tmp_path: Path, layout: str) -> None:
    tensors, config = BASES[layout]
    base = save(tmp_path / "base", tensors, config)
    source = lora(expert_modules())
    path = save_adapter(tmp_path / "adapter", source, base_model_name_or_path=str(base))
    (path / TEMPLATE).write_text("its own")
    assert export(path, tmp_path / "fused", "peft-fused") == {str(tmp_path / "fused"): 2 + 2 * 2}
    stored = load_file(tmp_path / "fused" / "adapter_model.safetensors")
    key = "base_model.model.model.layers.1.mlp.experts"
    assert stored[f"{key}.base_layer.lora_A.weight"].shape == (E * 8, H)
    assert stored[f"{key}.base_layer.lora_B.weight"].shape == (2 * I, 8 * E)
    check_same(base, tmp_path, path, tmp_path / "fused")
    export(tmp_path / "fused", tmp_path / "back", "peft-per-expert")
    back = load_file(tmp_path / "back" / "adapter_model.safetensors")
    assert back.keys() == {f"base_model.model.{name}" for name in source}
    assert all(torch.equal(back[f"base_model.model.{name}"], value) for name, value in source.items())
    assert (tmp_path / "back" / TEMPLATE).read_text() == "its own"
    config_back = json.loads((tmp_path / "back" / "adapter_config.json").read_text())
    assert (config_back["r"], config_back["lora_alpha"]) == (4, 6)


@pytest.mark.parametrize("layout", BASES)
def test_an_adapter_that_peft_trained_apart(tmp_path: Path, layout: str) -> None:
    """gate and up share A: each keeps the whole of it."""
    tensors, config = BASES[layout]
    base = save(tmp_path / "base", tensors, config)
    source, _ = fused_adapter(layout == "interleaved")
    path = save_adapter(tmp_path / "adapter", source, base_model_name_or_path=str(base))
    export(path, tmp_path / "out", "peft-per-expert")
    stored = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert len(stored) == 2 * E * 3 * 2
    check_same(base, tmp_path, path, tmp_path / "out")


def test_an_adapter_of_scale_0(tmp_path: Path) -> None:
    base = save(tmp_path / "base", per_expert(torch.float32))
    settings = {"base_model_name_or_path": str(base), "lora_alpha": 0}
    path = save_adapter(tmp_path / "adapter", fused_adapter(False)[0], **settings)
    export(path, tmp_path / "out", "peft-per-expert")
    check_same(base, tmp_path, path, tmp_path / "out")


def test_released_names_under_the_adapters_root(tmp_path: Path) -> None:
    """DeepSeek-V4's keys begin with "layers."; those of multi-token prediction name no trained layer."""
    tensors = {k.removeprefix("model."): v for k, v in per_expert(torch.float32, moe="ffn").items()}
    for e in range(E):
        for leaf in ("gate_proj", "up_proj", "down_proj"):
            name = f"experts.{e}.{leaf}.weight"
            tensors[f"mtp.layers.0.mlp.{name}"] = tensors[f"layers.0.ffn.{name}"].clone()
    base = save(tmp_path / "base", tensors)
    source, _ = fused_adapter(False)
    path = save_adapter(tmp_path / "adapter", source, base_model_name_or_path=str(base))
    export(path, tmp_path / "out", "peft-per-expert")
    stored = load_file(tmp_path / "out" / "adapter_model.safetensors")
    layers = {i: f"base_model.model.model.layers.{i}.ffn.experts." for i in range(2)}
    experts = [name for name in stored if ".experts." in name]
    assert len(experts) == 2 * E * 3 * 2
    assert all(any(name.startswith(prefix) for prefix in layers.values()) for name in experts)


def test_other_ranks_and_scales_outside_the_experts(tmp_path: Path) -> None:
    base = save(tmp_path / "base", per_expert(torch.float32))
    q = [f"model.layers.{i}.self_attn.q_proj" for i in range(2)]
    source = lora(expert_modules()) | lora({q[0]: (H, H)}, rank=2)
    options: dict[str, Any] = {"rank_pattern": {q[0]: 2}, "alpha_pattern": {q[0]: 5, q[1]: 3}}
    path = save_adapter(tmp_path / "adapter", source, base_model_name_or_path=str(base), **options)
    for form in ("peft-fused", "peft-per-expert"):
        (tmp_path / form).mkdir()
        export(path, tmp_path / form / "out", form)
        check_same(base, tmp_path / form, path, tmp_path / form / "out")
    with pytest.raises(UserError, match="several ranks or scales"):
        export(path, tmp_path / "kt", "sglang-kt")


def test_the_bases_weights_are_read_for_released_names_alone(tmp_path: Path) -> None:
    """mode=plan fetches config.json alone."""
    base = save(tmp_path / "base", per_expert())
    (base / "model.safetensors").unlink()
    path = save_adapter(tmp_path / "adapter", lora(expert_modules()), base_model_name_or_path=str(base))
    for form in ("peft-per-expert", "sglang-kt", "peft-fused"):
        assert sum(export(path, tmp_path / form, form).values())
    with pytest.raises(UserError, match="no safetensors weights"):
        export(tmp_path / "peft-fused", tmp_path / "single", "peft-per-expert")


def test_servers_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = save(tmp_path / "base", per_expert())
    source = lora(expert_modules())
    path = save_adapter(tmp_path / "adapter", source, base_model_name_or_path=str(base))
    arguments = ["export", str(path), str(tmp_path / "out"), "--form", "sglang-kt", "--dtype", "bfloat16"]
    assert main(arguments) == 0
    attention = load_file(tmp_path / "out" / "sglang" / "adapter_model.safetensors")
    experts = load_file(tmp_path / "out" / "kt" / "adapter_model.safetensors")
    assert attention.keys() | experts.keys() == source.keys() and not attention.keys() & experts.keys()
    assert all(".experts." in name for name in experts) and len(attention) == 4
    assert all(torch.equal(v, source[n].bfloat16()) for n, v in (attention | experts).items())
    config = json.loads((tmp_path / "out" / "kt" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["down_proj", "gate_proj", "up_proj"] and config["lora_alpha"] == 6
    assert "4 pairs" not in capsys.readouterr().out


def test_any_name_of_a_directory_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = save(tmp_path / "base", per_expert())
    path = save_adapter(tmp_path / "adapter", lora(expert_modules()), base_model_name_or_path=str(base))
    out = tmp_path / "[x] ä [" / "x]"
    assert main(["export", str(path), str(out), "--form", "peft-per-expert"]) == 0
    assert f"{out}: " in capsys.readouterr().out


def test_refusals(tmp_path: Path) -> None:
    base = save(tmp_path / "base", per_expert())
    source = lora(expert_modules())
    path = save_adapter(tmp_path / "adapter", source)
    with pytest.raises(UserError, match="base model is not here"):
        export(path, tmp_path / "out", "peft-fused")
    export(path, tmp_path / "out", "peft-fused", base=base)
    with pytest.raises(UserError, match="not empty"):
        export(path, tmp_path / "out", "peft-fused", base=base)
    with pytest.raises(UserError, match="output is no directory"):
        export(path, path / "adapter_model.safetensors", "peft-fused", base=base)
    with pytest.raises(UserError, match=r"config\.json.*--base DIR"):
        export(path, tmp_path / "nowhere", "peft-fused", base=tmp_path)
    wrong: list[tuple[str, int]] = [
        ("num_experts", 2),
        ("moe_intermediate_size", 64),
        ("num_hidden_layers", 1),
    ]
    for key, value in wrong:
        other = save(tmp_path / key, {}, {key: value})
        for given, form in ((path, "peft-per-expert"), (tmp_path / "out", "sglang-kt")):
            with pytest.raises(UserError, match=r"experts do not fit the base.*layers\.[01].*--base DIR"):
                export(given, tmp_path / "wrong", form, base=other)
    more = save(tmp_path / "more", {}, {"num_experts": 4})
    with pytest.raises(UserError, match=r"cannot be fused.*missing: model.layers.0.mlp.experts.3.gate_proj"):
        export(path, tmp_path / "wrong", "peft-fused", base=more)
    fewer = {k: v for k, v in source.items() if "layers.1.mlp.experts.0.up_proj" not in k}
    with pytest.raises(UserError, match=r"missing: model.layers.1.mlp.experts.0.up_proj"):
        export(save_adapter(tmp_path / "fewer", fewer), tmp_path / "f", "peft-fused", base=base)


def test_an_export_that_is_interrupted_leaves_nothing_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save(tmp_path / "base", per_expert())
    path = save_adapter(tmp_path / "adapter", lora(expert_modules()), base_model_name_or_path=str(base))
    partial = tmp_path / "out" / ".adapter_model.safetensors.partial"

    def interrupted(file: Path, *_: Any) -> None:
        file.write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("kt_ray.tools.export.write_safetensors", interrupted)
        export(path, tmp_path / "out", "peft-fused")
    assert not partial.exists()
    partial.write_bytes(b"of one that was killed, or is at work")
    with pytest.raises(UserError, match=r"not empty.*\.adapter_model\.safetensors\.partial"):
        export(path, tmp_path / "out", "peft-fused")
    partial.unlink()
    export(path, tmp_path / "out", "peft-fused")


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_peft_reads_every_form(tmp_path: Path, family: str) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = tiny_family(tmp_path, family)
    shapes = {
        name.removesuffix(".weight"): tuple(value.shape)
        for name, value in load_file(base / "model.safetensors").items()
        if name.endswith("_proj.weight")
    }
    source = lora(shapes)
    info = AdapterInfo(str(base), family, 4, 6.0)
    path = save_adapter(tmp_path / "adapter", source, **adapter_config(source, info))
    export(path, tmp_path / "fused", "peft-fused")
    export(tmp_path / "fused", tmp_path / "single", "peft-per-expert")
    ids = torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(3))
    logits = []
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", message="The following .*_pattern keys did not match")
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")
        for adapter in (path, tmp_path / "fused", tmp_path / "single"):
            model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
            before = model(ids).logits
            logits.append(PeftModel.from_pretrained(model, str(adapter)).eval()(ids).logits)
    assert float((logits[0] - before).abs().max()) > 0.05
    for other in logits[1:]:
        torch.testing.assert_close(other, logits[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "leaves", "merged"),
    [
        ("gpt_oss", ("gate_proj", "up_proj", "down_proj"), False),
        ("qwen3_moe", ("gate_proj", "up_proj", "down_proj"), True),
        ("qwen3_moe", ("gate_proj", "up_proj"), False),  # PEFT looks for them beneath down's
        ("qwen3_moe", ("down_proj",), True),
    ],
)
def test_says_where_peft_does_not_merge_single_experts(
    tmp_path: Path, family: str, leaves: Sequence[str], merged: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    base = save(tmp_path / "base", per_expert(), {"model_type": family, "intermediate_size": I})
    config = {"base_model_name_or_path": str(base)}
    modules = {name: shape for name, shape in expert_modules().items() if name.endswith(tuple(leaves))}
    path = save_adapter(tmp_path / "adapter", lora(modules), **config)
    assert main(["export", str(path), str(tmp_path / "out"), "--form", "peft-per-expert"]) == 0
    assert ("would leave the experts out" in capsys.readouterr().out) is not merged
    assert (inspect(tmp_path / "out")["takes"]["PEFT"] == "yes") is merged


@pytest.mark.parametrize(
    ("leaves", "parameters"),
    [(("down_proj",), ["experts.down_proj"]), (("gate_proj", "up_proj"), ["experts.gate_up_proj"])],
)
def test_only_the_parameters_that_are_adapted_are_named(leaves: Sequence[str], parameters: list[str]) -> None:
    names = [f"model.layers.0.mlp.experts.0.{leaf}.lora_{half}.weight" for leaf in leaves for half in "AB"]
    config = adapter_config(names, AdapterInfo("base", "qwen2_moe", 4, 6.0))
    assert config["target_parameters"] == parameters
