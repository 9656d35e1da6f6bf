"""Programs of actors that compute, wait and send messages, played through in events (kt_ray.timing.simulate).

What computes shares its resource with the others there: while more cores are asked for than the resource has,
everything on it slows down in proportion.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kt_ray.timing.shared_resource import Resource


class Leg(NamedTuple):
    """A part of a message's way: seconds on a resource, one unit of it."""

    resource: str
    seconds: float


class Carriage(NamedTuple):
    """How a message travels: legs one after the other, then `latency` seconds that occupy nothing."""

    legs: tuple[Leg, ...] = ()
    latency: float = 0.0


class Seat(NamedTuple):
    """Where an actor computes: its resource and how much of it it takes."""

    resource: str
    width: float = 1.0


class SimulatedSpan(NamedTuple):
    """Something an actor or link did, in seconds from the step's start."""

    actor: str
    name: str
    kind: str
    start: float
    end: float


@dataclass
class Stretch:
    """A part of the step that begins and ends with all actors together."""

    seconds: float = 0.0
    work: dict[str, float] = field(default_factory=dict)
    used: dict[str, float] = field(default_factory=dict)
    idle: dict[str, dict[str, float]] = field(default_factory=dict)
    path: dict[str, float] = field(default_factory=dict)
    events: list[SimulatedSpan] = field(default_factory=list)

    def add(self, other: Stretch) -> None:
        self.seconds += other.seconds
        for mine, theirs in ((self.work, other.work), (self.used, other.used), (self.path, other.path)):
            for key, value in theirs.items():
                mine[key] = mine.get(key, 0.0) + value
        for actor, reasons in other.idle.items():
            for reason, value in reasons.items():
                self.wait(actor, reason, value)
        self.events += other.events

    def wait(self, actor: str, reason: str, seconds: float) -> None:
        if seconds > 0:
            reasons = self.idle.setdefault(actor, {})
            reasons[reason] = reasons.get(reason, 0.0) + seconds


class Segment(NamedTuple):
    """A stretch of an actor's or message's time and what it followed from."""

    kind: str
    start: float
    end: float
    parent: Segment | None


class Busy(NamedTuple):
    """An actor computes: seconds alone on its resource."""

    name: str
    kind: str
    seconds: float


class Wait(NamedTuple):
    """An actor waits for a message; reason: for whom."""

    tag: tuple[Any, ...]
    reason: str


Program = Generator[Busy | Wait, None, None]


@dataclass(eq=False)
class Actor:
    """An actor in the middle of its program."""

    name: str
    seat: Seat
    program: Program
    past: Segment | None = None  # the last of what it went through
    ended: float = 0.0


