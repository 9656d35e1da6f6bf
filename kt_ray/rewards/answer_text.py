"""Fenced blocks in a generated text."""

from __future__ import annotations

import re

# A line with more backticks in it (```x``` is a name) opens no block. A block that is not closed ends with
# the text.
_BLOCK = re.compile(r"^([ \t]*)`{3,}[ \t]*([\w+-]*)[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)


def last_block(text: str, *languages: str) -> str | None:
    """The last fenced block of one of the languages, else the last without one; None = there is none.

    Its lines lose what its fence is indented by, as in a list of Markdown.
    """
    blocks = [(match[2].lower(), _outdented(match[3], len(match[1]))) for match in _BLOCK.finditer(text)]
    for known in (languages, ("",)):
        for language, content in reversed(blocks):
            if language in known:
                return content
    return None


def _outdented(content: str, columns: int) -> str:
    return re.sub(rf"^[ \t]{{1,{columns}}}", "", content, flags=re.MULTILINE) if columns else content
