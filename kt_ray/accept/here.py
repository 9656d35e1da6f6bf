"""Section `here`: doctor's look at the machine, and what the other sections cannot do on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kt_ray.accept.items import FAIL, Claim, Found, Item, Task
from kt_ray.config.schema import Config
from kt_ray.doctor.check import Check
from kt_ray.hardware.machine import Hardware
from kt_ray.placement.render import gib


def item(
    config: Config, hardware: Hardware, others: Sequence[Item], examine: Callable[[Config], list[Check]]
) -> Item:
    """others: items of the other sections. examine: mode=doctor's checks."""

    def run(task: Task) -> Found:
        checks = examine(config)
        claims = [
            Claim(c.status, c.name, c.observed, c.remedy, "docs/troubleshooting.md")
            for c in checks
            # A GPU or AMX that is not there is no fault of the machine: the sections say what they left out.
            if c.status == FAIL
        ]
        rows = [("", "check", "found", "what to do"), *(tuple(map(str, check)) for check in checks)]
        parts = [("section", "item", "can run"), *((i.section, i.title, i.missing or "yes") for i in others)]
        return Found(claims, {"Machine": machine(hardware), "Checks": rows, "Sections": parts})

    return Item("here", "machine", "What is here", run)


def machine(hardware: Hardware) -> list[tuple[str, str]]:
    """The machine in lines, without its name."""
    return [
        ("", "found"),
        *((f"socket {s.node}", f"{s.cores} cores, {gib(s.memory_bytes)}") for s in hardware.sockets),
        *((f"GPU {g.index}", f"{g.name}, {gib(g.memory_bytes)}") for g in hardware.gpus),
        ("instruction sets", ", ".join(hardware.isas)),
    ]
