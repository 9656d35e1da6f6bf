"""Packing through a whole run: the loss of the same rows, packed and not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kt_ray import cli

ARGUMENTS = [
    *(
        "cluster=local",
        "tracking.plot=false",
        "data=demo",
        "data.limit=12",
        "data.eval_fraction=0",
        "trainer.eval_every=0",
        "eval.after_training=0",
    ),
    *("trainer.max_steps=1", "data.max_length=512", "lora.dropout=0.1"),
]


pytestmark = pytest.mark.usefixtures("own_cache")


def first_step(name: str, *arguments: str) -> dict[str, Any]:
    assert cli.main([*ARGUMENTS, f"run.name={name}", *arguments]) == 0
    records = [json.loads(line) for line in Path("runs", name, "metrics.jsonl").read_text().splitlines()]
    return next(record for record in records if "loss" in record)


def test_a_step_of_the_same_rows_packed_and_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    alone = first_step("alone", "trainer.batch_size=12")
    packed = first_step("packed", "trainer.batch_size=12", "data.packing=true")
    grouped = first_step("grouped", "trainer.batch_size=12", "data.group_by_length=true")
    for other in (packed, grouped):
        assert other["tokens"] == alone["tokens"] and other["loss_tokens"] == alone["loss_tokens"]
        assert other["loss"] == pytest.approx(alone["loss"], rel=1e-3)  # bfloat16
        assert other["grad_norm"] == pytest.approx(alone["grad_norm"], rel=2e-2)
