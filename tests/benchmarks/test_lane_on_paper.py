"""The table of docs/streaming.md is what the program prints."""

from __future__ import annotations

from pathlib import Path

from benchmarks.lane_on_paper import table

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_table() -> None:
    lines = (ROOT / "docs" / "streaming.md").read_text().splitlines()
    assert [line for line in table() if line not in lines] == []
