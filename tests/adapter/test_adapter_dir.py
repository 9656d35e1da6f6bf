"""The adapter directory: PEFT loads every tensor of it and computes what LoRA computes by hand."""

from __future__ import annotations

import ast
import json
import os
import pickle
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from kt_ray.adapter.adapter_dir import adapter_layout, create_adapter, finish_adapter, write_tensors
from kt_ray.adapter.adapter_file import Lora
from kt_ray.adapter.fused import fuse_down, fuse_gate_up
from kt_ray.adapter.peft_config import PREFIX, AdapterInfo, adapter_config, adapter_readme
from kt_ray.errors import UserError
from kt_ray.evaluate.answer_file import adapter_mark

Make = Callable[..., Any]
Tensors = dict[str, torch.Tensor]
RANK, ALPHA = 4, 8.0
FAMILIES = ["deepseek_v3", "qwen3_moe", "mixtral", "qwen2_moe", "olmoe", "glm4_moe", "deepseek_v2"]
_PROJECTION = re.compile(r"^(?P<module>.*(?:_proj|kv_a_proj_with_mqa|\.w[123]))\.weight$")


def info_for(family: str, base: Path, **changes: Any) -> AdapterInfo:
    return AdapterInfo(
        **({"base_model": str(base), "model_type": family, "rank": RANK, "alpha": ALPHA} | changes)
    )


def random_lora(path: Path, keep: Callable[[str], bool] = lambda module: True) -> Tensors:
    """A and B, both random, for every projection of a checkpoint: attention, shared, dense, experts."""
    generator = torch.Generator().manual_seed(1)
    lora: Tensors = {}
    for name, weight in load_file(path / "model.safetensors").items():
        match = _PROJECTION.match(name)
        if match and keep(match["module"]):
            out_features, in_features = weight.shape
            lora[f"{match['module']}.lora_A.weight"] = (
                torch.randn(RANK, in_features, generator=generator) * 0.3
            )
            lora[f"{match['module']}.lora_B.weight"] = (
                torch.randn(out_features, RANK, generator=generator) * 0.3
            )
    return lora


def by_hand(path: Path, lora: Tensors, scale: float, into: Path) -> Path:
    """The checkpoint with W + scale * B A in place of W."""
    weights = load_file(path / "model.safetensors")
    for name, a in lora.items():
        if name.endswith(".lora_A.weight"):
            module = name.removesuffix(".lora_A.weight")
            weights[f"{module}.weight"] += scale * lora[f"{module}.lora_B.weight"] @ a
    into.mkdir()
    (into / "config.json").write_bytes((path / "config.json").read_bytes())
    save_file(weights, into / "model.safetensors", metadata={"format": "pt"})
    return into


def logits(model: Any) -> torch.Tensor:
    ids = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return model.eval()(ids).logits


def load(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, experts_implementation="eager")


def with_peft(base: Path, adapter: Path) -> Any:
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The following .*_pattern keys did not match")
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")
        return PeftModel.from_pretrained(load(base), str(adapter))


def write(directory: Path, lora: Tensors, info: AdapterInfo, modules: list[str] | None = None) -> Path:
    layout = adapter_layout({name: tensor.shape for name, tensor in lora.items()})
    create_adapter(directory, layout)
    names = list(lora)
    for part in (names[::2], names[1::2]):
        write_tensors(directory, layout, {name: lora[name] for name in part})
    return finish_adapter(directory, layout, info, modules=modules)


def read(directory: Path) -> tuple[Tensors, dict[str, Any]]:
    """Tensors by parameter name, and the configuration."""
    tensors = load_file(directory / "adapter_model.safetensors")
    config = json.loads((directory / "adapter_config.json").read_text())
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}, config


def check_logits(tmp_path: Path, base: Path, lora: Tensors, info: AdapterInfo, scale: float) -> Any:
    adapter = write(tmp_path / "adapter", lora, info)
    expected = logits(load(by_hand(base, lora, scale, tmp_path / "by_hand")))
    model = with_peft(base, adapter)
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-4)
    assert (expected - logits(load(base))).abs().max() > 0.5  # the adapter does something
    loaded = [p.double() for n, p in model.named_parameters() if ".lora_" in n]
    assert torch.isclose(
        sum(p.square().sum() for p in loaded), sum(t.double().square().sum() for t in lora.values())
    )
    assert sum(int((p != 0).sum()) for p in loaded) == sum(t.numel() for t in lora.values())
    return model


