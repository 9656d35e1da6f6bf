"""The error for one key of a configuration."""

from __future__ import annotations

import re
from typing import Any

from kt_ray.config.fields import default_of_key, show
from kt_ray.config.schema import Config
from kt_ray.errors import UserError


def fault(key: str, value: Any, reason: str, required: object, remedy: str | None = None) -> UserError:
    """The error for one key; without a remedy, setting the default is proposed."""
    if remedy is None:
        remedy = f"set {key}={show(default_of_key(key))} (the default) or another allowed value"
    return UserError(f"{key}={show(value)} {reason}", required=required, remedy=remedy)


def check_regex(key: str, pattern: object) -> None:
    """Raises UserError when `pattern` is no regular expression."""
    try:
        re.compile(pattern)  # type: ignore[call-overload]
    except (re.error, TypeError) as error:
        raise fault(
            key,
            pattern,
            f"is not a regular expression ({error})",
            "a Python regular expression",
            f"correct {key}; in a shell put it in single quotes",
        ) from None


def value_of(config: Config, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value
