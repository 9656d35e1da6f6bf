"""Who shares cores with whom in a simulated step, and the waves that rows are cut into. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from kt_ray.config.schema import Config
from kt_ray.hardware.machine import Socket, socket_name
from kt_ray.placement.memory import home_socket
from kt_ray.placement.plan_types import ExpertActorPlan, Plan, WorkerPlan
from kt_ray.timing.event_loop import Seat
from kt_ray.timing.simulate import ExpertClass, Group, Machine, Micro, WaveShape


def machine_of(plan: Plan) -> Machine:
    """Seats of a plan's actors, those that share cores on the same resource.

    Attention is on host 0: then expert actors of other hosts are far, and those that hold as much are one
    class. Or it is on all hosts, which are alike: then host 0 stands for all of them.
    """
    hardware, hosts, copies = plan.hardware, plan.attention_hosts // plan.copies, plan.copies
    # With cluster=local one host has all copies of the experts, each a part of its cores.
    sharing = 1 if hosts else copies
    capacity = {_name(plan, s): s.cores / sharing for s in hardware.sockets}

    def seat(worker: WorkerPlan) -> Seat:
        if worker.device != "cpu":
            return Seat(worker.place)
        socket = home_socket(worker, hardware)
        return Seat(socket, min(float(worker.threads), capacity[socket]))

    own = plan.replicas_of(0)
    workers = tuple(seat(worker) for worker in plan.workers if worker.host == 0 and worker.replica in own)
    if hosts > 1:
        return Machine(capacity, workers, _alike(plan, capacity, hosts), hosts, copies)
    places = [(actor.host, actor.node) for actor in plan.first_copy]
    classes: dict[tuple[object, ...], list[int]] = {}
    for i, (actor, place) in enumerate(zip(plan.first_copy, places, strict=True)):
        # Actors of other hosts that are alike do the same work at the same time: one stands for all of them.
        counts, beside = actor.counts(plan.dims.moe_layers), places[:i].count(place)
        node = actor.node if places.count(place) > 1 else -1
        key = (beside, node, actor.threads, counts, actor.isa) if actor.host else (actor.rank,)
        classes.setdefault(key, []).append(actor.rank)
    experts = []
    for ranks in classes.values():
        first = plan.experts[ranks[0]]
        name = _name(plan, first)
        width = min(float(first.threads), capacity[name])
        experts.append(ExpertClass(tuple(ranks), Seat(name, width), first.host > 0))
    return Machine(capacity, workers, tuple(experts), copies=copies)


def _alike(plan: Plan, capacity: dict[str, float], hosts: int) -> tuple[ExpertClass, ...]:
    """Expert actors of host 0, each with those in the same place of the copy's other hosts. The one with most
    experts gives a class its durations."""
    classes: dict[int, list[ExpertActorPlan]] = {}
    for host in range(hosts):
        for place, actor in enumerate(a for a in plan.experts if a.host == host):
            classes.setdefault(place, []).append(actor)
    experts = []
    for actors in classes.values():
        name = _name(plan, actors[0])
        fullest = max(actors, key=lambda actor: max(actor.counts(plan.dims.moe_layers)))
        others = tuple(actor.rank for actor in actors if actor is not fullest)
        width = min(float(fullest.threads), capacity[name])
        experts.append(ExpertClass((fullest.rank,), Seat(name, width), others=others))
    return tuple(experts)


def _name(plan: Plan, place: Socket | ExpertActorPlan) -> str:
    return socket_name(plan.hardware, place.host, place.node)


def even_waves(plan: Plan, config: Config, row: int) -> tuple[WaveShape, ...]:
    """The waves of a step of rows of `row` tokens each, all trained, as kt_ray.data.batches cuts them."""
    unit = config.rows_per_unit
    lengths = [(row, row)] * unit * config.trainer.batch_size
    return waves_of_rows(lengths, unit * plan.micro_batch_rows, plan.replicas, plan.groups, plan.wave)


def waves_of_rows(
    rows: Sequence[tuple[int, int]], micro_batch_size: int, replicas: int, groups: int, largest: int
) -> tuple[WaveShape, ...]:
    """Rows as (tokens, trained tokens), in order, cut as `kt_ray.data.batches.step_waves` cuts them: into
    waves of at most `largest` micro-batches of a replica."""
    micro = math.ceil(math.ceil(len(rows) / micro_batch_size) / replicas)
    waves = max(1, math.ceil(micro / max(1, largest)))
    count = math.ceil(micro / waves) * micro_batch_size * replicas
    return tuple(
        _wave(rows[i : i + count], micro_batch_size, replicas, groups) for i in range(0, len(rows), count)
    )


def _wave(rows: Sequence[tuple[int, int]], size: int, replicas: int, groups: int) -> WaveShape:
    parts = [rows[i : i + size] for i in range(0, len(rows), size)]
    micro = [
        Micro(len(p), max(t for t, _ in p), sum(t for t, _ in p), sum(trained for _, trained in p))
        for p in parts
    ]

    def cut(own: Sequence[Micro]) -> tuple[Group, ...]:
        """Groups whose sizes differ by one at most, larger ones first."""
        small, larger = divmod(len(own), groups)
        starts = [group * small + min(group, larger) for group in range(groups + 1)]
        return tuple(tuple(own[start:stop]) for start, stop in pairwise(starts))

    return tuple(cut(micro[replica::replicas]) for replica in range(replicas))
