"""hardware.yaml: of this host by mode=doctor, or of answers to plan.hardware=wizard."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from kt_ray.disk import write_atomic
from kt_ray.errors import UserError
from kt_ray.hardware.machine import Hardware
from kt_ray.hardware.parts import CPUS, CUDA_GIVES, GPUS, cpu_named, gpu_named

FILE = Path("hardware.yaml")  # in the current directory
OF_DOCTOR = "# This host, written by mode=doctor"
_GIB = 1 << 30
_NO_CARD = ("none", "no", "n", "0", "-")
_ISAS = {
    "amx": "Xeon of 2023 and later",
    "avx512_bf16": "EPYC 9004, Ryzen 7000 and later",
    "avx512": "Xeon of 2017 to 2021",
    "avx2": "the others",
}


def ask(host: Hardware, cpu: str) -> dict[str, Any]:
    """The content of the file by six questions on the terminal (two more for an unknown CPU), with this
    host's parts as suggestions.

    Args:
        host: this host; cpu: the name of its CPU.

    Raises:
        UserError: standard input is no terminal, or ends; the file exists.
    """
    if FILE.exists():
        raise UserError(
            f"{FILE} exists",
            where=str(FILE.absolute()),
            remedy=f"set plan.hardware={FILE} to plan for it, or move it away to answer again",
        )
    if not sys.stdin.isatty():
        raise UserError(
            "plan.hardware=wizard asks questions, but standard input is no terminal",
            required="a terminal, or a host by its parts",
            remedy="set plan.hardware=2x4090_2x9654_1024gb (your parts), or a file as in conf/hardware/",
        )
    try:
        return answers(host, cpu)
    except EOFError:
        raise UserError("the questions were not answered", remedy="run the same command again") from None


def keep(data: Mapping[str, Any]) -> None:
    """Write what `ask` was answered, once it is known to describe a host. Raises OSError."""
    write_hardware("# Written by plan.hardware=wizard", data)
    print(f"written to {FILE}: the next time, plan.hardware={FILE}")


def answers(host: Hardware, cpu: str) -> dict[str, Any]:
    """The content of the file."""
    data: dict[str, Any] = {}
    card = _text(
        f"GPU model ({', '.join(GPUS)}, another, or none)", host.gpus[0].name if host.gpus else "none"
    )
    if card.lower() not in _NO_CARD:
        count = _number("How many of them", len(host.gpus) or 1)
        sheet = gpu_named(card)
        gib = sheet.gib if sheet else 24 * CUDA_GIVES
        if host.gpus and card == host.gpus[0].name:
            gib = round(host.gpus[0].memory_bytes / _GIB, 2)
        usual = round(gib / CUDA_GIVES)
        sold = _number("GB of memory on each card", usual)
        given = gib if sold == usual else sold * CUDA_GIVES
        data["gpus"] = [{"count": count, "name": card, "memory_gib": round(given, 2)}]
    model = _text(f"CPU model ({', '.join(CPUS)}, or another)", cpu)
    sockets = _number("How many of them (sockets)", len(host.sockets))
    known = cpu_named(model)
    socket: dict[str, Any] = {"count": sockets, "cpu": known.name if known else model}
    if known is None:
        socket["cores"] = _number("Physical cores of each", host.sockets[0].cores)
        isas = "; ".join(f"{isa}: {which}" for isa, which in _ISAS.items())
        data["isa"] = _text(f"Its best instruction set ({isas})", host.best_isa, tuple(_ISAS))
    memory = round(sum(s.memory_bytes for s in host.sockets) / _GIB)
    total = _number("GB of memory in the host, all sockets together", max(1, memory))
    data["sockets"] = [{**socket, "memory_gib": total / sockets}]
    return data


def _text(question: str, default: str, required: tuple[str, ...] = ()) -> str:
    while True:
        answer = input(f"{question} [{default}]: ").strip() or default
        if not required or answer in required:
            return answer
        print(f"one of {', '.join(required)}, please")


def _number(question: str, default: int) -> int:
    while True:
        answer = input(f"{question} [{default}]: ").strip() or str(default)
        if answer.isascii() and answer.isdigit() and int(answer) > 0:
            return int(answer)
        print("a whole number above 0, please")


def write_own(hardware: Hardware, cpu: str, rates: Path | None) -> str:
    """This host as a hardware file in the current directory; an older one of mode=doctor is replaced.

    Args:
        rates: the file of the rates that were measured; None = none were.

    Returns:
        What was done, for the user.
    """
    try:
        if FILE.exists() and not FILE.read_text(encoding="utf-8", errors="replace").startswith(OF_DOCTOR):
            return f"{FILE} was not written by mode=doctor: left as it is"
        data: dict[str, Any] = {
            "isa": hardware.best_isa,
            "sockets": [
                {"cores": s.cores, "memory_gib": round(s.memory_bytes / _GIB, 1)} for s in hardware.sockets
            ],
            "gpus": [
                {"name": gpu.name, "memory_gib": round(gpu.memory_bytes / _GIB, 2)} for gpu in hardware.gpus
            ],
        }
        if rates is not None:
            data["rates"] = str(rates)
        write_hardware(f"{OF_DOCTOR}: {cpu}. Replaced by the next mode=doctor; change a copy", data)
    except OSError as error:
        return f"{FILE} was not written: {error.strerror}"
    return f"this host is described in {FILE}: change a copy of it, and plan for it with plan.hardware=COPY"


def write_hardware(heading: str, data: Mapping[str, Any]) -> None:
    """Make FILE, which `hardware_from_file` reads. Raises OSError."""
    text = yaml.safe_dump(dict(data), sort_keys=False, default_flow_style=None, allow_unicode=True, width=200)
    write_atomic(FILE, f"{' '.join(heading.split())}. Plan for it: mode=plan plan.hardware={FILE}\n{text}")
