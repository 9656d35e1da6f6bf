"""Passes of several trainings as one: which waves have room beside each other, and how their rows lie."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from kt_ray.batch import MicroBatch, Wave
from kt_ray.config.schema import Config
from kt_ray.data.batches import side_by_side, to_share
from kt_ray.placement.plan_types import Plan

# Of a group's micro-batches those together that pass its layers as one
Mix = Callable[[Sequence[MicroBatch]], Sequence[Sequence[MicroBatch]]]


class Room(NamedTuple):
    """Positions, padding included, that a pass of several trainings may have."""

    group: int  # of a replica's group
    replica: int


def room_for_several(config: Config, plan: Plan) -> Room:
    """What the plan counts memory for."""
    if not plan.joins_trainings:
        return Room(0, 0)
    micro = plan.micro_batch_rows * config.data.widest_row
    return Room(math.ceil(plan.wave / plan.groups) * micro, plan.wave * micro)


def mix_of(config: Config, plan: Plan, *, unpadded: bool) -> Mix:
    """Micro-batches as they are, or, where layers are shared, of several trainings' rows: as large as one
    training's may be.

    Args:
        unpadded: micro-batches hold rows of one length only.
    """
    if config.train_server.shared == "experts" or not plan.mixes_trainings:
        return each_alone
    return partial(to_share, most=plan.micro_batch_rows * config.data.widest_row, alike=unpadded)


def each_alone(micro: Sequence[MicroBatch]) -> list[list[MicroBatch]]:
    return [[one] for one in micro]


def joined(waves: Sequence[Sequence[Wave]], room: Room, mix: Mix) -> Iterator[dict[int, Wave]]:
    """The waves of each training in their order, in as few passes as there is room for: waves of a pass by
    number of their training. One alone always fits."""
    left = [list(own) for own in waves]

    def positions(parts: Sequence[MicroBatch]) -> int:
        """Of one micro-batch of them."""
        width = max(micro.input_ids.shape[1] for micro in parts)
        return width * sum(len(micro.input_ids) for micro in parts)

    def fits(chosen: Sequence[Wave]) -> bool:
        for replicas in zip(*chosen, strict=True):  # of each wave one replica's groups
            groups = [
                sum(map(positions, mix([micro for group in of_waves for micro in group])))
                for of_waves in zip(*replicas, strict=True)
            ]
            if max(groups) > room.group or sum(groups) > room.replica:
                return False
        return True

    while any(left):
        chosen: dict[int, Wave] = {}
        for number, own in enumerate(left):
            if own and (not chosen or fits([*chosen.values(), own[0]])):
                chosen[number] = own.pop(0)
        yield chosen


def one_wave(waves: Mapping[str, Wave], present: str, mix: Mix) -> Wave:
    """One wave of several trainings': a group has what it has of each. One training's stays as it is.

    Args:
        present: the training that is.
    """
    if len(waves) == 1:
        return waves[present]

    def own(model: str, micro: MicroBatch) -> MicroBatch:
        return micro if model == present else replace(micro, training=model)

    each = [
        [[[own(model, micro) for micro in group] for group in groups] for groups in wave]
        for model, wave in waves.items()
    ]
    return tuple(
        tuple(
            tuple(map(side_by_side, mix([micro for group in of_waves for micro in group])))
            for of_waves in zip(*replicas, strict=True)
        )
        for replicas in zip(*each, strict=True)
    )
