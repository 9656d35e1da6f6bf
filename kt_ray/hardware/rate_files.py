"""Rates in files: JSON that mode=doctor stores per host, and which rates a plan uses."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import types
import typing
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from kt_ray.config.schema import Config
from kt_ray.disk import write_atomic
from kt_ray.errors import UserError
from kt_ray.hardware.describe import cpu_name
from kt_ray.hardware.machine import Hardware
from kt_ray.hardware.nominal import nominal_rates, slowest
from kt_ray.hardware.parts import gpu_named
from kt_ray.hardware.rates import Curve, Figure, Rates
from kt_ray.parse import read_json

NOMINAL = "nominal"  # plan.rates: nothing measured
VERSION = 1  # of the file's layout; another one is refused
_REMEDY = "measure again with mode=doctor, or set plan.rates=auto"


def rates_for(config: Config, hardware: Hardware) -> Rates:
    """The rates that a plan for `hardware` is predicted with.

    plan.rates=FILE: that file, whatever described hardware (a note says so where it differs). auto: what
    mode=doctor stored for this host where the hardware is this host's; else the file of such rates that the
    hardware file names, or its figures, and nominal ones for what it does not say, or says otherwise than the
    rates. nominal: as if nothing had been measured.

    Raises:
        UserError: the named file is missing, is no rates file, is of another version or other hardware.
    """
    named = config.plan.rates if config.plan.rates not in ("auto", NOMINAL) else None
    if named is None and config.plan.rates == "auto":
        named = hardware.rates_file or None
    if named is not None:
        rates = read_rates(named)
        if not hardware.present:
            rates = _noted(rates, f"rates of {rates.cpu}, {rates.cores} cores, used for {hardware.source}")
            if named != config.plan.rates:
                return _with_gpu(_with_cpu(rates, hardware), hardware)
            return _with_gpu(rates, hardware) if rates.gpu is None or rates.link is None else rates
        wrong = mismatch(rates, hardware)
        if wrong:
            raise UserError(
                "the rates are of other hardware", where=f"plan.rates={named}",
                observed=wrong[0], required=wrong[1], remedy=_REMEDY,
            )  # fmt: skip
        return _with_gpu(rates, hardware)
    nominal = nominal_rates(hardware)
    if config.plan.rates == NOMINAL or not hardware.present:
        return nominal
    file = rates_path(hardware)
    if not os.path.isfile(file):  # nor where this user may not look: nothing needs it
        note = "no measured rates for this host: run mode=doctor once, then predictions use them"
        return _noted(nominal, note)
    try:
        rates = read_rates(file)
    except UserError as error:
        note = f"stored rates not used: {error.what} ({error.where}); run mode=doctor again"
        return _noted(nominal, note)
    wrong = mismatch(rates, hardware)
    if wrong:
        note = f"stored rates not used: they are of {wrong[0]}, this host has {wrong[1]}; run mode=doctor"
        return _noted(nominal, note)
    return _with_gpu(rates, hardware)


def _with_gpu(rates: Rates, hardware: Hardware) -> Rates:
    """Nominal figures for the GPUs of `hardware` where the rates are of other ones, or of none."""
    if not hardware.gpus:
        return rates
    name = slowest(hardware.gpus).name
    if rates.link is not None and of_card(rates, name):
        return rates
    of = "a host without a GPU" if rates.gpu is None else rates.gpu.name
    nominal = nominal_rates(hardware)
    layers = tuple(layer for layer in rates.layers if layer.threads)
    rates = dataclasses.replace(rates, gpu=nominal.gpu, link=nominal.link, layers=layers)
    return _noted(rates, f"these rates are of {of}: nominal ones for {name}")


def of_card(rates: Rates, name: str) -> bool:
    """Whether the rates' GPU is a card of this name; names of one data sheet are of one card."""
    of = "" if rates.gpu is None else rates.gpu.name
    return of == name or (gpu_named(of) is not None and gpu_named(of) is gpu_named(name))


def _with_cpu(rates: Rates, hardware: Hardware) -> Rates:
    """Nominal figures for sockets of other cores, or of another instruction set, than the rates'."""
    sockets = [(rates.isas[-1:], rates.cpu_all.threads), (hardware.isas[-1:], hardware.sockets[0].cores)]
    of, have = (f"{cores} cores per socket with {''.join(isa)}" for isa, cores in sockets)
    if of == have:
        return rates
    nominal = nominal_rates(hardware)
    sides = ("experts", "memory", "cpu_one", "cpu_all", "optimizer", "cpu", "cores", "isas")
    rates = dataclasses.replace(
        rates,
        layers=tuple(layer for layer in rates.layers if not layer.threads),
        **{side: getattr(nominal, side) for side in sides},
    )
    return _noted(rates, f"these rates are of {of}: nominal ones for {have}")


def _noted(rates: Rates, note: str) -> Rates:
    return dataclasses.replace(rates, notes=(*rates.notes, note))


