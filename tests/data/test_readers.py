"""Files: what is read, and how each fault is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kt_ray.data.readers import read_rows
from kt_ray.errors import UserError

ROWS: list[dict[str, Any]] = [
    {"instruction": "Who keeps the light?", "output": "Tilda does."},
    {"instruction": "Wie weit reicht es?", "output": "Achtzehn Meilen – très loin 灯台."},
]


def rows_of(*paths: Path) -> list[Any]:
    return [row for _, row in read_rows(list(paths))]


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def jsonl(path: Path, rows: list[Any]) -> Path:
    return write(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def test_all_kinds_of_file_give_the_same_rows(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    assert rows_of(jsonl(tmp_path / "a.jsonl", ROWS)) == ROWS
    assert rows_of(write(tmp_path / "a.json", json.dumps(ROWS, indent=1))) == ROWS
    assert rows_of(tmp_path / "a.parquet") == ROWS
    assert rows_of(jsonl(tmp_path / "lines.json", ROWS)) == ROWS, "one object per line under the name .json"
    assert rows_of(tmp_path / "a.jsonl", tmp_path / "a.parquet") == ROWS + ROWS


def test_parquet_keeps_nested_messages(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "m.parquet")
    assert list(read_rows(tmp_path / "m.parquet")) == [(f"{tmp_path / 'm.parquet'}, row 1", row)]


def test_blank_lines_and_a_byte_order_mark_are_skipped_but_lines_keep_their_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '\ufeff{"a": 1}\r\n\r\n{"a": "x\u2028y"}')
    assert [(where.rsplit(", ", 1)[1], row) for where, row in read_rows(path)] == [
        ("line 1", {"a": 1}),
        ("line 3", {"a": "x\u2028y"}),
    ]


BAD = {
    "invalid json": ("a.jsonl", '{"a": 1}\n{"a": 2,,}\n', ["invalid JSON", "a.jsonl, line 2, column 9"]),
    "cut json": ("a.json", '[{"a": 1},\n {"a": ', ["invalid JSON", "a.json, line 2"]),
    "an object": ("a.json", '{"data": []}', ["must hold a list", "keys data"]),
    "a number": ("a.json", "3", ["must hold a list", "int"]),
    "empty": ("a.jsonl", "", ["holds no rows"]),
    "blank": ("a.jsonl", "\n \n", ["holds no rows"]),
    "empty json": ("a.json", "", ["holds no rows"]),
    "empty list": ("a.json", "[]", ["holds no rows"]),
    "latin-1": ("a.jsonl", b'{"a": "gr\xfc\xdf"}', ["not UTF-8", "0xfc at offset 9"]),
    "a csv": ("a.csv", "a,b", ["unknown kind of data file", ".csv", ".jsonl"]),
    "no parquet": ("a.parquet", "PAR1 not really", ["parquet file cannot be read", "after row 0"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files(case: str, tmp_path: Path) -> None:
    if case == "no parquet":
        pytest.importorskip("pyarrow")
    name, content, expected = BAD[case]
    with pytest.raises(UserError) as caught:
        rows_of(write(tmp_path / name, content))
    for part in expected:
        assert part in str(caught.value)
    assert caught.value.remedy


def test_missing_file_directory_and_empty_list(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"does not exist.*data\.path="):
        rows_of(tmp_path / "absent.jsonl")
    jsonl(tmp_path / "inside.jsonl", ROWS)
    with pytest.raises(UserError, match=r"is a directory.*inside\.jsonl"):
        rows_of(tmp_path)
    with pytest.raises(UserError, match=r"list of data files is empty.*data\.eval_path"):
        list(read_rows([], "data.eval_path"))


def test_the_second_of_two_files_is_named(tmp_path: Path) -> None:
    first, second = jsonl(tmp_path / "1.jsonl", ROWS), write(tmp_path / "2.jsonl", "{}\n{")
    with pytest.raises(UserError, match=r"2\.jsonl, line 2"):
        rows_of(first, second)