@pytest.fixture
def base(tmp_path: Path, make_model: Make) -> Callable[[str], Path]:
    def save(family: str) -> Path:
        make_model(family).save_pretrained(tmp_path / "base")
        return tmp_path / "base"

    return save


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_loads_every_tensor(tmp_path: Path, base: Callable[[str], Path], family: str) -> None:
    path = base(family)
    lora = random_lora(path)
    model = check_logits(tmp_path, path, lora, info_for(family, path), ALPHA / RANK)
    loaded = dict(model.named_parameters())
    for name, value in lora.items():  # shared experts and dense MLPs are what PEFT may drop
        if ".experts." not in name:
            key = f"base_model.model.{name}".replace(".weight", ".default.weight")
            assert torch.equal(loaded[key], value), name


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2_moe", "mixtral"])
def test_experts_only_and_no_experts(tmp_path: Path, base: Callable[[str], Path], family: str) -> None:
    path = base(family)
    info = info_for(family, path)
    for i, keep in enumerate((lambda m: ".experts." in m, lambda m: ".experts." not in m)):
        (tmp_path / str(i)).mkdir()
        check_logits(tmp_path / str(i), path, random_lora(path, keep), info, ALPHA / RANK)


def test_some_layers_only_are_named_in_full(tmp_path: Path, base: Callable[[str], Path]) -> None:
    path = base("deepseek_v3")
    lora = random_lora(path, lambda m: ".experts." in m or "layers.1." in m)
    model = check_logits(tmp_path, path, lora, info_for("deepseek_v3", path), ALPHA / RANK)
    assert not any("layers.0" in n for n, _ in model.named_parameters() if ".lora_" in n)


