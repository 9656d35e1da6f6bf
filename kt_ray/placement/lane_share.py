"""Which experts a GPU computes beside the CPU: those that stay in its memory, and those carried to it.

Pure functions. Carrying an expert costs its bytes over PCIe, whatever it computes; what it saves the CPU
grows with the tokens it gets. So the experts with most tokens go, from a number of tokens on, and as many as
let both sides end together. docs/streaming.md has the arithmetic with figures.

Legend: T tokens of a call, E experts of a layer, n of them in an actor's host memory, K experts per token.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from kt_ray.placement.expert_load import touched

LANE_ROWS = 8192  # that are computed at a time: what they take on a GPU is bounded
# Experts that are computed at a time, and the parameters of all of them together: two buffers and the decoded
# matrices hold so many. 336 MiB in bfloat16, four experts of DeepSeek-V3: with fewer the host's thread that
# dispatches their kernels is the limit of steps in which GPUs compute all of them; with more it matters how
# long the first batch is copied before anything is computed.
LANE_BATCH, LANE_BATCH_PARAMS = 16, 168 << 20
# Times the seconds of a call by the rates that computing gates and ups again has to save, to be tried first.
RECOMPUTE_GAIN = 1.15
LEAST_GAIN = 0.05  # of a call's time: below it a lane is not worth its memory and its rounding


def streamed_experts(counts: Sequence[int], share: float, there: Collection[int] = ()) -> tuple[int, ...]:
    """Which experts a call carries to the device: the share with most rows, in ascending order.

    Args:
        counts: rows of every expert in host memory. share: of their number, rounded to whole experts; those
            without rows are never carried. Ties go to the lowest id.
        there: experts that were carried for the layer's call before, which come first.
    """
    wanted = whole_experts(share, len(counts))
    busy = (e for e, count in enumerate(counts) if count)
    return tuple(sorted(sorted(busy, key=lambda e: (e not in there, -counts[e], e))[:wanted]))


def dealt(
    experts: Sequence[int],
    counts: Sequence[int],
    devices: int,
    there: Sequence[Collection[int]] = (),
) -> tuple[tuple[int, ...], ...]:
    """A call's carried experts, dealt out: as many for every device, and about as many rows; ascending.

    Copies cost the same for all experts, so their number counts first: by descending rows, each goes to the
    device with fewest experts, of these to the one with fewest rows.

    Args:
        there: of every device the experts that it has from the layer's call before, and keeps.
    """
    own: list[list[int]] = [[e for e in experts if e in had] for had in there] or [[] for _ in range(devices)]
    new = set(experts).difference(*own)
    for expert in sorted(new, key=lambda e: (-counts[e], e)):
        min(own, key=lambda some: (len(some), sum(counts[e] for e in some))).append(expert)
    return tuple(tuple(sorted(some)) for some in own)


def places(rows: int) -> int:
    """For how many rows there is room where an expert has so many: an eighth more at most, or seven.

    Products on a GPU then have few shapes: a product of a new one takes the host half a millisecond, as far
    as a profile shows, while cuBLAS remembers the kernels of thousands of shapes.
    """
    step = max(8, (1 << rows.bit_length()) >> 4)
    return -(-rows // step) * step


def batch_size(rows: int, params: int) -> int:
    """How many experts of `params` parameters are computed at once where the first of them has most rows."""
    return max(1, min(LANE_BATCH, LANE_ROWS // places(max(1, rows)), LANE_BATCH_PARAMS // params))


def batches(experts: Sequence[int], counts: Sequence[int], params: int) -> tuple[tuple[int, ...], ...]:
    """Experts in the order and the batches in which a device computes them, those with most rows first.

    The rows of a batch are filled up to `places` of its longest expert's. As neighbours in this order are
    about as long, a call is filled up with no more than LANE_BATCH times these places, and what `places` adds
    to each expert.

    Args:
        counts: rows of every expert; ties go to the lowest id. params: of one expert.
    """
    order = sorted(experts, key=lambda e: (-counts[e], e))
    made, first = [], 0
    while first < len(order):
        size = batch_size(counts[order[first]], params)
        made.append(tuple(order[first : first + size]))
        first += size
    return tuple(made)


def ahead_experts(owners: Sequence[range], count: int) -> tuple[int, ...]:
    """Which `count` experts are carried before a layer's routing is known: the first ids of every owner, as
    evenly as they go."""
    in_turn = (
        own[place] for place in range(max(map(len, owners), default=0)) for own in owners if place < len(own)
    )
    return tuple(sorted(itertools.islice(in_turn, count)))


def whole_experts(share: float, experts: int) -> int:
    """How many of so many experts a share is."""
    return int(share * experts + 0.5)


def resident_experts(
    held: Sequence[Sequence[int]], wanted: int, load: Sequence[int] | None
) -> tuple[tuple[int, ...], ...]:
    """Experts of one layer that stay on the device, for each actor, ascending.

    Args:
        held: global ids of every actor. wanted: experts of the layer, over all actors.
        load: tokens of every expert; the most used ones stay, ties to the lowest id. None: the first ids of
            every actor's share, as evenly as they go.
    """
    if load is not None:
        every = sorted((e for ids in held for e in ids), key=lambda e: (-load[e], e))
        chosen = set(every[:wanted])
        return tuple(tuple(sorted(e for e in ids if e in chosen)) for ids in held)
    taken = [0] * len(held)
    for _ in range(min(wanted, sum(len(ids) for ids in held))):
        free = [a for a, ids in enumerate(held) if taken[a] < len(ids)]
        taken[min(free, key=lambda a: (taken[a], a))] += 1
    return tuple(tuple(sorted(ids)[:n]) for ids, n in zip(held, taken, strict=True))


class Tuning(NamedTuple):
    """How simulated steps correct the choice by rates, which knows of no attention on the same GPU.

    speed: factor of the rates of a GPU and its link. recompute: `LanePlan.recompute`; None = by the rates.
    """

    speed: float = 1.0
    recompute: bool | None = None


UNTUNED = Tuning()
NOTHING = Tuning(0.0)  # is streamed


@dataclass(frozen=True)
class LaneRates:
    """What the lane's choice divides by, for one expert actor."""

    link: float  # bytes/s from host memory to one GPU (the actor's part, where actors share the link)
    # FLOP/s of one GPU on matrices as large as an expert's, decoding its weights included (likewise)
    gpu: float
    cpu: float  # FLOP/s of the actor's engine in this format
    memory: float  # bytes/s that its socket reads
    source: str = ""  # where they come from
    devices: int = 1  # GPUs of the lane, each with its link
    actors: int = 1  # on its host
    sharing: int = 1  # that divide one GPU
    tuning: Tuning = UNTUNED  # that `tuned` made

    def tuned(self, tuning: Tuning) -> LaneRates:
        """For another split than these rates lead to; not of those by which NOTHING is streamed."""
        speed = tuning.speed / self.tuning.speed
        return replace(self, link=self.link * speed, gpu=self.gpu * speed, tuning=tuning)

    def of_worker(self, replicas: int) -> LaneRates:
        """What an attention worker has: a GPU and its link, and its part of what all actors of its host
        compute for so many replicas; weights are read once for all of them."""
        return replace(
            self,
            link=self.link * self.sharing,
            gpu=self.gpu * self.sharing,
            cpu=self.cpu * self.actors / replicas,
            memory=self.memory * self.actors,
            devices=1,
        )


