"""How many micro-batches pass the layers together, and what the experts keep for backward: by memory.

A wave passes every layer, forward and backward, before the next begins; gradients add up over a step's
waves. Each pass over an expert's weights serves all tokens of a group, so a larger wave reads memory less
often; what is kept for backward grows with it. Pure functions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kt_ray.config.schema import Config
from kt_ray.dims.model_dims import ModelDims
from kt_ray.placement.activation_bytes import may_retain
from kt_ray.placement.plan_types import Budget, Held
from kt_ray.placement.range_memory import RANGE_TOKENS
from kt_ray.placement.render import gib

ROOM = 0.9  # of a socket's memory that a plan may fill by choice: the system and the page cache need some


BudgetOf = Callable[[int, Held], tuple[Budget, ...]]  # of waves of so many micro-batches of a replica


class Fit(NamedTuple):
    """wave: micro-batches of a replica per wave."""

    wave: int
    held: Held
    memory: tuple[Budget, ...]
    notes: tuple[str, ...]


def micro_batches(config: Config) -> int:
    """Micro-batches of the largest replica in a step."""
    rows = math.ceil(config.trainer.batch_size / config.rule.replica_count)
    return math.ceil(rows / config.micro_batch_rows(config.rule.replica_count))


def waves_of(micro: int, wave: int) -> int:
    """Waves of a step of `micro` micro-batches per replica."""
    return math.ceil(micro / wave)


def choose_groups(config: Config, wave: int) -> int:
    """Groups in flight: one where a wave is one micro-batch, else two, never more than micro-batches."""
    groups = config.rule.groups
    return min(groups if isinstance(groups, int) else 2, wave)


def fit(
    config: Config,
    budget_of: BudgetOf,
    attention: Sequence[str] = ("group",),
    outputs: Sequence[str] = ("recompute",),
    ranges: Sequence[int] = (),
) -> Fit:
    """The fewest waves that fit; at equal numbers of waves what holds most, which computes and copies least.

    What leaves a tenth of every socket free comes before what fits at all. Keys that are set leave only what
    they allow. When nothing fits: the least of all, so that the shortage that is reported is the true one.

    Args:
        attention, outputs, ranges: what attention workers may hold, and of how many ranges of heads, in the
            order in which it is preferred.
    """
    micro = micro_batches(config)
    asked, activations = config.rule.wave, config.rule.experts.activations
    experts = ("retain", "recompute") if activations == "auto" else (activations,)
    each = itertools.product(experts, outputs, attention)
    kinds = [
        Held(of_experts, of_attention, output, count)
        for of_experts, output, of_attention in each
        if of_attention != "retain" or output == outputs[0]  # which it holds anyway
        for count in (ranges if of_attention == "ranges" else (0,))
    ]
    largest = min(asked, micro) if isinstance(asked, int) else micro

    def fitted(size: int, kind: Held) -> Fit:
        notes = _notes(config, micro, size, kind, lambda kind: budget_of(largest, kind))
        return Fit(size, kind, budget_of(size, kind), notes)

    for room in (ROOM, 1.0):
        for kind in kinds:  # mostly the first
            if not _lacking(budget_of(largest, kind), room):
                return fitted(largest, kind)
        if isinstance(asked, int):
            continue
        sizes = {kind: _largest(budget_of, kind, micro, room) for kind in kinds}
        for kind in sorted(kinds, key=lambda kind: -sizes[kind]):  # stable: those preferred first
            if not _lacking(budget_of(sizes[kind], kind), room):
                return fitted(sizes[kind], kind)
    least = largest if isinstance(asked, int) else 1

    def shortage(kind: Held) -> int:
        return sum(max(0, b.total - b.capacity) for b in budget_of(least, kind) if b.capacity)

    kind = min(reversed(kinds), key=shortage)
    return fitted(least, kind)


def attention_kinds(
    config: Config, dims: ModelDims, device: str, resident: int | None = None
) -> tuple[str, ...]:
    """What attention workers may hold for backward, in the order in which it is preferred.

    On the CPU a recomputation takes the experts' cores, and host memory is what workers hold in anyway. A GPU
    mostly recomputes while experts work: there simulated steps decide (kt_ray/timing/choose.py). Where the
    hidden state has several streams, dy is known only once a layer is recomputed: one micro-batch at a time
    would compute all of it twice. resident: `make_plan`'s; graphs would hold the slots of the other layers.
    """
    asked = config.rule.activations
    if asked != "auto":
        return (asked,)
    if dims.hidden_streams > 1:
        return ("group",)
    if device != "cpu":
        return ("group", "micro_batch", "host")
    retain = ("retain",) if resident is None and may_retain(dims, gpu=False) else ()
    return (*retain, "group", "micro_batch")


def output_kinds(config: Config) -> tuple[str, ...]:
    """Whether attention's outputs may be kept, what is preferred first. DoRA needs more of a product than its
    output."""
    asked = config.rule.attention_output
    if asked != "auto":
        return (asked,)
    return ("recompute",) if config.lora.dora else ("retain", "recompute")


def _largest(budget_of: BudgetOf, kind: Held, micro: int, room: float) -> int:
    """Micro-batches per wave of the fewest waves that fit (1 where none does), where one wave of all does
    not; waves of a step are alike."""
    low, high = 1, micro - 1
    while low < high:
        middle = (low + high + 1) // 2
        if _lacking(budget_of(middle, kind), room):
            high = middle - 1
        else:
            low = middle
    return math.ceil(micro / waves_of(micro, low))


def _lacking(memory: Sequence[Budget], room: float) -> list[Budget]:
    """Devices that are too full; a GPU's capacity is without what a plan leaves free of it."""
    return [b for b in memory if b.capacity and b.total > (room if b.is_socket else 1.0) * b.capacity]


