"""Promises: what a client asked for and fetches later. Safe to call from any thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass

KEPT = 600.0  # seconds that a result stays after it was fetched: the fetch may be repeated
UNFETCHED = 3600.0  # seconds that a result waits to be fetched
KEPT_BYTES = 512 << 20  # of all results; the oldest go first


@dataclass(frozen=True)
class Reply:
    """A result as it travels."""

    body: bytes
    media: str = "application/json"


@dataclass(frozen=True)
class Failure:
    """What went wrong instead."""

    message: str
    category: str = "user"  # whose fault: "user" or "server", as the SDK has them


Outcome = Reply | Failure


class Promise:
    """One request's outcome, now or later.

    Attributes:
        name: what clients call it. owner: model or sampler whose end drops it. paused: what it waits for
            beside its turn; "" = nothing, or it runs.
    """

    def __init__(self, name: str, owner: str) -> None:
        self.name = name
        self.owner = owner
        self.paused = ""
        self._future: Future[Outcome] = Future()

    @property
    def outcome(self) -> Outcome | None:
        return self._future.result() if self._future.done() else None

    def settle(self, outcome: Outcome) -> None:
        self._future.set_result(outcome)

    async def wait(self, seconds: float) -> Outcome | None:
        """The outcome; None = not yet."""
        if not self._future.done():
            await asyncio.wait([asyncio.wrap_future(self._future)], timeout=seconds)
        return self.outcome


class Promises:
    """All of a server's, each under one name for good: a repeated request gets the one that there is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: dict[str, Promise] = {}
        self._settled: OrderedDict[str, float] = OrderedDict()  # name -> when it goes, about ascending
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._all)

    def get(self, name: str) -> Promise | None:
        return self._all.get(name)

    def add(self, promise: Promise) -> None:
        with self._lock:
            self._all[promise.name] = promise

    def settle(self, promise: Promise, outcome: Outcome) -> None:
        """Nothing but the first outcome counts."""
        with self._lock:
            if promise.outcome is not None:
                return
            if self._all.get(promise.name) is promise:
                self._settled[promise.name] = time.monotonic() + UNFETCHED
                self._bytes += _size(outcome)
            promise.settle(outcome)
        if self._bytes > KEPT_BYTES:
            self.sweep()

    def abandon(self, failure: Failure) -> None:
        """The outcome of all that has none."""
        with self._lock:
            waiting = [promise for promise in self._all.values() if promise.outcome is None]
        for promise in waiting:
            self.settle(promise, failure)

    def fetched(self, promise: Promise) -> None:
        """Its outcome was sent: it stays a while, in case the answer was lost."""
        with self._lock:
            if promise.name in self._settled:
                self._settled[promise.name] = time.monotonic() + KEPT

    def sweep(self) -> None:
        """Drop what nobody will fetch any more."""
        now = time.monotonic()
        with self._lock:
            old = [name for name, ends in self._settled.items() if ends < now]
            for name in old:
                self._drop(name)
            while self._bytes > KEPT_BYTES and len(self._settled) > 1:
                # what was fetched goes before what was not: its time ends sooner
                self._drop(min(self._settled, key=self._settled.__getitem__))

    def drop_owner(self, owner: str) -> None:
        """Whoever asks for one of its promises later learns that there is none."""
        with self._lock:
            for name in [name for name, promise in self._all.items() if promise.owner == owner]:
                if name in self._settled:
                    self._settled[name] = min(self._settled[name], time.monotonic() + KEPT)

    def _drop(self, name: str) -> None:
        promise = self._all.pop(name)
        del self._settled[name]
        self._bytes -= _size(promise.outcome)


def _size(outcome: Outcome | None) -> int:
    return len(outcome.body) if isinstance(outcome, Reply) else 1000