@dataclass(frozen=True)
class LaneWork:
    """One actor's part of one call of a layer, forward or backward."""

    experts: int  # n, those in host memory that have rows
    bytes: float  # of one as stored, its adapter included
    flops: float  # of all their rows together
    tokens: float  # bytes of all tokens' activations: x to a device, y back, which has twice as many
    per_token: int  # K
    layer: int  # E
    kept: float = 0.0  # bytes of gates and ups of all their rows, which go to the host and come back
    answers: bool = True  # `ExpertSizes.answers`

    def moved(self, carried: float) -> float:
        """Bytes of activations to and from a device with so many of the experts: all tokens' x, and the
        answers to those that chose one."""
        return self.tokens * (1 + 2 * touched(self.layer, carried, self.per_token)) / 3


@dataclass(frozen=True)
class Share:
    """A split of one call: experts carried, and seconds of both sides; plain = seconds without a lane."""

    carried: int
    share: float
    cpu: float
    lane: float
    plain: float

    @property
    def seconds(self) -> float:
        """Until both have ended."""
        return max(self.cpu, self.lane)

    @property
    def gain(self) -> float:
        """Part of the plain time that is saved."""
        return 1 - self.seconds / self.plain if self.plain else 0.0


@dataclass(frozen=True)
class LaneParts:
    """Seconds of a lane's part of a call: experts copied and multiplied at the same time; then what has
    nothing to hide behind: the first copy, and the activations, both ways."""

    copies: float
    products: float
    first: float
    moved: float

    @property
    def seconds(self) -> float:
        return max(self.copies, self.products) + self.first + self.moved


