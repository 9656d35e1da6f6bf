"""Composition of conf/ by Hydra: where conf/ is, short forms, and Hydra's errors in our words."""

from __future__ import annotations

import atexit
import os
import re
import shlex
import shutil
import tempfile
import typing
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException, SearchPathException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from kt_ray.config.fields import closest, fields, groups, is_mapping, joined, show, type_name
from kt_ray.config.files import HUB_NAME, conf_dir, hardware_file, option_groups, option_names
from kt_ray.config.limits import WORDS
from kt_ray.config.mapping import load, unknown_key
from kt_ray.config.schema import Config
from kt_ray.errors import UserError

HYDRA_VERSION_BASE = "1.3"

# A path without a group choice means the generic option: model.path=DIR is model=custom model.path=DIR.
_IMPLIED = {"model": "custom", "data": "jsonl"}
# Models of the package, which train on the demo's data; another model's rows are one's own.
_BUILT = ("demo", "demo_random", "mini")


@cache
def register_resolvers() -> None:
    """Registers `${kt_ray.scratch:}`: a directory deleted at exit, for what Hydra insists on writing."""
    OmegaConf.register_new_resolver("kt_ray.scratch", _scratch, replace=True, use_cache=True)


@cache
def _scratch() -> str:
    path = tempfile.mkdtemp(prefix="kt_ray_")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def expand(overrides: Sequence[str], *, sweep: bool = False, implied: bool = True) -> list[str]:
    """`overrides` as Hydra takes them: lists without brackets get theirs, model=ORG/NAME becomes a path on
    the hub, and the group choices that model.path, data.path and data.sources imply are added, where none is
    made.
    A model that is not the package's implies data=jsonl, too: nobody means to train it on the demo's rows
    by naming none, and a plan's rows are as long as a user's.

    An experiment chooses its own groups, so none is implied beside one. trainer.epochs says how long a run
    is, so it unsets the trainer.max_steps of a file.

    Args:
        sweep: commas part several runs.
        implied: False = no group choices are added.
    """
    overrides = [part for o in overrides for part in _on_hub(_worded(_bracketed(at_home(o), sweep), sweep))]
    keys = [key for override in overrides for key in keys_given(override)]
    if "trainer.epochs" in keys:
        overrides = _counted_in_epochs(overrides)
    if "experiment" in keys or not implied:
        return list(overrides)
    choices = [
        f"{group}={option}"
        for group, option in _IMPLIED.items()
        if group not in keys
        and (
            f"{group}.path" in keys
            or (group == "data" and ("data.sources" in keys or _own_model(overrides, keys)))
        )
    ]
    return choices + list(overrides)


def at_home(override: str) -> str:
    """KEY=~/x with the home directory in the place of ~, which no shell expands there and Hydra refuses."""
    key, equals, value = override.partition("=")
    # Within a list or a mapping also behind a colon or a space; elsewhere these are a text's.
    before = r"(?<=[\[,:\s])" if value.startswith(("[", "{")) else r"(?<=,)"
    quoted = r"""("[^"]*"|'[^']*')"""
    home = os.path.expanduser("~")
    return key + equals + re.sub(rf"{quoted}|(?:^|{before})~(?=/)", lambda found: found[1] or home, value)


def keys_given(override: str) -> list[str]:
    """The keys that an argument sets: of GROUP={KEY:VALUE} those of the mapping, or of all mappings of a
    sweep, else its own."""
    name = override.lstrip("+~").partition("=")[0].partition("@")[0]
    mappings = _mappings_given(name, override)
    return [key for mapping in mappings for key in _keys_in(name, mapping)] if mappings else [name]


def _mappings_given(group: str, override: str) -> list[dict[str, Any]]:
    """The mapping in GROUP={KEY:VALUE}, or those of a sweep over such; [] where anything is none."""
    if group not in groups() or "{" not in override:
        return []
    try:
        parsed = OverridesParser.create().parse_override(override)
        values = [*parsed.sweep_iterator()] if parsed.is_sweep_override() else [parsed.value()]
    except HydraException:
        return []
    mappings = [value for value in values if isinstance(value, dict)]
    return mappings if len(mappings) == len(values) else []


