"""Pretraining: same bytes from the same seed, a loss that falls, documents kept apart, balanced experts."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.pretrain.documents import PackedText, encode, read_documents
from benchmarks.pretrain.train_base import RECIPES, Course, _balance, _count_loads, _loss, main, pretrain
from kt_ray.demo import builder
from kt_ray.demo.recipes import Recipe, persona_path
from kt_ray.demo.tokenizer import train_tokenizer

SMALL = Recipe(
    config={
        **RECIPES["demo"].config,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "n_routed_experts": 8,
        "moe_intermediate_size": 32,
    },
    vocab=600,
    head_std=0.02,
)
COURSE = Course(steps=30, rows=4, length=64)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(persona_path(), 600)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("pretrained")
    return out, pretrain(SMALL, read_documents([persona_path()]), tokenizer, COURSE, out, show=False)


def test_the_loss_falls_and_the_record_says_what_was_made(trained: tuple[Path, dict[str, Any]]) -> None:
    out, record = trained
    assert record["held_out_loss"] < 5.5  # ln 600 = 6.4
    assert json.loads((out / "pretrain.json").read_text()) == record
    for name, digest in record["sha256"].items():
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == digest
    assert record["tokens_trained"] == 30 * 4 * 64


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(
    trained: tuple[Path, dict[str, Any]], tokenizer: Any, tmp_path: Path
) -> None:
    documents = read_documents([persona_path()])
    again = pretrain(SMALL, documents, tokenizer, COURSE, tmp_path / "again", show=False)
    assert again == trained[1]
    other = pretrain(SMALL, documents, tokenizer, replace(COURSE, seed=1), tmp_path / "other", show=False)
    assert other["sha256"]["model.safetensors"] != again["sha256"]["model.safetensors"]


def test_the_checkpoint_is_what_transformers_loads(trained: tuple[Path, dict[str, Any]]) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(trained[0], output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.dtype == torch.bfloat16
    found = load_file(trained[0] / "model.safetensors")
    assert found["model.layers.1.mlp.experts.0.up_proj.weight"].dtype == torch.bfloat16
    bias = found["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert bias.dtype == torch.float32 and bias.abs().max() > 0


def test_documents_in_a_row_do_not_see_each_other(tokenizer: Any) -> None:
    documents = [encode(tokenizer, d) for d in read_documents([persona_path()])[:3]]
    model = builder.new_model(SMALL, tokenizer, 0, torch.float32)
    ids, positions = PackedText(documents, sum(map(len, documents)), seed=0).take(1)
    packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
    starts = [*(positions[0] == 0).nonzero().flatten().tolist(), ids.shape[1]]
    for begin, end in pairwise(starts):
        alone = model(input_ids=ids[:, begin:end], use_cache=False).logits[0]
        torch.testing.assert_close(packed[begin:end], alone, rtol=1e-4, atol=1e-4)
    losses = [_loss(model, torch.tensor([d]), torch.arange(len(d))[None]).item() for d in documents]
    weights = [len(d) - 1 for d in documents]
    mean = sum(x * w for x, w in zip(losses, weights, strict=True)) / sum(weights)
    assert _loss(model, ids, positions).item() == pytest.approx(mean, rel=1e-4)


def test_the_correction_bias_goes_against_the_load(tokenizer: Any) -> None:
    model = builder.new_model(replace(SMALL, bias_std=0.0), tokenizer, 0, torch.float32)
    loads = _count_loads(model)
    ids = torch.arange(40).view(1, 40)
    _loss(model, ids, torch.arange(40)[None])
    ((gate, counts),) = loads.items()
    assert int(counts.sum()) == 40 * 4
    _balance(loads, 0.5)
    assert torch.equal(gate.e_score_correction_bias, 0.5 * (counts.float().mean() - counts).sign())


def test_the_rate_warms_up_and_falls() -> None:
    rates = [Course(steps=100, lr=1.0).rate(step) for step in range(100)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert 0.02 < rates[-1] < 0.03


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--steps", "0"], "--steps"),
        (["--text", "absent.txt"], "cannot be read"),
        (["--text", "{text}"], "too little for the tokenizer"),
        (["--text", "{text}", "--tokenizer", "absent"], "tokenizer directory does not exist"),
    ],
)
def test_faults_are_told_in_one_message(
    arguments: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "few.txt").write_text("Few words.")
    given = [a.replace("{text}", str(tmp_path / "few.txt")) for a in arguments]
    assert main([*given, "--out", str(tmp_path / "out")]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
