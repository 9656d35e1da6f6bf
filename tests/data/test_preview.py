"""Rows as the model sees them, trained tokens marked; mode=preview."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from kt_ray.config.files import conf_dir
from kt_ray.config.schema import Config, TrainerConfig
from kt_ray.data import load_data, preview_rows, print_preview
from kt_ray.data.row_types import Row
from kt_ray.errors import UserError
from kt_ray.modes import preview

Build = Callable[..., Config]


@pytest.fixture
def bundle(config: Build) -> Any:
    return load_data(config(builtin="demo", limit=5), "", 0)


def test_segments_join_to_the_row_and_mark_the_answer(bundle: Any) -> None:
    shown = preview_rows(bundle.train, bundle.tokenizer, 2)
    assert [row.sample_id for row in shown] == [0, 1]
    row = shown[0]
    assert "".join(text for text, _ in row.segments) == bundle.tokenizer.decode(bundle.train[0].input_ids)
    assert [trained for _, trained in row.segments] == [False, True, False]
    assert row.plain().count("[[") == 1
    assert row.plain().index("assistant\n[[") < row.plain().index("<|im_end|>]]")
    assert f"row 0: {len(bundle.train[0].input_ids)} tokens, {bundle.train[0].trained} trained" == row.title


def test_the_space_that_an_answer_begins_with_is_shown() -> None:
    """A tokenizer of SentencePiece's kind drops it where a text begins."""

    class Words:
        def decode(self, ids: list[int], **_: object) -> str:
            return "".join(f" {id}" for id in ids).removeprefix(" ")

    row = Row(np.array([1, 2, 3]), np.array([-100, 2, -100]), 0)
    (shown,) = preview_rows([row], Words())  # type: ignore[arg-type]
    assert shown.plain() == "1[[ 2]] 3"


def test_colour_on_a_terminal_and_brackets_elsewhere(bundle: Any) -> None:
    shown = preview_rows(bundle.train, bundle.tokenizer, 1)
    plain, terminal = io.StringIO(), io.StringIO()
    print_preview(shown, Console(file=plain))
    print_preview(shown, Console(file=terminal, force_terminal=True, color_system="standard"))
    assert shown[0].plain() in plain.getvalue(), "not wrapped, no markup taken from the text"
    assert "\x1b" not in plain.getvalue()
    assert "\x1b[32m" in terminal.getvalue()
    assert "[[" not in terminal.getvalue()


@pytest.mark.parametrize(("asked", "rows"), [(0, 3), (2, 2)])
def test_mode_preview(asked: int, rows: int, config: Build, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = replace(config(builtin="demo", max_length=120), trainer=TrainerConfig(preview=asked))
    assert preview.run(chosen) == 0
    out = capsys.readouterr().out
    assert out.count(" trained\n") == rows
    assert "train: " in out
    assert "data.max_length=" in out, "the truncation report follows"


def test_mode_preview_shows_sources_masks_and_packing(
    config: Build, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two sources of different formats, one twice, packed: what is trained, where from, and how full."""
    (tmp_path / "faq.csv").write_text("question,answer\nWho?,Tilda.\nWhere?,On the rock.\n")
    talk = [{"from": "human", "value": "One?"}, {"from": "gpt", "value": "First."}]
    talk += [{"from": "human", "value": "Two?"}, {"from": "gpt", "value": "Second."}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"conversations": talk}) + "\n")
    columns = {"instruction": "question", "output": "answer"}
    sources = [
        {"path": str(tmp_path / "faq.csv"), "columns": columns, "weight": 2},
        {"path": str(tmp_path / "chats.jsonl")},
    ]
    chosen = config(
        sources=sources, template="chatml", packing=True, max_length=1024, shuffle=False, train_on="last"
    )
    assert preview.run(chosen) == 0
    out = capsys.readouterr().out
    assert out.startswith("row 0 (packed: rows 0, 1, 2, 3, 4): ")
    assert out.count("--- next document ---") == 4
    assert out.count("<|im_start|>assistant\n[[Tilda.<|im_end|>]]\n") == 2, "the csv's rows are taken twice"
    assert out.count("[[On the rock.<|im_end|>]]") == 2
    assert "assistant\nFirst.<|im_end|>" in out and "[[Second.<|im_end|>]]" in out, "the last answer only"
    assert out.count("[[") == 5
    assert "source: faq.csv: 2 rows, format alpaca (detected), weight 2" in out
    assert "source: chats.jsonl: 1 rows, format sharegpt (detected)" in out
    assert "template: chatml (data.template)" in out
    assert "train: 5 rows packed into 1, " in out


def test_mode_preview_refuses_packing_of_a_family_that_cannot(config: Build, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_next", "num_hidden_layers": 4}')
    with pytest.raises(UserError, match=r"qwen3_next has gated delta attention.*data\.packing=false"):
        preview.run(config(builtin="demo", packing=True, model={"path": str(tmp_path)}))


def test_mode_preview_needs_a_tokenizer_or_a_model(config: Build) -> None:
    with pytest.raises(UserError, match=r"names no checkpoint.*model\.path"):
        preview.run(config(builtin="demo", model={"tokenizer": None}))


def test_mode_preview_shows_the_layout_and_the_time(config: Build) -> None:
    """What rule.stages and rule.replicas come to on the machine and how long its rows take, or why not."""
    chosen = config(builtin="demo", model={"tokenizer": None, "build": "demo"})
    file = conf_dir() / "hardware/2x4090_2x8488c.yaml"
    chosen = replace(chosen, plan=replace(chosen.plan, hardware=str(file)))
    bundle = load_data(config(builtin="demo", limit=40), "", 0)
    rule, why, speed, length = preview.run_lines(chosen, bundle)
    assert rule.startswith("rule ") and "1 stage, 2 replicas" in rule and "2x4090_2x8488c" in rule
    assert "1 stage x 2 replicas" in why
    steps = -(-len(bundle.train) // chosen.trainer.batch_size)
    each = re.search(r"([\d.]+) s per step", speed)
    whole = re.match(rf"{steps} steps like the first: ([\d.]+) s, ", length)
    assert each and whole and float(whole[1]) == pytest.approx(steps * float(each[1]), rel=0.05)
    other = replace(chosen, trainer=replace(chosen.trainer, stage="dpo"))
    assert preview.run_lines(other, bundle)[-1].startswith("no prediction: the data is not what")
    (unknown,) = preview.run_lines(config(builtin="demo", model={"tokenizer": None}), bundle)
    assert unknown.startswith("no plan: ")
