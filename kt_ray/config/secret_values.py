"""Secrets: what is one by its name, and what is written without them.

A run's files, logs and reports are read by others: W&B, a shared disk, a bug report.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

MASK = "***"
# Of variables, of our options and of LLaMA-Factory's; a tokenizer's eos_token is none.
_WORD = (
    r"(?!(?:[be]os|pad|unk|sep|cls|mask|image|video|audio)_token\b)"
    r"(?:\w*_(?:key|token)|\w*(?:secret|password|webhook)\w*)"
)
_NAME = re.compile(rf"{_WORD}|token", re.IGNORECASE)
# serve.api_key=VALUE, serve={api_key: VALUE}, --password=VALUE
_VALUE = r"'[^']*'|\"[^\"]*\"|[^\s,}\]]+"
_STATED = re.compile(rf"(?P<stated>\b{_WORD}\s*[=:]\s*)(?:{_VALUE})", re.IGNORECASE)
# An argument that is one secret: its value goes to the end, with its spaces and escapes.
_WHOLE = re.compile(rf"(?P<stated>\A[-+.\w]*\b{_WORD}=)(?![{{\[]).+", re.IGNORECASE | re.DOTALL)
_SHORTEST = 8  # characters; what is shorter is no secret, and part of other words
_known: set[str] = set()


def is_secret(name: str) -> bool:
    """Whether a variable or a field holds a secret, by its name."""
    return _NAME.fullmatch(name.rpartition(".")[2]) is not None


def remember(value: str) -> None:
    """A secret of this process that is not, or no longer, in its environment."""
    _known.add(value)


def hide(text: str) -> str:
    """Text without the secrets of this process: those of its environment, and remembered ones."""
    values = {value for name, value in os.environ.items() if is_secret(name)} | _known
    for value in sorted(values, key=len, reverse=True):
        if len(value) >= _SHORTEST:
            text = text.replace(value, MASK)
    return text


def hidden_arguments(arguments: Iterable[str]) -> list[str]:
    """A command line without the values of secrets."""
    return [_hidden_argument(hide(argument)) for argument in arguments]


def _hidden_argument(argument: str) -> str:
    stated = _WHOLE if _WHOLE.match(argument) else _STATED
    return stated.sub(rf"\g<stated>{MASK}", argument)


def without_secrets(tree: Any) -> Any:
    """Mappings and lists with secrets masked: by the names of their keys, and by their values."""
    if isinstance(tree, Mapping):
        return {
            key: MASK if isinstance(value, str) and is_secret(str(key)) else without_secrets(value)
            for key, value in tree.items()
        }
    if isinstance(tree, list):
        return [hidden_arguments([e])[0] if isinstance(e, str) else without_secrets(e) for e in tree]
    return hide(tree) if isinstance(tree, str) else tree
