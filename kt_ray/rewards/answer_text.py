"""Fenced blocks in a generated text."""

from __future__ import annotations

import re
from collections.abc import Callable

# A line with more backticks in it (```x``` is a name) opens no block. A block that is not closed ends with
# the text.
_BLOCK = re.compile(
    r"^([ \t]*)`{3,}[ \t]*([\w+-]*)[^\n`]*\n(.*?)(?:(^[ \t]*```)|\Z)", re.MULTILINE | re.DOTALL
)


def last_block(text: str, *languages: str, wanted: Callable[[str], bool] = bool) -> str | None:
    """The last fenced block of one of the languages, else the last without one; None = there is none.

    One that is not closed may be cut off: it counts only where no other of its kind is there. Lines lose what
    the block's fence is indented by, as in a list of Markdown.

    Args:
        wanted: blocks of which this is true come first.
    """
    for known in (languages, ("",)):
        blocks = [match for match in _BLOCK.finditer(text) if match[2].lower() in known]
        if blocks:  # only the last can be unclosed
            whole = blocks if blocks[-1][4] or len(blocks) == 1 else blocks[:-1]
            contents = [_outdented(block[3], len(block[1])) for block in reversed(whole)]
            return next(filter(wanted, contents), contents[0])
    return None


def _outdented(content: str, columns: int) -> str:
    return re.sub(rf"^[ \t]{{1,{columns}}}", "", content, flags=re.MULTILINE) if columns else content