def mismatch(rates: Rates, hardware: Hardware) -> tuple[str, str] | None:
    """What the rates were measured on and what `hardware` is, where they differ; None = they agree."""
    cores = sum(socket.cores for socket in hardware.on(0))  # rates are of one host, all hosts are alike
    have = (cpu_name(), cores, hardware.isas)
    of = (rates.cpu, rates.cores, rates.isas)
    if of == have:
        return None

    def words(values: tuple[str, int, tuple[str, ...]]) -> str:
        name, count, isas = values
        return f"{name}, {count} cores, {', '.join(isas)}"

    return words(of), words(have)


def rates_path(hardware: Hardware) -> Path:
    """Where mode=doctor stores this host's rates: one file per CPU, number of cores and instruction sets."""
    cores = sum(socket.cores for socket in hardware.on(0))
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    name = "".join(c if c.isalnum() else "-" for c in cpu_name().lower()).strip("-")
    key = sha256(" ".join(hardware.isas).encode()).hexdigest()[:8]
    return Path(base) / "kt_ray" / f"rates-{name}-{cores}-{key}.json"


def write_rates(rates: Rates, path: Path) -> None:
    """Write `rates` as JSON, whole or not at all.

    Raises:
        UserError: the directory cannot be made or written.
    """
    values = {"version": VERSION, **dataclasses.asdict(rates)}
    with storing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(values, indent=1, ensure_ascii=False) + "\n")


@contextlib.contextmanager
def storing(path: Path) -> Iterator[None]:
    """The block writes `path`.

    Raises:
        UserError: it cannot.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            "the measured rates cannot be stored", where=str(path), observed=error.strerror or error,
            required="a directory that can be written",
            remedy="set plan.rates to a file elsewhere, or XDG_CACHE_HOME to another directory",
        ) from None  # fmt: skip


def read_rates(path: str | Path) -> Rates:
    """Rates from a JSON file that `write_rates` wrote.

    Raises:
        UserError: missing, no JSON, another version, or a figure is missing, no number or not above 0.
    """
    file = Path(path).expanduser()
    if not file.exists():
        remedy = "put it beside the hardware file that names it, measure it with mode=doctor, or set "
        raise UserError(
            "the rates file does not exist", where=str(file),
            required="a JSON file of mode=doctor", remedy=f"{remedy}plan.rates=nominal",
        )  # fmt: skip
    data = read_json(file, "the rates file", _REMEDY)
    version = data.get("version")
    if version != VERSION:
        raise _fault(file, "the rates file is of another version", version, VERSION)
    return typing.cast(Rates, _decode(Rates, {k: v for k, v in data.items() if k != "version"}, "", file))


def _decode(kind: Any, value: Any, key: str, file: Path) -> Any:
    """`value` as `kind`: a dataclass of rates, a tuple, a mapping, a number or a string."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)

    def expect(types_: Any, noun: str, required: str) -> None:
        if not isinstance(value, types_):
            raise _fault(file, f"{key or 'the file'} is no {noun}", value, required)

    if origin in (typing.Union, types.UnionType):  # X | None
        return None if value is None else _decode(arguments[0], value, key, file)
    if dataclasses.is_dataclass(kind):
        expect(Mapping, "mapping", "a mapping")
        hints = typing.get_type_hints(kind)
        unknown = next((name for name in value if name not in hints), None)
        if unknown is not None:
            raise _fault(file, f"{_join(key, unknown)} is unknown", unknown, ", ".join(hints))
        given = {name: _decode(hints[name], inner, _join(key, name), file) for name, inner in value.items()}
        for field in dataclasses.fields(kind):
            if field.name not in given and field.default is dataclasses.MISSING:
                raise _fault(file, f"{_join(key, field.name)} is missing", None, "a value")
        made: Any = typing.cast(Any, kind)(**given)
        _check(made, key, file)
        return made
    if origin is tuple:
        expect(list | tuple, "list", "a list")
        return tuple(_decode(arguments[0], entry, f"{key}[{i}]", file) for i, entry in enumerate(value))
    if origin is not None:  # Mapping[str, X]
        expect(Mapping, "mapping", "a mapping")
        return {str(n): _decode(arguments[1], inner, _join(key, n), file) for n, inner in value.items()}
    if kind is str:
        expect(str, "text", "text")
        return value
    number = not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value)
    if not number or value < 0 or (kind is int and value != int(value)):
        raise _fault(file, f"{key} is no number", value, "a whole number" if kind is int else "a number")
    return kind(value)


def _check(made: Any, key: str, file: Path) -> None:
    """What a type alone does not say: rates are above 0, curves ascend."""
    if isinstance(made, Figure) and not made.value > 0:
        raise _fault(file, f"{key} is not above 0", made.value, "a number above 0")
    if isinstance(made, Curve):
        if not made.at or len(made.at) != len(made.values) or list(made.at) != sorted(set(made.at)):
            raise _fault(file, f"{key} is no curve", made.at, "ascending sizes, one value for each")
        if min(made.values) <= 0 or made.at[0] <= 0:
            raise _fault(file, f"{key} is not above 0", min(*made.values, made.at[0]), "numbers above 0")


def _join(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)


def _fault(file: Path, what: str, observed: object, required: object) -> UserError:
    return UserError(what, where=str(file), observed=observed, required=required, remedy=_REMEDY)
