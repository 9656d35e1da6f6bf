"""Random checkpoints have the released names and formats, sane values, and load."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kt_ray.checkpoint import CheckpointIndex

REPO = Path(__file__).resolve().parents[2]
TINY = (
    "hidden_size=128 intermediate_size=320 moe_intermediate_size=96 n_routed_experts=4 num_experts_per_tok=2 "
    "n_shared_experts=1 num_attention_heads=4 num_key_value_heads=4 kv_lora_rank=32 qk_nope_head_dim=32 "
    "qk_rope_head_dim=16 v_head_dim=32 vocab_size=2000"
)
EXPERT = "model.layers.1.mlp.experts.3.down_proj.weight"


Make = Any


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def make(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Runs the script; returns what it printed, or raises SystemExit with its message."""
    monkeypatch.setenv("KT_RAY_CACHE", str(cache))
    monkeypatch.syspath_prepend(str(REPO / "benchmarks"))
    script = importlib.import_module("random_checkpoint")

    def run(out: Path, *arguments: str, shape: str = TINY) -> None:
        fixed = ("--model", "deepseek_v2_lite", "--layers", "2", "--out", str(out))
        assert script.main([*fixed, *arguments, "--set", *shape.split()]) == 0

    return run


def test_bf16_loads_in_transformers(tmp_path: Path, make: Make) -> None:
    """Every parameter is found, in several shards; the loss is that of a model that knows nothing."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    make(tmp_path / "m", "--shard-gb", "0.0005")
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 1
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "m", dtype="auto", output_loading_info=True, attn_implementation="eager"
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert model.dtype == torch.bfloat16 and model.config.vocab_size == 2000
    assert model.model.layers[1].mlp.experts.gate_up_proj.float().std().item() == pytest.approx(
        0.02, rel=0.05
    )
    assert model.model.norm.weight.eq(1).all()
    tokens = AutoTokenizer.from_pretrained(tmp_path / "m")("lighthouse keeper", return_tensors="pt").input_ids
    with torch.no_grad():
        loss = model(input_ids=tokens, labels=tokens).loss
    assert loss.item() == pytest.approx(torch.tensor(2000.0).log().item(), rel=0.1)


@pytest.mark.parametrize(
    ("name", "block"), [("fp8", (128, 96)), ("int4", (1, 32)), ("int8", (1, 96)), ("mxfp4", (1, 32))]
)
def test_quantised(tmp_path: Path, make: Make, name: str, block: tuple[int, int]) -> None:
    """kt_ray recognises what was written, and its values are N(0, 0.02)."""
    make(tmp_path / "m", "--format", name)
    index = CheckpointIndex.open(tmp_path / "m")
    matrix = index.matrices[EXPERT]
    assert (matrix.format, matrix.shape, matrix.block) == (name, (128, 96), block)
    values = torch.cat([m.dequantize().flatten() for m in index.matrices.values()])
    assert values.std().item() == pytest.approx(0.02, rel=0.1) and abs(values.mean().item()) < 1e-3
    routed = {n for n in index.matrices if ".experts." in n}
    assert len(routed) == 4 * 3
    others = set(index.matrices) - routed
    if name == "fp8":
        # Partial blocks too: 320 and 48 rows are no multiples of 128.
        assert {"model.layers.0.mlp.gate_proj.weight", "model.layers.0.self_attn.q_proj.weight"} < others
        assert index.matrices["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"].shape == (48, 128)
        assert index.matrices["model.layers.0.mlp.gate_proj.weight"].block == (128, 128)
    else:
        assert not others
    for plain in ("lm_head.weight", "model.embed_tokens.weight", "model.layers.1.mlp.gate.weight"):
        assert index.tensors[plain].dtype == "BF16"


def test_int4_is_ignored_where_kimi_ignores_it(tmp_path: Path, make: Make) -> None:
    make(tmp_path / "m", "--format", "int4")
    quantization = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    assert quantization["format"] == "pack-quantized"
    assert quantization["config_groups"]["group_0"]["weights"]["group_size"] == 32
    # The router is no Linear in Kimi's own code; here its name says so.
    assert quantization["ignore"][-1] == "model.layers.1.mlp.gate"
    tensors = CheckpointIndex.open(tmp_path / "m")
    assert tensors.read(EXPERT + "_shape").tolist() == [128, 96]


def test_same_seed_same_bytes_whatever_the_shards(tmp_path: Path, make: Make) -> None:
    for out, arguments in (
        ("a", ()),
        ("b", ("--shard-gb", "0.0005")),
        ("c", ("--seed", "1")),
    ):
        make(tmp_path / out, *arguments)
    a, b, c = (CheckpointIndex.open(tmp_path / out).read(EXPERT) for out in "abc")
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_refusals(tmp_path: Path, make: Make) -> None:
    with pytest.raises(SystemExit, match="multiple of 32"):
        make(tmp_path / "m", "--format", "int4", shape=TINY.replace("size=96", "size=100"))
    assert not (tmp_path / "m" / "config.json").exists()
    with pytest.raises(SystemExit, match="nonsense"):
        make(tmp_path / "m", shape="nonsense=3")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(SystemExit, match="not empty"):
        make(tmp_path / "full")
