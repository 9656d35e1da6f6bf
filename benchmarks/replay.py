"""A recorded pass, played through the simulator again: how far is its schedule that of a real run?

Every duration is taken from the recording (kt_ray.timeline) instead of from rates: what each operation of a
worker took before and after its message left, each engine call, each message's way. What is then different is
the schedule's fault: who waits for whom, in which order, and who shares cores. No torch, no Ray.

A message's way is known only where its receiver had to wait for it: from the end of the sender's span (or
the receiver's waking, if that came first) to the end of the wait. Elsewhere it is the median of those whose
receiver waited from before they were sent, and never longer than the recording allows.

Legend: rank, actor: of a worker, of an expert actor. Times in seconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kt_ray.placement.order import expert_order, worker_program
from kt_ray.placement.simulate import simulate
from kt_ray.placement.simulate_types import Carriage, ExpertClass, Group, Machine, Micro, Phase, Seat, Wave
from kt_ray.placement.types import Plan
from kt_ray.timeline import Activity, Event

Key = tuple[Any, ...]
Lanes = Mapping[str, Sequence[Event]]  # by actor: "worker-0", "experts-1", "driver"
ANSWERED = {"forward": "forward", "recompute": "backward"}  # operations that submit -> the call's direction
EMPTY = Micro(0, 0, 0, 0)
GLANCE = 1e-4  # seconds: a wait that is shorter found its message there


def lanes_of_trace(trace: Mapping[str, Any]) -> dict[str, list[Event]]:
    """Events of every actor, of a Chrome trace that kt_ray.tracking.chrome_trace made."""
    names: dict[tuple[int, int], str] = {}
    lanes: dict[str, list[Event]] = {}
    for item in trace["traceEvents"]:
        if item["ph"] == "M" and item["name"] == "thread_name":
            names[item["pid"], item["tid"]] = item["args"]["name"]
    for item in trace["traceEvents"]:
        if item["ph"] == "X":
            start, args = item["ts"] * 1e-6, item["args"]
            end = start + item["dur"] * 1e-6
            event = Event(item["name"], item["cat"], start, end, args.get("layer", -1), args.get("group", -1))
            lanes.setdefault(names[item["pid"], item["tid"]], []).append(event)
    return lanes


def lanes_of(activities: Iterable[Activity]) -> dict[str, list[Event]]:
    """The same of a host's activities."""
    return {a.actor: list(a.events) for a in activities}


def passes_of(lanes: Lanes) -> list[dict[str, list[Event]]]:
    """A step's lanes cut into its passes, by what the driver waited for."""
    found = []
    for one in (e for e in lanes["driver"] if e.name == "pass"):
        inside = {
            actor: [e for e in events if one.start <= (e.start + e.end) / 2 <= one.end]
            for actor, events in lanes.items()
            if actor != "driver"
        }
        found.append({"driver": [one], **inside})
    return found


@dataclass
class Terms:
    """Durations of one pass.

    Attributes:
        begin: rank -> seconds. operations: (rank, kind, layer, group) -> (before the message left, after).
        calls: (actor, layer, direction, group) -> seconds until the first answer left.
        ways: (what, from, to, direction or "", layer or -1, group) -> seconds of a message; what is
            "request", "reply", "hidden" or "grad", the ends are ranks of workers or expert actors.
    """

    begin: dict[int, float] = field(default_factory=dict)
    operations: dict[Key, tuple[float, float]] = field(default_factory=dict)
    calls: dict[Key, float] = field(default_factory=dict)
    ways: dict[Key, float] = field(default_factory=dict)


@dataclass
class Recorded:
    """A recorded pass.

    Attributes:
        terms: its durations.
        makespan: from the first worker's begin to the last span's end.
        driver: seconds of the driver's pass beyond it.
        busy, waited: actor -> what it did besides waiting, and kind of operation or call -> seconds waited.
        unread: seconds of expert actors between an answer's leaving and the next wait: no term.
        late: seconds by which the last actor began after the first one: no term.
        guessed: share of messages whose way is a median.
    """

    terms: Terms
    makespan: float
    driver: float
    busy: dict[str, float]
    waited: dict[str, dict[str, float]]
    unread: float
    late: float
    guessed: float


