"""The keys of the schema by command-line name, with type and default, and how values and types read."""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

from kt_ray.config.schema import Config

# How alike two keys must be (difflib's ratio) before one is proposed for the other: words that are only
# somewhat alike mean other things (learning_rate, plan.rates).
_NEAR = 0.75
_OF_MODES = ("generate", "serve", "train_server", "eval", "plan", "accept", "report", "compare")


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


def is_mapping(key: str) -> bool:
    """Whether a key takes a mapping."""
    return key in fields() and "mapping" in type_name(fields()[key].hint)


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


def closest(word: str, options: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The option that `word` is most likely a misspelling of, or None."""
    by_lower = {option.lower(): option for option in options}
    matches = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[matches[0]] if matches else None


def joined(key: str) -> str:
    """A key without what parts its words: lora_rank, lora-rank and LoraRank are lora.rank."""
    return re.sub(r"[._-]", "", key).lower()


def closest_key(key: str, fits: Callable[[str], bool] = lambda _: True) -> str | None:
    """The known key that an unknown dotted `key` is most likely meant to be, or None.

    Looks for the same words (lora_rank), in the same group (trainer.max_step), for the same last part in
    another group (rank → lora.rank), then for the whole dotted name (trianer.max_steps).

    Args:
        fits: whether a key could have the value that was given; others are not considered.
    """
    keys = [k for k in fields() if fits(k)]
    group, _, last = key.rpartition(".")
    if same := next((k for k in keys if joined(k) == joined(key)), None):
        return same
    siblings = {k.rpartition(".")[2]: k for k in keys if k.rpartition(".")[0] == group}
    if match := closest(last, siblings, _NEAR):
        return siblings[match]
    if group in _OF_MODES:
        return None
    # What a run is made of goes before what a mode is given.
    same_last = [k for k in keys if k.rpartition(".")[2] == last]
    of_run = [k for k in same_last if k.partition(".")[0] not in _OF_MODES]
    if same_last:
        return closest(key, same_last, _NEAR) or (of_run[0] if len(of_run) == 1 else None)
    if match := closest(key, [k for k in keys if "." in k], _NEAR):
        return match
    near = {k.rpartition(".")[2]: k for k in reversed(keys)}
    match = closest(last, near, _NEAR)
    return near[match] if match else None
