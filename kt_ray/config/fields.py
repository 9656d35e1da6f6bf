"""The keys of the schema by command-line name, with type and default, and how values and types read."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

from kt_ray.config.schema import Config


class Field(NamedTuple):
    """Resolved type hint of one key, e.g. `int | str`, and its default."""

    hint: Any
    default: Any


@cache
def hints(cls: type) -> dict[str, Any]:
    """Resolved type hints of a dataclass's fields, in order."""
    return typing.get_type_hints(cls)


def _walk(cls: type, prefix: str = "") -> Iterator[tuple[str, Field]]:
    """Every group and key below `cls`, depth first, in the schema's order."""
    for name, hint in hints(cls).items():
        yield prefix + name, Field(hint, getattr(cls(), name))
        if dataclasses.is_dataclass(hint):
            yield from _walk(typing.cast(type, hint), f"{prefix}{name}.")


@cache
def fields() -> dict[str, Field]:
    """Every key of the configuration by its command-line name."""
    return {key: f for key, f in _walk(Config) if not dataclasses.is_dataclass(f.hint)}


@cache
def groups() -> dict[str, type]:
    """Every group, nested ones too ("rule", "rule.experts", …), with its dataclass."""
    return {key: f.hint for key, f in _walk(Config) if key not in fields()}


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
