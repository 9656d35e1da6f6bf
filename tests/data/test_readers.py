"""Files: what is read, and how each fault is named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kt_ray.data.data_files import HELD_OUT, files_of, other_splits
from kt_ray.data.readers import read_rows
from kt_ray.errors import UserError

ROWS: list[dict[str, Any]] = [
    {"instruction": "Who keeps the light?", "output": "Tilda does."},
    {"instruction": "Wie weit reicht es?", "output": "Achtzehn Meilen – très loin 灯台."},
]


def rows_of(*paths: str | Path) -> list[Any]:
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


def test_one_of_two_columns_of_a_name_is_not_left_out(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table([pa.array(["q"]), pa.array(["r"])], names=["prompt"] * 2), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"parquet file cannot be read.*two columns of the name prompt"):
        rows_of(tmp_path / "a.parquet")


def test_keys_that_only_other_rows_of_a_table_have_are_none_of_a_rows(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = [
        {"calls": [{"name": "look", "arguments": {"at": "sea"}}], "tool": {"look": {"type": "string"}}},
        {"calls": [{"name": "add", "arguments": {"x": 1, "y": [1, None]}}, {"name": "add"}], "tool": None},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pa.ipc.new_stream(tmp_path / "a.arrow", pa.Table.from_pylist(rows).schema) as stream:
        stream.write_table(pa.Table.from_pylist(rows))
    assert rows_of(tmp_path / "a.parquet") == rows_of(tmp_path / "a.arrow") == rows


def test_blank_lines_and_a_byte_order_mark_are_skipped_but_lines_keep_their_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '\ufeff{"a": 1}\r\n\r\n{"a": "x\u2028y"}')
    assert [(where.rsplit(", ", 1)[1], row) for where, row in read_rows(path)] == [
        ("line 1", {"a": 1}),
        ("line 3", {"a": "x\u2028y"}),
    ]


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
BAD = {
    "invalid json": ("a.jsonl", '{"a": 1}\n{"a": 2,,}\n', ["invalid JSON", "a.jsonl, line 2, column 9"]),
    "cut json": ("a.json", '[{"a": 1},\n {"a": ', ["invalid JSON", "a.json, line 2"]),
    "a key twice": ("a.jsonl", '{"a": 1}\n{"a": 2, "a": 3}\n', ["key 'a' appears twice", "a.jsonl, line 2"]),
    "a key twice in a list": (
        "a.json",
        '[{"a": 1},\n {"b": {"a": 2, "a": 3}}]',
        ["'a' appears", "a.json, row 2"],
    ),
    "an object": ("a.json", '{"data": []}', ["must hold a list", "keys data", 'the list under "data"']),
    "objects": ("a.json", '{"rows": [{"a": 1}],\n "b": 2}', ["must hold a list", "wrap the rows in a list"]),
    "a list": ("a.jsonl", '[{"a": 1}, {"a": 2}]\n', ["a row per line", "one list", "name it a.json"]),
    "semicolons": ("a.csv", "a;b\n1;2\n", ["by another character", "a;b", "commas"]),
    "excel": ("a.csv", "sep=;\na;b\n1;2\n", ["by another character", "sep=;"]),
    "a pointer": ("a.txt", LFS, ["not what its name says", "a Git LFS pointer", "git lfs pull"]),
    "a pointer to a table": ("a.parquet", LFS, ["not what its name says", "a Git LFS pointer"]),
    "a web page": ("a.csv", "<!DOCTYPE html>\n<html>\n", ["not what its name says", "a web page"]),
    "zeros": ("a.txt", "\0" * 9, ["not what its name says", "never written"]),
    "a number": ("a.json", "3", ["must hold a list", "int"]),
    "empty": ("a.jsonl", "", ["holds no rows"]),
    "blank": ("a.jsonl", "\n \n", ["holds no rows"]),
    "empty json": ("a.json", "", ["holds no rows"]),
    "empty list": ("a.json", "[]", ["holds no rows"]),
    "latin-1": ("a.jsonl", b'{"a": "gr\xfc\xdf"}', ["not UTF-8", "0xfc at offset 9"]),
    "UTF-16": ("a.csv", "a,b\n1,2\n".encode("utf-16"), ["not UTF-8", "found UTF-16.", "iconv -f UTF-16 -t"]),
    "UTF-16 without a mark": ("a.txt", "text".encode("utf-16-be"), ["not UTF-8", "iconv -f UTF-16BE -t"]),
    "UTF-32": ("a.json", "[]".encode("utf-32"), ["not UTF-8", "iconv -f UTF-32 -t"]),
    "zeros behind": ("a.txt", "text\n\0\0", ["zero bytes", "2, the first in line 2"]),
    "zeros in json": ("a.jsonl", '{"a": 1}\n\0', ["invalid JSON", "line 2"]),
    "a workbook": ("a.xlsx", "a,b", ["unknown kind of data file", ".xlsx", ".jsonl"]),
    "a csv without rows": ("a.csv", "a,b", ["holds no rows"]),
    "a ragged csv": ("a.csv", "a,b\n1,2\n1\n", ["invalid CSV", "line 3", "fewer cells"]),
    "a wide csv": ("a.csv", "a,b\n1,2,3\n", ["invalid CSV", "line 2", "more cells"]),
    "a csv with twins": ("a.csv", "a,a\n1,2\n", ["invalid CSV", "same name"]),
    "an open quote": ("a.csv", 'a\n"x\n', ["invalid CSV"]),
    "no arrow": ("a.arrow", "ARROW1 not really", ["arrow file cannot be read", "after row 0"]),
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


@pytest.mark.parametrize("row", [{"a": 1, "b": []}, {"messages": [{"role": "user", "content": "?"}]}])
def test_a_json_file_may_hold_one_row(row: dict[str, Any], tmp_path: Path) -> None:
    assert rows_of(write(tmp_path / "a.json", json.dumps(row) + "\n")) == [row]


def test_missing_file_directory_and_empty_list(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"does not exist.*data\.path="):
        rows_of(tmp_path / "absent.jsonl")
    jsonl(tmp_path / "inside.jsonl", ROWS)
    with pytest.raises(UserError, match=r"a pattern, of 1 files.*'data\.path=\[\S+/inside\.jsonl\]'"):
        rows_of(tmp_path / "in*.jsonl")
    (tmp_path / "year=1").mkdir()
    jsonl(tmp_path / "year=1" / "a, b.jsonl", ROWS)
    with pytest.raises(UserError, match=r"'data\.path=\[\"\S+/year=1/a, b\.jsonl\"\]'"):
        rows_of(tmp_path / "*" / "a*.jsonl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"directory holds no data file.*empty"):
        rows_of(tmp_path / "empty")
    with pytest.raises(UserError, match=r"list of data files is empty.*data\.eval_path"):
        list(read_rows([], "data.eval_path"))


def test_the_second_of_two_files_is_named(tmp_path: Path) -> None:
    first, second = jsonl(tmp_path / "1.jsonl", ROWS), write(tmp_path / "2.jsonl", "{}\n{")
    with pytest.raises(UserError, match=r"2\.jsonl, line 2"):
        rows_of(first, second)


def test_tables_as_text(tmp_path: Path) -> None:
    text = 'instruction,output\n"Who, then?","Two\nlines"\nq,\n'
    expected = [{"instruction": "Who, then?", "output": "Two\nlines"}, {"instruction": "q", "output": None}]
    assert rows_of(write(tmp_path / "a.csv", text)) == expected
    assert rows_of(write(tmp_path / "a.tsv", "a\tb\n1\t2\n")) == [{"a": "1", "b": "2"}]


def test_text_files_are_one_row_each(tmp_path: Path) -> None:
    assert rows_of(write(tmp_path / "a.txt", "Once.\n\nTwice.")) == [{"text": "Once.\n\nTwice."}]
    with pytest.raises(UserError, match="holds no rows"):
        rows_of(write(tmp_path / "b.md", "\n"))


@pytest.mark.parametrize("footer", [False, True])
def test_arrow_files(footer: bool, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    table = pa.Table.from_pylist(ROWS)
    path = tmp_path / "a.arrow"
    opened = pa.ipc.new_file if footer else pa.ipc.new_stream
    with pa.OSFile(str(path), "wb") as sink, opened(sink, table.schema) as writer:
        writer.write_table(table)
    assert list(read_rows(path)) == [(f"{path}, row {i}", row) for i, row in enumerate(ROWS, start=1)]


def test_directories(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    jsonl(tmp_path / "b" / "2.jsonl", [ROWS[1]])
    jsonl(tmp_path / "1.jsonl", [ROWS[0]])
    write(tmp_path / "README.md", "about")
    write(tmp_path / ".hidden.jsonl", "{")
    write(tmp_path / "notes.log", "x")
    assert rows_of(tmp_path) == ROWS, "files by name, those of inner directories too"


def test_a_broken_link_in_a_directory_is_no_file_less(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", json.dumps(ROWS[0]))
    (tmp_path / "notes").symlink_to("nowhere")
    assert rows_of(tmp_path) == ROWS[:1]
    (tmp_path / "b.jsonl").symlink_to("../blobs/b")
    with pytest.raises(UserError, match=r"link to nothing.*b\.jsonl; found a link to \.\./blobs/b"):
        rows_of(tmp_path)


def test_a_broken_link_that_is_not_read_costs_nothing(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", json.dumps(ROWS[0]))
    (tmp_path / "validation.jsonl").symlink_to("nowhere")
    assert rows_of(tmp_path) == [row for _, row in read_rows(tmp_path, split="train")] == ROWS[:1]
    for split in ("validation", HELD_OUT):
        with pytest.raises(UserError, match=r"link to nothing.*validation\.jsonl"):
            list(read_rows(tmp_path, split=split))


def test_a_directory_of_splits_gives_one_of_them(tmp_path: Path) -> None:
    """Test rows in training would go unnoticed."""
    jsonl(tmp_path / "train-00000.jsonl", [ROWS[0]])
    jsonl(tmp_path / "test-00000.jsonl", [ROWS[1]])
    assert rows_of(tmp_path) == [ROWS[0]]
    assert [row for _, row in read_rows(tmp_path, split="test")] == [ROWS[1]]
    with pytest.raises(UserError, match=r"no file of that split.*test-00000"):
        list(read_rows(tmp_path, split="validation"))


def test_splits_of_the_hub_with_alike_names_are_not_mixed(tmp_path: Path) -> None:
    """Data sets have train_sft beside train_gen: the same questions, for another purpose."""
    for name in ("train_sft", "train_gen", "test_sft"):
        (tmp_path / f"{name}-00000-of-00001.parquet").touch()
    with pytest.raises(UserError, match=r"several splits that train may mean.*train_gen, train_sft.*data\.s"):
        files_of(tmp_path)
    assert [path.name[:9] for path in files_of(tmp_path, split="train_sft")] == ["train_sft"]
    assert [path.name[:8] for path in files_of(tmp_path, split="test")] == ["test_sft"]
    (tmp_path / "train-00000-of-00001.parquet").touch()
    assert [path.name[:6] for path in files_of(tmp_path)] == ["train-"]
    assert other_splits(tmp_path, "data.path")["train_gen-00000-of-00001.parquet"] == "train_gen"


def test_parts_in_the_directory_of_a_split_are_no_splits(tmp_path: Path) -> None:
    """Of train/en-… and train/fr-… none was trained on, and train/part-… was left out beside train-…"""
    (tmp_path / "train").mkdir()
    for name in ("en-00000-of-00002", "en-00001-of-00002", "fr-00000-of-00001"):
        (tmp_path / "train" / f"{name}.parquet").touch()
    assert [path.name[:5] for path in files_of(tmp_path)] == ["en-00", "en-00", "fr-00"]
    (tmp_path / "train-00000-of-00001.parquet").touch()
    assert len(files_of(tmp_path)) == 4 and other_splits(tmp_path, "data.path") == {}


def test_a_split_of_the_hub_is_not_mixed_with_one_whose_name_it_ends(tmp_path: Path) -> None:
    for name in ("sft", "test_sft"):
        (tmp_path / f"{name}-00000-of-00001.parquet").touch()
    assert [path.name[:4] for path in files_of(tmp_path, split="sft")] == ["sft-"]


def test_files_that_name_no_split_are_training_rows(tmp_path: Path) -> None:
    jsonl(tmp_path / "more.jsonl", [ROWS[0]])
    with pytest.raises(UserError, match=r"no file of that split.*more\.jsonl.*data\.split"):
        list(read_rows(tmp_path, split="test"))
    jsonl(tmp_path / "test.jsonl", [ROWS[1]])
    assert rows_of(tmp_path) == [ROWS[0]]
    jsonl(tmp_path / "train.jsonl", [ROWS[1]])
    assert rows_of(tmp_path) == ROWS


@pytest.mark.parametrize("key", ["data.path", "data.eval_path"])
def test_what_has_no_splits_is_refused_for_another_than_train(tmp_path: Path, key: str) -> None:
    path, saved = tmp_path / "a.jsonl", tmp_path / "saved"
    jsonl(path, ROWS)
    saved.mkdir()
    write(saved / "state.json", '{"_data_files": []}')
    for split in (None, "train", HELD_OUT):
        assert [row for _, row in read_rows(path, key, split=split)] == ROWS
        assert files_of(saved, key, split) == []
    where = "data.eval_split" if key == "data.eval_path" else "data.split"
    for place, split in ((path, "test"), (path, "train[:1]"), (saved, "test")):
        with pytest.raises(UserError, match=rf"has no splits.*{where}={re.escape(split)}.*leave out {where}"):
            files_of(place, key, split)


def test_held_out_rows_are_never_the_training_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def held(path: object) -> list[Any]:
        return [row for _, row in read_rows(str(path), "data.eval_path", split=HELD_OUT)]

    (tmp_path / "set").mkdir()
    train = jsonl(tmp_path / "set" / "train.jsonl", ROWS)
    assert held(train) == ROWS and held(tmp_path / "set") == ROWS  # named by the user, and nothing else there
    jsonl(tmp_path / "set" / "more.jsonl", ROWS)
    with pytest.raises(UserError, match=r"which of its splits.*more|which of its splits.*data\.eval_split"):
        held(tmp_path / "set")
    (tmp_path / "set" / "more.jsonl").unlink()
    jsonl(tmp_path / "set" / "test.jsonl", ROWS[1:])
    assert held(tmp_path / "set") == ROWS[1:]
    jsonl(tmp_path / "set" / "dev.jsonl", ROWS[:1])
    assert held(tmp_path / "set") == ROWS[:1]
    saved(tmp_path / "dict" / "train", ROWS)
    saved(tmp_path / "dict" / "test", ROWS[:1])
    write(tmp_path / "dict" / "dataset_dict.json", '{"splits": ["train", "test"]}')
    assert held(tmp_path / "dict") == ROWS[:1]
    write(tmp_path / "dict" / "dataset_dict.json", '{"splits": ["train", "other"]}')
    with pytest.raises(UserError, match=r"which of its splits.*train, other.*data\.eval_split"):
        held(tmp_path / "dict")
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    assert held(f"hf://{tmp_path / 'set'}") == ROWS[:1]


def saved(folder: Path, rows: list[Any]) -> None:
    """A data set as `datasets` saves it."""
    pa = pytest.importorskip("pyarrow")
    folder.mkdir(parents=True)
    for number, row in enumerate(rows):
        table = pa.Table.from_pylist([row])
        path = folder / f"data-{len(rows) - number}.arrow"  # the order of the list counts, not of names
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    names = [{"filename": f"data-{len(rows) - n}.arrow"} for n in range(len(rows))]
    write(folder / "state.json", json.dumps({"_data_files": names, "_indices_files": None}))
    write(folder / "dataset_info.json", "{}")


def test_saved_data_sets(tmp_path: Path) -> None:
    saved(tmp_path / "one", ROWS)
    assert rows_of(tmp_path / "one") == ROWS
    saved(tmp_path / "dict" / "train", ROWS)
    saved(tmp_path / "dict" / "test", ROWS[:1])
    write(tmp_path / "dict" / "dataset_dict.json", '{"splits": ["train", "test"]}')
    assert rows_of(tmp_path / "dict") == ROWS
    assert len(list(read_rows(tmp_path / "dict", split="test"))) == 1
    with pytest.raises(UserError, match=r"no such split.*found dev.*train or test"):
        list(read_rows(tmp_path / "dict", split="dev"))


def test_hub_names_go_through_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own code reads a local directory; nothing is downloaded."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "set").mkdir()
    jsonl(tmp_path / "set" / "train.jsonl", ROWS)
    found = list(read_rows(f"hf://{tmp_path / 'set'}"))
    assert [row for _, row in found] == ROWS
    assert found[1][0] == f"hf://{tmp_path / 'set'} [train], row 2"
    nested = [{"a": {"x": 1}}, {"a": {"y": 2}}]
    (tmp_path / "nested").mkdir()
    jsonl(tmp_path / "nested" / "train.jsonl", nested)
    assert rows_of(f"hf://{tmp_path / 'nested'}") == nested
    with pytest.raises(UserError, match=r"cannot be loaded from the hub.*hf://.*data\.split"):
        list(read_rows(f"hf://{tmp_path / 'set'}", split="nights"))
