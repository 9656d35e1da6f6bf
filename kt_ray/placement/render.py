"""A plan as plain values (plan.json) and as rows of text (the tables of mode=plan)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from kt_ray.hardware.machine import socket_name
from kt_ray.placement.memory import GIB, ITEMS, held_format, home_socket
from kt_ray.placement.plan_types import (
    Budget,
    Choice,
    ExpertActorPlan,
    HoldsExperts,
    LanePlan,
    Plan,
    WorkerPlan,
)
from kt_ray.placement.traffic import traffic_dict


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values; bytes are integers, ranges of layers half-open."""
    dims = plan.dims
    sizes = (
        *("name", "model_type", "total_params", "routed_params", "num_layers", "moe_layers", "hidden_size"),
        *("vocab_size", "num_experts", "experts_per_token", "expert_intermediate", "expert_format"),
    )
    model = {key: getattr(dims, key) for key in sizes}
    facts = (
        *("stages", "replicas", "attention_hosts", "copies", "groups", "micro_batch_rows"),
        *("micro_batch_tokens", "wave", "activations"),
        *("head_ranges", "attention_output", "resident", "overlap", "tokens_per_step", "tuning", "stream_to"),
    )
    return {
        "rule": plan.rule,
        "model": _lists({**model, "dtype": plan.dtype, "refusal": dims.refusal}),
        "hardware": _lists(dataclasses.asdict(plan.hardware)),
        **{key: getattr(plan, key) for key in facts},
        "transport": plan.transport._asdict(),
        "traffic": traffic_dict(plan),
        "workers": [_worker(worker) for worker in plan.workers],
        "experts": [_actor(actor) for actor in plan.experts],
        "expected_load": dataclasses.asdict(plan.expected_load) if plan.expected_load else None,
        "memory": [
            {
                "device": budget.device,
                "items": dict(budget.items),
                "total": budget.total,
                "capacity": budget.capacity,
                "fits": budget.fits,
            }
            for budget in plan.budgets
        ],
        "fits": plan.fits,
        "compared": [choice._asdict() for choice in plan.compared],
        "notes": list(plan.notes),
    }


def _worker(worker: WorkerPlan) -> dict[str, Any]:
    values: dict[str, Any] = _lists(dataclasses.asdict(worker))
    _lane_values(values)
    return values


def _lane_values(values: dict[str, Any]) -> None:
    """Leave out a lane that there is not, and of one that there is what is found when actors start."""
    if values["lane"] is None:
        del values["lane"]
    else:
        del values["lane"]["visible"], values["lane"]["named"]


def _actor(actor: ExpertActorPlan) -> dict[str, Any]:
    """As values; experts that differ from layer to layer in one line per layer, as ranges of ids."""
    values: dict[str, Any] = _lists(dataclasses.asdict(actor))
    del values["by_layer"]
    _lane_values(values)
    if actor.lane is not None:
        values["lane"]["resident"] = {str(layer): id_ranges(ids) for layer, ids in actor.lane.resident}
    if actor.by_layer:
        values["by_layer"] = {str(layer): id_ranges(ids) for layer, ids in actor.by_layer}
    return values


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lists(inner) for key, inner in value.items()}
    return [_lists(inner) for inner in value] if isinstance(value, list | tuple) else value


LAYOUT = "rule.stages=auto, rule.replicas=auto"  # how the note of kt_ray.placement.layout begins


def layout_line(plan: Plan) -> str:
    """How many of what there are."""
    return (
        f"{plan.rule}: {counted(plan.stages, 'stage')}, {counted(plan.replicas, 'replica')}, "
        f"{counted(len(plan.experts), 'expert actor')}, "
        + (f"{plan.copies} copies of the experts, " if plan.copies > 1 else "")
        + f"{counted(plan.groups, 'group')} in flight"
    )


