"""Whose work is next. Each model's requests run in the order of their numbers, models take turns.

A turn ends with an optimizer step, or when nothing of the model is ready: several trainings advance step by
step. All samples that wait are one more party. Passes of models that wait when one has its turn are joined to
its pass where all are in memory: that hastens them, and delays nobody's step by more than their tokens.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kt_ray.serve.api_errors import ApiError
from kt_ray.train_server.backend import Pass
from kt_ray.train_server.futures import Failure, Promise, Promises, Reply

GAP = 600.0  # seconds that a request waits for those before it: the SDK repeats what failed for 300
MOST_WAITING = 10_000  # requests of one model, or of all samplers
CONTROL = "control"  # the party of what belongs to no model's order
SAMPLES = "samples"  # the party of the samplers


@dataclass(frozen=True)
class Work:
    """What a promise stands for.

    Attributes:
        promise: None = nothing waits for it: a request that was refused holds its place in the order.
        ends_turn: whether another model comes after it.
        part: a pass that may be one of several models' at once; None = it runs by itself.
        loads: whether it runs where a load that failed holds up all others.
    """

    promise: Promise | None
    run: Callable[[], Reply] | None = None
    ends_turn: bool = False
    part: Pass | None = None
    loads: bool = False


@dataclass
class _Order:
    """One model's requests."""

    next: int  # number of the request that runs next
    waiting: dict[int, Work] = field(default_factory=dict)
    moved: float = field(default_factory=time.monotonic)  # when the last one ran or the first began to wait
    later: float = 0.0  # before then nothing runs
    barred: str = ""  # why all but loads fail

    @property
    def ready(self) -> bool:
        return self.next in self.waiting and time.monotonic() >= self.later


class WorkQueue:
    """All that waits for the worker. Hold `changed` for several calls together; each takes it by itself.

    Attributes:
        on_gap: told of a model and the number of its request that never came.
    """

    def __init__(self, promises: Promises) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.samples_wait: Callable[[], bool] = lambda: False
        self.on_gap: Callable[[str, int], None] = lambda model, number: None
        self._promises = promises
        self._orders: dict[str, _Order] = {}
        self._control: deque[Work] = deque()
        self._parties: deque[str] = deque([SAMPLES])

    def add_model(self, model: str) -> None:
        with self.changed:
            self._orders[model] = _Order(0)
            self._parties.append(model)

    def remove_model(self, model: str, why: str) -> None:
        """What waits fails."""
        with self.changed:
            order = self._orders.pop(model, None)
            if order is not None:
                self._parties.remove(model)
                self._fail(order, why)

    def submit(self, model: str, number: int, work: Work) -> None:
        """
        Raises:
            ApiError: too many wait.
        """
        with self.changed:
            order = self._orders[model]
            if len(order.waiting) >= MOST_WAITING:
                raise ApiError(429, f"{MOST_WAITING} requests of this model wait already")
            if not order.waiting:
                order.moved = time.monotonic()
            order.waiting.setdefault(number, work)
            self.changed.notify_all()

    def bar(self, model: str, why: str) -> None:
        """From now on all of a model's requests but loads fail, each in its turn; "" = no longer."""
        with self.changed:
            if model in self._orders:
                self._orders[model].barred = why

    def control(self, work: Work) -> None:
        with self.changed:
            self._control.append(work)
            self.changed.notify_all()

    def passed(self, model: str, number: int) -> bool:
        """Whether a request of that number waits, runs or has run."""
        with self.changed:
            order = self._orders[model]
            return number < order.next or number in order.waiting

    @property
    def waits(self) -> bool:
        """Whether anything but samples is ready."""
        with self.changed:
            return bool(self._control) or any(order.ready for order in self._orders.values())

    def busy(self) -> frozenset[str]:
        """Models with work that waits."""
        with self.changed:
            return frozenset(model for model, order in self._orders.items() if order.waiting)

    def turn(self) -> str | None:
        """The party whose turn is next; None = nobody has anything."""
        with self.changed:
            if self._control:  # what frees memory goes before what takes it
                return CONTROL
            for party in self._parties:
                if self._has(party):
                    self._parties.remove(party)
                    self._parties.append(party)
                    return party
            return None

    def take(self, party: str) -> Work | None:
        """A party's next work; None = there is none ready."""
        with self.changed:
            if party == CONTROL:
                return self._control.popleft() if self._control else None
            order = self._orders.get(party)
            while order is not None and order.ready:
                work = order.waiting.pop(order.next)
                order.next += 1
                order.moved = time.monotonic()
                if not order.barred or work.loads or work.promise is None:
                    return work
                self._promises.settle(work.promise, Failure(order.barred))
            return None

    def put_back(self, model: str, work: Work, seconds: float) -> None:
        """What was taken last waits so long, and all of the model behind it."""
        with self.changed:
            order = self._orders.get(model)
            if order is not None:
                order.next -= 1
                order.waiting[order.next] = work
                order.later = time.monotonic() + seconds
            elif work.promise is not None:
                self._promises.settle(work.promise, Failure("the model is gone"))

    def take_parts(self, model: str, fits: Callable[[str], bool]) -> list[Work]:
        """The next work of every other model that fits whose next work may be part of a pass of several."""
        with self.changed:
            orders = {party: self._orders[party] for party in self._parties if party in self._orders}
            others = [
                other
                for other, order in orders.items()
                if other != model
                and order.ready
                and not order.barred
                and order.waiting[order.next].part is not None
                and fits(other)
            ]
            return [work for other in others if (work := self.take(other)) is not None]

    def sweep(self) -> None:
        """Requests that waited too long for one before them fail."""
        with self.changed:
            for model, order in self._orders.items():
                if order.waiting and order.next not in order.waiting and time.monotonic() - order.moved > GAP:
                    self.on_gap(model, order.next)
                    why = f"request {order.next} of this model never came; those after it cannot run"
                    if any(work.loads for work in order.waiting.values()):
                        order.barred = f"{why}, a load of a state among them. To fix: load it again"
                    for number in sorted(order.waiting):
                        work = order.waiting[number]
                        if work.promise is None and work.run is not None:  # what a refused one leaves behind
                            work.run()
                    self._fail(order, why)
                    order.next = max(order.waiting) + 1
                    order.waiting.clear()

    def _has(self, party: str) -> bool:
        return self.samples_wait() if party == SAMPLES else self._orders[party].ready

    def _fail(self, order: _Order, why: str) -> None:
        for work in order.waiting.values():
            if work.promise is not None:
                self._promises.settle(work.promise, Failure(why))
