"""rule.stages=auto with rule.replicas=auto: how many GPUs hold one copy of the model, and how many copies.

The stages of a replica take turns (kt_ray.placement.order): more of them give memory, not speed. Replicas
work side by side. So as many replicas as have something to do and fit, each over an equal part of the GPUs.
Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from kt_ray.config.schema import Config
from kt_ray.dims.model_dims import ModelDims
from kt_ray.hardware.machine import Hardware
from kt_ray.placement.devices import resolve_device
from kt_ray.placement.plan_types import Plan
from kt_ray.placement.render import LAYOUT, counted, gib
from kt_ray.placement.wave import ENOUGH_ROWS, micro_batches, rows_per_call, waves_of

Layout = tuple[int, int]  # stages, replicas


def layouts(dims: ModelDims, config: Config, hardware: Hardware) -> tuple[Layout, ...]:
    """Layouts to choose from, most replicas first; empty where the rule or the hardware leaves no choice.

    Left out: a replica more than is needed for the fewest micro-batches in a row, which would shorten
    nothing (its GPUs hold layers instead), and fewer replicas of as many stages, which need no less memory.
    """
    rule, gpus = config.rule, len(hardware.gpus)
    named = rule.stages != "auto" or rule.replicas != "auto" or rule.layers
    if named or gpus < 2 or resolve_device(rule, hardware) == "cpu":
        return ()
    micro = _micro_batches(config)
    counts = [r for r in range(min(gpus, micro), 0, -1) if math.ceil(micro / math.ceil(micro / r)) == r]
    found: dict[int, int] = {}  # stages -> most replicas
    for replicas in counts:
        found.setdefault(min(gpus // replicas, dims.num_layers), replicas)
    return tuple(found.items())


def with_layout(config: Config, layout: Layout) -> Config:
    """The configuration with both numbers set."""
    return replace(config, rule=replace(config.rule, stages=layout[0], replicas=layout[1]))


def choose_layout(config: Config, choices: tuple[Layout, ...], plan_of: Callable[[Layout], Plan]) -> Plan:
    """The plan of the first layout that fits without starving the experts, with a note that says why.

    Experts are starved where memory forces waves so small that reading an expert's weights takes longer than
    multiplying (ENOUGH_ROWS): of layouts that all do so, the one with most rows per call. Where nothing fits
    the last one: it needs the least of each GPU.

    Args:
        choices: of `layouts`, not empty.
        plan_of: plans one of them.
    """
    fitting: list[tuple[float, Layout, Plan]] = []
    passed: list[str] = []  # why each layout before the chosen one is not taken
    for layout in choices:
        plan = plan_of(layout)
        if not plan.fits:
            passed.append(f"{_text(layout)} would lack {_shortage(plan)}")
            continue
        set_so = with_layout(config, layout)
        rows = rows_per_call(plan.dims, set_so, plan.wave)
        waves = waves_of(micro_batches(set_so), plan.wave)
        if config.rule.wave != "auto" or waves == 1 or rows >= ENOUGH_ROWS:
            return _noted(plan, layout, passed[-1] if passed else _first_reason(config, plan, layout))
        passed.append(f"{_text(layout)} would need {waves} waves: {rows:.0f} rows per expert and call")
        fitting.append((rows, layout, plan))
    if fitting:
        rows, layout, plan = max(fitting, key=lambda found: found[0])
        return _noted(
            plan,
            layout,
            f"memory forces small waves, and this one gives an expert most: {rows:.0f} rows per call",
        )
    return _noted(plan, layout, "nothing fits, and this needs the least of each GPU")


def _micro_batches(config: Config) -> int:
    """Micro-batches of a step, all replicas."""
    return math.ceil(config.trainer.batch_size / config.trainer.micro_batch_size)


def _first_reason(config: Config, plan: Plan, layout: Layout) -> str:
    micro = _micro_batches(config)
    if layout[1] < len(plan.hardware.gpus):
        batches = "1 micro-batch" if micro == 1 else f"{micro} micro-batches"
        return (
            f"more replicas would not shorten a step of {batches} (trainer.batch_size over micro_batch_size)"
        )
    return "a whole replica fits each GPU; replicas work side by side, stages take turns"


def _shortage(plan: Plan) -> str:
    worst = max((b for b in plan.budgets if not b.fits), key=lambda b: b.total - b.capacity)
    return f"{gib(worst.total - worst.capacity)} on {worst.device}"


def _text(layout: Layout) -> str:
    return f"{counted(layout[0], 'stage')} x {counted(layout[1], 'replica')}"


def _noted(plan: Plan, layout: Layout, reason: str) -> Plan:
    return replace(plan, notes=(f"{LAYOUT}: {_text(layout)}; {reason}", *plan.notes))
