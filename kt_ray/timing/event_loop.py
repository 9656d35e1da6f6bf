"""Programs of actors that compute, wait and send messages, played through in events (kt_ray.timing.simulate).

What computes shares its resource with the others there: while more cores are asked for than the resource
has, everything on it slows down in proportion. The loop itself is C++ (kt_ray/native/src/event_loop.cpp): to
choose a plan it plays more than a million events.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kt_ray.native import _native


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


class Busy(NamedTuple):
    """An actor computes: seconds alone on its resource."""

    name: str
    kind: str
    seconds: float


class Wait(NamedTuple):
    """An actor waits for a message; reason: for whom."""

    tag: tuple[Any, ...]
    reason: str


class Send(NamedTuple):
    """An actor starts a message on its way, and goes on at once."""

    tag: tuple[Any, ...]
    carriage: Carriage


Program = Iterator[Busy | Wait | Send]


class Actor(NamedTuple):
    """An actor and what it does."""

    name: str
    seat: Seat
    program: Program


def play(
    actors: Sequence[Actor],
    capacity: Mapping[str, float],
    *,
    ending: str,
    overhead: float = 0.0,
    offset: float = 0.0,
    events: bool = False,
) -> Stretch:
    """All programs to their ends.

    Args:
        capacity: of every resource that is not 1.
        ending: what an actor waits for that is done.
        overhead: of the driver, afterwards.
        offset: seconds of the step before.
        events: keep what every actor did.

    Raises:
        RuntimeError: the programs wait for each other.
    """
    programs = [(a.seat.resource, a.seat.width, a.program) for a in actors]
    ended, work, idle, used, path, spans, waiting = _native.play(programs, dict(capacity), events)
    if waiting:
        raise RuntimeError(f"the programs wait for each other: {sorted(map(str, waiting))[:4]}")
    last = max(ended)
    stretch = Stretch(last + overhead, dict(zip((a.name for a in actors), work, strict=True)), used)
    for actor, end, reasons in zip(actors, ended, idle, strict=True):
        for reason, seconds in (*reasons.items(), (ending, last - end), ("driver", overhead)):
            stretch.wait(actor.name, reason, seconds)
    stretch.path = {"driver": overhead} if overhead else {}
    for kind, seconds in path.items():
        stretch.path[kind] = stretch.path.get(kind, 0.0) + seconds
    for doer, what, start, end in spans:
        if isinstance(doer, int):
            named = (actors[doer].name, what.name, what.kind)
        else:  # a message on a link
            named = (what, " ".join(map(str, doer)), "transfer")
        stretch.events.append(SimulatedSpan(*named, offset + start, offset + end))
    return stretch
