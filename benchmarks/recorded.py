"""A recorded pass taken apart: what every operation, engine call and message took, and who waited how long.

From the spans of kt_ray.timeline; replay.py plays them through the simulator. No torch, no Ray.

A message's way is known only where its receiver had to wait for it: from the end of the sender's span (or
the receiver's waking, if that came first) to the end of the wait. Elsewhere it is the median of those whose
receiver waited from before they were sent, and never longer than the recording allows.

Legend: rank, actor: of a worker, of an expert actor. Times in seconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kt_ray.placement.order import expert_order, worker_program
from kt_ray.placement.plan_types import Plan
from kt_ray.timeline import Span

Key = tuple[Any, ...]
Lanes = Mapping[str, Sequence[Span]]  # by actor: "worker-0", "experts-1", "driver"
ANSWERED = {"forward": "forward", "recompute": "backward"}  # operations that submit -> the call's direction
GLANCE = 1e-4  # seconds: a wait that is shorter found its message there


def lanes_of_trace(trace: Mapping[str, Any]) -> dict[str, list[Span]]:
    """Events of every actor, of a Chrome trace that kt_ray.tracking.chrome_trace made."""
    names: dict[tuple[int, int], str] = {}
    lanes: dict[str, list[Span]] = {}
    for item in trace["traceEvents"]:
        if item["ph"] == "M" and item["name"] == "thread_name":
            names[item["pid"], item["tid"]] = item["args"]["name"]
    for item in trace["traceEvents"]:
        if item["ph"] == "X":
            start, args = item["ts"] * 1e-6, item["args"]
            end = start + item["dur"] * 1e-6
            event = Span(item["name"], item["cat"], start, end, args.get("layer", -1), args.get("group", -1))
            lanes.setdefault(names[item["pid"], item["tid"]], []).append(event)
    return lanes


def passes_of(lanes: Lanes) -> list[dict[str, list[Span]]]:
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

    def _first(self, actor: str) -> Span:
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
        # The look at recomputed routing behind the last operation is no part of the program.
        outer = [e for e in events if e.category == "compute" and e.name != "check"]
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
            own: list[Span] = []
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

    def _sent(self, rank: int, op: Span, own: Sequence[Span]) -> float | None:
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

    def _wait(self, actor: str, name: str, like: Span) -> Span:
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
