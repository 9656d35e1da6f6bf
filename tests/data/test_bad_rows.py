"""Bad rows: all of a file in one line, or left out and counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kt_ray.config.schema import DataConfig
from kt_ray.data.load import read_split
from kt_ray.errors import UserError

GOOD = {"instruction": "What is 2 and 2?", "output": "4"}


def write(path: Path, rows: list[Any]) -> str:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def read(path: str, **data: Any) -> tuple[list[str], list[str]]:
    """(places of the rows kept, notes)"""
    _, train, held_out, notes = read_split(DataConfig(path=path, eval_fraction=0.0, **data), 0)
    assert not held_out and [row.sample_id for row in train] == list(range(len(train)))
    return [row.where.rpartition(", ")[2] for row in train], notes


MIXED: list[Any] = ["{broken", GOOD, {"instruction": "", "output": "x"}, "{broken too", GOOD, [1, 2]]


def test_all_bad_rows_are_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        read(write(tmp_path / "rows.jsonl", MIXED))
    line = caught.value.line()
    assert line.startswith(
        "4 of 6 rows of rows.jsonl are bad: invalid JSON (line 1, column 2, line 4, column 2);"
    )
    assert "the question is empty (line 3)" in line and "a row is not an object (line 6)" in line
    assert line.endswith("To fix: correct or delete these rows; data.bad_rows=skip leaves such rows out")


def test_twenty_are_named_and_all_are_counted(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        read(write(tmp_path / "rows.jsonl", [GOOD, *[{"instruction": "a", "output": 1}] * 34]))
    line = caught.value.line()
    assert (
        "34 of 35 rows" in line and line.count("line ") == 20 and "line 21" in line and "and 14 more" in line
    )


def test_skipped_rows_are_counted(tmp_path: Path) -> None:
    kept, (note,) = read(write(tmp_path / "rows.jsonl", MIXED), bad_rows="skip")
    assert kept == ["line 2", "line 5"]
    assert note.startswith("rows.jsonl: 4 of 6 rows left out (data.bad_rows=skip): invalid JSON (line 1")
    assert read(write(tmp_path / "good.jsonl", [GOOD]), bad_rows="skip") == (["line 1"], [])


def test_held_out_rows_are_skipped_likewise(tmp_path: Path) -> None:
    path, other = write(tmp_path / "rows.jsonl", [GOOD]), write(tmp_path / "eval.jsonl", MIXED)
    _, train, held_out, notes = read_split(DataConfig(path=path, eval_path=other, bad_rows="skip"), 0)
    assert len(train) == 1 and len(held_out) == 2 and notes[0].startswith("eval.jsonl: 4 of 6 rows left out")


@pytest.mark.parametrize("bad_rows", ["stop", "skip"])
def test_what_no_row_can_be_read_of_is_told_as_it_is(tmp_path: Path, bad_rows: str) -> None:
    with pytest.raises(UserError, match=r"unknown data format; at .*line 1"):
        read(write(tmp_path / "rows.jsonl", [{"q": 1, "a": 2}] * 5), bad_rows=bad_rows)
    with pytest.raises(UserError, match=r"^invalid JSON; at .*line 1"):
        read(write(tmp_path / "rows.jsonl", ["{"] * 5), bad_rows=bad_rows)


def test_one_bad_row_keeps_its_own_remedy(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"line 2, .*To fix: fill or delete that row; data.bad_rows=skip"):
        read(write(tmp_path / "rows.jsonl", [GOOD, {"instruction": "a", "output": ""}]))


@pytest.mark.parametrize("bad_rows", ["stop", "skip"])
def test_rows_of_two_classes_out_of_many_are_not_bad_ones(tmp_path: Path, bad_rows: str) -> None:
    """Without them a model would learn the others alone; "correct or delete these rows" would say so."""
    path = write(tmp_path / "rows.jsonl", [{**GOOD, "label": label} for label in (3, 0, 1, 7)])
    remedy = r"data\.format=kto if label says .* else data\.format=alpaca$"
    with pytest.raises(UserError, match=rf"several data formats; at .*line 2; found .*label 0; .*{remedy}"):
        read(path, bad_rows=bad_rows)
    assert len(read(path, bad_rows=bad_rows, format="alpaca")[0]) == 4
