"""From a plain mapping to the frozen configuration and back.

The command line calls `load`: types (`from_dict`), then checks (`check`), then derived names and absolute
paths (`settle`). Errors name the command-line key, its value, what is required and what to write instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import re
import shlex
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kt_ray.config.checks import check, single_keys
from kt_ray.config.faults import value_of
from kt_ray.config.fields import closest, closest_key, fields, groups, hints, is_mapping, show, type_name
from kt_ray.config.files import hardware_file, is_hardware_path
from kt_ray.config.schema import Config
from kt_ray.config.secret_values import MASK, is_secret
from kt_ray.errors import UserError


def load(
    mapping: Mapping[str, Any], *, job: int | None = None, now: datetime.datetime | None = None
) -> Config:
    """The checked and settled configuration of one run.

    Args:
        mapping: nested plain values, as composed by Hydra or read from a run's config.yaml.
        job: number of this job in a multirun; None outside one.
        now: in the name of a multirun without one.

    Raises:
        UserError: unknown key, wrong type, or values that do not go together.
    """
    config = from_dict(mapping)
    check(config)
    return settle(config, job=job, now=now)


def from_dict(mapping: Mapping[str, Any]) -> Config:
    """Builds the frozen dataclasses from nested plain values; absent keys take their defaults.

    Coercions: whole floats to int (1e3), numbers and numeric strings to float, numbers to str,
    lists to tuples where the schema has a tuple. Nothing else is converted.

    Raises:
        UserError: a key that does not exist (with the closest one that does) or a value of the
            wrong type.
    """
    return typing.cast(Config, _build(Config, mapping, ""))


def settle(config: Config, *, job: int | None = None, now: datetime.datetime | None = None) -> Config:
    """Fills what follows from other keys: labels, absolute paths, a multirun's run names.

    `model.path` overrules `model.build`, `data.path` and `data.sources` `data.builtin`. plan.hardware
    may be the bare name of a file in conf/hardware; another name stays. Outside a multirun run.name=None
    stays: the run directory is named when it is made. In one, each job gets "<name>-<job>".

    Raises:
        UserError: a multirun resumes the latest checkpoint without saying of which run.
    """
    for key, words in _PATHS.items():
        value = value_of(config, key)
        if value and value not in words:
            config = _with(config, key, absolute(value))
    model, data, hardware = config.model, config.data, config.plan.hardware
    if model.path is not None:
        hub = model.path.startswith("hf://")
        label = Path(model.path.partition("@")[0] if hub else model.path).name
        name = label if model.build is not None or model.name == "custom" else model.name
        config = _with(config, "model", dataclasses.replace(model, name=name, build=None))
    if data.sources:
        sources = [{**source, "path": absolute(source["path"])} for source in data.sources]
        config = _with(config, "data.sources", sources)
    if data.path or data.sources:
        config = _with(config, "data.builtin", None)
    if config.reward and (file_of := re.fullmatch(r"(.+\.py)(:\w+)?", config.reward)):  # no verifier's name
        config = _with(config, "reward", absolute(file_of[1]) + (file_of[2] or ""))
    if hardware is not None:
        file = hardware_file(hardware) if "/" not in hardware else None
        if file is not None or is_hardware_path(hardware):
            config = _with(config, "plan.hardware", str(file or absolute(hardware)))
    return _with(config, "run.name", _run_name(config, job, now))


# Keys that hold a path, paths or null, with the words that they may hold instead.
_PATHS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("model.path", "model.tokenizer", "model.chat_template", "model.experts_path"), ()),
    **dict.fromkeys(("rule.experts.load", "data.path", "data.eval_path", "lora.adapter"), ()),
    **dict.fromkeys(("generate.adapter", "serve.adapters", "eval.adapter", "eval.base", "eval.out"), ()),
    **dict.fromkeys(("report.run", "report.out", "compare.out", "run.root", "accept.root", "accept.kt"), ()),
    "train_server.directory": (),
    "plan.rates": ("auto", "nominal"),
    "trainer.resume": ("latest",),
    "accept.resume": ("latest",),
}


def _with(group: Any, key: str, value: Any) -> Any:
    """A configuration (or group) with another value of a dotted key."""
    name, _, rest = key.partition(".")
    return dataclasses.replace(group, **{name: _with(getattr(group, name), rest, value) if rest else value})


def with_keys(config: Config, keys: Mapping[str, Any]) -> Config:
    """The configuration with other values of these dotted keys."""
    for key, value in keys.items():
        config = _with(config, key, value)
    return config


def absolute(path: Any) -> Any:
    """A path (also each in a list or mapping) with ~ expanded, from the current directory; links stay links.

    Names on the Hugging Face hub stay as they are.
    """
    if isinstance(path, Mapping):
        return {name: absolute(entry) for name, entry in path.items()}
    if isinstance(path, list):
        return [absolute(entry) for entry in path]
    return path if path.startswith("hf://") else os.path.abspath(os.path.expanduser(path))


def dated_name(model: str, now: datetime.datetime | None = None) -> str:
    """The directory name of a run without a name: "<model>-<date>-<time>"."""
    label = "".join(c if c.isalnum() or c in "._-" else "-" for c in model)
    return f"{label}-{now or datetime.datetime.now():%Y%m%d-%H%M%S}"


def _run_name(config: Config, job: int | None, now: datetime.datetime | None) -> str | None:
    name = config.run.name
    if job is None:
        return name
    if name is None and config.trainer.resume == "latest":
        raise UserError(
            "trainer.resume=latest in a multirun does not say which runs to resume",
            observed="run.name=null",
            required="the name that the multirun was started with, without -<job>",
            remedy="set run.name=<name>, or resume one run at a time",
        )
    if name is None:
        name = dated_name(config.model.name, now)
    return f"{name}-{job}"


# Keys that earlier versions had, which runs of theirs still name -> what to do instead.
REMOVED = {
    "data.name": "delete it: no name of the data was ever used",
    "plan.reference": "delete it, and run python benchmarks/reference_schedule.py",
    "trainer.on_signal": "delete it: the first signal saves, the second ends the run at once",
}


def unknown_key(key: str, value: Any, text: str = "") -> UserError:
    """The error for a key that does not exist, with the closest one that does.

    Args:
        text: as the value is written; "" = as `show` writes it.
    """
    given = MASK if is_secret(key) and value is not None else text or show(value)
    if key in REMOVED:
        return UserError(f"{key} was removed", observed=f"{key}={given}", remedy=REMOVED[key])
    if match := closest_key(key, lambda known: fits(known, value)):
        what = f"unknown key {key}; did you mean {match}?"
        return UserError(what, observed=f"{key}={given}", remedy=f"write {match}={given}")
    match = closest(key, groups()) if isinstance(value, Mapping) else None
    group = key.rpartition(".")[0]
    while group and group not in groups():
        group = group.rpartition(".")[0]
    names = list(hints(groups().get(group, Config)))
    within = f"{group} has" if group else "the keys are"
    what = f"unknown key {key}" + (f"; did you mean {match}?" if match else "")
    remedy = f"see docs/configuration.md; {within} {', '.join(names)}"
    return UserError(what, observed=f"{key}={given}", remedy=remedy)


def fits(key: str, value: Any) -> bool:
    """Whether a key may have a value, whatever the other keys are; None stands for any."""
    if value is None:
        return True
    try:
        config = _with(Config(), key, _coerce(fields()[key].hint, value))
    except TypeError:
        return False
    return all(fault.key != key for fault in single_keys(config))


def _build(cls: type, mapping: Any, group: str) -> Any:
    if not isinstance(mapping, Mapping):
        raise UserError(
            f"{group or 'the configuration'} is a group of keys, not a value",
            observed=f"{group}={show(mapping)}" if group else show(mapping),
            required="a mapping with " + ", ".join(hints(cls)),
            remedy=f"set its keys one by one, e.g. {group}.{next(iter(hints(cls)))}=..." if group else "",
        )
    values: dict[str, Any] = {}
    for name, value in mapping.items():
        key = f"{group}.{name}" if group else str(name)
        if name not in hints(cls):
            raise unknown_key(key, value)
        if key in groups():
            values[name] = _build(groups()[key], value, key)
            continue
        try:
            values[name] = _coerce(fields()[key].hint, value)
        except TypeError:
            raise _wrong_type(key, value) from None
    return cls(**values)


def _wrong_type(key: str, value: Any) -> UserError:
    hint, default = fields()[key]
    example = f"{key}={show(default)}"
    if is_mapping(key):
        example = f"'{key}={{NAME:VALUE}}'"
        if isinstance(value, Mapping):
            example += ", with values of another type"
    if hint == list[str] and isinstance(value, str) and not set('"\\') & set(value):
        example = shlex.quote(f'{key}=["{value}"]')
    if isinstance(value, bool) and "str" in type_name(hint):
        example = f"{key}=\"'{show(value)}'\" if the word itself is meant"
    remedy = f"write for example {example}"
    if example == f"{key}=null":
        named = " or ".join(name for name in type_name(hint).split(" | ") if name != "null")
        remedy = f"write {key}=<{named}>, or leave it out"
    return UserError(
        f"{key}={show(value)} has the wrong type",
        observed="null" if value is None else f"{show(value)} ({type(value).__name__})",
        required=type_name(hint),
        remedy=remedy,
    )


def _coerce(hint: Any, value: Any) -> Any:
    """`value` as `hint`, or TypeError."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if hint is Any or type(value) is hint:
        return value
    if origin in (types.UnionType, typing.Union):
        if type(value) in args:  # first, so that int | str leaves "8" a string and 8 a number
            return value
        for arg in args:
            with contextlib.suppress(TypeError):
                return _coerce(arg, value)
    elif hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    elif hint is float and (number or isinstance(value, str)):
        with contextlib.suppress(ValueError):
            return float(value)  # YAML 1.1 reads 1e-4 as a string
    elif hint is str and number:
        return str(value)
    elif origin is list and isinstance(value, list | tuple):
        return [_coerce(args[0], v) for v in value]
    elif origin is tuple and isinstance(value, list | tuple) and len(value) == len(args):
        return tuple(map(_coerce, args, value))
    elif origin is dict and isinstance(value, Mapping):
        return {str(k): _coerce(args[1], v) for k, v in value.items()}
    raise TypeError
