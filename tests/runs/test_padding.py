"""A model that padding moves is trained on micro-batches of rows of one length, and the run says so."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kt_ray import cli
from kt_ray.data.batches import step_waves
from kt_ray.data.row_types import Row
from kt_ray.demo.recipes import persona_path
from kt_ray.demo.tokenizer import train_tokenizer
from tests.helpers.families import save_whole, write_config

SMALL = "cluster=local model.dtype=float32 model.attn_implementation=eager rule.worker_threads=1 data=demo"
STEPS = "trainer.max_steps=2 trainer.batch_size=6 trainer.eval_every=0 tracking.plot=false optim.warmup=0"


def losses(model: Path, name: str, *overrides: str) -> list[float]:
    arguments = [*SMALL.split(), *STEPS.split(), f"model.path={model}", f"run.name={name}", *overrides]
    assert cli.main(arguments) == 0
    lines = (Path("runs") / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.parametrize(("family", "moved"), [("deepseek_v32", True), ("qwen3_moe", False)])
def test_the_loss_does_not_depend_on_micro_batches(
    tmp_path: Path, family: str, moved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = write_config(tmp_path / "model", family, vocab_size=320, max_position_embeddings=512)
    save_whole(model)
    train_tokenizer(persona_path(), 320).save_pretrained(model)
    alone = losses(model, "alone", "trainer.micro_batch_size=1")
    together = losses(model, "together", "trainer.micro_batch_size=3", "data.pad_to_multiple_of=8")
    assert together == pytest.approx(alone, rel=2e-6)
    log = (tmp_path / "runs" / "together" / "train.log").read_text()
    assert ("padding moves this model" in log) is moved
    assert "padding moves" not in (tmp_path / "runs" / "alone" / "train.log").read_text()


def test_micro_batches_of_rows_of_one_length() -> None:
    rows = [Row(np.ones(n, np.int64), np.ones(n, np.int64), i) for i, n in enumerate((7, 7, 3, 7, 5, 5, 5))]
    ((replica,),) = step_waves(rows, 3, multiple=8, unpadded=True)
    micro = [m for group in replica for m in group]
    assert [m.sample_ids.tolist() for m in micro] == [[0, 1], [2], [3], [4, 5], [6]]
    assert all((m.lengths == m.input_ids.shape[1]).all() for m in micro)
