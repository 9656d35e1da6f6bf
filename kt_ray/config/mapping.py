"""From a plain mapping to the frozen configuration and back.

The command line calls `load`: types (`from_dict`), then checks (`check`), then derived names and absolute
paths (`settle`). Errors name the command-line key, its value, what is required and what to write instead.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kt_ray.config.checks import check, value_of
from kt_ray.config.fields import closest_key, default_of, groups, hints, show, type_name
from kt_ray.config.files import hardware_file
from kt_ray.config.schema import Config
from kt_ray.errors import UserError


def load(mapping: Mapping[str, Any], *, job: int | None = None) -> Config:
    """The checked and settled configuration of one run.

    Args:
        mapping: nested plain values, as composed by Hydra or read from a run's config.yaml.
        job: number of this job in a multirun; None outside one.

    Raises:
        UserError: unknown key, wrong type, or values that do not go together.
    """
    config = from_dict(mapping)
    check(config)
    return settle(config, job=job)


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
    may be the bare name of a file in conf/hardware. Outside a multirun run.name=None stays: the
    run directory is named when it is made. In one, each job gets "<name>-<job>".

    Raises:
        UserError: a multirun resumes the latest checkpoint without saying of which run.
    """
    for key in _PATHS:
        if value := value_of(config, key):
            config = _with(config, key, absolute(value))
    model, data, hardware, adapters = config.model, config.data, config.plan.hardware, config.serve.adapters
    if model.path is not None:
        name = Path(model.path).name if model.build is not None or model.name == "custom" else model.name
        config = _with(config, "model", dataclasses.replace(model, name=name, build=None))
    sources = data.sources and [{**source, "path": _paths(source["path"])} for source in data.sources]
    path = data.path and _paths(data.path)
    eval_path = data.eval_path and _paths(data.eval_path)
    builtin = None if path or sources else data.builtin
    data = dataclasses.replace(data, path=path, sources=sources, eval_path=eval_path, builtin=builtin)
    config = _with(config, "data", data)
    if hardware is not None:
        file = hardware_file(hardware) if "/" not in hardware else None
        config = _with(config, "plan.hardware", str(file) if file else absolute(hardware))
    if config.plan.rates not in ("auto", "nominal"):
        config = _with(config, "plan.rates", absolute(config.plan.rates))
    if config.trainer.resume not in (None, "latest"):
        config = _with(config, "trainer.resume", absolute(str(config.trainer.resume)))
    if adapters is not None:
        adapters = {name: absolute(directory) for name, directory in adapters.items()}
        config = _with(config, "serve.adapters", adapters)
    return _with(config, "run.name", _run_name(config, job, now))


# Keys that hold a path, or null.
_PATHS = (
    *("model.path", "model.tokenizer", "model.chat_template", "model.experts_path", "rule.experts.load"),
    *("generate.adapter", "eval.adapter", "eval.base", "eval.out", "report.run", "report.out", "compare.out"),
    "run.root",
)


def _with(group: Any, key: str, value: Any) -> Any:
    """A configuration (or group) with another value of a dotted key."""
    name, _, rest = key.partition(".")
    return dataclasses.replace(group, **{name: _with(getattr(group, name), rest, value) if rest else value})


def with_keys(config: Config, keys: Mapping[str, Any]) -> Config:
    """The configuration with other values of these dotted keys."""
    for key, value in keys.items():
        config = _with(config, key, value)
    return config


def absolute(path: str) -> str:
    """`path` with ~ expanded, from the current directory; links stay as the user wrote them."""
    return os.path.abspath(os.path.expanduser(path))


def _paths(path: str | list[str]) -> str | list[str]:
    if not isinstance(path, str):
        return [str(_paths(p)) for p in path]
    return path if path.startswith("hf://") else absolute(path)


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
        name = f"{config.model.name}-{now or datetime.datetime.now():%Y%m%d-%H%M%S}"
    return f"{name}-{job}"


def to_dict(config: Config) -> dict[str, Any]:
    """Plain nested values (tuples as lists), such that `from_dict(to_dict(c)) == c`."""
    return typing.cast(dict[str, Any], _plain(dataclasses.asdict(config)))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