class _Reader:
    """Takes one pass apart."""

    def __init__(self, plan: Plan, lanes: Lanes) -> None:
        self.plan = plan
        self.lanes = {
            actor: sorted(events, key=lambda e: (e.start, -e.end)) for actor, events in lanes.items()
        }
        self.moe = frozenset(plan.dims.moe_layers)
        self.terms = Terms()
        self.busy: dict[str, float] = {}
        self.waited: dict[str, dict[str, float]] = {}
        self.unread = 0.0
        # By message: (sent, when the receiver began to wait, when it went on).
        self.messages: dict[Key, tuple[float, float, float]] = {}
        self.waits = {
            (actor, e.name, e.layer, e.group): e
            for actor, events in self.lanes.items()
            for e in events
            if e.category == "wait"
        }

    def read(self) -> Recorded:
        every = [e for actor, events in self.lanes.items() if actor != "driver" for e in events]
        begins = [self._first(f"worker-{w.rank}").start for w in self.plan.workers]
        firsts = begins + [self._first(f"experts-{a.rank}").start for a in self.plan.experts]
        for worker in self.plan.workers:
            self._worker(worker.rank)
        for actor in self.plan.experts:
            self._experts(actor.rank)
        guessed = self._ways()
        makespan = max(e.end for e in every) - min(begins)
        (whole,) = self.lanes["driver"]
        return Recorded(
            self.terms,
            makespan,
            whole.end - whole.start - makespan,
            self.busy,
            self.waited,
            self.unread,
            max(firsts) - min(begins),
            guessed,
        )

    def _first(self, actor: str) -> Event:
        if not self.lanes.get(actor):
            raise ValueError(
                f"the recording has no events of {actor}: another plan, or trainer.timeline_every=0"
            )
        return self.lanes[actor][0]

    # -- workers -----------------------------------------------------------------------------

    def _worker(self, rank: int) -> None:
        plan, name = self.plan, f"worker-{rank}"
        here = plan.workers[rank]
        events = self.lanes[name]
        program = worker_program(plan, here.replica, here.stage, "train")
        outer = [e for e in events if e.category == "compute"]
        found = [(e.name, e.layer, e.group) for e in outer[1:]]
        if outer[0].name != "begin" or found != [tuple(op) for op in program]:
            raise ValueError(f"{name} did not walk the plan's program: the recording is of another plan")
        busy, waited = self.busy, self.waited.setdefault(name, {})
        self.terms.begin[rank] = outer[1].start - outer[0].start
        busy[name] = self.terms.begin[rank]
        inner = [e for e in events if e.category != "compute"]
        at = 0
        for number, op in enumerate(outer[1:], start=1):
            # Up to the next operation, so that what lies between two belongs to the former.
            end = outer[number + 1].start if number + 1 < len(outer) else op.end
            own: list[Event] = []
            while at < len(inner) and inner[at].start < end:
                own.append(inner[at])
                at += 1
            waits = sum(e.end - e.start for e in own if e.category == "wait")
            sent = self._sent(rank, op, own)
            before = sent - op.start if sent is not None else 0.0
            after = end - op.start - waits - before
            self.terms.operations[rank, op.name, op.layer, op.group] = (before, max(0.0, after))
            busy[name] += before + after
            if waits or op.name in ("join", "backward", "recv_hidden", "recv_grad"):
                waited[op.name] = waited.get(op.name, 0.0) + waits

    def _sent(self, rank: int, op: Event, own: Sequence[Event]) -> float | None:
        """When an operation's message had left; notes the message. None: it sends none."""
        plan, here = self.plan, self.plan.workers[rank]
        for e in own:
            what, _, direction = e.name.partition(" ")
            if what == "submit":
                direction = ANSWERED[op.name]
                waits = {
                    a.rank: self._wait(f"experts-{a.rank}", f"wait {direction}", op) for a in plan.experts
                }
                sent = min(e.end, *(wait.end for wait in waits.values()))
                for actor, wait in waits.items():
                    key = ("request", rank, actor, direction, op.layer, op.group)
                    self.messages[key] = (sent, wait.start, wait.end)
                return sent
            if what == "send":
                to = rank + (1 if direction == "hidden" else -1)
                wait = self.waits[f"worker-{to}", f"stage {direction}", -1, op.group]
                sent = min(e.end, wait.end)
                self.messages[direction, rank, to, "", -1, op.group] = (sent, wait.start, wait.end)
                return sent
        if op.name.startswith("send") or (op.layer in self.moe and op.name in ANSWERED):
            raise ValueError(
                f"worker-{rank}: {op.name} of layer {op.layer} sent nothing (stage {here.stage})"
            )
        return None

    def _wait(self, actor: str, name: str, like: Event) -> Event:
        return self.waits[actor, name, like.layer, like.group]

    # -- expert actors -----------------------------------------------------------------------

    def _experts(self, actor: int) -> None:
        plan, name = self.plan, f"experts-{actor}"
        events = self.lanes[name]
        starts = [i for i, e in enumerate(events) if e.category == "wait"]
        order = expert_order(plan, "train")
        found = [(events[i].layer, events[i].name.partition(" ")[2], events[i].group) for i in starts]
        if found != list(order):
            raise ValueError(f"{name} did not serve the plan's calls: the recording is of another plan")
        owner = {(w.replica, layer): w.rank for w in plan.workers for layer in range(*w.layers)}
        waited = self.waited.setdefault(name, {})
        self.busy[name] = 0.0
        for number, ((layer, direction, group), i) in enumerate(zip(order, starts, strict=True)):
            stop = starts[number + 1] if number + 1 < len(starts) else len(events)
            wait, replies = events[i], [e for e in events[i:stop] if e.name.startswith("reply")]
            end = events[stop].start if stop < len(events) else replies[-1].end
            first = None
            for replica, reply in enumerate(replies):
                rank = owner[replica, layer]
                taken = self._wait(f"worker-{rank}", f"{name} {direction}", wait)
                sent = min(reply.end, taken.end)
                first = sent if first is None else first
                key = ("reply", actor, rank, direction, layer, group)
                # From the first answer on: the simulator sends all of a call's answers at once.
                self.messages[key] = (sent, taken.start, taken.end)
                self.terms.ways[key] = sent - first
            assert first is not None
            self.terms.calls[actor, layer, direction, group] = first - wait.end
            self.busy[name] += end - wait.end
            self.unread += end - first
            waited[direction] = waited.get(direction, 0.0) + wait.end - wait.start

    # -- messages ----------------------------------------------------------------------------

    def _ways(self) -> float:
        """Seconds of every message. Returns the share of those that are a median."""
        last: dict[Key, float] = {}  # of the replicas' requests of a call, when the last one left
        for key, (sent, _, _) in self.messages.items():
            if key[0] == "request":
                last[key[2:]] = max(last.get(key[2:], sent), sent)
        known: dict[str, list[float]] = {}
        blocked: dict[str, list[float]] = {}
        guessed: list[tuple[Key, float]] = []
        for key, (sent, waits, ends) in self.messages.items():
            binding = key[0] != "request" or sent == last[key[2:]]
            if binding and (waits <= sent or ends - waits > GLANCE):
                self.terms.ways[key] = self.terms.ways.get(key, 0.0) + ends - sent
                (known if waits <= sent else blocked).setdefault(key[0], []).append(ends - sent)
            else:
                guessed.append((key, ends - sent))
        for key, most in guessed:
            values = known.get(key[0]) or blocked.get(key[0]) or [0.0]
            usual = min(statistics.median(values), most)
            self.terms.ways[key] = self.terms.ways.get(key, 0.0) + usual
        return len(guessed) / max(1, len(self.messages))


def read_pass(plan: Plan, lanes: Lanes) -> Recorded:
    """One of `passes_of`.

    Raises:
        ValueError: the recording is not of this plan, or has no events.
    """
    return _Reader(plan, lanes).read()


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

    def wave(self) -> Wave:
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

    def expert(self, actor: int, layer: int, direction: str, tokens: int) -> float:
        planned = next(self._calls[actor])
        assert planned[:2] == (layer, direction)
        return self.terms.calls[actor, *planned]

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
