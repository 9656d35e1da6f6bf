"""A recorded pass (recorded.py), played through the simulator again: is its schedule that of a real run?

Every duration is taken from the recording instead of from rates. What is then different is the schedule's
fault: who waits for whom, in which order, and who shares cores. No torch, no Ray.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from recorded import ANSWERED, Terms

from kt_ray.placement.order import expert_order, worker_program
from kt_ray.placement.plan_types import Plan
from kt_ray.timing.event_loop import Carriage, Seat
from kt_ray.timing.simulate import ExpertCall, ExpertClass, Group, Machine, Micro, Phase, WaveShape, simulate

EMPTY = Micro(0, 0, 0, 0)


def typical_terms(
    several: Sequence[Terms], middle: Callable[[Sequence[float]], float] = statistics.fmean
) -> Terms:
    """The mean, or whatever `middle` is, of every duration over passes of equal work."""

    def typical(key: str) -> dict[Any, Any]:
        parts = [getattr(terms, key) for terms in several]
        found: dict[Any, Any] = {}
        for name in parts[0]:
            values = [part[name] for part in parts]
            if isinstance(values[0], tuple):
                found[name] = tuple(middle(column) for column in zip(*values, strict=True))
            else:
                found[name] = middle(values)
        return found

    return Terms(typical("begin"), typical("operations"), typical("calls"), typical("ways"))


class _Marked(tuple[Micro, ...]):
    """A group that knows where it belongs: durations are looked up by it."""

    replica: int
    number: int


class MeasuredDurations:
    """`Durations` of one pass of `plan` from `terms`.

    Messages and calls have no names when the simulator asks for them, but every actor asks in the order of
    its program.
    """

    def __init__(self, plan: Plan, terms: Terms) -> None:
        self.plan = plan
        self.terms = terms
        self._calls: dict[int, Iterator[Any]] = {}
        self._requests: dict[tuple[int, int], Iterator[Any]] = {}
        self._replies: dict[tuple[int, int], Iterator[Any]] = {}
        self._stages: dict[int, Iterator[Any]] = {}
        order = expert_order(plan, "train")
        for actor in plan.experts:
            self._calls[actor.rank] = iter(order)
        for worker in plan.workers:
            program = worker_program(plan, worker.replica, worker.stage, "train")
            asked = [
                (ANSWERED[op.kind], op.layer, op.group)
                for op in program
                if op.kind in ANSWERED and op.layer in plan.dims.moe_layers
            ]
            answered = [
                (d, layer, g) for layer, d, g in order if worker.layers[0] <= layer < worker.layers[1]
            ]
            self._stages[worker.rank] = iter([op for op in program if op.kind.startswith("send")])
            for actor in plan.experts:
                self._requests[worker.rank, actor.rank] = iter(asked)
                self._replies[worker.rank, actor.rank] = iter(answered)

    def wave(self) -> WaveShape:
        """What to simulate: micro-batches are of no account, their groups' names are."""
        replicas = []
        for replica in range(self.plan.replicas):
            groups = []
            for number in range(self.plan.groups):
                group = _Marked((EMPTY,))
                group.replica, group.number = replica, number
                groups.append(group)
            replicas.append(tuple(groups))
        return tuple(replicas)

    def attention(self, kind: str, layer: int, group: Group) -> tuple[float, float]:
        assert isinstance(group, _Marked)
        (rank,) = (
            w.rank
            for w in self.plan.workers
            if w.replica == group.replica and w.layers[0] <= layer < w.layers[1]
        )
        if kind == "begin":
            return self.terms.begin[rank] / self.plan.groups, 0.0
        return self.terms.operations[rank, kind, layer, group.number]

    def expert(self, actor: int, layer: int, direction: str, tokens: int, *, call: int) -> ExpertCall:
        planned = next(self._calls[actor])
        assert planned[:2] == (layer, direction)
        return ExpertCall(self.terms.calls[actor, *planned], 0.0)

    def lane(self, actor: int, layer: int, direction: str, tokens: int, *, call: int) -> tuple[()]:
        """A recorded call lasts until its part on a GPU is done."""
        return ()

    def worker_lane(self, worker: int, layer: int, direction: str, tokens: int, *, call: int) -> None:
        """What a worker waited for is in what its operations took."""

    def request(self, worker: int, actors: ExpertClass, direction: str, tokens: int) -> Carriage:
        actor = actors.actors[0]
        key = next(self._requests[worker, actor])
        return Carriage((), self.terms.ways["request", worker, actor, *key])

    def reply(self, worker: int, actors: ExpertClass, direction: str, tokens: int) -> Carriage:
        actor = actors.actors[0]
        key = next(self._replies[worker, actor])
        return Carriage((), self.terms.ways["reply", actor, worker, *key])

    def stage(self, worker: int, to: int, tokens: int) -> Carriage:
        op = next(self._stages[worker])
        return Carriage((), self.terms.ways[op.kind[5:], worker, to, "", -1, op.group])

    def pass_end(self) -> float:
        return 0.0

    def phases(self) -> tuple[Phase, ...]:
        return ()


def apart(plan: Plan) -> Machine:
    """Every actor on a resource of its own: what others took of its cores is in the recorded durations."""
    return Machine(
        {},
        tuple(Seat(f"worker {w.rank}") for w in plan.workers),
        tuple(ExpertClass((a.rank,), Seat(f"experts {a.rank}")) for a in plan.experts),
    )


@dataclass
class Replayed:
    """A pass as simulated: seconds; busy and waited as in `Recorded`."""

    seconds: float
    busy: dict[str, float]
    waited: dict[str, dict[str, float]]


def replay(plan: Plan, terms: Terms, machine: Machine | None = None) -> Replayed:
    """Simulate one pass with these durations.

    Args:
        machine: who shares cores; None = nobody.
    """
    durations = MeasuredDurations(plan, terms)
    found = simulate(plan, machine or apart(plan), durations, [durations.wave()], events=True)
    busy: dict[str, float] = {}
    waited: dict[str, dict[str, float]] = {}
    ended: dict[str, float] = {}
    for e in sorted(found.events, key=lambda e: (e.start, e.end)):
        name = e.actor.replace(" ", "-")
        kind = e.name.partition(" ")[0]
        busy[name] = busy.get(name, 0.0) + e.end - e.start
        gap = e.start - ended.get(name, 0.0)
        if gap > 1e-9:
            waits = waited.setdefault(name, {})
            waits[kind] = waits.get(kind, 0.0) + gap
        ended[name] = e.end
    return Replayed(found.seconds, busy, waited)