# Keys that earlier versions had, which runs of theirs still name -> what to do instead.
REMOVED = {
    "data.name": "delete it: no name of the data was ever used",
    "lora.rank_pattern": "delete it: every adapter matrix has lora.rank",
    "plan.reference": "delete it, and run python benchmarks/reference_schedule.py",
}


def unknown_key(key: str, value: Any) -> UserError:
    """The error for a key that does not exist, with the closest one that does."""
    if key in REMOVED:
        return UserError(f"{key} was removed", observed=f"{key}={show(value)}", remedy=REMOVED[key])
    match = closest_key(key)
    group = key.rpartition(".")[0]
    names = list(hints(groups().get(group, Config)))
    within = f"{group} has" if group in groups() else "the keys are"
    what = f"unknown key {key}" + (f"; did you mean {match}?" if match else "")
    # A group takes an option name, not the value that was meant for a key.
    remedy = f"write {match}={show(value)}; " if match and match not in groups() else ""
    return UserError(what, observed=f"{key}={show(value)}", remedy=f"{remedy}{within} {', '.join(names)}")


def _build(cls: type, mapping: Any, group: str) -> Any:
    if not isinstance(mapping, Mapping):
        raise UserError(
            f"{group or 'the configuration'} is a group of keys, not a value",
            observed=f"{group}={show(mapping)}" if group else show(mapping),
            required="a mapping with " + ", ".join(hints(cls)),
            remedy=f"set its keys one by one, e.g. {group}.{next(iter(hints(cls)))}=..." if group else "",
        )
    for key in mapping:
        if key not in hints(cls):
            raise unknown_key(f"{group}.{key}" if group else str(key), mapping[key])
    values: dict[str, Any] = {}
    for f in dataclasses.fields(cls):
        if f.name not in mapping:
            continue
        key = f"{group}.{f.name}" if group else f.name
        hint = hints(cls)[f.name]
        if dataclasses.is_dataclass(hint):
            values[f.name] = _build(typing.cast(type, hint), mapping[f.name], key)
            continue
        try:
            values[f.name] = _coerce(hint, mapping[f.name])
        except TypeError:
            raise _wrong_type(key, mapping[f.name], hint, default_of(f)) from None
    return cls(**values)


def _wrong_type(key: str, value: Any, hint: Any, default: Any) -> UserError:
    kind = "null" if value is None else f"{show(value)} ({type(value).__name__})"
    if isinstance(value, bool) and "str" in type_name(hint):
        example = f"{key}=\"'{show(value)}'\" if the word itself is meant"
    else:
        example = f"{key}={show(default)}" if default is not None else f"{key}=null"
    return UserError(
        f"{key}={show(value)} has the wrong type",
        observed=kind,
        required=type_name(hint),
        remedy=f"write for example {example}",
    )


def _coerce(hint: Any, value: Any) -> Any:
    """`value` as `hint`, or TypeError."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        # Exact matches first, so that int | str leaves "8" a string and 8 a number.
        for arg in args:
            if typing.get_origin(arg) is None and arg is not Any and type(value) is arg:
                return value
        for arg in args:
            try:
                return _coerce(arg, value)
            except TypeError:
                continue
        raise TypeError
    if hint is type(None):
        if value is None:
            return None
    elif hint is bool:
        if isinstance(value, bool):
            return value
    elif hint is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, float) and value.is_integer():
            return int(value)
    elif hint is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if isinstance(value, str):
            try:
                return float(value)  # YAML 1.1 reads 1e-4 as a string
            except ValueError:
                raise TypeError from None
    elif hint is str:
        if isinstance(value, str):
            return value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
    elif origin is list:
        if isinstance(value, list | tuple):
            return [_coerce(args[0], v) for v in value]
    elif origin is tuple:
        if isinstance(value, list | tuple) and len(value) == len(args):
            return tuple(_coerce(a, v) for a, v in zip(args, value, strict=True))
    elif origin is dict and isinstance(value, Mapping):
        return {str(k): _coerce(args[1], v) for k, v in value.items()}
    raise TypeError