class EventLoop:
    """The event loop.

    Args:
        capacity: of every resource that is not 1. events: keep what every actor did.
    """

    def __init__(self, capacity: Mapping[str, float], events: bool) -> None:
        self.capacity = capacity
        self.keep = events

    def play(
        self,
        actors: Sequence[Actor],
        offset: float,
        overhead: float,
        ending: str,
    ) -> Stretch:
        """All programs to their ends.

        Args:
            offset: seconds of the step before. overhead: of the driver, afterwards. ending: what an actor
                waits for that is done.

        Raises:
            RuntimeError: the programs wait for each other.
        """
        self.now = 0.0
        self.order = itertools.count()
        # what to call; or a resource of which a task ends, and the version of it that foresaw that
        self.queue: list[tuple[float, int, Callable[[], None] | Resource, int]] = []
        self.resources: dict[str, Resource] = {}
        self.arrived: set[tuple[Any, ...]] = set()
        self.waiting: dict[tuple[Any, ...], tuple[Actor, str, float]] = {}
        self.stretch = Stretch()
        self.offset = offset
        self.current: Actor | None = None
        for actor in actors:
            self.stretch.work[actor.name] = 0.0
            self._resume(actor)
        while self.queue:
            self.now, _, item, version = heapq.heappop(self.queue)
            if not isinstance(item, Resource):
                item()
            elif version == item.version:
                call = item.end(self.now)
                if item.tasks:
                    self._foresee(item)
                call()
        if self.waiting:
            raise RuntimeError(f"the programs wait for each other: {sorted(map(str, self.waiting))[:4]}")
        last = max(actors, key=lambda a: a.ended)
        stretch = self.stretch
        for actor in actors:
            stretch.wait(actor.name, ending, last.ended - actor.ended)
            stretch.wait(actor.name, "driver", overhead)
        for name, resource in self.resources.items():
            stretch.used[name] = resource.used
        stretch.seconds = last.ended + overhead
        if overhead:
            stretch.path["driver"] = overhead
        past = last.past
        while past is not None:
            stretch.path[past.kind] = stretch.path.get(past.kind, 0.0) + past.end - past.start
            past = past.parent
        return stretch

    def _resume(self, actor: Actor) -> None:
        """Run an actor until it computes, waits, or is done."""
        while True:
            self.current = actor
            item = next(actor.program, None)
            if item is None:
                actor.ended = self.now
                return
            if isinstance(item, Busy):
                if item.seconds <= 0:
                    continue
                self.stretch.work[actor.name] += item.seconds
                self._task(actor.seat.resource, item.seconds, actor.seat.width, self._done(actor, item))
                return
            if item.tag not in self.arrived:
                self.waiting[item.tag] = (actor, item.reason, self.now)
                return

    def _done(self, actor: Actor, item: Busy) -> Callable[[], None]:
        start = self.now

        def done() -> None:
            actor.past = Segment(item.kind, start, self.now, actor.past)
            if self.keep:
                self._note(actor.name, item.name, item.kind, start)
            self._resume(actor)

        return done

    def _note(self, actor: str, name: str, kind: str, start: float) -> None:
        self.stretch.events.append(
            SimulatedSpan(actor, name, kind, self.offset + start, self.offset + self.now)
        )

    def send(self, tag: tuple[Any, ...], carriage: Carriage) -> None:
        """Start a message's way; the sender goes on at once."""
        assert self.current is not None
        self._travel(tag, carriage, 0, self.now, self.current.past)

    def _travel(
        self,
        tag: tuple[Any, ...],
        carriage: Carriage,
        at: int,
        sent: float,
        past: Segment | None,
        *,
        alone: bool = False,
    ) -> None:
        """A message goes on with its leg number `at`. alone: nothing else is done afterwards."""
        start, legs = self.now, carriage.legs
        while at < len(legs) and legs[at].seconds <= 0:
            at += 1
        if at < len(legs):
            leg = legs[at]

            def carried() -> None:
                if self.keep:
                    self._note(leg.resource, " ".join(map(str, tag)), "transfer", start)
                gone = Segment(leg.resource, start, self.now, past)
                self._travel(tag, carriage, at + 1, sent, gone, alone=True)

            self._task(leg.resource, leg.seconds, 1.0, carried)
            return

        def arrive() -> None:
            self.arrived.add(tag)
            waiter = self.waiting.pop(tag, None)
            if waiter is None:
                return
            actor, reason, since = waiter
            self.stretch.wait(actor.name, reason, max(0.0, sent - since))
            self.stretch.wait(actor.name, "transfer", self.now - max(since, sent))
            actor.past = Segment("call", start, self.now, past) if self.now > start else past
            self._resume(actor)

        if alone and not carriage.latency and not (self.queue and self.queue[0][0] <= start):
            arrive()  # it would be the next of the queue
            return
        heapq.heappush(self.queue, (start + carriage.latency, next(self.order), arrive, 0))

    def _task(self, name: str, seconds: float, width: float, end: Callable[[], None]) -> None:
        resource = self.resources.get(name)
        if resource is None:
            resource = self.resources[name] = Resource(self.capacity.get(name, 1.0))
        if resource.begin(next(self.order), seconds, width, end, self.now):
            self._foresee(resource)

    def _foresee(self, resource: Resource) -> None:
        heapq.heappush(self.queue, (resource.foresee(), next(self.order), resource, resource.version))
