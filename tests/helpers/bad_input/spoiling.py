"""Ways to spoil one file of a case, and contents that are made to do harm."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.helpers.bad_input.place import ROWS, Case, Place

PLANNED = "mode=plan model.path={model}"
GOOD = json.dumps(ROWS[0])
SLOW = r"((.{1,99}){1,99}){1,99}(?!.)\w"
DEEP = "[" * 100_000
BOMB = "a: &a [x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join(['*' + a] * 8)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


def written(name: str, content: str | bytes) -> Callable[[Place], object]:
    """A file in the case's directory; "model/..." in the model's."""

    def spoil(place: Place) -> None:
        if name.startswith("model/"):
            _ = place.model
        if name.startswith("runs/done/"):
            _ = place.run
        file = place.path / name
        if file.is_symlink() or file.exists():
            file.unlink()
        place.write(name, content)

    return spoil


def json_file(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Place], object]:
    """A JSON file of the model or the run with a change."""

    def spoil(place: Place) -> None:
        _ = place.model if name.startswith("model/") else place.run
        value = json.loads((place.path / name).read_text())
        change(value)
        (place.path / name).write_text(json.dumps(value))

    return spoil


def pipe(name: str) -> Callable[[Place], object]:
    def spoil(place: Place) -> None:
        _ = place.model
        (place.path / name).unlink(missing_ok=True)
        os.mkfifo(place.path / name)

    return spoil


def link(name: str, to: str) -> Callable[[Place], object]:
    def spoil(place: Place) -> None:
        _ = place.model
        (place.path / name).unlink(missing_ok=True)
        (place.path / name).symlink_to(to)

    return spoil


def impatient(case: Case) -> Case:
    """With 0.05 s for a regular expression, not a whole one."""

    def spoil(place: Place) -> None:
        case.spoil(place)
        place.monkeypatch.setattr("kt_ray.parse._PATTERN_SECONDS", 0.05)

    return replace(case, spoil=spoil)
