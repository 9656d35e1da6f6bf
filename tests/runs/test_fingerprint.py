"""Training and generation recognise the same weights, also with experts from a file of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kt_ray import cli
from kt_ray.demo.recipes import persona_path
from kt_ray.demo.tokenizer import train_tokenizer
from tests.helpers.hf_reference import build_checkpoint
from tests.train.test_gguf import SIZES, gguf_of


def test_answers_given_after_training_count_in_eval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = build_checkpoint(tmp_path, "qwen3_moe", vocab_size=320, **SIZES)
    train_tokenizer(persona_path(), 320).save_pretrained(path)
    gguf = gguf_of(path, tmp_path / "m.gguf")
    common = [f"model.path={path}", f"model.experts_path={gguf}", "rule.experts.backend=llamafile"]
    common += [
        "cluster=local",
        "tracking.plot=false",
        "rule=cpu_1worker_1socket",
        "model.dtype=float32",
        "tracking.progress=false",
    ]
    common += ["data=demo", "data.limit=20", "data.eval_fraction=0.2", "generate.max_new_tokens=4"]
    train = ["run.name=t", "trainer.max_steps=1", "trainer.batch_size=2", "trainer.eval_every=0"]
    assert cli.main([*common, *train, "eval.after_training=2"]) == 0
    file = Path("runs/t/predictions.jsonl")
    answers = file.read_text()
    capsys.readouterr()
    assert cli.main([*common, "mode=eval", "generate.adapter=runs/t", "generate.limit=2"]) == 0
    assert "2 rows, 2 of them answered already" in capsys.readouterr().out and file.read_text() == answers
    manifest = json.loads(next(Path("runs/t/checkpoints").glob("step_*/manifest.json")).read_text())
    assert manifest["model"] == json.loads(Path("runs/t/predictions.json").read_text())["model"]
