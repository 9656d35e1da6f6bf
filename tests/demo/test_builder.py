"""The demo model: the same bytes from the same seed, the family's own layout, built once."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kt_ray.config.schema import ModelConfig
from kt_ray.demo import builder, ensure_demo_model, resolve_model_dir
from kt_ray.demo.recipes import RECIPES, base_path
from kt_ray.errors import UserError


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(ensure_demo_model("demo", 0, tmp_path_factory.mktemp("cache")))


def digest(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def tensors(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_two_builds_are_byte_identical_and_another_seed_differs(demo: Path, tmp_path: Path) -> None:
    again = Path(ensure_demo_model("demo", 0, tmp_path))
    assert again.name == demo.name
    assert digest(again) == digest(demo)
    other = Path(ensure_demo_model("demo", 1, tmp_path))
    assert other.name != demo.name
    assert digest(other)["model.safetensors"] != digest(demo)["model.safetensors"]


def test_size_keys_and_types(demo: Path) -> None:
    import torch

    found = tensors(demo)
    assert 2e6 <= sum(t.numel() for t in found.values()) <= 4e6
    config = json.loads((demo / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    for layer in range(config["first_k_dense_replace"], config["num_hidden_layers"]):
        for expert in range(config["n_routed_experts"]):
            for name, shape in shapes.items():
                weight = found.pop(f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight")
                assert weight.shape == shape
                assert weight.dtype == torch.bfloat16
        bias = found.pop(f"model.layers.{layer}.mlp.gate.e_score_correction_bias")
        assert bias.dtype == torch.float32
        assert bias.abs().min() > 0
        assert f"model.layers.{layer}.mlp.shared_experts.up_proj.weight" in found
        assert f"model.layers.{layer}.self_attn.q_a_proj.weight" in found
    assert "model.layers.0.mlp.up_proj.weight" in found
    assert not [name for name in found if ".experts." in name]
    assert {t.dtype for t in found.values()} == {torch.bfloat16}


def test_transformers_loads_it_whole_and_every_expert_group_is_used(demo: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, info = AutoModelForCausalLM.from_pretrained(demo, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(demo)
    assert len(tokenizer) <= model.config.vocab_size
    ids = tokenizer("Who keeps the light on Skerrow Rock?", return_tensors="pt")["input_ids"]
    used: list[int] = []
    gates = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    for gate in gates:
        gate.register_forward_hook(lambda _m, _i, out: used.append(out[2].unique().numel()))
    logits = model(input_ids=ids).logits
    assert torch.isfinite(logits).all()
    assert len(used) == 3
    assert min(used) > model.config.num_experts_per_tok


def test_tokenizer(demo: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo)
    assert len(tokenizer) == RECIPES["demo"].vocab
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert tokenizer.convert_ids_to_tokens([0, 1, 2, 3]) == [
        "<|pad|>",
        "<|bos|>",
        "<|im_start|>",
        "<|im_end|>",
    ]
    for text in ("The lamp stays lit.", "Ünïcode, 灯台 and 🪨\n\ttabs"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Welcome"}]
    out = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    marked = [i for i, m in zip(out["input_ids"], out["assistant_masks"], strict=True) if m]
    assert tokenizer.decode(marked) == "Welcome<|im_end|>"


def test_a_built_model_is_not_built_again(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("built again")

    monkeypatch.setattr(builder, "_build", never)
    assert ensure_demo_model("demo", 0, demo.parent.parent) == str(demo)


def test_a_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(_recipe: Any, _seed: int, _tokenizer: Any, out: Path) -> None:
        (out / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(builder, "_build", half)
    with pytest.raises(KeyboardInterrupt):
        ensure_demo_model("demo", 0, tmp_path)
    assert list((tmp_path / "models").iterdir()) == []


def test_the_first_of_two_builders_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(_recipe: Any, _seed: int, _tokenizer: Any, out: Path) -> None:
        (out / "config.json").write_text("mine")
        name = out.name[1:].rsplit("-", 1)[0]
        winner = out.parent / name
        winner.mkdir()
        (winner / "config.json").write_text("theirs")

    monkeypatch.setattr(builder, "_build", slow)
    path = Path(ensure_demo_model("demo", 0, tmp_path))
    assert (path / "config.json").read_text() == "theirs"
    assert list(path.parent.iterdir()) == [path]


def test_the_directory_name_follows_everything_that_decides_the_bytes() -> None:
    recipe = RECIPES["demo"]
    names = [
        recipe.fingerprint(0, b"data"),
        recipe.fingerprint(1, b"data"),
        recipe.fingerprint(0, b"other"),
        replace(recipe, head_std=0.2).fingerprint(0, b"data"),
    ]
    assert len(set(names)) == 4
    assert recipe.fingerprint(0, b"data") == names[0]


def test_mini_has_about_thirty_million_parameters() -> None:
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    with torch.device("meta"):
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**RECIPES["mini"].config, vocab_size=6400))
    assert math.isclose(sum(p.numel() for p in model.parameters()), 30e6, rel_tol=0.1)


def test_a_given_tokenizer_sets_the_vocabulary(demo: Path, tmp_path: Path) -> None:
    from kt_ray.demo.tokenizer import train_tokenizer

    train_tokenizer(builder.persona_path(), 600).save_pretrained(tmp_path / "tokenizer")
    path = Path(ensure_demo_model("demo", 0, tmp_path, tmp_path / "tokenizer"))
    assert path.name != demo.name
    assert json.loads((path / "config.json").read_text())["vocab_size"] == 640
    assert (path / "tokenizer.json").is_file()


def test_resolve_model_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model_dir(ModelConfig("m", path=str(tmp_path))) == str(tmp_path)
    monkeypatch.setattr(builder, "ensure_demo_model", lambda name, **options: f"{name} {options}")
    built = resolve_model_dir(ModelConfig("m", build="mini", seed=4, tokenizer="t"))
    assert built == "mini {'seed': 4, 'tokenizer_dir': 't'}"


def test_faults(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model directory does not exist.*model\.path"):
        resolve_model_dir(ModelConfig("m", path=str(tmp_path / "absent")))
    with pytest.raises(UserError, match="names no checkpoint"):
        resolve_model_dir(ModelConfig("deepseek_v3"))
    with pytest.raises(UserError, match=r"no such built-in model.*found huge.*demo_base or demo or mini"):
        ensure_demo_model("huge", cache_dir=tmp_path)
    with pytest.raises(UserError, match=r"no tokenizer found.*model\.tokenizer"):
        ensure_demo_model("mini", cache_dir=tmp_path, tokenizer_dir=tmp_path / "absent")
    (tmp_path / "models").write_text("a file in the way")
    with pytest.raises(UserError, match=r"cannot be written.*KT_RAY_CACHE"):
        ensure_demo_model("demo", cache_dir=tmp_path)


def test_the_pretrained_base_is_copied_whole_and_small_enough_to_ship(tmp_path: Path) -> None:
    path = Path(ensure_demo_model("demo_base", cache_dir=tmp_path))
    assert digest(path) == digest(base_path())
    assert sum(p.stat().st_size for p in path.iterdir()) <= 8e6
    known = json.loads((path / "pretrain.json").read_text())["sha256"]
    assert {name: digest(path)[name] for name in known} == known
    assert set(known) == {"model.safetensors", "tokenizer.json"}
    assert ensure_demo_model("demo_base", cache_dir=tmp_path) == str(path)


def test_the_pretrained_base_has_the_demos_dimensions_and_a_bias_that_takes_part(tmp_path: Path) -> None:
    from kt_ray.demo.recipes import built

    config = json.loads((base_path() / "config.json").read_text())
    recipe = built("demo_base")
    assert recipe.config == RECIPES["demo"].config
    assert {key: config[key] for key in recipe.config} == recipe.config
    assert config["vocab_size"] == recipe.vocab
    found = tensors(base_path())
    for layer in range(1, config["num_hidden_layers"]):
        assert found[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"].abs().max() > 0


def test_a_damaged_base_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    shutil.copytree(base_path(), tmp_path / "base")
    (tmp_path / "base" / "model.safetensors").write_bytes(b"version https://git-lfs")
    monkeypatch.setattr(builder, "base_path", lambda: tmp_path / "base")
    with pytest.raises(UserError, match=r"base model is damaged.*model\.safetensors.*install kt_ray again"):
        ensure_demo_model("demo_base", cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache" / "models").iterdir()) == []


@pytest.mark.parametrize(("option", "key"), [({"seed": 1}, "seed"), ({"tokenizer_dir": "t"}, "tokenizer")])
def test_the_base_takes_no_other_seed_or_tokenizer(tmp_path: Path, option: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError, match=rf"pretrained.*model\.{key}.*model=demo_random"):
        ensure_demo_model("demo_base", cache_dir=tmp_path, **option)


def test_a_new_model_has_its_rotary_frequencies(demo: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo)
    made = builder.new_model(RECIPES["demo"], tokenizer, 0, torch.float32)
    loaded = AutoModelForCausalLM.from_pretrained(demo)
    torch.testing.assert_close(made.model.rotary_emb.inv_freq, loaded.model.rotary_emb.inv_freq)
