"""GPUs that are described, not present: streams, events and copies that take the time of a described card.

A driver (`kt_ray.gpu.Driver`) whose devices are "cpu:0", "cpu:1", …. Tensors lie in host memory, and what the
code computes is computed at once; but every stream is a queue in which copies and products wait their turn
and take bytes or FLOP over the card's rates, streams wait for each other by events, and so does the host.
Streams that use a link or a card at the same time share it, as the simulator has it (`Resource`).

One thread keeps the clock. Whatever follows from something else on the cards begins at the computed time, not
when the thread woke up; only the host is late, by as much as it sleeps too long.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kt_ray.gpu import Driver
from kt_ray.native._native import Resource


class Card(NamedTuple):
    """What a described GPU does. name: the plan's, "cuda:0".

    to_device, to_host: bytes/s of its link. product: seconds of multiplying matrices [B, n, K] by [B, K, N].
    """

    name: str
    to_device: float
    to_host: float
    product: Callable[[int, int, int, int], float]


class Done(NamedTuple):
    """What a resource did for a stream, seconds of CLOCK_MONOTONIC."""

    resource: str
    stream: str
    name: str
    start: float
    end: float


@dataclass(eq=False)
class Event:
    """After all that its stream was given before."""

    reached: bool = False
    waiting: list[Stream] = field(default_factory=list)
    told: threading.Event = field(default_factory=threading.Event)

    def synchronize(self) -> None:
        self.told.wait()


@dataclass(eq=False)
class Stream:
    """A queue of a card."""

    board: Board
    device: torch.device
    name: str
    held: bool = False  # by work that is done, or an event that it waits for
    items: deque[Callable[[Stream], bool]] = field(default_factory=deque)  # each says whether it holds it

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()

        def reach(_: Stream) -> bool:
            event.reached = True
            event.told.set()
            for stream in event.waiting:
                stream.held = False
                self.board.go_on(stream)
            return False

        self.board.give(self, reach)
        return event

    def wait_event(self, event: Event) -> None:
        def wait(stream: Stream) -> bool:
            if not event.reached:
                event.waiting.append(stream)
            return not event.reached

        self.board.give(self, wait)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def work(self, resource: str, seconds: float, name: str) -> None:
        """Occupy a resource."""
        if seconds > 0:
            self.board.give(self, lambda stream: self.board.begin(stream, resource, seconds, name))


class Board:
    """The clock of all cards, and what they did."""

    def __init__(self) -> None:
        self.done: list[Done] = []
        self._changed = threading.Condition(threading.RLock())
        self._now = time.monotonic()
        self._ends: list[tuple[float, int, Resource, int]] = []
        self._order = itertools.count()
        self._resources: dict[str, Resource] = {}
        self._called: dict[int, Callable[[], None]] = {}  # at the end of a task, by its number
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="board", daemon=True)
        self._thread.start()

    def give(self, stream: Stream, item: Callable[[Stream], bool]) -> None:
        with self._changed:
            self._advance(time.monotonic())
            stream.items.append(item)
            self.go_on(stream)
            self._changed.notify()

    def go_on(self, stream: Stream) -> None:
        while stream.items and not stream.held:
            stream.held = stream.items.popleft()(stream)

    def begin(self, stream: Stream, name: str, seconds: float, what: str) -> bool:
        start = self._now
        resource = self._resources.setdefault(name, Resource(1.0, since=start))

        def end() -> None:
            self.done.append(Done(name, stream.name, what, start, self._now))
            stream.held = False
            self.go_on(stream)

        number = next(self._order)
        self._called[number] = end
        resource.begin(number, seconds, 1.0, start)
        self._foresee(resource)
        return True

    def note(self, resource: str, name: str, start: float, end: float) -> None:
        """Something that the host did."""
        with self._changed:
            self.done.append(Done(resource, "host", name, start, end))

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _foresee(self, resource: Resource) -> None:
        heapq.heappush(self._ends, (resource.foresee(), next(self._order), resource, resource.version))

    def _advance(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            at, _, resource, version = heapq.heappop(self._ends)
            self._now = max(self._now, at)
            if version == resource.version:
                end = self._called.pop(resource.end(self._now))
                if not resource.idle:
                    self._foresee(resource)
                end()
        self._now = max(self._now, now)

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                self._advance(time.monotonic())
                left = self._ends[0][0] - time.monotonic() if self._ends else None
                if left is None or left > 0:
                    self._changed.wait(left)


class DescribedDriver(Driver):
    """Stands for the cards of these devices.

    Args:
        cards: by device, "cpu:i".
    """

    def __init__(self, cards: Mapping[str, Card]) -> None:
        super().__init__()
        self.board = Board()
        self.cards = {torch.device(name): card for name, card in cards.items()}
        self.streams = {device: Stream(self.board, device, "compute") for device in self.cards}
        self._used = threading.local()

    def queues(self, device: torch.device) -> bool:
        return device in self.cards

    def stream(self, device: torch.device, name: str) -> Stream:
        return Stream(self.board, device, name)

    def claim(self, device: torch.device) -> None:
        """The calling thread computes on this device, if it is told of no stream."""
        self._used.own = self.streams.get(device)

    def current(self, device: torch.device) -> Stream:
        return self._now_used or self.streams[device]

    @contextmanager
    def using(self, stream: Any) -> Iterator[None]:
        before, self._used.stream = getattr(self._used, "stream", None), stream
        try:
            yield
        finally:
            self._used.stream = before

    @property
    def _now_used(self) -> Stream | None:
        """None on a thread that has nothing to do with a card."""
        return getattr(self._used, "stream", None) or getattr(self._used, "own", None)

    def mark(self, device: torch.device) -> Event:
        return self.current(device).record_event()

    def copy_in(self, to: Tensor, source: Tensor) -> None:
        to.copy_(source)
        self._cross(source, "in")

    def copy_out(self, to: Tensor, source: Tensor) -> None:
        to.copy_(source)
        self._cross(source, "out")

    def upload(self, tensor: Tensor, device: torch.device, *, copy: bool = False) -> Tensor:
        made = tensor.to(device, copy=copy)
        self._cross(tensor, "in")
        return made

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        self._multiply(a, b)
        return super().product(a, b)

    def product8(self, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
        self._multiply(a, b.mT)
        return super().product8(a, a_scale, b, b_scale)

    def _multiply(self, a: Tensor, b: Tensor) -> None:
        used = getattr(self._used, "stream", None)  # attention's are counted by layers
        if used is not None:
            card = self.cards[used.device]
            count = a.shape[0] if a.dim() == 3 else 1
            seconds = card.product(count, a.shape[-2], a.shape[-1], b.shape[-1])
            used.work(card.name, seconds, "product")

    def compute(self, device: torch.device, seconds: float, name: str) -> None:
        """Let the thread's stream compute."""
        self.current(device).work(self.cards[device].name, seconds, name)

    def _cross(self, tensor: Tensor, way: str) -> None:
        stream = self._now_used
        if stream is not None:
            card = self.cards[stream.device]
            rate = card.to_device if way == "in" else card.to_host
            stream.work(f"pcie {card.name} {way}", tensor.numel() * tensor.element_size() / rate, stream.name)
