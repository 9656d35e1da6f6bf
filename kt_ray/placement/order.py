"""Who does what in which order: a pure function of the plan.

An attention worker walks its program of operations; an expert actor serves a fixed list of
(layer, direction, group). The list is taken from a simulated run of all programs in unit time, so it
is a linear extension of all dependencies. Programs, list and messages together form a graph in which
the simulation's clock only rises along the edges: it has no cycle, so no timing of the real run can
deadlock (sends never wait).

Operations of a worker, for layer L and micro-batch group g (groups count over all replicas):
    embed, recv_hidden   the input of the worker's first layer
    forward              the layer; where it has experts, its tokens are submitted to them
    join                 wait for the experts of layer L and add their output
    send_hidden, loss    the output of the worker's last layer
    recv_grad            gradient of the worker's last layer's output
    recompute            submit dy where the layer has experts, then recompute the layer under grad; a layer
                         without experts may be recomputed before its gradient is there
    backward             wait for dx and dw of the experts, then differentiate
    send_grad            gradient of the worker's first layer's input
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from kt_ray.placement.plan_types import Plan

KINDS = ("train", "eval")
_TIMED = frozenset(("forward", "recompute", "backward"))  # the others take no time in the simulation


class Op(NamedTuple):
    """One operation of an attention worker on one layer and one micro-batch group."""

    kind: str
    layer: int
    group: int


ExpertCall = tuple[int, str, int]  # layer, "forward" or "backward", group


def worker_program(plan: Plan, replica: int, stage: int, kind: str) -> tuple[Op, ...]:
    """The operations of one worker in one pass, in order. kind: "train" or "eval" (forward and loss)."""
    return _program(_shape(plan), replica, stage, kind)


def expert_order(plan: Plan, kind: str) -> tuple[ExpertCall, ...]:
    """The calls that every expert actor computes in one pass, in order; MoE layers only.

    All replicas' tokens of one call form one engine call.
    """
    return _expert_order(_shape(plan), kind)


def stage_program(
    layers: Sequence[tuple[int, int]], moe: Iterable[int], groups: int, stage: int, kind: str, lowest: int = 0
) -> tuple[Op, ...]:
    """`worker_program` of a plan that is still being made. layers: of every stage, half-open. lowest: as in
    `BackwardPart`."""
    return _program(_Shape(tuple(layers), frozenset(moe), 1, groups, lowest), 0, stage, kind)


class _Shape(NamedTuple):
    """What the order depends on."""

    layers: tuple[tuple[int, int], ...]  # per stage, half-open
    moe: frozenset[int]
    replicas: int
    groups: int
    lowest: int  # at which backward ends


def _shape(plan: Plan) -> _Shape:
    layers = tuple(plan.worker(0, stage).layers for stage in range(plan.stages))
    return _Shape(layers, frozenset(plan.dims.moe_layers), plan.replicas, plan.groups, plan.backward.lowest)


@lru_cache(maxsize=256)
def _program(shape: _Shape, replica: int, stage: int, kind: str) -> tuple[Op, ...]:
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {KINDS}, not {kind!r}")
    if not (0 <= replica < shape.replicas and 0 <= stage < len(shape.layers)):
        raise ValueError(f"no worker has replica {replica} and stage {stage}")
    return tuple(_operations(shape, stage, kind))


def _runs(layers: Iterable[int], moe: frozenset[int]) -> list[list[int]]:
    """Consecutive layers, cut behind each that has experts; the last run may have none.

    A group passes a whole run at a time, so that it reaches the experts before the next group is taken up.
    """
    runs: list[list[int]] = [[]]
    for layer in layers:
        runs[-1].append(layer)
        if layer in moe:
            runs.append([])
    return runs


def _operations(shape: _Shape, stage: int, kind: str) -> list[Op]:
    """Forward in runs of layers, then backward as a software pipeline.

    On the last stage a group goes into backward as soon as its loss is there, while the experts still
    compute the last layer of the groups behind it. In backward at most `groups` recomputed layers are
    alive; the oldest is finished (its experts' answer awaited) only when the next item needs its gradient
    or its place, so that recomputation fills the waits. Layers below the lowest with LoRA have no backward.
    """
    start, stop = shape.layers[stage]
    last_stage = stage == len(shape.layers) - 1
    groups = range(shape.groups)
    ops: list[Op] = []

    def enter(run: int, layer: int, group: int) -> None:
        if run > 0:
            ops.append(Op("join", layer - 1, group))
        else:
            ops.append(Op("embed" if stage == 0 else "recv_hidden", start, group))

    *whole, tail = _runs(range(start, stop), shape.moe)
    for number, run in enumerate(whole):
        for group in groups:
            enter(number, run[0], group)
            ops += [Op("forward", layer, group) for layer in run]
    backward = _Backward(shape, stage, ops)
    for group in groups:
        enter(len(whole), tail[0] if tail else stop, group)
        ops += [Op("forward", layer, group) for layer in tail]
        ops.append(Op("loss" if last_stage else "send_hidden", stop - 1, group))
        if kind == "train" and last_stage:  # which has layers to train, or there would be none
            backward.take(0, group)
    if kind == "train":
        for number in range(1 if last_stage else 0, len(backward.runs)):
            for group in groups:
                backward.take(number, group)
        while backward.alive:
            backward.finish()
    return ops


class _Backward:
    """The backward half of a program, emitted run by run and group by group."""

    def __init__(self, shape: _Shape, stage: int, ops: list[Op]) -> None:
        self.shape = shape
        self.stage = stage
        self.start, self.stop = shape.layers[stage]
        lowest = max(self.start, shape.lowest)
        self.runs = [r for r in _runs(reversed(range(lowest, self.stop)), shape.moe) if r]
        self.ops = ops
        self.alive: list[tuple[int, int]] = []  # (layer, group) recomputed, their experts not yet awaited

    def take(self, run: int, group: int) -> None:
        """A run's layers for one group: dense ones to their end, the last one until its experts have dy."""
        for layer in self.runs[run]:
            if layer == self.stop - 1 and self.stage < len(self.shape.layers) - 1:
                self.ops.append(Op("recv_grad", layer, group))
            if layer in self.shape.moe:
                self.finish_for(layer, group)  # dy is what the layer above hands down
            if len(self.alive) == self.shape.groups:
                self.finish()
            self.ops.append(Op("recompute", layer, group))
            if layer in self.shape.moe:
                self.alive.append((layer, group))
            else:
                self.finish_for(layer, group)
                self.backward(layer, group)

    def finish_for(self, layer: int, group: int) -> None:
        """Finish what the gradient of this layer's output comes from, and what is older."""
        while (layer + 1, group) in self.alive:
            self.finish()

    def finish(self) -> None:
        self.backward(*self.alive.pop(0))

    def backward(self, layer: int, group: int) -> None:
        self.ops.append(Op("backward", layer, group))
        if layer == self.start > self.shape.lowest and self.stage > 0:
            self.ops.append(Op("send_grad", layer, group))


@lru_cache(maxsize=256)
def _expert_order(shape: _Shape, kind: str) -> tuple[ExpertCall, ...]:
    """Unit-time simulation: every forward, recompute, backward and expert call takes one tick.

    Each tick the expert side takes up the request that has waited longest (ties: lowest layer, then
    direction, then group), and each worker in rank order does what it can.
    """
    workers = [(replica, stage) for replica in range(shape.replicas) for stage in range(len(shape.layers))]
    programs = {worker: _program(shape, *worker, kind) for worker in workers}
    at = dict.fromkeys(workers, 0)  # operations done
    order: list[ExpertCall] = []
    submitted: Counter[ExpertCall] = Counter()
    ready: dict[ExpertCall, int] = {}  # call -> tick at which its last replica submitted
    arrived: set[tuple[object, ...]] = set()  # answered calls, and (what, replica, receiving stage, group)
    tick = 0

    def awaited(op: Op, replica: int, stage: int) -> tuple[object, ...] | None:
        if op.kind.startswith("recv"):
            return op.kind[5:], replica, stage, op.group
        if op.kind == "join":
            return op.layer, "forward", op.group
        if op.kind == "backward" and op.layer in shape.moe:
            return op.layer, "backward", op.group
        return None

    def run(op: Op, replica: int, stage: int) -> None:
        if op.kind.startswith("send"):
            to = stage + (1 if op.kind == "send_hidden" else -1)
            arrived.add((op.kind[5:], replica, to, op.group))
        elif op.kind in ("forward", "recompute") and op.layer in shape.moe:
            call = (op.layer, "forward" if op.kind == "forward" else "backward", op.group)
            submitted[call] += 1
            if submitted[call] == shape.replicas:
                ready[call] = tick

    while any(at[worker] < len(programs[worker]) for worker in workers):
        before = (len(order), sum(at.values()))
        waiting = [call for call, since in ready.items() if since < tick]
        taken = min(waiting, key=lambda call: (ready[call], call)) if waiting else None
        if taken is not None:
            del ready[taken]
            order.append(taken)
        for worker, program in programs.items():
            while at[worker] < len(program):
                op = program[at[worker]]
                needed = awaited(op, *worker)
                if needed is not None and needed not in arrived:
                    break
                run(op, *worker)
                at[worker] += 1
                if op.kind in _TIMED:
                    break
        if taken is not None:
            arrived.add(taken)
        tick += 1
        assert (len(order), sum(at.values())) != before or ready, "the programs wait for each other"
    back = sum(layer >= shape.lowest for layer in shape.moe) if kind == "train" else 0
    assert len(order) == (len(shape.moe) + back) * shape.groups
    return tuple(order)
