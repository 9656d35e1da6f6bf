"""Files from outside as values: what a bad one says, and what good ones may hold."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest

from kt_ray.errors import UserError
from kt_ray.parse import check_shape, finds, matches, parse_json, read_json, read_yaml


def _written(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_json_that_releases_hold_is_read(tmp_path: Path) -> None:
    """Infinity (Mamba's time_step_limit), letters beyond 16 bits, and pairs of surrogates."""
    file = _written(tmp_path / "a.json", '{"limit": [0.0, Infinity], "face": "\\ud83d\\ude00", "b": "😀"}')
    value = read_json(file, "the file", "")
    assert value == {"limit": [0.0, math.inf], "face": "😀", "b": "😀"}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "line 1 column 2"),
        ('{"a": 1, "a": 2}', "'a' appears twice"),
        ('{"a": "\\udfff"}', "half of a surrogate pair"),
        ('{"\\ud800": 1}', "half of a surrogate pair"),
        ("[" * 200_000, "nested too deeply"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        (b"\xff", "utf-8"),
        ("", "an empty file"),
        ("[]", "not a JSON object; .*found list"),
    ],
)
def test_json_that_is_refused(text: str | bytes, fault: str, tmp_path: Path) -> None:
    file = _written(tmp_path / "a.json", text)
    with pytest.raises(
        UserError, match=rf"the thing (cannot be read|is .*).*a\.json.*{fault}|{fault}"
    ) as caught:
        read_json(file, "the thing", "fetch it again")
    assert caught.value.where == str(file) and caught.value.remedy == "fetch it again"


def test_what_is_no_regular_file_is_not_opened(tmp_path: Path) -> None:
    """Opening a pipe would wait for a writer, and a device has no end."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    for name, kind in (("pipe", "a pipe"), ("device", "a device"), (".", "a directory"), ("gone", "No such")):
        with pytest.raises(UserError, match=kind):
            read_json(tmp_path / name, "the thing", "")


def test_a_row_may_hold_a_key_twice() -> None:
    assert parse_json('{"a": 1, "a": 2}') == {"a": 2}
    with pytest.raises(ValueError, match="'a' appears twice"):
        parse_json('{"a": 1, "a": 2}', unique=True)


def test_yaml_with_aliases(tmp_path: Path) -> None:
    """As many as a person writes, not as many as a machine."""
    good = _written(tmp_path / "a.yaml", "a: &a [1, 2]\nb: [*a, *a]\n")
    assert read_yaml(good, "the thing", "") == {"a": [1, 2], "b": [[1, 2], [1, 2]]}
    merged = _written(tmp_path / "m.yaml", "a: &a {x: 1}\nb: {<<: *a, x: 2, 1: 3, '1': 4}\n")
    assert read_yaml(merged, "the thing", "")["b"] == {"x": 2, 1: 3, "1": 4}
    levels = ["a: &l0 [x, x, x, x, x, x, x, x]"]
    levels += [f"b{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 8)}]" for n in range(1, 9)]
    bomb = _written(tmp_path / "b.yaml", "\n".join(levels))
    with pytest.raises(UserError, match=r"too large with its aliases.*at most 100000"):
        read_yaml(bomb, "the thing", "")
    with pytest.raises(UserError, match="inside of what it names"):
        read_yaml(_written(tmp_path / "c.yaml", "a: &a [*a]"), "the thing", "")


@pytest.mark.parametrize(
    "text",
    [
        *("a: [", "a: !!int x", "a: 2024-13-45", "a: !!python/name:os.system", "[" * 9000),
        *("a: 1\nb: 2\na: 3", "- {a: {b: 1, b: 2}}"),
    ],
)
def test_yaml_that_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the thing cannot be read; at .*a\.yaml"):
        read_yaml(_written(tmp_path / "a.yaml", text), "the thing", "")


_SHAPE = {
    "n": int,
    "x?": float,
    "names": [str],
    "pair?": (int, int),
    "by": {str: {"k": bool}},
    "any?": object,
}
_GOOD = {"n": 1, "names": ["a"], "by": {"z": {"k": True, "more": 5}}, "unknown": [None]}


@pytest.mark.parametrize(
    ("change", "place", "required"),
    [
        ({"n": True}, "n", "a whole number"),
        ({"n": 1.0}, "n", "a whole number"),
        ({"n": None}, "n", "a whole number"),
        ({"x": math.nan}, "x", "a number"),
        ({"x": 10**400}, "x", "a number"),
        ({"names": "a"}, "names", "a list"),
        ({"names": ["a", 1]}, "names[1]", "a text"),
        ({"pair": [1]}, "pair", "a list of 2"),
        ({"pair": [1, "2"]}, "pair[1]", "a whole number"),
        ({"by": []}, "by", "an object"),
        ({"by": {"z": {}}}, "by.z.k", "true or false"),
        ({"by": {5: {"k": True}}}, "by.5", "a text"),
    ],
)
def test_a_value_of_another_shape(change: dict[str, Any], place: str, required: str) -> None:
    assert check_shape(_GOOD, _SHAPE, Path("f.json"), "the thing", "") is _GOOD
    with pytest.raises(UserError) as caught:
        check_shape({**_GOOD, **change}, _SHAPE, Path("f.json"), "the thing", "mend it")
    assert (caught.value.where, caught.value.required) == (f"f.json, {place}", required)


def test_patterns_from_files() -> None:
    assert matches(r"model\.layers\.\d", "model.layers.1.mlp", where="f")
    assert not matches("layers", "model.layers", where="f") and finds("layers", "model.layers", where="f")
    with pytest.raises(UserError, match=r"takes too long; at f\.json, rank_pattern.*within 1 s"):
        matches(r"((.{1,99}){1,99}){1,99}(?!.)\w", "model.layers.1.mlp", where="f.json, rank_pattern")
