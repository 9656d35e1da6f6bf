"""rule.stages=auto with rule.replicas=auto: how many GPUs hold one copy of the model, and how many copies.

The stages of a replica take turns (kt_ray.placement.order): more of them give memory, not speed. Replicas
work side by side. So as many replicas as have something to do and fit, each over an equal part of the GPUs.
On the CPU a worker computes on one socket: as many replicas as there are sockets, of one stage each.
Pure functions.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from kt_ray.config.mapping import with_keys
from kt_ray.config.schema import Config, RuleConfig
from kt_ray.dims.model_dims import ModelDims
from kt_ray.hardware.machine import Hardware
from kt_ray.placement.devices import resolve_device
from kt_ray.placement.generation_memory import generates
from kt_ray.placement.plan_types import Plan
from kt_ray.placement.render import LAYOUT, counted, gib, layout_text


class Layout(NamedTuple):
    """hosts: with attention, each with as many of the replicas."""

    stages: int
    replicas: int
    hosts: int = 1


def layouts(dims: ModelDims, config: Config, hardware: Hardware) -> tuple[Layout, ...]:
    """Layouts to choose from, those on all hosts first, then most replicas first; empty where the rule or the
    hardware leaves no choice.

    Left out: a replica more than is needed for the fewest micro-batches in a row, which would shorten
    nothing (its GPUs hold layers instead), and on GPUs fewer replicas of as many stages, which need no less
    memory. On the CPU only training has a choice, and attention is on the driver's host.
    """
    rule, on_cpu = config.rule, resolve_device(config.rule, hardware) == "cpu"
    places = len(hardware.on(0)) if on_cpu else len(hardware.gpus)  # of a host
    asked = rule.attention_hosts
    asked = "all" if asked == "auto" and rule.experts.copy_count > 1 else asked
    nodes = 1 if config.cluster.name == "local" or on_cpu else rule.nodes
    if not layout_is_auto(rule) or places * nodes < 2 or (on_cpu and (asked == "all" or generates(config))):
        return ()
    micro = _micro_batches(config)
    found: list[Layout] = []
    for hosts in sorted({nodes if asked != "driver" else 1, nodes if asked == "all" else 1}, reverse=True):
        stages = 0  # of the layout before
        for own in range(places, 0, -1):  # replicas of a host
            fewer = math.ceil(micro / ((own - 1) * hosts)) if own > 1 else micro + 1
            more = 1 if on_cpu else min(places // own, len(dims.cuts) + 1)
            shortens = own * hosts <= micro and math.ceil(micro / (own * hosts)) < fewer
            if shortens and (on_cpu or more > stages):
                found.append(Layout(more, own * hosts, hosts))
                stages = more
    return tuple(found)


def layout_is_auto(rule: RuleConfig) -> bool:
    """Whether the rule leaves stages and replicas open."""
    return rule.stages == "auto" and rule.replicas == "auto" and not rule.layers


def with_layout(config: Config, layout: Layout) -> Config:
    """The configuration with these numbers set."""
    hosts = "all" if layout.hosts > 1 else "driver"
    keys = {"rule.stages": layout.stages, "rule.replicas": layout.replicas, "rule.attention_hosts": hosts}
    return with_keys(config, keys)


def layout_of(plan: Plan) -> Layout:
    """The layout of a plan."""
    return Layout(plan.stages, plan.replicas, plan.attention_hosts)


def choose_layout(config: Config, choices: tuple[Layout, ...], plan_of: Callable[[Layout], Plan]) -> Plan:
    """The plan of the first layout that fits, with a note that says why; of the last where none does, which
    needs the least of each GPU.

    Args:
        choices: of `layouts`, not empty.
        plan_of: plans one of them.
    """
    reason = ""
    for layout in choices:
        plan = plan_of(layout)
        if plan.fits:
            return _noted(plan, reason or _first_reason(config, plan))
        worst = max(plan.budgets, key=lambda b: b.total - b.capacity if not b.fits else 0)
        reason = f"{layout_text(*layout)} would lack {gib(worst.total - worst.capacity)} on {worst.device}"
    place = "socket" if _on_cpu(plan) else "GPU"
    return _noted(plan, f"nothing fits, and this needs the least of each {place}")


def _noted(plan: Plan, reason: str) -> Plan:
    text = f"{LAYOUT}: {layout_text(*layout_of(plan))}; {reason}"
    return replace(plan, notes=(text, *plan.notes))


def _micro_batches(config: Config) -> int:
    """Micro-batches of a step, all replicas; at auto each row could be one. Answers have no such end, but for
    those of plans that also have passes of training (mode=eval, which measures losses too)."""
    if generates(config):
        return sys.maxsize
    size = config.trainer.micro_batch_size
    return math.ceil(config.trainer.batch_size / (size if isinstance(size, int) else 1))


def _first_reason(config: Config, plan: Plan) -> str:
    places = len(plan.hardware.on(0) if _on_cpu(plan) else plan.hardware.gpus)
    if plan.replicas < places * plan.attention_hosts:
        batches = counted(_micro_batches(config), "micro-batch")
        return (
            f"more replicas would not shorten a step of {batches} (trainer.batch_size over micro_batch_size)"
        )
    if _on_cpu(plan):
        return "a replica for each socket, whose cores alone it uses"
    return "a whole replica fits each GPU; replicas work side by side, stages take turns"


def _on_cpu(plan: Plan) -> bool:
    return plan.workers[0].device == "cpu"
