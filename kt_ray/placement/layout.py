"""rule.stages=auto with rule.replicas=auto: how many GPUs hold one copy of the model, and how many copies.

The stages of a replica take turns (kt_ray.placement.order): more of them give memory, not speed. Replicas
work side by side. So as many replicas as have something to do and fit, each over an equal part of the GPUs.
Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from kt_ray.config.mapping import with_keys
from kt_ray.config.schema import Config, RuleConfig
from kt_ray.dims.model_dims import ModelDims
from kt_ray.hardware.machine import Hardware
from kt_ray.placement.devices import resolve_device
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
    nothing (its GPUs hold layers instead), and fewer replicas of as many stages, which need no less memory.
    """
    rule, gpus = config.rule, len(hardware.gpus)
    asked = rule.attention_hosts
    asked = "all" if asked == "auto" and rule.experts.copy_count > 1 else asked
    nodes = 1 if config.cluster.name == "local" else rule.nodes
    if not layout_is_auto(rule) or gpus * nodes < 2 or resolve_device(rule, hardware) == "cpu":
        return ()
    micro = _micro_batches(config)
    found = []
    for hosts in sorted({nodes if asked != "driver" else 1, nodes if asked == "all" else 1}, reverse=True):
        most: dict[int, int] = {}  # stages -> most replicas of a host
        for own in range(gpus, 0, -1):
            fewer = math.ceil(micro / ((own - 1) * hosts)) if own > 1 else micro + 1
            if own * hosts <= micro and math.ceil(micro / (own * hosts)) < fewer:
                most.setdefault(min(gpus // own, dims.num_layers), own)
        found += [Layout(stages, own * hosts, hosts) for stages, own in most.items()]
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
    return _noted(plan, "nothing fits, and this needs the least of each GPU")


def _noted(plan: Plan, reason: str) -> Plan:
    text = f"{LAYOUT}: {layout_text(*layout_of(plan))}; {reason}"
    return replace(plan, notes=(text, *plan.notes))


def _micro_batches(config: Config) -> int:
    """Micro-batches of a step, all replicas; at auto each row could be one."""
    size = config.trainer.micro_batch_size
    return math.ceil(config.trainer.batch_size / (size if isinstance(size, int) else 1))


def _first_reason(config: Config, plan: Plan) -> str:
    if plan.replicas < len(plan.hardware.gpus) * plan.attention_hosts:
        batches = counted(_micro_batches(config), "micro-batch")
        return (
            f"more replicas would not shorten a step of {batches} (trainer.batch_size over micro_batch_size)"
        )
    return "a whole replica fits each GPU; replicas work side by side, stages take turns"
