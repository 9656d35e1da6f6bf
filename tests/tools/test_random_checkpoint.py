"""Random checkpoints have the released names and formats, sane values, and load."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kt_ray import cli
from kt_ray.checkpoint import CheckpointIndex, ExpertLayout
from kt_ray.checkpoint.load_experts import load_experts
from kt_ray.checkpoint.safetensors_file import read_tensor
from kt_ray.checkpoint.shard_writer import Notes, copied
from kt_ray.errors import BAD_INPUT
from kt_ray.native import ExpertMatrix
from kt_ray.tools.__main__ import RANDOM_FORMATS, main
from kt_ray.tools.inspect import inspect

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
    """Runs the command."""
    monkeypatch.setenv("KT_RAY_CACHE", str(cache))

    def run(out: Path, *arguments: str, shape: str = TINY, code: int = 0) -> None:
        fixed = ("random", str(out), "--model", "deepseek_v2_lite", "--layers", "2")
        assert main([*fixed, *arguments, "--set", *shape.split()]) == code

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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("vocab_size=many", "--set vocab_size=many has no JSON value; found many"),
        ("n_routed_experts=-1", "found n_routed_experts in the model's config.json is not usable"),
        ("num_experts_per_tok=9", "found num_experts_per_tok is larger than the number of experts"),
        ('hidden_act="no"', "found KeyError: "),
    ],
)
def test_values_that_make_no_model(
    tmp_path: Path, make: Make, change: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "m", shape=f"{TINY} {change}", code=2)
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


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


def test_longcat_flash_is_cut_by_its_own_key_and_has_no_zero_experts(tmp_path: Path) -> None:
    """transformers' model has gate and up of those, and twice as many hidden layers."""
    shape = (
        "hidden_size=128 ffn_hidden_size=160 expert_ffn_hidden_size=96 n_routed_experts=3 zero_expert_num=2 "
        "moe_topk=2 num_attention_heads=4 q_lora_rank=48 kv_lora_rank=32 vocab_size=2000"
    )
    out = tmp_path / "m"
    assert (
        main(["random", str(out), "--model", "longcat_flash", "--layers", "2", "--set", *shape.split()]) == 0
    )
    index = CheckpointIndex.open(out)
    assert index.layer_count == 2 and "model.layers.1.self_attn.1.o_proj.weight" in index.names
    assert ExpertLayout.detect(index).num_experts == 3 and not any("experts.3." in n for n in index.names)
    report = inspect(out)
    assert report["takes"]["kt_ray"] == "yes" and report["takes"]["transformers"].startswith("no: ")
    assert "other" not in report["parts"]


@pytest.mark.parametrize("name", RANDOM_FORMATS)
def test_holes_are_filled_with_what_would_have_been_written(tmp_path: Path, make: Make, name: str) -> None:
    """Tensor by tensor, whole and in parts; on the disk there are headers alone."""
    make(tmp_path / "written", "--format", name)
    make(tmp_path / "holes", "--format", name, "--sparse")
    written, holes = (CheckpointIndex.open(tmp_path / out) for out in ("written", "holes"))
    assert written.config == holes.config and written.nbytes == holes.nbytes > 1 << 20
    assert sum(file.stat().st_blocks for file in holes.files) * 512 < 1 << 19
    for key, info in holes.tensors.items():
        raw = [index.read(key).contiguous().view(torch.uint8) for index in (written, holes)]
        assert torch.equal(*raw) and (raw[0].any() or "bias" in key), key
        if len(info.shape) == 2 and info.shape[0] > 2:
            part = read_tensor(info.rows(1, 3)).contiguous().view(torch.uint8)
            assert torch.equal(part, raw[0].reshape(info.shape[0], -1)[1:3].reshape(part.shape)), key
        # As merge and convert copy what they do not change.
        pieces = [piece.value.contiguous().view(torch.uint8) for piece in copied(info).produce(Notes())]
        assert torch.equal(torch.cat([piece.flatten() for piece in pieces]), raw[0].flatten()), key
    ours, theirs = (
        load_experts(index, ExpertLayout.detect(index), 1, [2, 0], threads=2) for index in (holes, written)
    )
    for mine, want in ((ours.gate, theirs.gate), (ours.down, theirs.down)):
        parts = [(m.data, m.scales) if isinstance(m, ExpertMatrix) else (m, m) for m in (mine, want)]
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(*parts, strict=True))


def test_a_run_on_holes_is_a_run_on_the_written_files(tmp_path: Path, make: Make) -> None:
    """By the command line, so that every reader is met."""
    losses = []
    for out, how in (("written", ()), ("holes", ("--sparse",))):
        make(tmp_path / out, "--format", "fp8", *how)
        run = [
            f"model.path={tmp_path / out}",
            "cluster=local",
            "tracking.plot=false",
            "trainer.max_steps=2",
            "data=demo",
        ]
        run += ["data.limit=8", "data.max_length=32", "eval.after_training=0", f"run.name={out}"]
        run += [
            "trainer.batch_size=2",
            "rule.device=cpu",
            f"run.root={tmp_path / 'runs'}",
            "trainer.eval_every=0",
        ]
        assert cli.main(run) == 0
        lines = (tmp_path / "runs" / out / "metrics.jsonl").read_text().splitlines()
        losses.append([record["loss"] for record in map(json.loads, lines) if "loss" in record])
    assert losses[0] == losses[1] and len(losses[0]) == 2


def test_refusals(
    tmp_path: Path, make: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "m", "--format", "int4", shape=TINY.replace("size=96", "size=100"), code=BAD_INPUT)
    assert "multiple of 32" in capsys.readouterr().err
    assert not (tmp_path / "m" / "config.json").exists()
    make(tmp_path / "m", shape="nonsense=3", code=BAD_INPUT)
    assert "nonsense=3" in capsys.readouterr().err
    make(tmp_path / "m", "--layers", "99", code=BAD_INPUT)
    assert "at most 27" in capsys.readouterr().err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    make(tmp_path / "full", code=BAD_INPUT)
    assert "not empty" in capsys.readouterr().err
    assert main(["random", str(tmp_path / "g"), "--model", "gpt_oss_20b", "--format", "fp8"]) == BAD_INPUT
    assert "are not released in fp8" in capsys.readouterr().err
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=1000, free=1000))
    make(tmp_path / "small", code=BAD_INPUT)
    assert "add --sparse" in capsys.readouterr().err
    make(tmp_path / "small", "--sparse")  # as it said
    make(tmp_path / "full" / "x", code=BAD_INPUT)
    assert "cannot be made" in capsys.readouterr().err


def test_a_full_disk_leaves_nothing_in_the_way(
    tmp_path: Path, make: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: Path, *_: object, **__: object) -> None:
        file.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("kt_ray.tools.random_checkpoint.write", full)
        make(tmp_path / "m", code=BAD_INPUT)
    error = capsys.readouterr().err
    assert "checkpoint cannot be written" in error and "bytes of free space" in error
    assert not [*(tmp_path / "m").iterdir()]
    make(tmp_path / "m", "--sparse")


def test_set_may_be_given_again(tmp_path: Path, make: Make) -> None:
    make(tmp_path / "m", "--sparse", "--set", "vocab_size=3000", shape=TINY.replace("vocab_size=2000", ""))
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert (config["vocab_size"], config["hidden_size"]) == (3000, 128)