def _notes(
    config: Config, micro: int, wave: int, kind: Held, whole: Callable[[Held], Sequence[Budget]]
) -> tuple[str, ...]:
    """whole: the memory of a kind with the whole step, or rule.wave, as one wave."""
    rule, notes = config.rule, []

    def need(kind: Held) -> str:
        full = _lacking(whole(kind), ROOM)
        worst = max(full, key=lambda b: b.total / b.capacity, default=None)
        return (
            f"would need {gib(worst.total)} of the {gib(worst.capacity)} of {worst.device}" if worst else ""
        )

    if rule.experts.activations == "auto":
        retain = need(kind._replace(experts="retain")) if kind.experts == "recompute" else ""
        choice = f"recompute; retain {retain}" if retain else "retain, which fits"
        notes.append(f"rule.experts.activations=auto: {choice}")
    if kind.ranges:
        notes.append(
            f"rule.activations=ranges: attention goes by {kind.ranges} ranges of heads, all else by "
            f"{RANGE_TOKENS:,} tokens; what is as long as a row waits in host memory"
        )
    if rule.activations == "auto" and kind.attention not in ("group", "retain"):
        more = need(kind._replace(attention="group"))
        notes.append(f"rule.activations=auto: {kind.attention}; with group the whole step {more}")
    if isinstance(rule.wave, int) and rule.wave > micro:
        notes.append(f"rule.wave={rule.wave} lowered to {micro}, the micro-batches of a replica in a step")
    waves = waves_of(micro, wave)
    if waves > 1 and rule.wave == "auto":
        why = f"; the whole step {need(kind)}" if need(kind) else ""
        notes.append(f"rule.wave=auto: {waves} waves of {wave} of a replica's {micro} micro-batches{why}")
    if isinstance(rule.groups, int) and rule.groups > wave:
        lowered = f"rule.groups={rule.groups} lowered to {wave}"
        notes.append(f"{lowered}, the micro-batches of a replica in a wave")
    return tuple(notes)
