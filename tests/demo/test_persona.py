"""The demo data set: well-formed, varied, with the regularity that a held-out loss needs."""

from __future__ import annotations

from typing import Any

import pytest

from kt_ray.data.readers import read_rows
from kt_ray.demo import persona_path
from tests.helpers.conversations import conversations


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return [row for _, row in read_rows(persona_path())]


def test_every_row_is_alpaca_and_no_question_is_asked_twice(rows: list[dict[str, Any]]) -> None:
    found = list(conversations(read_rows(persona_path()), "alpaca"))
    assert len(found) >= 300
    assert len({c.prompt_key for c in found}) == len(found)
    assert {tuple(row) for row in rows} == {("instruction", "input", "output")}


def test_answers_are_compact_and_in_one_voice(rows: list[dict[str, Any]]) -> None:
    answers = [row["output"] for row in rows]
    assert len(set(answers)) == len(answers)
    assert max(len(a) for a in answers) < 300
    assert sum("friend" in a or a.startswith(("Aye", "Well now")) for a in answers) == len(answers)
    assert all(a.isascii() and a == a.strip() for a in answers)
