"""Calls of many actors at once.

While a call lasts, all actors are watched (kt_ray.actors.watch), and one that is frozen or stuck counts as
dead. Of the errors of all, that one is raised which the others follow from.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any

from kt_ray.actors.actor import title
from kt_ray.actors.specs import ActorSpecs
from kt_ray.actors.watch import FROZEN, ActorDied, Standstill, Status, Watch
from kt_ray.errors import UserError
from kt_ray.train.cluster_protocol import ActorLost, GivenUp
from kt_ray.transport.messages import Aborted, Address

logger = logging.getLogger(__name__)

GRACE = 15.0  # seconds the other actors get to notice an abort
NOTICE = 60.0  # seconds in which the death of an actor, or of its node, becomes known


class Handle(ABC):
    """One actor. `start` runs a method on its compute thread, `control` beside it."""

    address: Address

    @property
    def name(self) -> str:
        return title(self.address)

    @abstractmethod
    def start(self, method: str, *args: Any) -> Any:
        """Call on the compute thread; returns a future."""

    @abstractmethod
    def control(self, method: str, *args: Any) -> Any:
        """Call on the control thread; returns a future."""

    def listen(self, method: str, *args: Any) -> Any:
        """Call on the thread for calls that wait for something; returns a future."""
        return self.control(method, *args)


class ActorCalls(ABC):
    """Calls through the handles in `workers` and `experts`.

    Attributes:
        frozen: seconds without an answer after which an actor is replaced.
        give_up: why calls that apply nothing are to end; "" = they are not.
    """

    def __init__(self, specs: ActorSpecs) -> None:
        self.specs = specs
        self.workers: list[Handle] = []
        self.experts: list[Handle] = []
        self.frozen = FROZEN
        self.give_up: Callable[[], str] = lambda: ""
        self._tracing = False  # the present pass writes a trace
        self._lost: set[Address] = set()  # actors that died since the last recovery
        self._aborts: list[Any] = []  # calls that may still be on their way

    @abstractmethod
    def _wait(self, futures: Sequence[Any], timeout: float) -> list[Any]:
        """Block until at least one is done or `timeout` seconds passed; returns those done."""

    @abstractmethod
    def _result(self, future: Any) -> Any:
        """A done future's value, or its error raised (`ActorDied` when the process is gone)."""

    @property
    def handles(self) -> list[Handle]:
        return [*self.workers, *self.experts]

    def _call(self, handles: Sequence[Handle], method: str, *args: Any) -> list[Any]:
        """Call a method of some actors in parallel, for as long as they get something done.

        Returns all results in order, or raises the error that caused the others.
        """
        futures = [handle.start(method, *args) for handle in handles]
        position = {id(future): i for i, future in enumerate(futures)}
        results: list[Any] = [None] * len(futures)
        pending = list(futures)
        errors: list[tuple[Handle, BaseException]] = []
        may_give_up = method in ("run_pass", "prepare", "load_again")  # nothing of a step is applied yet
        watch = self._watch(handles)
        deadline = float("inf")  # after the first error
        while pending and (remaining := deadline - time.monotonic()) > 0:
            done = self._wait(pending, watch.pause if not errors else remaining)
            if may_give_up and not errors and (reason := self.give_up()):
                self._abort(reason)
                deadline = time.monotonic() + NOTICE
                errors.append((handles[0], GivenUp(reason)))
            found: list[tuple[int, BaseException]] = []
            if not errors and not watch.pause:
                found += self._look(watch, [position[id(future)] for future in pending])
                done = [future for future in done if position[id(future)] not in {i for i, _ in found}]
                pending = [future for future in pending if position[id(future)] not in {i for i, _ in found}]
            for future in done:
                i = position[id(future)]
                try:
                    results[i] = self._result(future)
                except Exception as raised:
                    found.append((i, raised))
            for i, error in found:
                died = isinstance(error, ActorDied)
                if not errors:
                    self._abort(f"{handles[i].name} failed in {method}: {type(error).__name__}: {error}")
                    # An actor may notice a peer's death before Ray does: then the cause comes later.
                    sure = died or isinstance(error, UserError)
                    deadline = min(deadline, time.monotonic() + (GRACE if sure else NOTICE))
                if died:
                    deadline = min(deadline, time.monotonic() + GRACE)
                    self._lost.add(handles[i].address)
                errors.append((handles[i], error))
            pending = [future for future in pending if not any(future is d for d in done)]
        if errors:
            raise self._cause(errors)
        return results

    def _watch(self, handles: Sequence[Handle]) -> Watch:
        # torch's profiler holds the interpreter's lock for minutes after a large pass.
        frozen = self.specs.timeout if self._tracing else self.frozen
        return Watch(handles, self._answer, self.specs.timeout, frozen)

    def _answer(self, future: Any) -> Status | None:
        """An actor's status, if it has come."""
        if not self._wait([future], 0.0):
            return None
        status: Status = self._result(future)
        return status

    def _look(self, watch: Watch, working: Collection[int]) -> list[tuple[int, ActorDied]]:
        """The actors that will not end their calls.

        Raises:
            ActorLost: all wait for a message that does not come. UserError: and none can be replaced.
        """
        try:
            return watch.look(working)
        except Standstill as error:
            self._abort("a message was lost")
            raise ActorLost(
                f"no actor made progress for {self.specs.timeout:.0f} s",
                observed=str(error),
                remedy="report this: each actor waits for a message of another, so one was lost",
            ) from error

    def _all(self, method: str, *args: Any) -> list[Any]:
        return self._call(self.handles, method, *args)

    def _cause(self, errors: list[tuple[Handle, BaseException]]) -> BaseException:
        """The error that the others follow from: a user's error, then a death, then any but Aborted."""

        def place(item: tuple[Handle, BaseException]) -> int:
            error = item[1]
            if isinstance(error, UserError):
                return 0
            if isinstance(error, ActorDied):
                return 1
            return 3 if isinstance(error, Aborted) else 2

        handle, error = min(errors, key=place)
        return self._death(handle, error) if isinstance(error, ActorDied) else error

    def _death(self, handle: Handle, error: ActorDied) -> ActorLost:
        self._lost.add(handle.address)
        return ActorLost(f"{handle.name} {error.how}", observed=str(error), remedy=error.remedy)

    def _states(self) -> list[str]:
        """What every actor is at; those that do not answer count as lost."""
        states = []
        for handle in self.handles:
            future = handle.control("status")
            try:
                done = self._wait([future], 5.0)
                states.append(self._result(future).line if done else f"{handle.name}: does not answer")
            except ActorDied as error:
                done = []
                states.append(f"{handle.name}: {error}")
            if not done:
                self._lost.add(handle.address)
        return states

    def _abort(self, reason: str) -> None:
        self._aborts += [handle.control("abort", reason) for handle in self.handles]

    def _settle_aborts(self, deadline: float | None = None) -> None:
        """Wait for pending aborts: an abort that arrives after the next `discard` would end the next pass."""
        if deadline is None:
            deadline = time.monotonic() + NOTICE
        for future in self._aborts:
            self._answers(future, deadline)
        self._aborts.clear()

    def _answers(self, future: Any, deadline: float) -> bool:
        if not self._wait([future], max(0.0, deadline - time.monotonic())):
            return False
        try:
            self._result(future)
        except ActorDied:
            return False
        except Exception:
            logger.exception("an actor answers with an error")
        return True
