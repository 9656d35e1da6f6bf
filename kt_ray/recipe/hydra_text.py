"""Values as Hydra's command line takes them."""

from __future__ import annotations

import re
from typing import Any

_PLAIN = re.compile(r"[A-Za-z_./][\w./-]*")
_WORDS = ("null", "true", "false", "nan", "inf")


def override(key: str, value: Any) -> str:
    """`key=value`, such that Hydra reads this very value."""
    return f"{key}={text(value)}"


def text(value: Any) -> str:
    """A plain value (null, boolean, number, string, list, mapping) in Hydra's grammar."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.12g}" if value == float(f"{value:.12g}") else repr(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(text, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{text(part)}" for name, part in value.items()) + "}"
    word = str(value)
    if _PLAIN.fullmatch(word) and word.lower() not in _WORDS:
        return word
    # In quotes, backslashes count only before a quote (and at the end); ${ would be an interpolation.
    word = re.sub(r"(\\*)'", r"\1\1\\'", word)
    word = re.sub(r"(\\+)$", r"\1\1", word)
    return "'" + word.replace("${", "\\${") + "'"
