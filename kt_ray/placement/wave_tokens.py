"""Tokens of a wave, by which a plan's bytes are counted: worst case, every row at data.max_length."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from kt_ray.config.schema import Config
from kt_ray.dims.model_dims import ModelDims
from kt_ray.placement.generation_memory import generates, step_tokens
from kt_ray.placement.plan_types import Held

HELD = Held("retain")  # the least that attention workers hold of recomputed layers' products


@dataclass(frozen=True)
class Load:
    """Tokens of a wave, worst case.

    total: all replicas. replica: the largest replica. group: one group of all replicas. micro: one
    micro-batch. row: the longest row. recomputed: of a replica, whose recomputed layers are held at once.
    retained: whether nothing is computed again. on_host: whether hidden states wait for backward in host
    memory. outputs: whether attention's wait beside them, too.
    """

    total: int
    replica: int
    group: int
    micro: int
    row: int
    recomputed: int
    on_host: bool = False
    outputs: bool = False
    own_group: int = 0  # one group of the largest replica
    ranges: int = 0  # of heads, where layers go by ranges
    retained: bool = False

    def of_copy(self, copies: int, replicas: int) -> Load:
        """The same with the most tokens that one of so many copies of the experts computes: of the replicas
        that have one, whose rows may be more than others'."""
        if copies == 1:
            return self
        total = min(self.total, self.replica * replicas // copies)
        return replace(self, total=total, group=min(total, self.own_group * replicas // copies))


def load_of(dims: ModelDims, config: Config, wave: int, groups: int, held: Held = HELD) -> Load:
    """Tokens of a wave of `wave` micro-batches per replica, cut into `groups`; every row at data.max_length.

    Of generation those of one step: an engine call is over one replica's, or the rows of all that decode.
    """
    if generates(config):
        tokens, replicas = step_tokens(dims, config), config.rule.replica_count
        call = max(tokens, replicas * config.generate.batch_size)
        return Load(replicas * tokens, tokens, call, tokens, tokens, tokens, own_group=tokens)
    trainer, row = config.trainer, config.data.widest_row
    unit = config.rows_per_unit * row  # of a pair both rows
    replicas = config.rule.replica_count
    step_rows = math.ceil(trainer.batch_size / replicas)
    micro = min(config.micro_batch_rows(replicas), step_rows)
    # Micro-batches are dealt out whole, so the first replica may get more rows than its share.
    number = math.ceil(trainer.batch_size / micro)
    missing = number * micro - trainer.batch_size  # rows that the last one lacks
    first = math.ceil(number / replicas) * micro - (missing if (number - 1) % replicas == 0 else 0)
    rows = min(first, wave * micro)
    group_rows = min(rows, math.ceil(math.ceil(rows / micro) / groups) * micro)
    total = min(trainer.batch_size, rows * replicas) * unit
    # One micro-batch of each group, and the gradients while one is differentiated.
    at_once = rows if held.attention == "group" else min(rows, (groups + 1) * micro)
    group = min(total, group_rows * unit * replicas)
    retained = held.attention == "retain"
    if retained:
        at_once = 0
    waiting = (held.attention in ("host", "ranges"), held.output == "retain" and not retained)
    own = (group_rows * unit, held.ranges)
    sizes = (total, rows * unit, group, micro * unit, row, at_once * unit)
    return Load(*sizes, *waiting, *own, retained)


def part_of(tokens: int, part: float) -> int:
    """A part of so many tokens, rounded up."""
    return math.ceil(tokens * part)