def _counted_in_epochs(overrides: Sequence[str]) -> list[str]:
    """With the max_steps of a file unset wherever trainer.epochs is given and trainer.max_steps is not: first
    of all, or in those mappings of a sweep that give it."""
    swept = [o for o in overrides if len(_mappings_given("trainer", o)) > 1 and o.startswith("trainer=")]
    keys = [key for override in overrides if override not in swept for key in keys_given(override)]
    if "trainer.max_steps" in keys:
        return list(overrides)

    def unset(override: str) -> str:
        texts = OverridesParser.create().parse_override(override).sweep_string_iterator()
        pairs = zip(texts, _mappings_given("trainer", override), strict=True)
        return "trainer=" + ",".join(
            f"{{max_steps:null,{text[1:]}" if "epochs" in given and "max_steps" not in given else text
            for text, given in pairs
        )

    first = ["trainer.max_steps=null"] if "trainer.epochs" in keys else []
    return first + [unset(override) if override in swept else override for override in overrides]


def _keys_in(group: str, mapping: dict[str, Any]) -> list[str]:
    keys = []
    for name, value in mapping.items():
        key = f"{group}.{name}"
        keys += _keys_in(key, value) if key in groups() and isinstance(value, dict) else [key]
    return keys


def _own_model(overrides: Sequence[str], keys: Sequence[str]) -> bool:
    """Whether a model is named that is not the package's."""
    named = [o.removeprefix("model=") for o in overrides if re.match(r"model=[^{]", o)]
    return "model.path" in keys or any(set(value.split(",")).difference(_BUILT) for value in named)


def _on_hub(override: str) -> tuple[str, ...]:
    """model=ORG/NAME, where that is no directory here, as model.path=hf://ORG/NAME."""
    key, _, value = override.partition("=")
    if key != "model" or not HUB_NAME.fullmatch(value) or Path(value).exists():
        return (override,)
    return "model=custom", f"model.path=hf://{value.removeprefix('hf://')}"


def _bracketed(override: str, sweep: bool) -> str:
    """KEY=a,b as KEY=[a,b] where the key takes a list of words and nothing else."""
    key, _, value = override.partition("=")
    field = fields().get(key)
    plain = re.fullmatch(r"[\w./~*?-]+" if sweep else r"[\w./~*?-]+(,[\w./~*?-]+)*", value)
    if field is None or field.hint not in (list[str], list[int]) or not plain or value == "null":
        return override
    if re.search("[*?]", value):  # which Hydra takes in quotes only
        value = '"' + value.replace(",", '","') + '"'
    return f"{key}=[{value}]"


def _worded(override: str, sweep: bool) -> str:
    """KEY=2026_11_29 as KEY="2026_11_29" where the key takes a text: else Hydra reads the number 20261129."""
    key, _, value = override.partition("=")
    field = fields().get(key.lstrip("+"))
    kinds = set[Any]() if field is None else {field.hint, *typing.get_args(field.hint)}
    if list[str] in kinds and re.fullmatch(r"\[[^][{}\"'()]*\]", value):
        return f"{key}=[{','.join(map(_as_text, value[1:-1].split(',')))}]"
    if str in kinds and not {int, float} & kinds:
        return f"{key}={','.join(map(_as_text, value.split(','))) if sweep else _as_text(value)}"
    return override


def _as_text(value: str) -> str:
    """In quotes what Hydra would take for a number, and not write again as it was typed."""
    return (
        f'"{value.strip()}"'
        if re.fullmatch(r"[-+]?[\d.][\d_.]*(e[-+]?\d+)?", value.strip(), re.IGNORECASE)
        else value
    )


def compose(overrides: Sequence[str] = (), *, config_dir: str | None = None) -> Config:
    """The configuration that `python launch.py <overrides>` would run with, for tests and notebooks.

    Raises:
        UserError: as the command line would print it.
    """
    return load(composed(expand(overrides), config_dir=config_dir))