def gib(size: float) -> str:
    """Bytes as text: GiB, or MiB below a tenth of a GiB."""
    if size >= 100 * GIB:
        return f"{size / GIB:,.0f} GiB"
    return f"{size / GIB:.2f} GiB" if size >= 0.1 * GIB else f"{size / (1 << 20):.1f} MiB"


def cpu_ranges(cpus: Sequence[int]) -> str:
    """CPU numbers in the kernel's notation: "0-3,8-11"."""
    return id_ranges(cpus) or "any"


def id_ranges(ids: Sequence[int]) -> str:
    """Numbers as runs: "0-3,8-11"."""
    runs = []
    for _, run in groupby(enumerate(sorted(ids)), lambda pair: pair[1] - pair[0]):
        numbers = [number for _, number in run]
        runs.append(f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0]))
    return ",".join(runs)


def billions(count: int) -> str:
    """A number of parameters as text: 671.03 B, 2.61 M."""
    return f"{count / 1e9:.2f} B" if count >= 1e8 else f"{count / 1e6:.2f} M"


def worker_row(plan: Plan, worker: WorkerPlan) -> tuple[str, ...]:
    """Rank, replica, stage, device and host, layers (those streamed), MoE layers, threads, CPUs, lane."""
    start, stop = worker.layers
    moe = sum(1 for layer in range(start, stop) if layer in plan.dims.moe_layers)
    away = len(worker.streamed)
    return (
        str(worker.rank),
        str(worker.replica),
        str(worker.stage),
        worker.place,
        f"{start}-{stop - 1} ({stop - start}{f', {away} streamed' if away else ''})",
        str(moe),
        str(worker.threads),
        cpu_ranges(worker.cpus),
        _lane(worker.lane),
    )


def expert_row(plan: Plan, actor: ExpertActorPlan) -> tuple[str, ...]:
    """Rank, NUMA node, experts per layer, threads, CPUs, backend, ISA, kept for backward, lane."""
    best = plan.hardware.auto_isa
    return (
        str(actor.rank),
        str(actor.node) if plan.hardware.hosts == 1 else f"{actor.node} of host {actor.host}",
        f"{'by load' if actor.by_layer else id_ranges(actor.experts)} ({experts_per_layer(plan, actor)})",
        str(actor.threads),
        cpu_ranges(actor.cpus),
        actor.backend,
        f"auto ({best})" if actor.isa == "auto" else actor.isa,
        actor.activations,
        _lane(actor.lane),
    )


def _lane(lane: LanePlan | None) -> str:
    """What a GPU computes: its device, experts that stay there per layer at most, share that is streamed."""
    if lane is None:
        return "-"
    stays = max((len(ids) for _, ids in lane.resident), default=0)
    parts = [f"{stays} stay"] if stays else []
    if lane.streams:
        parts.append(f"{max(share for _, share in (*lane.shares, *lane.later)):.0%} streamed")
    parts += [f"{lane.held} held"] if lane.held else []
    parts += [f"{lane.ahead} ahead"] if lane.ahead else []
    return f"{' '.join(lane.devices)}: {', '.join(parts)}"


def experts_per_layer(plan: Plan, actor: HoldsExperts) -> str:
    """Number of experts of a MoE layer that an actor holds: "32", or "31-32" where layers differ."""
    counts = actor.counts(plan.dims.moe_layers)
    return f"{min(counts)}-{max(counts)}" if min(counts) < max(counts) else str(max(counts))


