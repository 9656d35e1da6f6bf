"""Samples: what waits is generated together, in one session of the backend."""

from __future__ import annotations

import errno
import logging
import shutil
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kt_ray.errors import TryAgain, UserError
from kt_ray.generate.requests import Token
from kt_ray.serve.api_errors import ApiError
from kt_ray.train_server.backend import Backend, SamplingSession, Scores
from kt_ray.train_server.futures import Failure, Promise, Promises
from kt_ray.train_server.sample_requests import SampleRequest
from kt_ray.train_server.wire import sample_reply
from kt_ray.train_server.work_queue import MOST_WAITING, WorkQueue

logger = logging.getLogger(__name__)

_POLL = 0.5  # seconds; nothing depends on it
MOST_TRIES = 4  # of a job in whose rounds actors die
_NOT_KEPT = (
    "of samplers without a name the server keeps each training's latest, others while there is room; save "
    "under a name (save_weights_for_sampler) what is needed longer"
)
CANCELLED = Failure("the request was cancelled")


def failure_of(error: BaseException) -> Failure:
    """What a client learns of an error of the backend's: addresses and processes are the operator's."""
    if isinstance(error, TryAgain):
        return Failure(f"the server lost a part of itself: {error.what}", "server")
    if isinstance(error, UserError):
        return Failure(error.line())
    if isinstance(error, ApiError):
        return Failure(error.message)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        logger.warning("a request failed: %s", error)
        remedy = "free space there, or start it with train_server.directory on another disk"
        return Failure(f"the server's disk is full. To fix: {remedy}", "server")
    logger.error("a request failed", exc_info=error)
    return Failure("the server failed at this request; its log says why", "server")


@dataclass
class Sampler:
    """Weights to sample from.

    Attributes:
        key: the backend's name; False = the base model. path: tinker:// path that it comes from, or None.
        find: where to load it from when it is first used, or again. loaded: whether the backend has it.
        model: whose weights a nameless one has. replaced: there is a later one of this model.
        aside: where such a one lies on disk, for `find`. lost: why it is neither there nor in memory.
        jobs: that wait or run.
    """

    name: str
    session: str
    key: str | bool
    path: str | None = None
    find: Callable[[], Path] | None = None
    model: str | None = None
    replaced: bool = False
    loaded: bool = False
    aside: Path | None = None
    lost: str = ""
    jobs: int = 0


@dataclass
class SampleJob:
    """One asample request."""

    promise: Promise
    sampler: Sampler
    request: SampleRequest
    scores: Scores | None = None
    sequences: list[list[Token]] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)
    running: int = 0
    failure: Failure | None = None
    again: bool = False  # an actor died meanwhile: its samples, whose seeds are fixed, are drawn again
    tries: int = 1


