"""A resource of the simulation that several tasks use at once: cores, a GPU, a link."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class Resource:
    """Tasks that share a capacity: all of them run at rate min(1, capacity / demand).

    `served` is the work that a task present from the start would have got; a task ends when it has grown
    by its seconds. One rate for all keeps the order of ends a heap's.
    """

    capacity: float
    demand: float = 0.0
    rate: float = 1.0
    served: float = 0.0
    since: float = 0.0
    used: float = 0.0
    version: int = 0  # of what was foreseen last; earlier ones are void
    tasks: list[tuple[float, int, float, Callable[[], None]]] = field(default_factory=list)

    def begin(self, number: int, seconds: float, width: float, end: Callable[[], None], now: float) -> bool:
        """A task that would take `seconds` alone. number: orders tasks that end at once.

        Returns whether the next end must be foreseen anew.
        """
        self._advance(now)
        rate = self.rate
        self._want(self.demand + width)
        task = (self.served + seconds, number, width, end)
        heapq.heappush(self.tasks, task)
        return self.tasks[0] is task or self.rate != rate

    def foresee(self) -> float:
        """When the next task ends. A change makes it void: what is foreseen then has another version."""
        self.version += 1
        left = self.tasks[0][0] - self.served
        return self.since + left / self.rate if left > 0 else self.since

    def end(self, now: float) -> Callable[[], None]:
        """The next task ends, as foreseen. Returns what it wanted called; if tasks are left, theirs is to be
        foreseen first."""
        self._advance(now)
        _, _, width, call = heapq.heappop(self.tasks)
        self._want(self.demand - width if self.tasks else 0.0)
        return call

    def _advance(self, now: float) -> None:
        if self.tasks:
            step = (now - self.since) * self.rate
            self.served += step
            self.used += step * self.demand
        self.since = now

    def _want(self, demand: float) -> None:
        self.demand = demand
        self.rate = self.capacity / demand if demand > self.capacity else 1.0