def composed(given: Sequence[str], *, config_dir: str | None = None) -> dict[str, Any]:
    """What Hydra makes of overrides that `expand` has written, as plain values that nobody has checked yet.

    Raises:
        UserError: as the command line would print it.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    register_resolvers()
    given = list(given)
    if config_dir is not None:
        given.append(f"hydra.searchpath=[file://{Path(config_dir).resolve()}]")
    # Inside a program that Hydra started (mode=accept), whose own state is put back.
    hydra = GlobalHydra.instance()
    running, hydra.hydra = hydra.hydra, None
    try:
        with initialize_config_dir(str(conf_dir()), version_base=HYDRA_VERSION_BASE):
            return to_mapping(hydra_compose("config", given))
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        raise translate(error, given) from error
    finally:
        GlobalHydra.instance().hydra = running  # initialize_config_dir puts another instance there


def to_mapping(composed: Any) -> dict[str, Any]:
    """A composed DictConfig as plain values, interpolations resolved.

    Raises:
        UserError: an interpolation (for instance of an environment variable) cannot be resolved.
    """
    try:
        plain = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise translate(error, ()) from error
    assert isinstance(plain, dict)
    plain.pop("hydra", None)
    return {str(key): value for key, value in plain.items()}


def translate(error: Exception, overrides: Sequence[str]) -> UserError:
    """An exception of Hydra, OmegaConf or the YAML parser as a UserError in terms of the command line."""
    if isinstance(error, OverrideParseException):
        return _malformed(error.override)
    if isinstance(error, MissingConfigException):
        return _missing_option(error, overrides)
    if isinstance(error, SearchPathException):
        return UserError(_first_line(error), remedy="give --config-dir an existing directory")
    if isinstance(error, yaml.YAMLError):
        mark = getattr(error, "problem_mark", None)
        return UserError(
            f"malformed YAML: {getattr(error, 'problem', None) or _first_line(error)}",
            where=f"{mark.name} line {mark.line + 1}" if mark else "",
            remedy="correct that line",
        )
    text, cause = str(error), error.__cause__
    if text.startswith("Ambiguous value for argument"):
        return _ambiguous(text, overrides)
    if missing := re.search(r"Could not override '([^']+)'", text):
        return _missing_key(missing[1], text, getattr(cause, "key", None), overrides)
    for pattern, fault in (
        (r"An item is already at '([^']+)'", "exists, + adds keys that do not"),
        (r"Multiple values for (\w+)\.", "has an option already, + adds a second one"),
    ):
        if present := re.search(pattern, text):
            given = f"{present[1]}={show(_value_given(present[1], overrides))}"
            return UserError(f"{present[1]} {fault}", observed=f"+{given}", remedy=f"write {given}")
    if text.startswith("Config group override must be"):
        named = [override.lstrip("+").partition("=")[0] for override in overrides]
        group = next(g for g in option_groups() if g in named and _is_plain_value(_value_given(g, overrides)))
        return _no_option(group, show(_value_given(group, overrides)), option_names(group))
    for fault_of in (error, cause):
        if isinstance(fault_of, OmegaConfBaseException):
            return _omegaconf(fault_of, overrides)
    return UserError(_first_line(error), remedy="see `python launch.py --help` for groups, options and keys")


def _missing_key(key: str, text: str, inner: Any, overrides: Sequence[str]) -> UserError:
    """Hydra could not override `key`; `inner` is the key within a group's mapping that does not exist."""
    if key in groups() and inner is not None:  # run={nam: x}
        given = _value_given(key, overrides)
        return unknown_key(f"{key}.{inner}", given.get(inner) if isinstance(given, dict) else given)
    if in_file := re.search(r"In '([^']+)':", text):
        return UserError(
            f"'override /{key}' matches no group",
            where=f"{in_file[1]}.yaml",
            required="one of " + ", ".join(option_groups()),
            remedy="correct the defaults list of that file",
        )
    return _unknown(key, overrides)


def _is_plain_value(value: Any) -> bool:
    return not isinstance(value, str | list)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def _value_given(key: str, overrides: Sequence[str]) -> Any:
    """What the command line gives `key`; the last one counts, as it does for Hydra."""
    for override in reversed(overrides):
        name, equals, text = override.lstrip("+~").partition("=")
        if equals and name == key:
            try:
                return OverridesParser.create().parse_override(override).value()
            except HydraException:
                return text
    return None


def _unknown(key: str, overrides: Sequence[str]) -> UserError:
    value = _value_given(key, overrides)
    given = f"{key}={show(value)}"
    if key.startswith("model.config."):
        return UserError(
            f"{key} is not in this model's config", observed=given, remedy=f"write +{given} to add it"
        )
    if key in fields() or key in groups():  # present in the schema, absent from a file that replaced ours
        return UserError(
            f"{key} is not in the composed configuration", observed=given, remedy=f"write ++{given}"
        )
    if parent := next((p for p in fields() if key.startswith(f"{p}.")), None):
        inner = f"{{{key.removeprefix(f'{parent}.')}:{show(value)}}}"
        remedy = f"write '{parent}={inner}'" if is_mapping(parent) else f"write {parent}={show(value)}"
        what = f"{parent} is {'written as one mapping' if is_mapping(parent) else 'a value, it has no keys'}"
        return UserError(what, observed=given, remedy=remedy)
    spelled = joined(key) in map(joined, fields())
    group = closest(key, option_groups()) if "." not in key and not spelled and value is not None else None
    if group and (option := closest(str(value), option_names(group))):
        return UserError(
            f"unknown group {key}; did you mean {group}?",
            observed=given,
            required="one of " + ", ".join(option_groups()),
            remedy=f"write {group}={option}",
        )
    return unknown_key(key, value)