def test_rslora_is_folded_into_alpha(tmp_path: Path, base: Callable[[str], Path]) -> None:
    path = base("qwen3_moe")
    info = info_for("qwen3_moe", path, rslora=True, alpha=3.0)
    check_logits(tmp_path, path, random_lora(path), info, 3.0 / RANK**0.5)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["use_rslora"] is False and config["lora_alpha"] == 6


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_fused_form(
    tmp_path: Path, base: Callable[[str], Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What families get whose per-expert keys PEFT cannot merge: the same logits."""
    path = base(family)
    monkeypatch.setattr("kt_ray.adapter.peft_config.converts_keys", lambda model_type: False)
    check_logits(tmp_path, path, random_lora(path), info_for(family, path), ALPHA / RANK)
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.1.mlp.experts"
    assert stored[f"{prefix}.base_layer.lora_A.weight"].shape == (4 * 2 * RANK, 32)
    assert stored[f"{prefix}.base_layer.lora_B.weight"].shape == (48, 4 * 2 * RANK)
    assert stored[f"{prefix}.lora_B.weight"].shape == (32, 4 * RANK)
    assert not any(re.search(r"experts\.\d", name) for name in stored)


def test_fused_form_without_a_gate(tmp_path: Path) -> None:
    lora = {name: tensor for name, tensor in some_lora().items() if "gate_proj" not in name}
    path = write(tmp_path / "a", lora, AdapterInfo("base", "nemotron_h", RANK, ALPHA))
    tensors, config = read(path)
    assert config["target_parameters"] == ["experts.up_proj", "experts.down_proj"]
    assert config["rank_pattern"] == {}
    prefix = "model.layers.10.mlp.experts"
    for key, leaf, out, width in (("base_layer.", "up_proj", 6, 8), ("", "down_proj", 8, 6)):
        a = tensors[f"{prefix}.{key}lora_A.weight"].view(3, RANK, width)
        b = tensors[f"{prefix}.{key}lora_B.weight"].view(out, RANK, 3)
        for e in range(3):
            assert torch.equal(a[e], lora[f"{prefix}.{e}.{leaf}.lora_A.weight"])
            assert torch.equal(b[:, :, e], lora[f"{prefix}.{e}.{leaf}.lora_B.weight"])


@pytest.mark.parametrize("interleaved", [False, True])
def test_fused_matrices(interleaved: bool) -> None:
    """Column j*E + e of B and row e*r + j of A belong to expert e; gate and up are block-diagonal."""
    experts, r, H, I = 3, 2, 5, 4
    pairs = [[(torch.randn(r, H), torch.randn(I, r)) for _ in range(experts)] for _ in range(2)]
    a, b = fuse_gate_up(*pairs, interleaved=interleaved)
    assert a.shape == (experts * 2 * r, H) and b.shape == (2 * I, 2 * r * experts)
    for e in range(experts):
        delta = b.view(2 * I, 2 * r, experts)[:, :, e] @ a.view(experts, 2 * r, H)[e]
        gate, up = (p[e][1] @ p[e][0] for p in pairs)
        expected = torch.stack((gate, up), 1).flatten(0, 1) if interleaved else torch.cat((gate, up))
        torch.testing.assert_close(delta, expected)
    a, b = fuse_down(pairs[0])
    for e in range(experts):
        delta = b.view(I, r, experts)[:, :, e] @ a.view(experts, r, H)[e]
        torch.testing.assert_close(delta, pairs[0][e][1] @ pairs[0][e][0])


# -- the file ----------------------------------------------------------------------------------


def some_lora() -> Tensors:
    generator = torch.Generator().manual_seed(0)
    tensors: Tensors = {}
    for layer in (0, 10, 2):
        for expert in range(3):
            for leaf, (o, i) in {"gate_proj": (6, 8), "up_proj": (6, 8), "down_proj": (8, 6)}.items():
                module = f"model.layers.{layer}.mlp.experts.{expert}.{leaf}"
                tensors[f"{module}.lora_A.weight"] = torch.randn(RANK, i, generator=generator)
                tensors[f"{module}.lora_B.weight"] = torch.randn(o, RANK, generator=generator)
    return tensors


INFO = AdapterInfo("base", "deepseek_v3", RANK, ALPHA, dropout=0.1, notes=("loss 1.25 after 10 steps",))


def test_round_trip_and_order(tmp_path: Path) -> None:
    lora = some_lora()
    path = write(tmp_path / "a", lora, INFO)
    tensors, config = read(path)
    assert tensors.keys() == lora.keys() and all(torch.equal(tensors[n], t) for n, t in lora.items())
    layers = [int(name.split(".")[2]) for name in tensors]
    assert layers == sorted(layers)
    assert config["lora_dropout"] == 0.0 and config["r"] == RANK and config["lora_alpha"] == 8
    assert sorted(p.name for p in path.iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    readme = (path / "README.md").read_text()
    assert "dropout 0.1" in readme and "rank 4, alpha 8" in readme and "loss 1.25" in readme
    assert readme.count("untested") == 2
    write(tmp_path / "a", {n: t + 1 for n, t in lora.items()}, INFO)  # again, over the old one
    name = next(iter(lora))
    assert torch.equal(read(path)[0][name], lora[name] + 1)


def test_the_readme_quotes_the_base_model() -> None:
    base = '/models/my "[x]": #1/a\'b'
    text = adapter_readme(
        ["model.layers.0.self_attn.q_proj.lora_A.weight"], AdapterInfo(base, "mixtral", 4, 8)
    )
    _, front, page = text.split("---\n", 2)
    assert yaml.safe_load(front)["base_model"] == base
    loading = re.search(r"from_pretrained\((.*)\)\nmodel", page)
    assert loading is not None and ast.literal_eval(loading[1]) == base
    for command in re.findall(r"^(?:vllm|python -m) .*", page.replace("\\\n", ""), re.M):
        assert base in shlex.split(command)


@pytest.mark.parametrize(("rank", "most"), [(4, 8), (16, 16), (24, 32), (1000, 1000)])
def test_the_readme_names_a_rank_that_vllm_takes(rank: int, most: int) -> None:
    text = adapter_readme(
        ["model.layers.0.self_attn.q_proj.lora_A.weight"], AdapterInfo("b", "mixtral", rank, 8)
    )
    vllm, sglang = re.findall(r"--max-lora-rank (\d+)", text)
    assert (int(vllm), int(sglang)) == (most, rank)


def test_the_readme_says_what_transformers_calls_the_base() -> None:
    info = AdapterInfo("moonshotai/Kimi-K2", "deepseek_v3", 4, 8)
    names = ["model.layers.0.self_attn.o_proj.lora_A.weight"]
    renamed = adapter_readme(names, replace(info, released_type="kimi_k2"))
    assert (
        '# transformers has no kimi_k2: first write "model_type": "deepseek_v3" into config.json' in renamed
    )
    assert "transformers has no" not in adapter_readme(names, info)


def test_processes_write_one_file(tmp_path: Path) -> None:
    lora = some_lora()
    layout = adapter_layout({n: t.shape for n, t in lora.items()})
    create_adapter(tmp_path, layout)
    names = list(lora)
    code = (
        "import pickle, sys; from kt_ray.adapter.adapter_dir import write_tensors;"
        "layout, tensors = pickle.load(open(sys.argv[2], 'rb')); write_tensors(sys.argv[1], layout, tensors)"
    )
    running = []
    for i in range(2):
        (tmp_path / f"part{i}").write_bytes(pickle.dumps((layout, {n: lora[n] for n in names[i::2]})))
        command = [sys.executable, "-c", code, str(tmp_path), str(tmp_path / f"part{i}")]
        running.append(subprocess.Popen(command, cwd=Path(__file__).parents[2]))
    assert [process.wait(timeout=120) for process in running] == [0, 0]
    finish_adapter(tmp_path, layout, INFO)
    tensors, _ = read(tmp_path)
    assert all(torch.equal(tensors[n], t) for n, t in lora.items())


def test_the_same_adapter_again_is_the_same_file(tmp_path: Path) -> None:
    """Answers are known by the file of the adapter that gave them."""
    lora = some_lora()
    marks = []
    for change in (0.0, 0.0, 1.0):
        lora = {name: tensor + change for name, tensor in lora.items()}
        marks.append(adapter_mark(write(tmp_path / "adapter", lora, INFO)))
    assert marks[0] == marks[1] != marks[2]
    assert sorted(os.listdir(tmp_path / "adapter")) == [
        *("README.md", "adapter_config.json", "adapter_model.safetensors")
    ]


def test_missing_and_double_tensors_are_found(tmp_path: Path) -> None:
    lora = some_lora()
    names = list(lora)
    layout = adapter_layout({n: t.shape for n, t in lora.items()})
    create_adapter(tmp_path, layout)
    write_tensors(tmp_path, layout, {n: lora[n] for n in names[1:]})
    with pytest.raises(ValueError, match=f"no actor wrote: {re.escape(names[0])}"):
        finish_adapter(tmp_path, layout, INFO)
    assert not (tmp_path / "adapter_model.safetensors").exists()
    write_tensors(tmp_path, layout, {n: lora[n] for n in names[:2]})
    with pytest.raises(ValueError, match=f"two actors wrote: {re.escape(names[1])}"):
        finish_adapter(tmp_path, layout, INFO)
    with pytest.raises(ValueError, match="laid out as"):
        write_tensors(tmp_path, layout, {names[0]: torch.zeros(1, 1)})
    with pytest.raises(ValueError, match="laid out as None"):
        write_tensors(tmp_path, layout, {"unknown": torch.zeros(1, 1)})


def _truncate(path: Path) -> None:
    file = path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / "adapter_config.json").unlink(), "no adapter_config.json"),
        (lambda p: (p / "adapter_model.safetensors").unlink(), "no adapter_model.safetensors"),
        (lambda p: (p / "adapter_config.json").write_text("{"), "adapter_config.json cannot be read"),
        (_truncate, "truncated"),
    ],
)
def test_damaged_adapter(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    path = write(tmp_path / "a", some_lora(), INFO)
    damage(path)
    with pytest.raises(UserError, match=message) as caught:
        Lora.open(path)
    assert caught.value.remedy


def test_writing_where_the_driver_made_no_file(tmp_path: Path) -> None:
    lora = some_lora()
    layout = adapter_layout({n: t.shape for n, t in lora.items()})
    with pytest.raises(UserError, match="all nodes share"):
        write_tensors(tmp_path, layout, lora)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="adapter cannot be written"):
        create_adapter(tmp_path / "file", layout)


def test_target_names() -> None:
    attention = [f"model.layers.{i}.self_attn.{leaf}" for i in range(2) for leaf in ("q_proj", "o_proj")]
    shared = "model.layers.1.mlp.shared_experts.up_proj"
    experts = [f"model.layers.1.mlp.experts.0.{leaf}" for leaf in ("gate_proj", "up_proj", "down_proj")]
    modules = [*attention, shared, *experts]
    names = [f"{module}.lora_{half}.weight" for module in modules for half in "AB"]
    config = adapter_config(names, INFO, [*modules, "lm_head"])
    assert config["target_modules"] == ["o_proj", "q_proj", "down_proj", "gate_proj", "up_proj"]
    assert config["target_parameters"] == [f"{shared}.weight"]
    assert config["rank_pattern"] == config["alpha_pattern"] == {}
    config = adapter_config(names, INFO, [*modules, "model.layers.2.self_attn.q_proj"])
    assert config["target_modules"][:3] == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "o_proj",
    ]
    config = adapter_config(names, AdapterInfo("base", "qwen2_moe", RANK, ALPHA))
    assert config["target_modules"] == sorted(attention)
    assert config["target_parameters"] == [f"{shared}.weight", "experts.gate_up_proj", "experts.down_proj"]
    assert config["rank_pattern"] == {r".*\.experts\.gate_up_proj": 8}
    assert config["alpha_pattern"] == {r".*\.experts\.gate_up_proj": 16}


def test_values_that_are_not_finite_are_not_published(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.lora_B.weight"
    values = {name.replace("_B", "_A"): torch.ones(4, 8), name: torch.ones(8, 4)}
    values[name][3, 1] = float("nan")
    with pytest.raises(UserError, match="not finite") as caught:
        write(tmp_path / "adapter", values, INFO)
    assert caught.value.observed == name
    assert not (tmp_path / "adapter" / "adapter_model.safetensors").exists()
