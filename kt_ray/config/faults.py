"""What the checks of a configuration yield, and what they share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from kt_ray.config.fields import closest, show
from kt_ray.config.schema import Config


class Fault(NamedTuple):
    """A value, or a combination of values, that cannot work."""

    # A key, which the message shows with its value, or KEY=VALUE.
    key: str
    # Read after the key: "is out of range".
    reason: str
    required: str | None = None
    # Empty: set the key's default.
    remedy: str = ""


def value_of(config: Config, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def quoted(value: Any) -> str:
    """A value as a message shows it."""
    return "''" if value == "" else show(value)


def regex_faults(key: str, pattern: Any) -> Iterator[Fault]:
    """Of a value that has to be a regular expression."""
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        yield Fault(
            f"{key}={quoted(pattern)}",
            f"is not a regular expression ({error})",
            "a Python regular expression",
            f"correct {key}; in a shell put it in single quotes",
        )


def guess(value: str, words: Iterable[str]) -> tuple[str | None, str]:
    """The word that may be meant, and the question for the message."""
    match = closest(value, words)
    return match, f"; did you mean {match}?" if match else ""
