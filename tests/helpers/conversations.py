"""Rows of one format as conversations, as kt_ray.data.sources takes them from files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kt_ray.data.formats import Parser
from kt_ray.data.row_types import Conversation


def conversations(
    rows: Iterable[tuple[str, Any]],
    format: str = "auto",
    system: str | None = None,
    columns: Mapping[str, str | None] | None = None,
) -> Iterator[Conversation]:
    """Conversations in source order, numbered from 0; rows are (where, row) pairs."""
    parser = Parser(format, system, columns)
    for index, (where, row) in enumerate(rows):
        yield parser(row, where, index)
