"""Fenced blocks in a generated text."""

from __future__ import annotations

import re

_BLOCK = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)


def last_block(text: str, *languages: str) -> str | None:
    """The last fenced block of one of the languages, else the last without one; None = there is none."""
    blocks = [(match[1].lower(), match[2]) for match in _BLOCK.finditer(text)]
    for known in (languages, ("",)):
        for language, content in reversed(blocks):
            if language in known:
                return content
    return None
