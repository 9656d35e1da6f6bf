"""What `kt_ray.config.compose.compose` gives, but Hydra, which takes a seventh of a second, is asked once for
each choice of groups: for tests of anything but the composition itself."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache, reduce
from operator import getitem
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from kt_ray.config.compose import composed, expand
from kt_ray.config.fields import fields, is_mapping
from kt_ray.config.mapping import load
from kt_ray.config.schema import Config


def compose(overrides: Sequence[str] = ()) -> Config:
    """The configuration that `python launch.py <overrides>` would run with, or its UserError."""
    given = expand(overrides)
    config = copy.deepcopy(_composed(tuple(o for o in given if _key_and_value(o) is None)))
    for key, value in filter(None, map(_key_and_value, given)):
        *groups, name = key.split(".")
        reduce(getitem, groups, config)[name] = value
    return load(config)


@cache
def _composed(choices: tuple[str, ...]) -> dict[str, Any]:
    return composed(choices)


@cache
def _key_and_value(override: str) -> tuple[str, Any] | None:
    """None = Hydra's: a choice, a mapping, which it merges, and what it has an error for."""
    key, equals, value = override.partition("=")
    if key not in fields() or is_mapping(key) or not equals or "${" in value:
        return None
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException:
        return None
    return None if parsed.is_sweep_override() else (key, parsed.value())


def nested(key: str, value: Any) -> dict[str, Any]:
    """The configuration with this one key: "a.b" is {"a": {"b": value}}."""
    for part in reversed(key.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value
