"""KEY=VALUE as Hydra's grammar has it."""

from __future__ import annotations

import re
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString

_PLAIN = re.compile(r"[A-Za-z_./][\w./@-]*|[\d.]+(epochs?|min|h|s)")
_SPECIAL = re.compile(r"[\\()\[\]{}:=, \t]")  # what Hydra reads in a key of a mapping only after a backslash
_WORDS = ("null", "true", "false", "nan", "inf")


def override(key: str, value: Any) -> str:
    """`key=value`, such that Hydra reads this very value."""
    return f"{key}={_hydra_text(value)}"


def _hydra_text(value: Any) -> str:
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
        return "[" + ",".join(map(_hydra_text, value)) + "]"
    if isinstance(value, dict):
        pairs = ((_SPECIAL.sub(r"\\\g<0>", str(name)), _hydra_text(part)) for name, part in value.items())
        return "{" + ",".join(f"{name}:{text}" for name, text in pairs) + "}"
    word = str(value)
    if _PLAIN.fullmatch(word) and word.lower() not in _WORDS:
        return word
    quoted = QuotedString(word, Quote.single).with_quotes()
    return quoted.replace("${", "\\${")  # else an interpolation
