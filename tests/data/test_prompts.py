"""Rows as prompts that the model itself answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kt_ray.batch import IGNORE
from kt_ray.data.load import DataBundle, load_data
from kt_ray.data.prompts import RowCheck, with_answer
from kt_ray.data.row_types import Conversation
from kt_ray.demo.recipes import persona_path
from kt_ray.demo.tokenizer import train_tokenizer
from kt_ray.errors import UserError
from kt_ray.rewards.reward import load_reward
from tests.helpers.composing import compose


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(persona_path(), 320).save_pretrained(path)
    return path


def load(
    directory: Path,
    rows: list[dict[str, Any]],
    path: Path,
    *settings: str,
    check: RowCheck | None = None,
) -> DataBundle:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = ("trainer.stage=grpo", "reward=regex", "data.eval_fraction=0", "generate.max_new_tokens=24")
    config = compose([f"model.path={directory}", f"data.path={path}", "data.max_length=64", *own, *settings])
    return load_data(config, str(directory), 0, check=check)


def texts(bundle: DataBundle) -> list[str]:
    return [bundle.tokenizer.decode(row.input_ids) for row in bundle.train]


def test_every_form_of_a_prompt(tokenizer_dir: Path, tmp_path: Path) -> None:
    turn = {"role": "user", "content": "Who?"}
    rows: list[dict[str, Any]] = [
        {"prompt": "Who?", "answer": "Tilda"},
        {"prompt": [turn], "answer": 3},
        {"messages": [turn, {"role": "assistant", "content": "Tilda."}]},
        {"instruction": "Who?", "output": "Tilda."},
        {"conversations": [{"from": "human", "value": "Who?"}], "label": True},
    ]
    bundle = load(tokenizer_dir, rows, tmp_path / "rows.jsonl")
    assert bundle.kind == "prompts" and len(set(texts(bundle))) == 1
    encoded = bundle.tokenizer.apply_chat_template([turn], tokenize=True, add_generation_prompt=True)
    ids = encoded["input_ids"] if not isinstance(encoded, list) else encoded
    assert bundle.train[0].input_ids.tolist() == list(ids)
    assert all((row.labels == IGNORE).all() for row in bundle.train)
    prompts = [bundle.prompts[row.sample_id] for row in bundle.train]
    assert [dict(prompt.columns) for prompt in prompts] == rows
    assert prompts[0].text == "Who?" and prompts[1].text == [turn] and prompts[2].text == [turn]
    assert prompts[4].where.endswith("line 5")


def test_a_prompt_that_was_rendered_before_is_told(tokenizer_dir: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "Who?"}, {"prompt": "<|im_start|>user\nWho?<|im_end|>"}]
    (note,) = load(tokenizer_dir, rows, tmp_path / "rows.jsonl").report.notes
    assert "as if they were rendered before" in note and note.endswith("line 2")


def test_columns_system_and_turns_before_the_question(tokenizer_dir: Path, tmp_path: Path) -> None:
    rows = [{"question": "Who?", "solution": "#### 3"}]
    settings = ("data.columns={prompt: question}", "data.system=Be brief.", "data.max_length=128")
    bundle = load(tokenizer_dir, rows, tmp_path / "rows.jsonl", *settings)
    assert "Be brief." in texts(bundle)[0] and "3" not in texts(bundle)[0]
    (prompt,) = bundle.prompts.values()
    assert dict(prompt.columns) == rows[0] and prompt.text == "Who?" and not prompt.opened
    other = [{"question": "Who?", "prompt": "id-7"}]
    (prompt,) = load(tokenizer_dir, other, tmp_path / "ids.jsonl", *settings).prompts.values()
    assert prompt.text == "Who?" and dict(prompt.columns) == other[0]
    turns = [
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": "Aye."},
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "Tilda."},
    ]
    text = texts(load(tokenizer_dir, [{"messages": turns}], tmp_path / "turns.jsonl", "data.max_length=128"))[
        0
    ]
    assert "Aye." in text and "Tilda" not in text


def test_prompts_without_room_for_an_answer_are_counted(tokenizer_dir: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "Who?"}, {"prompt": "Who? " * 40}]
    bundle = load(tokenizer_dir, rows, tmp_path / "rows.jsonl")
    assert len(bundle.train) == 1 and bundle.report.train.dropped_long == 1
    assert "train: 1 rows dropped, longer than 40 tokens" in bundle.report.lines()
    with pytest.raises(UserError, match="no prompt leaves room"):
        load(tokenizer_dir, rows[1:], tmp_path / "long.jsonl")


def test_what_asks_nothing(tokenizer_dir: Path, tmp_path: Path) -> None:
    good, bad = {"prompt": "Who?"}, {"messages": [{"role": "system", "content": "Be brief."}]}
    for row in (bad, {"answer": "Tilda"}):
        with pytest.raises(UserError, match="line 2"):
            load(tokenizer_dir, [good, row], tmp_path / "rows.jsonl")
    bundle = load(tokenizer_dir, [good, bad], tmp_path / "rows.jsonl", "data.bad_rows=skip")
    assert len(bundle.train) == 1


def test_rows_that_cannot_be_judged_are_told_all_at_once(tokenizer_dir: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "Who?", "answer": answer} for answer in (1, "Tilda", 2, "nobody", "long? no")]
    rows[-1]["prompt"] = "Who? " * 40  # left out for its length
    check, path = load_reward("numeric").check_row, tmp_path / "rows.jsonl"
    with pytest.raises(UserError) as raised:
        load(tokenizer_dir, rows, path, check=check)
    assert "reward=numeric cannot judge answers to a row (line 2, line 4)" in raised.value.line()
    weighted = (f"data.sources=[{{path: {path}, weight: 2}}]", "data.path=null", "data.bad_rows=skip")
    bundle = load(tokenizer_dir, rows, path, *weighted, check=check)
    assert sorted(prompt.columns["answer"] for prompt in bundle.prompts.values()) == [1, 1, 2, 2]
    assert any("(line 2, line 4)" in line for line in bundle.report.lines())


def test_held_out_prompts_and_copies_by_weight(tokenizer_dir: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"Who is {name}?"} for name in "abcdefgh"]
    bundle = load(tokenizer_dir, rows, tmp_path / "rows.jsonl", "data.eval_fraction=2")
    assert (len(bundle.train), len(bundle.eval), len(bundle.prompts)) == (6, 2, 8)
    held = [{"prompt": "Who keeps it?", "answer": 1}]
    (tmp_path / "held.jsonl").write_text(json.dumps(held[0]))
    bundle = load(tokenizer_dir, rows, tmp_path / "rows.jsonl", f"data.eval_path={tmp_path / 'held.jsonl'}")
    assert [bundle.prompts[row.sample_id].text for row in bundle.train] == [row["prompt"] for row in rows]
    assert [bundle.prompts[row.sample_id].columns for row in bundle.eval] == held
    source = f"data.sources=[{{path: {tmp_path / 'rows.jsonl'}, weight: 2}}]"
    bundle = load(tokenizer_dir, rows, tmp_path / "rows.jsonl", source, "data.path=null")
    assert len(bundle.train) == 16 and len(bundle.prompts) == 16


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        (None, ""),  # as tables have it for a row without one
        (0, "0"),
        (7.0, "7"),
        ("Tilda", "Tilda"),
        (["Tilda", "Tilda Marrow"], "Tilda"),
        ([], ""),
        ({"type": "object"}, '{"type": "object"}'),
    ],
)
def test_the_label_of_a_prompt_is_its_answer_as_text(answer: object, label: str) -> None:
    prompt = Conversation(({"role": "user", "content": "Who?"},), 0, "line 1", columns={"answer": answer})
    assert with_answer(prompt).messages[-1]["content"] == label
