"""A recipe while it is read: its fields, what they became, what was ignored and what was refused."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kt_ray.config.fields import show
from kt_ray.config.secret_values import MASK, is_secret

_NO_KEY = re.compile(r"[^\w\-/+.$%*@?|\\()\[\]{}:=, \t]")  # what no key of a mapping holds in Hydra's grammar


@dataclass(frozen=True)
class Override:
    """One option that the recipe sets."""

    key: str  # option or group of kt_ray
    value: Any  # plain value (a group's option name for a group)
    source: str  # the fields it comes from, as the user wrote them or with "(default)"
    note: str = ""  # what the user should know about the mapping ("" = nothing)


@dataclass(frozen=True)
class Refusal:
    """A field that kt_ray does not map."""

    field: str  # "name=value"
    reason: str  # why
    keys: tuple[str, ...] = ()  # options that lift the refusal when the command line gives one of them


@dataclass
class Reading:
    """A recipe and what it has been mapped to so far."""

    path: Path  # the YAML file
    fields: dict[str, Any]  # its fields
    # options set, in order; a later one of the same key replaces the earlier
    overrides: dict[str, Override] = field(default_factory=dict)
    ignored: list[tuple[str, str]] = field(default_factory=list)  # (field=value, reason)
    refused: list[Refusal] = field(default_factory=list)  # all fields that are not mapped
    frozen_experts: str = ""  # the field that leaves the routed experts without adapters; "" = none

    def get(self, name: str, default: Any = None) -> Any:
        """The field's value, or the default where it is absent or null."""
        value = self.fields.get(name)
        return default if value is None else value

    def given(self, name: str) -> bool:
        """Whether the recipe has the field with a value."""
        return self.fields.get(name) is not None

    def set(self, key: str, value: Any, *names: str, note: str = "") -> None:
        """Records an option and the fields that it comes from; absent ones are marked as defaults."""
        source = ", ".join(
            f"{name}={masked(name, self.fields[name])}" if self.given(name) else f"{name} (default)"
            for name in names
        )
        self.overrides[key] = Override(key, value, source, note)

    def refuse(self, name: str, reason: str, *keys: str, value: Any = None) -> None:
        """Records a field that is not mapped."""
        value = self.fields.get(name) if value is None else value
        self.refused.append(Refusal(f"{name}={masked(name, value)}", reason, keys))

    def number(self, name: str, default: float, *keys: str) -> float:
        """A field that must be a number."""
        value = self.get(name, default)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = float(value)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not abs(value) < 1e15:  # nor NaN
            self.refuse(name, "is no number", *keys)
            return default
        return value

    def integer(self, name: str, default: int, *keys: str) -> int:
        """A field that must be a whole number."""
        value = self.number(name, default, *keys)
        if value != int(value):
            self.refuse(name, "is no whole number", *keys)
            return default
        return int(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """A field that must be true or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            self.refuse(name, "is neither true nor false")
            return default
        return value

    def word(self, name: str, words: Mapping[str, Any] | Sequence[str], default: str, *keys: str) -> Any:
        """A field that must be one of `words`: what they map it to, or the word itself."""
        value = str(self.get(name, default))
        if value not in words:
            self.refuse(name, "is none of " + ", ".join(words), *keys)
            value = default
        return words[value] if isinstance(words, Mapping) else value

    def patterns(self, name: str) -> dict[str, float]:
        """A field of PEFT that maps patterns of modules' names to numbers."""
        value = self.get(name, {})
        given: Mapping[Any, Any] = value if isinstance(value, Mapping) else {"": None}
        numbers = [isinstance(v, int | float) and not isinstance(v, bool) for v in given.values()]
        if not all(numbers):
            self.refuse(name, "is no mapping of patterns to numbers")
            return {}
        # Hydra knows no ^ in a key, and \\A says the same at the beginning.
        patterns = {re.sub(r"^\^", r"\\A", str(pattern)): number for pattern, number in given.items()}
        if foreign := [pattern for pattern in patterns if _NO_KEY.search(pattern)]:
            self.refuse(name, f"has a pattern that no key may be: {foreign[0]}", f"lora.{name}")
            return {}
        return patterns

    def names(self, name: str) -> list[str]:
        """A field that lists names: a YAML list, or text with commas."""
        value = self.get(name, [])
        parts = value if isinstance(value, list) else str(value).split(",")
        return [str(part).strip() for part in parts if str(part).strip()]

    def existing(self, path: str) -> Path:
        """A path from the current directory, or from the recipe's where only there is something."""
        given = Path(path).expanduser()
        beside = self.path.parent / given
        return beside if not given.exists() and beside.exists() else given


def masked(name: str, value: Any) -> str:
    """A value in a message; secrets are not shown."""
    if is_secret(name) and isinstance(value, str):
        return MASK
    text = show(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