def _malformed(override: str) -> UserError:
    key, equals, value = override.partition("=")
    if not equals:
        match = closest(key, [*option_groups(), *fields()])
        remedy = f"write {match or key}=<value>"
    elif not key.strip():
        remedy = "write the key before the equals sign, without spaces around it"
    elif is_mapping(key) or (key in groups() and value.startswith("{")):
        remedy = (
            f"write '{key}={{NAME:VALUE}}': names without quotes, and a backslash before ( ) | , : in them"
        )
    else:
        remedy = f"quote the value: {_quoted(key, value)}"
    return UserError(f"malformed argument {override}", required="KEY=VALUE or GROUP=OPTION", remedy=remedy)


def _quoted(key: str, value: str) -> str:
    """An argument whose value is one text, for Hydra and for a shell."""
    # Hydra takes a backslash for itself but before a quote and at the end.
    text = re.sub(r'(\\*)("|\Z)', lambda found: found[1] * 2 + (found[2] and '\\"'), value)
    return shlex.quote(f'{key}="{text}"')


def _ambiguous(text: str, overrides: Sequence[str]) -> UserError:
    override = next((o for o in overrides if f"'{o}'" in text.splitlines()[0]), "")
    key, _, value = override.partition("=")
    if key not in fields() and key not in option_groups():
        return unknown_key(key, None, value)
    types = type_name(fields()[key].hint) if key in fields() else ""
    ways = [f"{key}=[{value}] for a list"] if "list" in types else []
    if "str" in types and key not in WORDS:
        ways.append(f"{_quoted(key, value)} for a text")
    one = re.match(r"[^,()\[\]{}]+(?=,)", value)
    ways = ways or [f"{key}={one[0] if one else '<value>'}"]
    return UserError(
        f"{override} gives several values",
        required="one value without -m",
        remedy=f"write {', '.join(ways)}, or add -m to sweep",
    )


def _missing_option(error: MissingConfigException, overrides: Sequence[str]) -> UserError:
    # The option may itself hold slashes (model=/data/DeepSeek), so the group is what precedes the first.
    group, slash, option = (error.missing_cfg_file or "").partition("/")
    if not slash:
        group, option = "", group
    if not group:
        return UserError(
            f"there is no primary configuration '{option}'",
            where="--config-name",
            required=f"a file {option}.yaml in conf/ or --config-dir",
            remedy="leave out --config-name",
        )
    given = _value_given(group, overrides)
    name = show(given) if given is not None else option
    options = sorted(error.options or option_names(group))
    return _no_option(group, name, options)


def _no_option(group: str, name: str, options: list[str]) -> UserError:
    match = closest(name, options)
    # Someone who names a directory or a file where an option belongs means its path.
    machine = _model_on_machine(name) if group == "experiment" else None
    if machine:
        plan = f"mode=plan model={machine[0]} plan.hardware={machine[1]}"
        remedy = f"write {plan}; to train there, model={machine[0]} model.path=DIR"
    elif group in _IMPLIED and ("/" in name or re.search(r"\.(jsonl?|parquet)$", name)):
        remedy = f"write {group}.path={name}"
    elif name == "null":
        match, remedy = None, f"leave {group}=null out"
    else:
        remedy = f"write {group}={match}" if match else "choose one of these"
    return UserError(
        f"{group}={name} is not an option" + (f"; did you mean {group}={match}?" if match else ""),
        required="one of " + ", ".join(options),
        remedy=remedy,
    )


def _model_on_machine(name: str) -> tuple[str, str] | None:
    """("olmoe", "laptop_16gb") of "olmoe_laptop_16gb", an experiment of earlier versions; else None."""
    for model in option_names("model"):
        hardware = name.removeprefix(f"{model}_")
        if hardware != name and hardware_file(hardware):
            return model, hardware
    return None


def _omegaconf(error: OmegaConfBaseException, overrides: Sequence[str]) -> UserError:
    key = str(getattr(error, "full_key", None) or getattr(error, "key", None) or "")
    variable = re.search(r"Environment variable '(\w+)' not found", str(error))
    if variable:
        return UserError(
            f"{key} takes the environment variable {variable[1]}, which is not set",
            where=key,
            required=f"a value of {variable[1]}",
            remedy=f"export {variable[1]}=<value>, or set {key}=<value>",
        )
    if isinstance(error, ConfigAttributeError | ConfigKeyError) and key:
        return _unknown(key, overrides)
    value = _value_given(key, overrides)
    return UserError(
        f"{key or 'the configuration'} cannot be composed: {_first_line(error)}",
        observed=None if value is None else f"{key}={show(value)}",
        remedy=f"set {key}=<value>" if key else "see `python launch.py --help`",
    )
