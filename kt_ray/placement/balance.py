"""Which expert actor holds which experts of which layer, by how many tokens each expert gets.

A layer's experts are done when the fullest actor is, and layers follow one another: each layer is divided
by itself. Every actor keeps as many experts as a contiguous split gives one (the quotient, or one more), so
that memory stays even. Pure functions on integers: the same load gives the same placement everywhere.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from kt_ray.config.mapping import with_keys
from kt_ray.config.schema import Config
from kt_ray.dims.model_dims import ModelDims
from kt_ray.errors import UserError
from kt_ray.placement.expert_load import ExpertLoad
from kt_ray.placement.plan_types import ExpectedLoad, ExpertActorPlan
from kt_ray.placement.split import split_experts

Shares = tuple[tuple[int, ...], ...]
"""Global expert ids of each actor, ascending."""

# Another placement adds up in another order, so a resumed run continues to rounding, not bit for bit. `auto`
# gives that up only for a gain that is real: sampling noise is 1 / sqrt(slots) of an actor's load, 1 % here.
LEAST_GAIN = 0.05
LEAST_SLOTS = 10_000  # per actor and layer


def place_experts(
    actors: tuple[ExpertActorPlan, ...], dims: ModelDims, config: Config, load: ExpertLoad | None
) -> tuple[tuple[ExpertActorPlan, ...], ExpectedLoad | None, list[str]]:
    """The actors with the experts that rule.experts.placement gives them; what the load says; plan's notes.

    Actors come with contiguous experts; an actor's speed is its number of threads.

    Raises:
        UserError: placement=balanced where no load is known.
    """
    asked = config.rule.experts.placement
    if load is None:
        if asked == "balanced":
            raise UserError(
                "experts cannot be placed by load: no load is known",
                where="rule.experts.placement",
                observed="balanced",
                required="a checkpoint with a histogram of tokens per expert (expert_load.json)",
                remedy="set rule.experts.load=<checkpoint directory>, or rule.experts.placement=auto",
            )
        return actors, None, []
    speeds = [actor.threads for actor in actors]
    contiguous = dict.fromkeys(dims.moe_layers, split_experts(dims.num_experts, len(actors)))
    before = _kept(load, contiguous)
    by_load = {layer: balance(load.slots[layer], speeds) for layer in dims.moe_layers}
    level = {
        name: mean_imbalance(load.slots, shares, speeds)
        for name, shares in (("contiguous", contiguous), ("kept", before), ("balanced", by_load))
    }
    chosen, notes = _choice(asked, load, level, len(actors), kept=before is not contiguous)
    if asked == "kept" and load.owners and before is contiguous:
        raise UserError(
            "experts cannot be kept where they were",
            where="rule.experts.placement=kept",
            observed=f"{len(actors)} expert actors",
            required=f"{1 + max(map(max, load.owners.values()))}, as {load.source} was written under",
            remedy="set rule.experts.placement=auto: the run then goes on to rounding, not bit for bit",
        )
    shares = {"contiguous": contiguous, "kept": before, "balanced": by_load}[chosen]
    if config.trainer.resume is not None and shares != before:
        notes.append(
            "other actors now add up the experts' outputs: the run goes on to rounding, not bit for bit"
        )
    expected = ExpectedLoad(load.source, load.steps, chosen, level["contiguous"], level[chosen])
    return _holding(actors, shares), expected, notes


def _choice(
    asked: str, load: ExpertLoad, level: Mapping[str, float], actors: int, *, kept: bool
) -> tuple[str, list[str]]:
    """ "contiguous", "kept" (as the checkpoint was written under) or "balanced", and why."""
    if asked == "contiguous":
        return "contiguous", []
    if asked == "kept":
        return "kept", []
    if actors == 1:
        alone = "one expert actor holds all experts: there is nothing to place by load"
        return "contiguous", [alone] if asked == "balanced" else []
    now = "kept" if kept else "contiguous"
    gain = 1 - level["balanced"] / level[now]
    stays = f"rule.experts.placement=auto: experts stay {'as they were placed' if kept else 'contiguous'}"
    if asked == "auto" and load.least_slots() < LEAST_SLOTS * actors:
        seen = f"{load.least_slots() / actors:,.0f} tokens per actor and layer"
        return now, [
            f"{stays}; {load.source} has seen {seen}, too few to place by (at least {LEAST_SLOTS:,})"
        ]
    if asked == "auto" and gain < LEAST_GAIN:
        return now, [
            f"{stays}; placing them by the load of {load.source} would bring the fullest actor from "
            f"{level[now]:.3f} to {level['balanced']:.3f} times the mean, less than {LEAST_GAIN:.0%}"
        ]
    return "balanced", [
        f"rule.experts.placement={asked}: experts are placed by the load of {load.source}; the fullest actor "
        f"gets {level['balanced']:.3f} times the mean, {level[now]:.3f} "
        f"{'as they were placed' if kept else 'if contiguous'}"
    ]


def balance(loads: Sequence[int], speeds: Sequence[int]) -> Shares:
    """Divide one layer's experts so that the actor that takes longest takes as little as can be found.

    Longest first onto the actor that is then done soonest, then exchanges that relieve the last one; ties
    go to the lowest id. Where that is no better than contiguous runs, those stay.

    Args:
        loads: tokens of each expert. speeds: relative speed of each actor, a positive integer.
    """
    n = len(speeds)
    contiguous = split_experts(len(loads), n)
    unit = math.lcm(*speeds)
    seconds = [unit // speed for speed in speeds]  # per token, in exact integers
    lists = _longest_first(loads, seconds)
    while _exchange(lists, loads, seconds):
        pass
    balanced = tuple(tuple(sorted(ids)) for ids in lists)

    def last(shares: Shares) -> int:
        return max(_time(ids, loads, s) for ids, s in zip(shares, seconds, strict=True))

    return balanced if last(balanced) < last(contiguous) else contiguous


def _time(ids: Sequence[int], loads: Sequence[int], seconds: int) -> int:
    return sum(loads[e] for e in ids) * seconds


def _longest_first(loads: Sequence[int], seconds: Sequence[int]) -> list[list[int]]:
    n = len(seconds)
    least, more = divmod(len(loads), n)  # `more` actors hold one expert more than the others
    by_actor: list[list[int]] = [[] for _ in range(n)]
    total = [0] * n
    for expert in sorted(range(len(loads)), key=lambda e: (-loads[e], e)):
        free = [a for a in range(n) if len(by_actor[a]) < least or (more and len(by_actor[a]) == least)]
        taker = min(free, key=lambda a: ((total[a] + loads[expert]) * seconds[a], len(by_actor[a]), a))
        more -= len(by_actor[taker]) == least
        by_actor[taker].append(expert)
        total[taker] += loads[expert]
    return by_actor


def _exchange(by_actor: list[list[int]], loads: Sequence[int], seconds: Sequence[int]) -> bool:
    """Do the one exchange or move that relieves the last actor most; False = none does."""
    times = [_time(ids, loads, s) for ids, s in zip(by_actor, seconds, strict=True)]
    last = max(range(len(by_actor)), key=lambda a: (times[a], -a))
    best: tuple[int, int, int, int] | None = None  # (later of the two then, actor, expert, its or -1)
    for other in range(len(by_actor)):
        if other == last:
            continue
        theirs = sorted((loads[e], e) for e in by_actor[other])
        may_move = len(by_actor[last]) > len(by_actor[other])
        ideal = (times[last] - times[other]) // (seconds[last] + seconds[other])
        for expert in by_actor[last]:
            # Candidates around the load whose exchange would make both end together.
            at = bisect.bisect_left(theirs, (loads[expert] - ideal, -1))
            partners = theirs[max(0, at - 1) : at + 1] + ([(0, -1)] if may_move else [])
            for load, partner in partners:
                given = loads[expert] - load
                later = max(times[last] - given * seconds[last], times[other] + given * seconds[other])
                best = min(best or (later, other, expert, partner), (later, other, expert, partner))
    if best is None or best[0] >= times[last]:
        return False
    _, other, expert, partner = best
    by_actor[last].remove(expert)
    by_actor[other].append(expert)
    if partner >= 0:
        by_actor[other].remove(partner)
        by_actor[last].append(partner)
    return True


def imbalance(loads: Sequence[int], shares: Shares, speeds: Sequence[int]) -> float:
    """Tokens per speed of the fullest actor over the mean: 1 = all end together. 1 without tokens."""
    total = sum(loads)
    if not total:
        return 1.0
    fullest = max(sum(loads[e] for e in ids) / speed for ids, speed in zip(shares, speeds, strict=True))
    return fullest * sum(speeds) / total


def mean_imbalance(
    slots: Mapping[int, Sequence[int]], shares: Mapping[int, Shares], speeds: Sequence[int]
) -> float:
    """`imbalance`, averaged over the layers of `shares`."""
    ratios = [imbalance(slots[layer], of_layer, speeds) for layer, of_layer in shares.items()]
    return sum(ratios) / len(ratios)


def without_load(config: Config) -> Config:
    """The same with contiguous experts, for plans whose memory alone matters: it is as even either way."""
    return with_keys(config, {"rule.experts.placement": "contiguous"})


def owners_of(actors: Sequence[ExpertActorPlan], dims: ModelDims) -> dict[int, tuple[int, ...]]:
    """MoE layer -> rank of the actor that holds each expert; empty where all layers are contiguous."""
    if not any(actor.by_layer for actor in actors):
        return {}
    rank = {
        (layer, e): actor.rank
        for actor in actors
        for layer in dims.moe_layers
        for e in actor.experts_of(layer)
    }
    return {layer: tuple(rank[layer, e] for e in range(dims.num_experts)) for layer in dims.moe_layers}


def residents_of(actors: Sequence[ExpertActorPlan]) -> dict[int, tuple[int, ...]]:
    """MoE layer -> experts that stay on a lane's device, ascending; empty where none does."""
    residents: dict[int, tuple[int, ...]] = {}
    for actor in actors:
        for layer, ids in actor.lane.resident if actor.lane is not None else ():
            residents[layer] = tuple(sorted((*residents.get(layer, ()), *ids)))
    return residents


def _kept(load: ExpertLoad, contiguous: dict[int, Shares]) -> dict[int, Shares]:
    """The placement that the checkpoint was written under, where it suits as many actors; else contiguous."""
    n = len(next(iter(contiguous.values())))
    if not load.owners or any(set(ranks) != set(range(n)) for ranks in load.owners.values()):
        return contiguous
    return {
        layer: tuple(tuple(e for e, rank in enumerate(load.owners[layer]) if rank == a) for a in range(n))
        for layer in contiguous
    }


def _holding(
    actors: tuple[ExpertActorPlan, ...], shares: Mapping[int, Shares]
) -> tuple[ExpertActorPlan, ...]:
    if all(of_layer == tuple(actor.experts for actor in actors) for of_layer in shares.values()):
        return actors
    return tuple(
        replace(actor, experts=(), by_layer=tuple((layer, s[i]) for layer, s in shares.items()))
        for i, actor in enumerate(actors)
    )
