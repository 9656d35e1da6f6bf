"""What the driver does while it waits for its actors: it asks each how far it is, beside its work.

An actor that does not answer is frozen (stopped, or its host is), one that answers but gets nothing done is
stuck, and one that waits for a message is neither, as long as anybody gets something done. There is no limit
on how long work may take.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, NamedTuple, Protocol

LOOK = 1.0  # seconds between looks at the actors
FROZEN = 90.0  # seconds without an answer


class Status(NamedTuple):
    """An actor's answer.

    beats: changes with what is done in its process (kt_ray.pulse). waiting: for a message of a peer's; "idle"
    = for one that may never come; "" = it computes, or has nothing to do. line: for people. loaded: layer,
    bytes done, bytes in total.
    """

    beats: int
    waiting: Literal["", "peer", "idle"]
    line: str
    loaded: tuple[int, int, int] = (0, 0, 0)


class ActorDied(RuntimeError):
    """An actor's process is gone, or as good as gone.

    Attributes:
        how: what it did, after its name: "died", "did not answer for 90 s".
        remedy: what to look at.
    """

    def __init__(
        self,
        observed: str,
        how: str = "died",
        remedy: str = "an actor that dies usually ran out of memory: look for the kernel's out-of-memory "
        "killer (dmesg) and at the actor's log, compare mode=plan with the memory that is free",
    ) -> None:
        super().__init__(observed)
        self.how, self.remedy = how, remedy


class Standstill(RuntimeError):
    """All actors wait for messages, and nobody gets anything done: one was lost."""


class Watched(Protocol):
    """What is asked (kt_ray.actors.actor_calls.Handle)."""

    @property
    def name(self) -> str: ...

    def control(self, method: str, *args: Any) -> Any: ...


class Watch:
    """The actors of one round of calls.

    Args:
        actors: whom to ask; each has its own state here.
        answer: a future's value, or None if it has not come; raises the actor's error.
        patience: seconds without progress after which an actor counts as stuck.
        frozen: seconds without an answer after which it counts as frozen.
        clock: seconds that only grow.

    Only time in which the driver itself runs counts: one that was stopped for an hour blames nobody.
    """

    def __init__(
        self,
        actors: Sequence[Watched],
        answer: Callable[[Any], Status | None],
        patience: float,
        frozen: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._actors = actors
        self._answer = answer
        self._patience = patience
        self._frozen = min(frozen, patience)
        self._clock = clock
        self._looked = clock()
        self._asked: list[Any] = [None] * len(actors)
        self._silent = [0.0] * len(actors)  # seconds since the last answer
        self._still = [0.0] * len(actors)  # seconds since the last progress
        self.statuses: list[Status | None] = [None] * len(actors)

    @property
    def pause(self) -> float:
        """Seconds until the next look is due."""
        return max(0.0, self._looked + LOOK - self._clock())

    def look(self, working: Collection[int]) -> list[tuple[int, ActorDied]]:
        """Ask all again, and judge them by what they have answered.

        Args:
            working: those that still have to end their call, by position.

        Returns:
            Position and reason of every actor that is dead, frozen or stuck.

        Raises:
            Standstill: nobody is to blame.
        """
        now = self._clock()
        passed, self._looked = min(now - self._looked, 2 * LOOK), now
        found = []
        for i, actor in enumerate(self._actors):
            self._silent[i] += passed
            self._still[i] += passed
            try:
                self._ask(i, actor)
            except ActorDied as error:
                found.append((i, error))
        blamed = {i for i, _ in found}
        found += [
            (i, self._blame(i)) for i in range(len(self._actors)) if i not in blamed and self._bad(i, working)
        ]
        if not found and self._all_wait(working):
            raise Standstill(self.report())
        return found

    def _ask(self, i: int, actor: Watched) -> None:
        """Take the answer to the last question, if it has come; then the next one can be asked."""
        if self._asked[i] is not None:
            status = self._answer(self._asked[i])
            if status is None:
                return
            before = self.statuses[i]
            self._silent[i] = 0.0
            if before is None or status[:3] != before[:3]:
                self._still[i] = 0.0
            self.statuses[i] = status
        self._asked[i] = actor.control("status")

    def _bad(self, i: int, working: Collection[int]) -> bool:
        status = self.statuses[i]
        waits = status is not None and bool(status.waiting)
        stuck = i in working and not waits and self._still[i] >= self._patience
        return stuck or self._silent[i] >= self._frozen

    def _blame(self, i: int) -> ActorDied:
        if self._silent[i] >= self._frozen:
            return ActorDied(
                self.report(),
                f"did not answer for {self._silent[i]:.0f} s",
                "its process or its host was stopped (SIGSTOP, a debugger, a suspended machine), or its host "
                "has no memory left: look at the host and at the actor's log",
            )
        return ActorDied(
            self.report(),
            f"made no progress for {self._still[i]:.0f} s",
            "if its work is only slow, raise trainer.step_timeout; the actor's log may say more",
        )

    def _all_wait(self, working: Collection[int]) -> bool:
        """Whether a message that must come does not, and nobody is left who could send it."""
        waiting = [status.waiting for i in working if (status := self.statuses[i]) is not None]
        return (
            len(waiting) == len(working)
            and all(waiting)
            and "peer" in waiting
            and min(self._still[i] for i in working) >= self._patience
        )

    def report(self) -> str:
        """What every actor is at, on one line."""
        lines = []
        for actor, status, silent in zip(self._actors, self.statuses, self._silent, strict=True):
            line = actor.name if status is None else status.line
            lines.append(line if silent < 2 * LOOK + 1 else f"{line} (no answer for {silent:.0f} s)")
        return " | ".join(lines)
