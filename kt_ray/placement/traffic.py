"""Bytes that travel in one training step, by who asks whom. Pure functions of the plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kt_ray.dims.weight_formats import ELEMENT_BYTES
from kt_ray.placement.expert_load import touched
from kt_ray.placement.plan_types import ExpertActorPlan, Plan

_FLOAT = 4  # dy, d(router weights) and router weights travel in float32
_ID = 4  # expert ids travel as int32
_KEY = 8  # dropout keys: sample and position


class Link(NamedTuple):
    """What one expert actor and the attention workers send each other for one layer in one step, in bytes.

    far: those on other hosts than the actor, or those on its own. tokens: expected number of theirs. Of the
    forward: x, ids, weights, keys there, y back; of the backward: dy there, dx and d(router weights) back.
    """

    layer: int
    actor: int
    far: bool
    tokens: float
    forward_there: float
    forward_back: float
    backward_there: float
    backward_back: float

    @property
    def bytes(self) -> float:
        return sum(self[4:])


class Traffic(NamedTuple):
    """Bytes of one training step of `Plan.tokens_per_step` tokens.

    experts: per MoE layer and expert actor. stages: hidden states and their gradients across each boundary
    between stages (all replicas), forward and backward together.
    """

    experts: tuple[Link, ...]
    stages: tuple[float, ...]

    def to_experts(self, *, far: bool) -> float:
        """Bytes between workers and expert actors on other nodes (far) or on their own, both directions."""
        return sum(link.bytes for link in self.experts if link.far == far)


def traffic(plan: Plan, far: Sequence[int] | None = None, tokens: float | None = None) -> Traffic:
    """Bytes that a training step moves between actors.

    Args:
        far: ranks of expert actors that share no worker's memory, so that only the tokens routed
            there travel, expected by balanced routing; None = as the plan puts them on nodes, or
            all where the rule forces another way than shared memory.
        tokens: of one step, all replicas; None = the plan's worst case.
    """
    dims = plan.dims
    count = float(plan.tokens_per_step if tokens is None else tokens)
    parts = {a.rank: far_part(plan, a) if far is None else float(a.rank in far) for a in plan.experts}
    k, width = dims.experts_per_token, dims.expert_width
    x_bytes = 4 if plan.dtype == "float32" else 2
    links = []
    for layer in dims.moe_layers:
        for actor in plan.experts:
            own, away = count / plan.copies, parts[actor.rank]
            routed = away * touched(dims.choices, len(actor.experts_of(layer)), k)
            answer = ELEMENT_BYTES[actor.answers] * width
            back, passed = answer if layer >= plan.backward.inputs else 0, layer >= plan.backward.lowest
            links += [
                Link(
                    layer=layer,
                    actor=actor.rank,
                    far=is_far,
                    tokens=n,
                    forward_there=n * (x_bytes * width + (_ID + _FLOAT) * k + _KEY),
                    forward_back=n * answer,
                    backward_there=n * _FLOAT * width * passed,
                    backward_back=n * (back + _FLOAT * k) * passed,
                )
                for is_far, n in ((False, own * (1 - away)), (True, own * routed))
                if n
            ]
    hidden = count * x_bytes * dims.hidden_size * dims.hidden_streams
    starts = [plan.worker(0, stage).layers[0] for stage in range(1, plan.stages)]
    return Traffic(tuple(links), tuple(hidden * (1 + (start > plan.backward.lowest)) for start in starts))


def far_part(plan: Plan, actor: ExpertActorPlan) -> float:
    """Part of the tokens of an actor's copy whose workers reach it over the network, or by bytes all the
    same."""
    if plan.transport.near != "arena":
        return 1.0
    hosts = plan.attention_hosts  # the first ones, as many replicas on each
    return 1 - plan.copies / max(plan.copies, hosts) if actor.host < hosts else 1.0


def traffic_notes(plan: Plan) -> list[str]:
    """What a step sends over the network, for people; nothing where all is within shared memory."""
    links = [link for link in traffic(plan).experts if link.far]
    if not links:
        return []
    parts = {actor.rank: far_part(plan, actor) for actor in plan.experts}
    share = sum(link.tokens for link in links) / sum(
        parts[link.actor] * plan.tokens_per_step / plan.copies for link in links
    )
    return [
        f"{sum(link.bytes for link in links) / 1e9:.2f} GB per step travel to and from expert actors out of "
        f"shared memory's reach ({plan.transport.far}): balanced routing sends {100 * share:.0f} % of the "
        f"tokens {'of other hosts ' if plan.attention_hosts > 1 else ''}to each"
    ]


def traffic_dict(plan: Plan) -> dict[str, Any]:
    """Sums for plan.json, in bytes per step."""
    moved = traffic(plan)
    return {
        "far_actors": [actor.rank for actor in plan.experts if far_part(plan, actor)],
        "experts_near": round(moved.to_experts(far=False)),
        "experts_far": round(moved.to_experts(far=True)),
        "stages": round(sum(moved.stages)),
    }
