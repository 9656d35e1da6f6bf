"""The thread that works: whose turn it is, does the next of it, and tells of the outcome."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial

from kt_ray.train_server.backend import Backend, NoRoomYet
from kt_ray.train_server.futures import Failure, Promises, Reply
from kt_ray.train_server.sample_rounds import SampleRounds, failure_of
from kt_ray.train_server.wire import pass_reply
from kt_ray.train_server.work_queue import SAMPLES, Work, WorkQueue

logger = logging.getLogger(__name__)

_TURN = 64  # requests of one model before another has its turn, where no optimizer step ends it
_PAUSE = 10.0  # seconds until what had no room is tried again
_WAIT = 1.0  # seconds without work between calls of `sweep`


class WorkThread:
    """
    Args:
        sweep: called between turns, and once a second where nothing waits.

    Attributes:
        closing: nothing more begins. Set it under `queue.changed`, and notify.
    """

    def __init__(
        self,
        backend: Backend,
        queue: WorkQueue,
        rounds: SampleRounds,
        promises: Promises,
        sweep: Callable[[], None],
    ) -> None:
        self.closing = False
        self._backend = backend
        self._queue = queue
        self._rounds = rounds
        self._promises = promises
        self._sweep = sweep
        self._thread = threading.Thread(target=self._work, name="kt-train-server", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def _work(self) -> None:
        while not self.closing:
            try:
                self._sweep()
                with self._queue.changed:
                    party = self._queue.turn()
                    if party is None and not self.closing:
                        self._queue.changed.wait(_WAIT)
                if party == SAMPLES:
                    self._rounds.run()
                elif party is not None:
                    self._take_turn(party)
            except Exception:
                logger.exception("the worker goes on after a fault")

    def _take_turn(self, party: str) -> None:
        for _ in range(_TURN):
            work = None if self.closing else self._queue.take(party)
            if work is None:
                return
            held = self._backend.held
            joins = work.part is not None and held(party)  # one on disk would take another's place meanwhile
            if joins and (others := self._queue.take_parts(party, held)):
                self._run_joined([work, *others])
            else:
                self._run(work, party)
            if work.ends_turn:
                return

    def _run_joined(self, works: list[Work]) -> None:
        try:
            results = self._backend.join([work.part for work in works if work.part is not None])
        except Exception as error:
            # Nothing has changed: alone, only the one whose fault it is fails.
            logger.warning("passes of %d models are repeated one by one: %s", len(works), error)
            for work in works:
                self._run(work, work.part.model if work.part else "")
            return
        for work, result in zip(works, results, strict=True):
            self._run(work, "", partial(pass_reply, result))

    def _run(self, work: Work, model: str, made: Callable[[], Reply] | None = None) -> None:
        """made: the reply, where it is known by now."""
        run = made or work.run
        if run is None:
            return
        waited = ""
        if work.promise is not None:
            waited, work.promise.paused = work.promise.paused, ""
        try:
            outcome: Reply | Failure = run()
        except NoRoomYet as error:
            self._pause(work, model, error.line(), told=bool(waited))
            return
        except Exception as error:
            outcome = failure_of(error)
        if work.promise is not None:
            self._promises.settle(work.promise, outcome)

    def _pause(self, work: Work, model: str, reason: str, *, told: bool) -> None:
        """Its client waits, as others' trainings must not end its own. told: whether the log says so."""
        if work.promise is not None:
            if not told:
                logger.warning("request %s waits until there is room: %s", work.promise.name, reason)
            work.promise.paused = reason
        self._queue.put_back(model, work, _PAUSE)
