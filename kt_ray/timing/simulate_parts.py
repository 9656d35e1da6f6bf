"""The pieces of the event loop of simulate.py: what actors do, what they share, what is summed up."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kt_ray.timing.simulate_types import Event, Seat


@dataclass
class Stretch:
    """A part of the step that begins and ends with all actors together."""

    seconds: float = 0.0
    work: dict[str, float] = field(default_factory=dict)
    used: dict[str, float] = field(default_factory=dict)
    idle: dict[str, dict[str, float]] = field(default_factory=dict)
    path: dict[str, float] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

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


class Node(NamedTuple):
    """A stretch of an actor's or message's time and what it followed from."""

    kind: str
    start: float
    end: float
    parent: Node | None


class Work(NamedTuple):
    name: str
    kind: str
    seconds: float


class Wait(NamedTuple):
    tag: tuple[Any, ...]
    reason: str


Program = Generator[Work | Wait, None, None]


class Resource:
    """Tasks that share a capacity: all of them run at rate min(1, capacity / demand).

    `served` is the work that a task present from the start would have got; a task ends when it has grown
    by its seconds. One rate for all keeps the order of ends a heap's.
    """

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.demand = 0.0
        self.served = 0.0
        self.since = 0.0
        self.used = 0.0
        self.version = 0
        self.tasks: list[tuple[float, int, float, Callable[[], None]]] = []

    @property
    def rate(self) -> float:
        return min(1.0, self.capacity / self.demand) if self.demand > self.capacity else 1.0

    def advance(self, now: float) -> None:
        step = (now - self.since) * self.rate if self.tasks else 0.0
        self.served += step
        self.used += step * self.demand
        self.since = now

    def next_end(self) -> float:
        return self.since + max(0.0, self.tasks[0][0] - self.served) / self.rate


class Actor:
    """An actor in the middle of its program."""

    def __init__(self, name: str, seat: Seat, program: Program) -> None:
        self.name = name
        self.seat = seat
        self.program = program
        self.node: Node | None = None
        self.ended = 0.0
