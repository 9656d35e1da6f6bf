"""What becomes of every known field of a LLaMA-Factory training YAML, from field_table.yaml.

A field is mapped (to options of kt_ray), ignored (with the reason) or fixed (only some values are accepted,
usually "off"; the reason is part of the error).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

OFF = (False, None, 0, "", "none", "None")


@dataclass(frozen=True)
class Field:
    """One field."""

    section: str  # heading under which the documentation lists it
    kind: str  # "mapped", "ignored" or "fixed"
    keys: tuple[str, ...] = ()  # options that it becomes (mapped)
    text: str = ""  # how it is mapped, why it is ignored, or why other values are refused
    values: tuple[Any, ...] = OFF  # what a fixed field may be

    def accepts(self, value: Any) -> bool:
        """Whether a fixed field may have `value`."""
        return value is None or any(
            value == v and isinstance(value, bool) is isinstance(v, bool) for v in self.values
        )


@cache
def _sections() -> dict[str, Any]:
    import yaml

    loaded: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return loaded


@cache
def names_elsewhere() -> dict[str, str]:
    """What other programs call a field, or an option of kt_ray -> that field or option."""
    return {name: meant for meant, names in _sections()["elsewhere"].items() for name in names.split()}


@cache
def programs() -> dict[str, tuple[str, ...]]:
    """Other programs with recipes -> fields that theirs have and LLaMA-Factory's do not."""
    return {name: tuple(fields.split()) for name, fields in _sections()["programs"].items()}


@cache
def field_table() -> dict[str, Field]:
    """All fields by name."""
    import yaml

    table: dict[str, Field] = {}
    for section, kinds in _sections().items():
        if section in ("elsewhere", "programs"):
            continue
        for name, becomes in kinds["mapped"].items():
            ((keys, text),) = becomes.items()
            table[name] = Field(section, "mapped", tuple(keys.split()), text or "")
        for kind in ("ignored", "fixed"):
            for reason, names in kinds.get(kind, {}).items():
                for name, equals, values in (entry.partition("=") for entry in names.split()):
                    only = tuple(map(yaml.safe_load, values.split("|"))) if equals else OFF
                    table[name] = Field(section, kind, (), reason, only)
    return table