class SampleRounds:
    """Jobs that wait, and those that run. `run` is the worker's, everything else anybody's.

    Args:
        most_samplers: that the backend keeps at the same time. Of the nameless a model's latest waits on disk
            where others take its room, an earlier one is lost. What is on disk is loaded when it is needed.
        tick: called now and then while samples run, which may be without end.
    """

    def __init__(
        self,
        backend: Backend,
        queue: WorkQueue,
        promises: Promises,
        most_samplers: int,
        tick: Callable[[], None],
    ) -> None:
        self._tick = tick
        self._backend = backend
        self._queue = queue
        self._promises = promises
        self._most = most_samplers
        self._waiting: deque[SampleJob] = deque()
        self._running: list[SampleJob] = []
        self._died = False  # an actor, in the present round
        self._loaded: dict[str, Sampler] = {}  # by use, the last one used last
        self._aside: list[Sampler] = []  # nameless ones with a file
        self.closing = False
        queue.samples_wait = lambda: bool(self._waiting)

    def submit(self, job: SampleJob) -> None:
        """
        Raises:
            ApiError: too many wait; the SDK comes back.
        """
        with self._queue.changed:
            if len(self._waiting) >= MOST_WAITING:
                raise ApiError(429, f"{MOST_WAITING} requests for samples wait already")
            job.sampler.jobs += 1
            self._waiting.append(job)
            self._queue.changed.notify_all()

    def cancel(self, matches: Callable[[SampleJob], bool], failure: Failure = CANCELLED) -> None:
        """End jobs: those that wait now, those that run as soon as may be."""
        with self._queue.changed:
            for job in [job for job in self._waiting if matches(job)]:
                self._waiting.remove(job)
                job.failure = failure
                self._end(job)
            for job in self._running:
                if matches(job) and job.failure is None:
                    job.failure = failure
            self._queue.changed.notify_all()

    def hold(self, sampler: Sampler) -> None:
        """The backend has this one now."""
        sampler.loaded = True
        assert isinstance(sampler.key, str)
        self._loaded[sampler.key] = sampler

    def make_room(self, model: str | None = None) -> bool:
        """For one more; the worker's. What can be loaded again goes first, what is waited for last.

        A nameless sampler that is waited for answers before it goes; within a round it cannot.

        Args:
            model: whose weights it will have, if it is nameless.

        Returns:
            Whether there is room.
        """
        for sampler in (*self._loaded.values(), *self._aside):
            sampler.replaced |= model is not None and sampler.model == model
        for sampler in [one for one in self._aside if one.replaced and not (one.loaded or one.jobs)]:
            self.drop(sampler)
        while True:
            with self._queue.changed:
                needed = {job.sampler.key for job in self._running}
                spare = [
                    sampler
                    for sampler in self._loaded.values()
                    if sampler.key not in needed and (sampler.find is not None or not sampler.jobs)
                ]
                spare.sort(key=lambda s: (s.jobs > 0, s.find is None, not s.replaced))
                spare = spare[: max(0, len(self._loaded) + 1 - self._most)]
            for sampler in spare:
                self._unload(sampler)
            if len(self._loaded) < self._most:
                return True
            if self._running:
                return False
            self.run(more=False)

    def drop(self, sampler: Sampler) -> None:
        """With what lies on disk of a nameless one; the worker's."""
        sampler.replaced = True
        if sampler.loaded:
            self._unload(sampler)
        if sampler.aside is not None:
            self._aside.remove(sampler)
            shutil.rmtree(sampler.aside, ignore_errors=True)
            sampler.aside = sampler.find = None
            sampler.lost = _NOT_KEPT

    def _unload(self, sampler: Sampler) -> None:
        """From memory; the latest of a model goes to disk."""
        assert isinstance(sampler.key, str)
        if sampler.find is None:
            sampler.lost = _NOT_KEPT if sampler.replaced else self._put_aside(sampler)
        self._backend.drop(sampler.key)
        del self._loaded[sampler.key]
        sampler.loaded = False

    def _put_aside(self, sampler: Sampler) -> str:
        """Returns why it cannot be; "" = it is on disk."""
        assert isinstance(sampler.key, str)
        try:
            aside = self._backend.put_aside(sampler.key)
        except Exception as error:
            reason = failure_of(error).message
            logger.warning("a sampler is lost: it had to go to disk, and could not: %s", reason)
            return f"they had to go to disk, and could not: {reason}"
        sampler.aside, sampler.find = aside, lambda: aside
        self._aside.append(sampler)
        return ""

    def _lasting(self) -> set[str]:
        """Samplers that cannot be loaded again and are waited for: they stay."""
        with self._queue.changed:
            return {key for key, sampler in self._loaded.items() if sampler.jobs and sampler.find is None}

    def run(self, more: bool = True) -> None:
        """Generate what waits. more: others join until something else waits for the worker."""
        self._died = False
        jobs = self._admit(lambda job: True)
        for sampler in {id(job.sampler): job.sampler for job in jobs}.values():
            self._load(sampler, jobs)
        jobs = [job for job in jobs if not job.again]  # those have no room, and wait again
        for key in {job.sampler.key for job in jobs if job.request.wants_scores and job.failure is None}:
            self._score(key, [job for job in jobs if job.sampler.key == key and job.request.wants_scores])
        self._settle()
        if not self._running:
            return
        try:
            with self._backend.sampling() as session:
                for job in jobs:
                    self._start(session, job)
                self._attend(session, more)
        except Exception as error:
            with self._queue.changed:
                for job in self._running:
                    self._note(job, error)
                    job.running = 0
        finally:
            self._settle()

    def _attend(self, session: SamplingSession, more: bool) -> None:
        """Until nothing runs."""
        while True:
            self._tick()
            with self._queue.changed:
                self._settle()
                if not self._running:
                    return
                broken = [job for job in self._running if job.failure is not None or self.closing]
                fresh: list[SampleJob] = []
                if more and not (self._queue.waits or self.closing or self._died):
                    fresh = self._admit(
                        lambda job: job.sampler.loaded or job.sampler.key is False, scored=False
                    )
                if not fresh and not broken:
                    self._queue.changed.wait(_POLL)
            for job in broken:
                for answer, sequence in zip(job.answers, job.sequences, strict=False):
                    if not (sequence and sequence[-1].finish):
                        answer.cancel()
            for job in fresh:
                self._start(session, job)
            if broken and not fresh:
                with self._queue.changed:
                    self._queue.changed.wait(_POLL)

    def _admit(self, fits: Callable[[SampleJob], bool], scored: bool = True) -> list[SampleJob]:
        """Jobs that run from now on: from the first one that waits to the first that does not fit, of no more
        samplers than the backend keeps. Where samplers that stay take all the room, theirs go first."""
        with self._queue.changed:
            jobs: list[SampleJob] = []
            keys = {job.sampler.key for job in self._running if job.sampler.key is not False}
            keys |= self._lasting()
            for job in self._waiting:
                key = job.sampler.key
                if not fits(job) or (job.request.wants_scores and not scored):
                    break
                if key is False or len(keys | {key}) <= self._most:
                    keys |= set() if key is False else {key}
                    jobs.append(job)
                elif jobs or self._running:
                    break
            for job in jobs:
                self._waiting.remove(job)
            self._running += jobs
            return jobs

    def _load(self, sampler: Sampler, jobs: Sequence[SampleJob]) -> None:
        failure: Failure | None = None
        if sampler.lost:
            failure = Failure(f"the weights of this sampler are no longer kept: {sampler.lost}")
        elif sampler.key is not False and not sampler.loaded:
            try:
                assert isinstance(sampler.key, str) and sampler.find is not None
                if self.make_room():
                    self._backend.load_sampler(sampler.key, sampler.find)
                    self.hold(sampler)
                else:  # nameless ones were asked since its jobs were admitted, and go first
                    for job in (job for job in jobs if job.sampler is sampler):
                        job.again, job.tries = True, job.tries - 1  # which is no try
            except Exception as error:
                failure = failure_of(error)
        elif isinstance(sampler.key, str):
            self._loaded[sampler.key] = self._loaded.pop(sampler.key)
        if failure is not None:
            for job in jobs:
                if job.sampler is sampler:
                    job.failure = failure

    def _score(self, key: str | bool, jobs: Sequence[SampleJob]) -> None:
        try:
            prompts = [np.array(job.request.prompt, np.int64) for job in jobs]
            scores = self._backend.score(key, prompts, max(job.request.prompt_top for job in jobs))
            for job, scored in zip(jobs, scores, strict=True):
                job.scores = scored
                if not job.request.draws:
                    job.sequences = [[Token(0, -1, finish="length")] for _ in job.request.samples]
        except Exception as error:
            failure = failure_of(error)
            for job in jobs:
                job.failure = failure

    def _start(self, session: SamplingSession, job: SampleJob) -> None:
        if job.failure is not None or not job.request.draws:
            return
        job.sequences = [[] for _ in job.request.samples]
        with self._queue.changed:
            job.running = len(job.request.samples)
        listeners = [self._listener(job, place) for place in range(job.running)]
        try:
            job.answers += session.submit_all(job.request.samples, listeners)
        except Exception as error:
            with self._queue.changed:
                self._note(job, error)
                job.running = 0

    def _note(self, job: SampleJob, error: BaseException) -> None:
        """What ended a job before its time."""
        if isinstance(error, TryAgain) or isinstance(error.__cause__, TryAgain):
            self._died = True
            job.again = job.tries < MOST_TRIES
        if not job.again:
            job.failure = job.failure or failure_of(error)

    def _listener(self, job: SampleJob, place: int) -> Callable[[Any], None]:
        def listen(piece: Any) -> None:
            ended = isinstance(piece, BaseException) or bool(piece.token.finish)
            with self._queue.changed:
                if isinstance(piece, BaseException):
                    self._note(job, piece)
                else:
                    job.sequences[place].append(piece.token)
                    if piece.token.finish == "error":
                        job.failure = job.failure or Failure(
                            f"a sample failed: {piece.token.error}", "server"
                        )
                    elif piece.token.finish == "cancelled":
                        job.failure = job.failure or CANCELLED
                if ended:
                    job.running -= 1
                    self._queue.changed.notify_all()

        return listen

    def _settle(self) -> None:
        """Tell of what has ended."""
        with self._queue.changed:
            ended = [
                job
                for job in self._running
                if not job.running and (job.failure or job.again or job.answers or not job.request.draws)
            ]
            for job in reversed(ended):
                self._running.remove(job)
                if job.again and job.failure is None:
                    job.again, job.tries = False, job.tries + 1
                    job.sequences, job.answers = [], []
                    self._waiting.appendleft(job)
                else:
                    self._end(job)

    def _end(self, job: SampleJob) -> None:
        job.sampler.jobs -= 1
        outcome = job.failure or sample_reply(
            job.sequences,
            job.scores,
            top=job.request.top,
            prompt_logprobs=job.request.prompt_logprobs,
            prompt_top=job.request.prompt_top,
            last=job.request.last,
        )
        self._promises.settle(job.promise, outcome)