def memory_table(plan: Plan) -> tuple[list[str], list[list[str]]]:
    """Header and rows: one column per device, one row per item, then sum, capacity, share and verdict.

    Devices of other hosts than the driver's that are filled alike have one column.
    """
    alike: dict[tuple[object, ...], list[Budget]] = {}
    for budget in plan.budgets:
        own = budget.device.partition(f"host {budget.host} ")[2] if budget.host else budget.device
        alike.setdefault((own, budget.host > 0, *budget.items.items(), budget.capacity), []).append(budget)
    shown = [budgets[0] for budgets in alike.values()]
    header = ["", *(_column(str(key[0]), budgets) for key, budgets in alike.items())]
    sizes = [budget.items for budget in shown]
    rows = [
        ["layers", *(_layers_on(plan, budget.device) for budget in shown)],
        ["experts per layer", *(_experts_on(plan, budget.device) for budget in shown)],
    ]
    rows += [
        [
            f"experts ({held_format(plan.dims, plan.experts[0].backend)})" if item == "experts" else item,
            *(gib(s[item]) if item in s else "-" for s in sizes),
        ]
        for item in ITEMS
        if any(item in s for s in sizes)
    ]
    rows.append(["sum", *(gib(b.total) for b in shown)])
    rows.append(["capacity", *(gib(b.capacity) if b.capacity else "unknown" for b in shown)])
    rows.append(["used", *(f"{100 * b.total / b.capacity:.0f} %" if b.capacity else "-" for b in shown)])
    rows.append(["", *("fits" if b.fits else "too much" for b in shown)])
    return header, rows


def _column(device: str, budgets: Sequence[Budget]) -> str:
    hosts = id_ranges([budget.host for budget in budgets])
    return f"hosts {hosts} {device}" if len(budgets) > 1 else budgets[0].device


def _layers_on(plan: Plan, device: str) -> str:
    """Ranges of layers of the workers whose weights lie on `device`."""
    texts = []
    for worker in plan.workers:
        place = home_socket(worker, plan.hardware) if worker.device == "cpu" else worker.place
        if place == device:
            texts.append(f"{worker.layers[0]}-{worker.layers[1] - 1}")
    return " + ".join(texts) or "-"


def _experts_on(plan: Plan, device: str) -> str:
    layers = plan.dims.moe_layers
    count = sum(
        max(a.counts(layers)) for a in plan.experts if socket_name(plan.hardware, a.host, a.node) == device
    )
    return str(count) if count else "-"


def layout_text(stages: int, replicas: int, hosts: int = 1) -> str:
    """ "2 stages x 1 replica", with attention on several hosts "1 stage x 4 replicas on 2 hosts"."""
    text = f"{counted(stages, 'stage')} x {counted(replicas, 'replica')}"
    return f"{text} on {hosts} hosts" if hosts > 1 else text


def choice_text(choice: Choice) -> str:
    """ "2 stages x 1 replica, 2 groups, waves of 16 micro-batches, retain"."""
    layout = layout_text(choice.stages, choice.replicas, choice.hosts)
    groups = counted(choice.groups, "group")
    of_attention = {"group": "", "retain": ", layers retained"}
    held = choice.activations + of_attention.get(choice.attention, f", {choice.attention}")
    held += f" of heads: {choice.ranges}" if choice.ranges else ""
    held += "" if choice.output == "retain" else ", attention output recomputed"
    groups += f", {choice.copies} copies of the experts" if choice.copies > 1 else ""
    held += "" if choice.resident is None else f", {counted(choice.resident, 'layer')} resident"
    held += ", experts streamed to attention workers" if choice.stream_to == "workers" else ""
    again = {None: "", True: ", experts on the GPU recomputed", False: ", experts on the GPU retained"}
    held += again[choice.tuning.recompute]
    held += _tuning_text(choice.tuning.speed)
    tokens = "" if choice.micro_batch_tokens is None else f" of {choice.micro_batch_tokens} tokens"
    return f"{layout}, {groups}, waves of {counted(choice.wave, 'micro-batch')}{tokens}, {held}"


def _tuning_text(speed: float) -> str:
    """Of what is streamed; the plan of a rule that streams nothing has no rates that are tuned."""
    if speed == 0:
        return ", nothing streamed"
    return "" if speed == 1 else f", streamed as by GPUs {speed:g} times as fast"


def counted(number: int, noun: str) -> str:
    """ "1 stage", "2 stages"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('ch') else 's'}"
