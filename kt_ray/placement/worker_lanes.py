"""Attention workers that compute streamed experts for their own tokens (rule.experts.stream_to=workers).

A worker copies experts of its host's actors to the GPU on which it computes anyway, for its own tokens, which
stay there. Legend as in memory.py; T_r and T_g of the worker's own replica. Bytes of a worker's lane:
    workspace         (its GPU) what an actor's lane takes there (lane_plan.py), and 8 T_g H for every group
                      but one: answers that wait, and dy of calls that do; places of carried experts that are
                      held, and of those copied ahead
    kept activations  (its socket) n layers * (T_r H s, x; 36 bytes per row; without `recompute` gates and
                      ups, twice, as torch rounds page-locked blocks up to powers of two); routing, T_r K 12
    staging           (its socket) adapters' gradients of three layers' carried experts, of every group
Expert actors of its host keep and compute what is left of its tokens (`Left`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from kt_ray.config.schema import Config, RuleConfig
from kt_ray.dims.model_dims import ModelDims
from kt_ray.errors import UserError
from kt_ray.hardware.machine import Hardware
from kt_ray.placement.expert_load import touched
from kt_ray.placement.lane_plan import (
    HELD_ROOM,
    LaneMemory,
    check_products,
    expert_sizes,
    lane_buffers,
    lane_devices,
    lane_shares,
)
from kt_ray.placement.lane_share import LaneRates, whole_experts
from kt_ray.placement.lora_sizes import expert_lora_params, lowest_kept
from kt_ray.placement.plan_types import ExpertActorPlan, LanePlan, WorkerPlan

Workers = tuple[WorkerPlan, ...]
# Experts that are copied while the layer before is computed, at the most: what a link brings meanwhile.
AHEAD = 96
GRADIENT_LAYERS = 3  # whose adapters' gradients are on their way at once


def streams_to_workers(rule: RuleConfig) -> bool:
    """Whether the rule has attention workers compute streamed experts."""
    return rule.experts.stream != "off" and rule.experts.stream_to == "workers"


def may_stream_to_workers(rule: RuleConfig) -> bool:
    """Whether workers might compute what is streamed, where the rule leaves it open."""
    asked = rule.experts
    open_to_both = asked.stream != "off" and asked.stream_to == "auto" and asked.lane_devices == ("auto",)
    return open_to_both and not asked.gpu_resident and rule.activations != "ranges"


def experts_near(worker: WorkerPlan, actors: Sequence[ExpertActorPlan]) -> tuple[ExpertActorPlan, ...]:
    """Those of the actors that compute a worker's tokens which are on its host: whose experts it can read.

    Args:
        actors: of the copy of the experts that has the worker's replica.
    """
    return tuple(actor for actor in actors if actor.host == worker.host)


def plan_worker_lanes(
    workers: Workers,
    actors: Sequence[ExpertActorPlan],
    dims: ModelDims,
    config: Config,
    hardware: Hardware,
    rates: LaneRates | None,
    replicas: int,
) -> tuple[Workers, list[str]]:
    """The workers with their lanes, and sentences for the plan's notes.

    Args:
        actors: of the first copy of the experts. rates: of one actor's lane, by which stream=auto decides;
            None = nothing was measured. replicas: on each host.

    Raises:
        UserError: experts that stay on GPUs, layers by ranges, or another device than the workers' own;
            as `check_products`.
    """
    _check(workers, config, hardware)
    check_products(config, dims, hardware, {worker.device for worker in workers})
    own = experts_near(workers[0], actors)
    units = -(-config.trainer.batch_size // config.rule.replica_count)
    tokens = units * config.rows_per_unit * config.data.max_length
    of_worker = None if rates is None else rates.of_worker(replicas)
    sizes = replace(expert_sizes(own, dims, config, together=True), answers=False)
    shares, said = lane_shares(sizes, tokens, config, of_worker, "to attention workers")
    if not shares.streams:
        return workers, said
    said.append("attention workers compute streamed experts for their own tokens")
    if len(own) < len(actors):
        said.append("attention workers stream experts of their own host; actors of others compute theirs")
    if any(worker.device == "cpu" for worker in workers):
        said.append("attention workers on the CPU stream experts for their numerics: a stand-in, not faster")
    # Every group's call carries as much: with more in later ones actors would have less to do in some groups
    # than in others, and all would wait for each other.
    shares = replace(shares, later=())
    return tuple(replace(w, lane=replace(shares, devices=(w.device,))) for w in workers), said


def _check(workers: Workers, config: Config, hardware: Hardware) -> None:
    asked, device = config.rule.experts, workers[0].device
    where = "rule.experts.stream_to=workers"
    if asked.gpu_resident:
        raise UserError(
            "attention workers compute streamed experts, none that stay on a GPU",
            where=where,
            observed=f"rule.experts.gpu_resident={asked.gpu_resident}",
            required="rule.experts.gpu_resident=0",
            remedy="set rule.experts.gpu_resident=0, or rule.experts.stream_to=actors",
        )
    if config.rule.activations == "ranges":
        raise UserError(
            "attention workers that go through a layer by ranges compute no streamed experts",
            where=where,
            observed="rule.activations=ranges",
            required="another rule.activations",
            remedy="set rule.experts.stream_to=actors, or rule.activations=auto",
        )
    own = "cpu" if device == "cpu" else "auto"
    if asked.lane_devices != (own,):
        if device == "cpu" and asked.lane_devices == ("auto",):
            lane_devices(config, hardware)  # where there is no GPU it says so
        raise UserError(
            "an attention worker computes streamed experts on its own device",
            where=f"{where}, rule.experts.lane_device={asked.lane_device}",
            observed=f"attention on {'the CPU' if device == 'cpu' else 'GPUs'}",
            required=f"rule.experts.lane_device={own}",
            remedy=f"set rule.experts.lane_device={own}, or rule.experts.stream_to=actors",
        )


def with_places(
    workers: Workers,
    actors: Sequence[ExpertActorPlan],
    dims: ModelDims,
    config: Config,
    groups: int,
    tokens: int,
    room: Mapping[str, float],
) -> Workers:
    """The workers with lanes that have as many places on their devices as the fullest one has room for.

    Of these up to half are for experts that are copied ahead; the others hold what a layer's groups share.

    Args:
        tokens: of a group's call. room: bytes by name of every GPU's budget that nothing else needs, of which
            a tenth stays free; a stand-in has room for all.
    """
    lanes = {worker: worker.lane for worker in workers if worker.lane is not None}
    if not lanes:
        return workers
    stored, sharing = dims.most_held_bytes(config.rule.experts.backend), Counter(w.place for w in lanes)
    most = max(whole_experts(lane.share(tokens), streamable(w, actors, dims)) for w, lane in lanes.items())
    places = 2 * most
    for worker in (worker for worker, lane in lanes.items() if lane.cuda):
        free = HELD_ROOM * room.get(worker.place, 0.0) / sharing[worker.place]
        places = min(places, max(0, int(free // stored)))
    ahead = min(AHEAD, most, places // 2)
    held = min(most if groups > 1 else ahead, places - ahead)
    return tuple(replace(w, lane=replace(lane, held=held, ahead=ahead)) for w, lane in lanes.items())


def streamable(worker: WorkerPlan, actors: Sequence[ExpertActorPlan], dims: ModelDims) -> int:
    """Experts of a layer that a worker may carry. actors: as for `experts_near`, of a copy."""
    counts = [actor.counts(dims.moe_layers) for actor in experts_near(worker, actors)]
    return min(dims.num_experts, max(map(sum, zip(*counts, strict=True)), default=0))


def left_part(lane: LanePlan, tokens: int) -> float:
    """Of the rows of a call of `tokens` tokens the largest part that is left to the actors: by it, or by a
    call of fewer, which carries less."""
    steps = ((0, 0.0), *lane.shares, (tokens + 1, 0.0))
    left = [min(tokens, above - 1) * (1 - share) for (_, share), (above, _) in pairwise(steps)]
    return min(1.0, max(left) / tokens) if tokens else 1.0


class Left(NamedTuple):
    """What attention workers leave to an expert actor: parts of the tokens that would come to it, and of
    their rows there; routing balanced, which is the worst: those with most rows are carried."""

    tokens: float = 1.0
    rows: float = 1.0


def left_of(worker: WorkerPlan, dims: ModelDims, tokens: int, hosts: int) -> Left:
    """What goes to expert actors of a worker's tokens and rows.

    Args:
        tokens: of a group's call of one replica. hosts: that divide the experts, of which it reaches one's.
    """
    if worker.lane is None:
        return Left()
    rows = 1 - (1 - left_part(worker.lane, tokens)) / hosts
    return Left(touched(dims.choices, rows * dims.num_experts, dims.experts_per_token), rows)


def left_to(
    actor: ExpertActorPlan, workers: Sequence[WorkerPlan], dims: ModelDims, tokens: int, hosts: int
) -> Left:
    """Of what comes to an actor; as `left_of`. hosts: with attention, of a copy of the experts."""
    near = next((worker for worker in workers if worker.host == actor.host), None)
    if near is None or near.lane is None:
        return Left()
    own = left_part(near.lane, tokens)  # other hosts' tokens come as ever
    return Left(1 - (1 - left_of(near, dims, tokens, hosts).tokens) / hosts, 1 - (1 - own) / hosts)


def gradient_staging(
    dims: ModelDims, config: Config, worker: WorkerPlan, actors: Sequence[ExpertActorPlan], groups: int
) -> int:
    """Bytes of a worker's messages with adapters' gradients, worst case."""
    if worker.lane is None:
        return 0
    most = max(share for _, share in worker.lane.shares)
    carried = whole_experts(most, streamable(worker, actors, dims))
    return GRADIENT_LAYERS * groups * carried * 4 * expert_lora_params(dims, config.lora)


def worker_lane_lines(
    dims: ModelDims, config: Config, worker: WorkerPlan, size: LaneMemory, experts: int
) -> Iterator[tuple[bool, str, float]]:
    """(whether in host memory, item, bytes) that a worker's lane adds.

    Args:
        size: group and total are the replica's. experts: `streamable`.
    """
    lane = worker.lane
    if lane is None:
        return
    width, element = dims.expert_width, 4 if size.float32 else 2
    lowest = lowest_kept(dims, config)
    own = sum(layer in dims.moe_layers and layer >= lowest for layer in range(*worker.layers))
    workspace = lane_buffers(dims, config, lane, size, experts)
    others = max(1, -(-size.total // max(1, size.group)) - 1)
    workspace += (lane.held + lane.ahead) * size.largest + 8 * others * size.group * width
    yield not lane.cuda, "workspace", workspace
    rows = lane.share(size.group) * size.slots * size.total
    kept = size.total * width * element + 36 * rows
    if not lane.recompute:
        kept += (2 if lane.cuda else 1) * rows * (2 if dims.gated else 1) * dims.expert_intermediate * element
    yield True, "kept activations", own * math.ceil(kept) + 12 * size.total * dims.experts_per_token
