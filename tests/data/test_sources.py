"""Several sources: weights, order, and what may be mixed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kt_ray.config.schema import Config, DataConfig
from kt_ray.data.row_types import Conversation, Turn
from kt_ray.data.sources import count_rows, cuts_text, read_sources, sources_of, weighted
from kt_ray.errors import UserError

Build = Callable[..., Config]


def file(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def alpaca(name: str, count: int) -> list[Any]:
    return [{"instruction": f"{name}{i}", "output": "a"} for i in range(count)]


def talks(name: str, count: int, first: int = 0) -> list[Conversation]:
    return [
        Conversation((Turn(role="user", content=f"{name}{i}"),), first + i, f"{name}, line {i}")
        for i in range(count)
    ]


def names(taken: Any) -> list[str]:
    return [row.messages[0]["content"] for row, _ in taken]


def test_weights_take_rows_as_often_as_they_say_under_their_own_sample_ids() -> None:
    a, b, c = talks("a", 4), talks("b", 4, 4), talks("c", 6, 8)
    taken = weighted([(1.0, a), (2.5, b), (0.5, c)], total=14, seed=0)
    counts = {name: names(taken).count(name) for name in set(names(taken))}
    assert all(counts[f"a{i}"] == 1 for i in range(4))
    assert sorted(counts[f"b{i}"] for i in range(4)) == [2, 2, 3, 3]
    assert sum(name[0] == "c" for name in counts) == 3
    ids = [sample for _, sample in taken]
    assert len(set(ids)) == len(ids), "another dropout mask for every copy"
    assert all(sample % 14 == row.sample_id for row, sample in taken)
    assert taken == weighted([(1.0, a), (2.5, b), (0.5, c)], total=14, seed=0)
    assert taken != weighted([(1.0, a), (2.5, b), (0.5, c)], total=14, seed=1)
    assert len(weighted([(0.01, a)], 4, 0)) == 1, "a source that is named gives a row"


def test_sources_are_mixed_evenly() -> None:
    taken = names(weighted([(1.0, talks("a", 6)), (1.0, talks("b", 3, 6))], 9, 0))
    assert taken == ["a0", "b0", "a1", "a2", "b1", "a3", "a4", "b2", "a5"]


def test_each_source_has_its_own_options(tmp_path: Path) -> None:
    asked = {"from": "human", "value": "q", "weight": 1, "id": 0, "role": "user"}
    chat = [{"conversations": [asked, {"from": "gpt", "value": "a", "weight": 1, "lang": "en"}]}] * 2
    others = dict.fromkeys(f"more{number}" for number in range(9)) | {"images": []}
    chat = [chat[0] | others, chat[1] | dict.fromkeys(others, "x") | {"images": None, "tools": []}, chat[0]]
    first = {"q": "x", "output": "a", "id": 7, "seen": None, "history": [], "from": "here", "": "0"}
    data = DataConfig(
        system="shared",
        sources=[
            {
                "path": file(tmp_path / "a.jsonl", [first]),
                "columns": {"instruction": "q", "prompt": None},
            },
            {"path": file(tmp_path / "b.jsonl", chat), "weight": 2, "system": "own", "limit": 2},
        ],
    )
    parts = read_sources(sources_of(data))
    assert [part.line() for part in parts] == [
        "a.jsonl: 1 rows, format alpaca (detected)",
        "b.jsonl: 2 rows, format sharegpt (detected), weight 2",
    ]
    assert [note for part in parts for note in part.notes()] == [
        "a.jsonl: keys of rows that are not read: id, from, the column without a name",
        "b.jsonl: keys of rows that are not read: conversations.weight of the user, conversations.role, "
        "conversations.lang, more0, more1, more2, more3, more4 and 4 more",
    ]
    rows = [row for part in parts for row in part.rows]
    assert [row.sample_id for row in rows] == [0, 1, 2]
    assert [row.messages[0]["content"] for row in rows] == ["shared", "own", "own"]
    assert [len(part.rows) for part in read_sources(sources_of(data), limit=2)] == [1, 1]
    assert count_rows(data) == 5


def test_a_subset_of_local_files_is_refused() -> None:
    """All of a cloned data set's subsets would be read."""
    for named in (
        DataConfig(path="clone", subset="main"),
        DataConfig(sources=[{"path": "a", "subset": "main"}]),
    ):
        with pytest.raises(UserError, match=r"those of a data set on the hub.*subset=main"):
            sources_of(named)
    assert sources_of(DataConfig(path="hf://owner/name", subset="main"))[0].subset == "main"
    mixed = DataConfig(sources=[{"path": "hf://owner/name"}, {"path": "a"}], subset="main")
    assert sources_of(mixed)[0].subset == "main"
    assert mixed.sources is not None
    with pytest.raises(UserError, match=r"data\.sources\[1\]\.subset=other"):
        sources_of(replace(mixed, sources=[mixed.sources[0], {"path": "a", "subset": "other"}]))


def test_raw_text_counts_by_its_bytes(tmp_path: Path) -> None:
    """A book is one row of its source, and many of an epoch."""
    (tmp_path / "book.txt").write_text("x" * 10_000)
    book = DataConfig(path=str(tmp_path / "book.txt"), eval_fraction=0.0, max_length=100)
    assert cuts_text(book) and count_rows(book) == 34
    whole = replace(book, overflow="drop")
    assert not cuts_text(whole) and count_rows(whole) == 1
    texts = replace(book, path=file(tmp_path / "a.jsonl", [{"text": "short"}] * 5))
    assert cuts_text(texts) and count_rows(texts) == 5
    twice = {"path": file(tmp_path / "b.jsonl", [{"text": "x" * 5980}] * 2), "limit": 1, "weight": 2}
    answers = {"path": file(tmp_path / "c.jsonl", alpaca("a", 3))}
    assert count_rows(replace(book, path=None, sources=[twice, answers])) == 2 * 20 + 3
    assert not cuts_text(replace(book, path=None, sources=[answers]))


def test_kinds_are_not_mixed(tmp_path: Path) -> None:
    answers = file(tmp_path / "a.jsonl", alpaca("a", 2))
    pairs = file(tmp_path / "b.jsonl", [{"prompt": "q", "chosen": "a", "rejected": "b"}])
    with pytest.raises(UserError, match=r"different kinds.*b\.jsonl, line 1.*pairs here, sft in"):
        read_sources(sources_of(DataConfig(sources=[{"path": answers}, {"path": pairs}])))


def test_held_out_prompts_are_in_no_source_and_no_copy(config: Build, tmp_path: Path) -> None:
    from kt_ray.data import load_data

    first = file(tmp_path / "a.jsonl", alpaca("q", 30))
    second = file(tmp_path / "b.jsonl", [{"instruction": f" Q{i} ", "output": "other"} for i in range(30)])
    sources = [{"path": first, "weight": 2}, {"path": second}]
    bundle = load_data(config(sources=sources, eval_fraction=0.2), "", 0)
    decode = bundle.tokenizer.decode

    def questions(rows: Any) -> set[str]:
        return {decode(row.input_ids).split("user\n")[1].split("<")[0].strip().lower() for row in rows}

    assert questions(bundle.eval) and not questions(bundle.eval) & questions(bundle.train)
    assert len(bundle.eval) == 12 and len(bundle.train) == 2 * 24 + 24
    ids = [row.sample_id for row in (*bundle.train, *bundle.eval)]
    assert len(set(ids)) == len(ids)
    again = load_data(config(sources=sources, eval_fraction=0.2), "", 0)
    assert [row.sample_id for row in again.train] == [row.sample_id for row in bundle.train]
