"""docs/troubleshooting.md quotes messages as kt_ray says them."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
# **"one message", "another".** at the beginning of an item; an ellipsis stands for what differs.
HEADS = re.findall(r"^- \*\*(.*?)\*\*", PAGE, re.MULTILINE | re.DOTALL)
QUOTED = sorted({" ".join(q.split()) for head in HEADS for q in re.findall(r'"([^"]+)"', head)})


@cache
def sources() -> str:
    """All of kt_ray, adjacent string literals joined and expressions in f-strings replaced by an ellipsis."""
    text = "\n".join(p.read_text(encoding="utf-8") for p in sorted((ROOT / "kt_ray").rglob("*.py")))
    joined = re.sub(r"\"\s*\n\s*f?\"", "", text)
    return re.sub(r"\{[^{}\n]*\}", "…", joined)


def is_said(message: str) -> bool:
    """Whether a line of the sources holds the parts of `message` in this order."""
    parts = [re.escape(part.strip()) for part in message.split("…") if part.strip()]
    return bool(parts) and re.search("[^\n]*".join(parts), sources()) is not None


def test_there_are_messages_to_look_for() -> None:
    assert len(QUOTED) > 30
    assert is_said("the plan does not fit") and not is_said("the plan does not quite fit")


@pytest.mark.parametrize("message", QUOTED)
def test_a_quoted_message_is_one_of_ours(message: str) -> None:
    assert is_said(message)
