"""What a simulated step is made of: who sits where, what is given, what comes out. See simulate.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


class Micro(NamedTuple):
    """A micro-batch: rows x width positions are computed, `tokens` of them are no padding, `trained` have
    a loss."""

    rows: int
    width: int
    tokens: int
    trained: int


Group = tuple[Micro, ...]  # the micro-batches of one group of one replica
Wave = tuple[tuple[Group, ...], ...]  # per replica, per group: what one pass takes


class Leg(NamedTuple):
    """A part of a message's way: seconds on a resource of which it takes `width`."""

    resource: str
    seconds: float
    width: float = 1.0


class Carriage(NamedTuple):
    """How a message travels: legs one after the other, then `latency` seconds that occupy nothing."""

    legs: tuple[Leg, ...] = ()
    latency: float = 0.0


class Phase(NamedTuple):
    """A part of a step in which all actors work side by side, and which ends when the last one does.

    workers, experts: seconds of every attention worker and of every expert class; overhead: seconds of the
    driver afterwards.
    """

    name: str
    workers: tuple[float, ...]
    experts: tuple[float, ...]
    overhead: float = 0.0


class Seat(NamedTuple):
    """Where an actor computes: its resource and how much of it it takes."""

    resource: str
    width: float = 1.0


class ExpertClass(NamedTuple):
    """Expert actors that do the same work at the same time, simulated as one. far: on another host."""

    actors: tuple[int, ...]
    seat: Seat
    far: bool = False


class Machine(NamedTuple):
    """Who shares what. capacity: of every resource that is not 1."""

    capacity: Mapping[str, float]
    workers: tuple[Seat, ...]
    experts: tuple[ExpertClass, ...]


class LaneCall(NamedTuple):
    """What a GPU does of an expert actor's call, beside the CPU, in seconds alone on its resource.

    device: "cuda:i". ahead: on the link before anything is computed. copies: on the link, products: on the
    GPU, and dispatch: on a core of the actor's, all at the same time. back: on the link, afterwards.
    """

    device: str
    ahead: float
    copies: float
    products: float
    dispatch: float
    back: float


class Durations(Protocol):
    """Seconds of everything, an actor alone on its resource.

    Asked for in the order of every actor's own program, once for each operation, call and message.
    """

    def attention(self, kind: str, layer: int, group: Group) -> tuple[float, float]:
        """An operation of a worker program ("begin" before the first one): seconds before what it sends
        leaves, and after that."""
        ...

    def expert(self, actor: int, layer: int, direction: str, tokens: int) -> float:
        """A call of expert actor `actor` (the first of its class) for `tokens` tokens of all replicas."""
        ...

    def lane(self, actor: int, layer: int, direction: str, tokens: int) -> LaneCall | None:
        """The same call's part on a GPU, at the same time; None = there is none."""
        ...

    def request(self, worker: int, actors: ExpertClass, direction: str, tokens: int) -> Carriage:
        """Tokens of one worker, or their gradients, on the way to a class of expert actors."""
        ...

    def reply(self, worker: int, actors: ExpertClass, direction: str, tokens: int) -> Carriage:
        """The way back."""
        ...

    def stage(self, worker: int, to: int, tokens: int) -> Carriage:
        """Hidden states or their gradients from stage to stage."""
        ...

    def pass_end(self) -> float:
        """The driver's seconds between passes."""
        ...

    def phases(self) -> tuple[Phase, ...]:
        """What follows the last pass of a step."""
        ...


class Event(NamedTuple):
    """Something an actor or link did, in seconds from the step's start."""

    actor: str
    name: str
    kind: str
    start: float
    end: float


@dataclass(frozen=True)
class Simulated:
    """A step.

    Attributes:
        seconds: wall time. pass_seconds: of all passes; the rest are the optimizer's phases.
        work: seconds that every actor would compute alone on its resource, by its name ("worker 0",
            "experts 3"; a class has its first actor's name).
        busy: work / seconds.
        used: resource -> share of its capacity used over the step.
        idle: actor -> reason -> seconds.
        path: seconds of the step's longest chain by what it went through: "attention", "experts", "call"
            (latency), a link's name, or a phase's. They add up to `seconds`.
        critical: the resource used most.
        events: what every actor did, when asked for.
    """

    seconds: float
    pass_seconds: float
    work: Mapping[str, float]
    busy: Mapping[str, float]
    used: Mapping[str, float]
    idle: Mapping[str, Mapping[str, float]]
    path: Mapping[str, float]
    critical: str
    events: tuple[Event, ...] = ()

    def chrome_trace(self) -> list[dict[str, Any]]:
        """Events for chrome://tracing and Perfetto ("traceEvents"), microseconds."""
        actors = {actor: i for i, actor in enumerate(dict.fromkeys(e.actor for e in self.events))}
        names = [
            {"ph": "M", "name": "process_name", "pid": i, "tid": 0, "args": {"name": actor}}
            for actor, i in actors.items()
        ]
        return names + [
            {"ph": "X", "name": e.name, "cat": e.kind, "pid": actors[e.actor], "tid": 0,
             "ts": e.start * 1e6, "dur": (e.end - e.start) * 1e6}
            for e in self.events
        ]  # fmt: skip
