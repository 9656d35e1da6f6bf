"""Continuous batching: which rows wait, which run, what the next step is. Plain Python, no waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from torch import Tensor

from kt_ray.generate.requests import Batch, Request, SessionSpec, Step, Token
from kt_ray.generate.sampling import RowSampler, failed, sample

_KEPT = 100_000  # numbers of requests: a server runs for months


class _Recent(dict[int, bool]):
    """The last numbers that were added, each with True."""

    def add(self, number: int) -> None:
        self[number] = True
        if len(self) > _KEPT:
            del self[next(iter(self))]


class Batcher:
    """Requests join and leave between steps; those that wait are taken in the order they came.

    Args:
        spec: of the session.
        joint: rows of the same adapter share one cache; False = every row has its own (families whose
            caches cannot be put together).
    """

    def __init__(self, spec: SessionSpec, joint: bool) -> None:
        self.spec = spec
        self.joint = joint
        self.steps = 0
        self._waiting: deque[RowSampler] = deque()
        self._rows: dict[int, RowSampler] = {}
        self._cohorts: dict[str, list[int]] = {}  # in the order of their caches' rows
        self._drop: list[int] = []
        self._seen = _Recent()
        self._unwanted = _Recent()  # cancelled before they came

    @property
    def busy(self) -> bool:
        """Whether there is something to do without waiting for a request."""
        return bool(self._waiting or self._cohorts or self._drop)

    def add(self, number: int, request: Request) -> list[Token]:
        """A new request waits for its turn; its end, if it was cancelled before or cannot be served."""
        self._seen.add(number)
        if self._unwanted.pop(number, False):
            return [Token(number, -1, finish="cancelled")]
        room = self.spec.cache_tokens
        if room is not None and request.longest > room:
            return [failed(number, f"{request.longest} tokens do not fit the caches' {room}")]
        try:
            self._waiting.append(RowSampler(number, request))
        except Exception as error:  # of this request's settings
            return [failed(number, error)]
        return []

    def in_order(self) -> None:
        """Those that wait take turns by their numbers: messages may overtake each other."""
        self._waiting = deque(sorted(self._waiting, key=lambda row: row.number))

    def cancel(self, number: int) -> list[Token]:
        """Between steps: a request's end, if it has not ended yet. May overtake the request itself."""
        if number not in self._seen:
            self._unwanted.add(number)
        waiting = next((row for row in self._waiting if row.number == number), None)
        if waiting is not None:
            self._waiting.remove(waiting)
        elif number in self._rows:
            self._leave(number)
        else:
            return []
        return [Token(number, -1, finish="cancelled")]

    def _leave(self, number: int) -> None:
        del self._rows[number]
        self._drop.append(number)
        for name, rows in list(self._cohorts.items()):
            if number in rows:
                rows.remove(number)
                if not rows:
                    del self._cohorts[name]

    def next(self) -> Step:
        """The next step: a token for all that run, and as many of those that wait as there is room for."""
        running = [self._running(name, rows) for name, rows in self._cohorts.items()]
        fresh = [self._read_in(name, rows) for name, rows in self._taken().items()]
        step = Step(self.steps, tuple(self._drop), (*running, *fresh))
        self._drop.clear()
        self.steps += 1
        return step

    def last(self) -> Step:
        """The step that ends the session."""
        return Step(self.steps, last=True)

    def _running(self, name: str, rows: list[int]) -> Batch:
        samplers = [self._rows[number] for number in rows]
        ids = np.array([[row.tokens[-1]] for row in samplers], dtype=np.int64)
        lengths = np.ones(len(rows), dtype=np.int64)
        return Batch(name, samplers[0].request.adapter, tuple(rows), ids, lengths, fresh=False)

    def _taken(self) -> dict[str, list[RowSampler]]:
        """Cohort -> rows that join it now."""
        taken: list[RowSampler] = []
        while self._waiting and len(self._rows) < self.spec.max_rows:
            row = self._waiting[0]
            width = self._padded([*taken, row], lambda request: len(request.prompt))
            if taken and width > self.spec.prefill_tokens:
                break
            # The caches must hold every row to its end, whatever the answers become.
            room = self.spec.cache_tokens
            rows = [*self._rows.values(), row]
            if room is not None and self._padded(rows, lambda request: request.longest) > room:
                break
            self._rows[row.number] = self._waiting.popleft()
            taken.append(row)
        return self._by_cohort(taken)

    def _by_cohort(self, rows: Iterable[RowSampler]) -> dict[str, list[RowSampler]]:
        cohorts: dict[str, list[RowSampler]] = {}
        for row in rows:
            cohorts.setdefault(self._cohort_of(row), []).append(row)
        return cohorts

    def _padded(self, rows: Iterable[RowSampler], length: Callable[[Request], int]) -> int:
        """Tokens of rows that are padded to the longest of their cohort."""
        cohorts = self._by_cohort(rows).values()
        return sum(max(length(row.request) for row in cohort) * len(cohort) for cohort in cohorts)

    def _cohort_of(self, row: RowSampler) -> str:
        if not self.joint:
            return f"row {row.number}"
        adapter = row.request.adapter
        if isinstance(adapter, str):
            return f"adapter {adapter}"
        return "adapter" if adapter else "base"

    def _read_in(self, name: str, rows: list[RowSampler]) -> Batch:
        lengths = np.array([len(row.request.prompt) for row in rows], dtype=np.int64)
        ids = np.full((len(rows), int(lengths.max())), self.spec.pad_id, dtype=np.int64)
        for place, row in zip(ids, rows, strict=True):
            place[len(place) - len(row.request.prompt) :] = row.request.prompt
        numbers = tuple(row.number for row in rows)
        return Batch(name, rows[0].request.adapter, numbers, ids, lengths, fresh=True)

    def advance(self, step: Step, logits: Sequence[Tensor]) -> list[Token]:
        """Choose every row's next token, from float32 logits [b, V] of the last position per batch."""
        tokens: list[Token] = []
        for batch, logits_BV in zip(step.batches, logits, strict=True):
            if batch.fresh:
                self._cohorts.setdefault(batch.cohort, []).extend(batch.rows)
            tokens += sample([self._rows[number] for number in batch.rows], logits_BV)
        for token in tokens:
            if token.finish:
                self._leave(token.request)
        return tokens
