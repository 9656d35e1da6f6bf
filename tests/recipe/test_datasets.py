"""dataset_info.json: formats, columns, tags, several sets, and rows as they are then read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kt_ray.data.readers import read_rows
from kt_ray.data.turns import ROLES
from kt_ray.errors import UserError
from kt_ray.recipe import read
from kt_ray.recipe.datasets import TAGS
from tests.helpers.conversations import conversations
from tests.helpers.recipes import HERE, recipe, refused, values

DATA = HERE / "data"


def rows(got: dict[str, Any]) -> list[Any]:
    """The rows as kt_ray reads them with these overrides."""
    source = read_rows(got["data.path"])
    return list(conversations(source, got["data.format"], columns=got.get("data.columns")))


def test_alpaca(tmp_path: Path) -> None:
    got = values(tmp_path, dataset="identity", max_samples=3)
    assert got["data.path"] == str(DATA / "identity.json") and got["data.limit"] == 3
    assert got["data.format"] == "alpaca"


def test_columns_that_the_entry_leaves_out_are_not_read(tmp_path: Path) -> None:
    got = values(tmp_path, dataset="renamed")
    assert got["data.columns"] == {
        "instruction": "question",
        "output": "answer",
        **dict.fromkeys(("input", "system", "history", "tools")),
    }
    first = rows(got)[0]
    assert [m["role"] for m in first.messages] == ["user", "assistant"]
    assert "not to be read" not in first.messages[0]["content"]


def test_what_the_first_row_lacks_is_not_read_either(tmp_path: Path) -> None:
    """Nor does it tell sets of the same entry apart."""
    row = {"instruction": "Who?", "output": "I."}
    for name, lines in (
        ("a.jsonl", [row, row | {"system": "Lie.", "history": [["a", "b"]]}]),
        ("b.jsonl", [row]),
    ):
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    info = {"a": {"file_name": "a.jsonl"}, "b": {"file_name": "b.jsonl"}, "c": {"hf_hub_url": "o/c"}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    got = values(tmp_path, dataset="a", dataset_dir=str(tmp_path), eval_dataset="b, c")
    assert got["data.eval_path"] == [str(tmp_path / "b.jsonl"), "hf://o/c"]
    assert [[m["role"] for m in row.messages] for row in rows(got)] == [["user", "assistant"]] * 2


def test_sharegpt_with_openai_tags(tmp_path: Path) -> None:
    got = values(tmp_path, dataset="chat")
    assert got["data.format"] == "messages"
    assert got["data.columns"] == {"messages": "turns", "tools": None}
    assert [m["role"] for m in rows(got)[0].messages] == ["system", "user", "assistant"]


def test_pairs_and_verdicts(tmp_path: Path) -> None:
    got = values(tmp_path, stage="dpo", dataset="dpo_en_demo")
    assert got["data.format"] == "preference" and all(row.kind == "pairs" for row in rows(got))
    got = values(tmp_path, stage="kto", dataset="kto_en_demo")
    assert got["data.format"] == "kto" and [row.label for row in rows(got)[:2]] == [True, False]


def test_raw_text(tmp_path: Path) -> None:
    got = values(tmp_path, stage="pt", dataset="c4_demo")
    assert got["data.format"] == "text" and rows(got)[0].text.startswith("There was a light")


def test_the_hub(tmp_path: Path) -> None:
    got = values(tmp_path, dataset="hub")
    assert got["data.path"] == "hf://owner/rows@v1"
    assert (got["data.split"], got["data.subset"]) == ("train_sft", "en")
    assert values(tmp_path, dataset="owner/other", dataset_dir="ONLINE")["data.path"] == "hf://owner/other"


def test_several_sets(tmp_path: Path) -> None:
    got = values(tmp_path, dataset="identity, chat")
    first, second = got["data.sources"]
    assert first == {
        "path": str(DATA / "identity.json"),
        "format": "alpaca",
        "columns": dict.fromkeys(("system", "history", "tools")),
    }
    assert second["format"] == "messages" and "weight" not in second
    assert values(tmp_path, dataset=["identity", "chat"])["data.sources"] == got["data.sources"]


@pytest.mark.parametrize(
    ("strategy", "weights"),
    # 8 and 12 rows, drawn 3 : 1. Until the first is used up: 8 and 8/3; until the last: 36 and 12.
    [("interleave_under", [1, 8 / 36]), ("interleave_over", [4.5, 1])],
)
def test_interleaving_becomes_weights(tmp_path: Path, strategy: str, weights: list[float]) -> None:
    got = values(
        tmp_path, dataset="identity,alpaca_en_demo", mix_strategy=strategy, interleave_probs="0.75,0.25"
    )
    assert [s.get("weight", 1) for s in got["data.sources"]] == pytest.approx(weights, abs=1e-6)


def test_sets_that_are_not_shuffled_come_one_after_the_other(tmp_path: Path) -> None:
    one, other = (str(DATA / f"{name}.json") for name in ("identity", "alpaca_en_demo"))
    fields = {"dataset": "identity,alpaca_en_demo", "disable_shuffling": True}
    for more in ({}, {"max_samples": 12}):  # as many as the longer one has
        got = values(tmp_path, **fields, **more)
        assert got["data.path"] == [one, other] and "data.sources" not in got
    assert "data.sources" in values(tmp_path, **fields, mix_strategy="interleave_over")
    message = "disable_shuffling=true: takes one set after the other"
    assert refused(tmp_path, **fields, max_samples=11)[0].startswith(message)
    assert refused(tmp_path, **{**fields, "dataset": "identity,chat"})[0].startswith(message)


def test_held_out_sets(tmp_path: Path) -> None:
    got = values(tmp_path, dataset="identity", eval_dataset="alpaca_en_demo")
    assert got["data.eval_path"] == str(DATA / "alpaca_en_demo.json") and "data.eval_fraction" not in got
    assert refused(tmp_path, dataset="identity", eval_dataset="chat")[0].startswith(
        "eval_dataset=chat: chat has"
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dataset": None}, "dataset=null: names no data set"),
        ({"dataset": "nothing"}, "dataset=nothing: is not in"),
        ({"dataset": "pictures"}, "dataset_info.json: pictures.columns.images=images: is not read"),
        ({"dataset": "elsewhere"}, "dataset_info.json: elsewhere.ms_hub_url=owner/rows: is another hub"),
        ({"dataset": "scripted"}, "dataset_info.json: scripted.script_url=rows: is not known"),
        ({"dataset": "strange_tags"}, "dataset_info.json: strange_tags.tags.user_tag=Q: is no word"),
        (
            {"dataset": "dpo_en_demo"},
            "dataset_info.json: dpo_en_demo.ranking=true: does not go with stage sft",
        ),
        ({"dataset": "part"}, "dataset_info.json: part.split=train[:4]: a file has no split but train"),
        (
            {"dataset": "other_split"},
            "dataset_info.json: other_split.split=test: a file has no split but train",
        ),
        (
            {"dataset": "identity", "stage": "pt"},
            "dataset_info.json: identity.columns=null: must name the one",
        ),
        ({"dataset": "identity", "stage": "dpo"}, "dataset_info.json: identity.ranking=false"),
        ({"dataset": "identity", "stage": "kto"}, "dataset_info.json: identity.columns.kto_tag=null"),
        ({"dataset_dir": "/nowhere"}, "dataset_dir=/nowhere: holds no dataset_info.json"),
        (
            {"dataset": "identity,hub", "mix_strategy": "interleave_over"},
            "mix_strategy=interleave_over: needs",
        ),
        ({"dataset": "identity,chat", "interleave_probs": "1,2"}, "interleave_probs=1,2: has no meaning"),
        (
            {
                "dataset": "identity,alpaca_en_demo",
                "interleave_probs": "1,2",
                "disable_shuffling": True,
            },
            "interleave_probs=1,2: has no meaning",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    assert refused(tmp_path, **fields)[0].startswith(message), refused(tmp_path, **fields)


def test_words_for_roles_are_those_of_the_readers() -> None:
    roles = {"user_tag": "user", "assistant_tag": "assistant", "observation_tag": "tool"}
    roles |= {"function_tag": "assistant", "system_tag": "system"}
    for tag, (default, words) in TAGS.items():
        assert default in words and all(ROLES[word] == roles[tag] for word in words)
    assert {w for _, words in TAGS.values() for w in words} == set(ROLES)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text("{")
    with pytest.raises(UserError, match=r"dataset_info\.json cannot be read"):
        read(recipe(tmp_path, dataset_dir=str(tmp_path)))
    (tmp_path / "dataset_info.json").write_text(json.dumps([]))
    with pytest.raises(UserError, match="is not a JSON object"):
        read(recipe(tmp_path, dataset_dir=str(tmp_path)))