def lane_parts(work: LaneWork, link: float, gpu: float, carried: int, devices: int = 1) -> LaneParts:
    """What carrying `carried` of the experts takes, at `link` bytes/s and `gpu` FLOP/s of every device."""
    if not carried:
        return LaneParts(0.0, 0.0, 0.0, 0.0)
    own = -(-carried // devices)  # of the GPU that gets most
    copies, first = own * work.bytes / link, work.bytes / link
    return LaneParts(copies, own / work.experts * work.flops / gpu, first, work.moved(own) / link)


def split_seconds(
    work: LaneWork, rates: LaneRates, carried: int, *, recompute: bool = False, held: int = 0
) -> Share:
    """Both sides' seconds with `carried` of the experts on the device, the mean of forward and backward.

    The engine multiplies what is left, and is no faster than the socket's memory gives the weights: those
    carried are read from the same memory. Neither attention on the same GPU is counted, nor that one copy of
    an expert may serve several calls: simulated steps correct the choice (`Tuning`).

    Args:
        recompute: whether the lane computes gates and ups again; else they leave in forward (on the link's
            other direction) and come back in backward.
        held: of the experts carried, those that are there from the call before.
    """
    part = carried / work.experts if work.experts else 0.0
    weights = work.experts * work.bytes / rates.memory
    cpu = max((1 - part) * work.flops / rates.cpu, weights)
    if part == 1 and not work.answers:  # then actors get no token
        cpu = 0.0
    found = lane_parts(work, rates.link, rates.gpu, carried, rates.devices)
    lane = 0.0
    if carried:
        new = 1 - held / carried
        copies, products = new * found.copies, found.products
        if recompute:  # two thirds of the products, in one of the two directions
            products += found.products / 3
        else:
            copies += work.kept * part / rates.devices / rates.link / 2
        lane = max(copies, products) + (found.first if new else 0.0) + found.moved
    return Share(carried, part, cpu, lane, max(work.flops / rates.cpu, weights))


def best_share(work: LaneWork, rates: LaneRates, *, recompute: bool = False, held: int = 0) -> Share:
    """The number of carried experts with which the later side ends soonest; of equals the fewest. held: that
    are there from the call before."""
    splits = (
        split_seconds(work, rates, n, recompute=recompute, held=held) for n in range(held, work.experts + 1)
    )
    return min(splits, key=lambda split: (split.seconds, split.carried))


@dataclass(frozen=True)
class ExpertSizes:
    """What one actor's layer is made of, to count a call's work."""

    held: int  # n
    experts: int  # E, all that a token may choose
    per_token: int  # K
    params: int  # of one expert
    bytes: float  # of one as stored, adapter included
    hidden: int  # H
    kept: float = 0.0  # bytes of gate and up that a row keeps for backward
    answers: bool = (
        True  # whether y and dx leave the device; else x does, and comes back: an attention worker's
    )

    def work(self, tokens: int) -> LaneWork:
        """Forward of T tokens with even routing; backward has the same products and as many bytes.

        Of n experts those get no row that no token chose: n (1 - K / E)^T of them.
        """
        slots = tokens * self.per_token * self.held / self.experts
        empty = (1 - self.per_token / self.experts) ** tokens
        busy = min(self.held, max(1, round(self.held * (1 - empty))))
        moved = tokens * self.hidden * (6.0 if self.answers else 2.0)
        work = 2.0 * self.params * slots
        kept = self.kept * slots
        shape = self.per_token, self.experts
        return LaneWork(busy, self.bytes, work, moved, *shape, kept, self.answers)


class Shares(NamedTuple):
    """steps, later: `LanePlan.shares` and `later`. largest: the split of the largest call. recompute:
    `LanePlan.recompute`."""

    steps: tuple[tuple[int, float], ...]
    later: tuple[tuple[int, float], ...]
    largest: Share
    recompute: bool


@lru_cache(maxsize=256)  # the plans of a search ask the same
def choose_shares(sizes: ExpertSizes, rates: LaneRates, most_tokens: int, *, recompute: bool) -> Shares:
    """How much is carried in calls of up to `most_tokens`.

    One step per doubling of tokens, from the first power of two at which a lane saves at least LEAST_GAIN;
    none where it never does.

    Args:
        recompute: whether gates and ups have to be computed again, as the engine does; else the lane does
            what simulated steps chose, or what ends the largest call clearly sooner: attention needs the GPU,
            too.
    """
    most = sizes.work(max(1, most_tokens))
    retained, recomputed = (best_share(most, rates, recompute=kind).seconds for kind in (False, True))
    again = recompute or rates.tuning.recompute
    if again is None:
        again = retained >= RECOMPUTE_GAIN * recomputed
    steps: list[tuple[int, float]] = []
    later: list[tuple[int, float]] = []
    at = [1 << n for n in range(max(1, most_tokens).bit_length()) if 1 << n < most_tokens]
    for tokens in (*at, max(1, most_tokens)):
        found = best_share(sizes.work(tokens), rates, recompute=again)
        share = round(found.carried / sizes.held, 4) if found.gain >= LEAST_GAIN else 0.0
        if share or steps:
            more = best_share(sizes.work(tokens), rates, recompute=again, held=found.carried if share else 0)
            steps.append((tokens, share))
            later.append((tokens, round(more.carried / sizes.held, 4) if share else 0.0))
    return Shares(_changes(steps), _changes(later), best_share(most, rates, recompute=again), again)


def _changes(steps: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Without steps that repeat the one before."""
    return tuple(step for i, step in enumerate(steps) if not i or step[1] != steps[i - 1][1])


def resident_by_layer(
    held: Mapping[int, Sequence[Sequence[int]]],
    wanted: int,
    loads: Mapping[int, Sequence[int]] | None,
) -> tuple[tuple[tuple[int, tuple[int, ...]], ...], ...]:
    """`LanePlan.resident` of every actor. held: layer -> ids of every actor. loads: layer -> tokens."""
    actors = len(next(iter(held.values())))
    chosen: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in range(actors)]
    for layer, of_layer in held.items():
        load = None if loads is None else loads[layer]
        for actor, ids in enumerate(resident_experts(of_layer, wanted, load)):
            if ids:
                chosen[actor].append((layer, ids))
    return tuple(tuple(of_actor) for of_actor in chosen)
