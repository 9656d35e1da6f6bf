"""What the schema says about each key: its type, default and meaning, by command-line name.

One walk over the dataclasses serves the loader's messages, "did you mean" and the generated
reference, so that none of them can fall behind the schema.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from kt_ray.config.schema import Config

_ENTRY = re.compile(r"^    (\w+): (.*)$")


@dataclass(frozen=True)
class Field:
    """One key.

    Attributes:
        key: name on the command line, e.g. "rule.experts.isa".
        hint: resolved type hint, e.g. `int | str`.
        default: value of the dataclass (dataclasses.MISSING = none).
        doc: its entry under "Attributes:" of the class docstring, on one line.
        group: the key without its last part ("" at the top level).
    """

    key: str
    hint: Any
    default: Any
    doc: str
    group: str


@cache
def hints(cls: type) -> dict[str, Any]:
    """Resolved type hints of a dataclass's fields, in order."""
    resolved = typing.get_type_hints(cls)
    return {f.name: resolved[f.name] for f in dataclasses.fields(cls)}


def default_of(f: dataclasses.Field[Any]) -> Any:
    """The default of a dataclass field; `dataclasses.MISSING` if it has none."""
    if f.default_factory is not dataclasses.MISSING:
        return f.default_factory()
    return f.default


def attribute_docs(cls: type) -> dict[str, str]:
    """The entries of "Attributes:" in a class docstring, each joined to one line."""
    _, _, section = (inspect.getdoc(cls) or "").partition("Attributes:\n")
    docs: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        entry = _ENTRY.match(line)
        if entry:
            name = entry[1]
            docs[name] = entry[2].strip()
        elif name and line.strip():
            docs[name] += " " + line.strip()
    return docs


def walk(cls: type = Config, group: str = "") -> Iterator[Field]:
    """Every key below `cls`, depth first, in the schema's order; nested groups are entered, not listed."""
    docs = attribute_docs(cls)
    for f in dataclasses.fields(cls):
        hint = hints(cls)[f.name]
        key = f"{group}.{f.name}" if group else f.name
        if dataclasses.is_dataclass(hint):
            yield from walk(typing.cast(type, hint), key)
        else:
            yield Field(key, hint, default_of(f), docs.get(f.name, ""), group)


@cache
def fields() -> dict[str, Field]:
    """Every key of the configuration by its command-line name."""
    return {f.key: f for f in walk()}


@cache
def groups() -> dict[str, type]:
    """Every group, nested ones too ("rule", "rule.experts", …), with its dataclass."""

    def inner(cls: type, prefix: str) -> Iterator[tuple[str, type]]:
        for name, hint in hints(cls).items():
            if dataclasses.is_dataclass(hint):
                yield prefix + name, typing.cast(type, hint)
                yield from inner(typing.cast(type, hint), f"{prefix}{name}.")

    return dict(inner(Config, ""))


def type_name(hint: Any) -> str:
    """A type hint as a user reads it: `int | str`, `list of str`, `null`."""
    if hint is type(None):
        return "null"
    if hint is Any:
        return "any value"
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " | ".join(type_name(a) for a in args)
    if origin is list:
        return "list" if args[0] is Any else f"list of {type_name(args[0])}"
    if origin is tuple:
        return f"list of {len(args)} {type_name(args[0])}"
    if origin is dict:
        return "mapping"
    return str(hint.__name__)


def show(value: Any) -> str:
    """A value as it is typed on the command line or in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ",".join(show(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {show(v)}" for k, v in value.items()) + "}"
    return str(value)


def closest(word: str, options: Iterable[str]) -> str | None:
    """The option that `word` is most likely a misspelling of, or None."""
    by_lower = {option.lower(): option for option in options}
    matches = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[matches[0]] if matches else None


def closest_key(key: str) -> str | None:
    """The known key that an unknown dotted `key` is most likely meant to be, or None.

    Looks in the same group first (trainer.max_step), then for the same last part in any group
    (rank → lora.rank), then for the whole dotted name (trianer.max_steps).
    """
    keys = list(fields()) + list(groups())
    group, _, last = key.rpartition(".")
    siblings = [k for k in keys if k.rpartition(".")[0] == group]
    match = closest(last, [k.rpartition(".")[2] for k in siblings])
    if match:
        return f"{group}.{match}" if group else match
    same = [k for k in keys if k.rpartition(".")[2] == last]
    if len(same) == 1:
        return same[0]
    if same:
        return closest(key, same) or same[0]
    whole = closest(key, fields() if group else keys)
    if whole and group not in groups():
        return whole
    match = closest(last, [k.rpartition(".")[2] for k in fields()])
    return next((k for k in fields() if k.rpartition(".")[2] == match), None) if match else None
