"""Continuous batching: which rows wait, which run, what the next step is. Plain Python, no waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kt_ray.generate.requests import Batch, Request, SessionSpec, Step, Token

if TYPE_CHECKING:
    from torch import Tensor

    from kt_ray.generate.sampling import RowSampler


_KEPT = 100_000  # numbers of requests: a server runs for months


class _Recent:
    """The last numbers that were added."""

    def __init__(self) -> None:
        self._numbers: dict[int, None] = {}  # in the order that they came

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, number: int) -> bool:
        return number in self._numbers

    def add(self, number: int) -> None:
        self._numbers[number] = None
        if len(self._numbers) > _KEPT:
            del self._numbers[next(iter(self._numbers))]

    def discard(self, number: int) -> bool:
        """Whether it was there."""
        return self._numbers.pop(number, 0) is None


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
        from kt_ray.generate.sampling import RowSampler, failed

        self._seen.add(number)
        if self._unwanted.discard(number):
            return [Token(number, -1, finish="cancelled")]
        room = self.spec.cache_tokens
        if room is not None and request.longest > room:
            return [failed(number, f"{request.longest} tokens do not fit the caches' {room}")]
        try:
            self._waiting.append(RowSampler(number, request))
        except Exception as error:  # of this request's settings
            return [failed(number, error)]
        return []

    def cancel(self, number: int) -> list[Token]:
        """Between steps: a request's end, if it has not ended yet. May overtake the request itself."""
        if number not in self._seen:
            self._unwanted.add(number)
        for row in self._waiting:
            if row.number == number:
                self._waiting.remove(row)
                return [Token(number, -1, finish="cancelled")]
        if number not in self._rows:
            return []
        self._leave(number)
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
        batches = [self._running(name, rows) for name, rows in self._cohorts.items()]
        batches += self._fresh()
        step = Step(self.steps, tuple(self._drop), tuple(batches))
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

    def _fresh(self) -> list[Batch]:
        taken: dict[str, list[RowSampler]] = {}
        longest: dict[str, int] = {}
        while self._waiting and len(self._rows) < self.spec.max_rows:
            row = self._waiting[0]
            name = self._cohort_of(row)
            length = len(row.request.prompt)
            sizes = {n: longest[n] * len(rows) for n, rows in taken.items()}
            sizes[name] = max(length, longest.get(name, 0)) * (len(taken.get(name, ())) + 1)
            if taken and sum(sizes.values()) > self.spec.prefill_tokens:
                break
            if not self._has_room(name, row):
                break
            self._waiting.popleft()
            self._rows[row.number] = row
            taken.setdefault(name, []).append(row)
            longest[name] = max(length, longest.get(name, 0))
        return [self._read_in(name, rows) for name, rows in taken.items()]

    def _has_room(self, name: str, row: RowSampler) -> bool:
        """Whether the caches can hold one more row to its end, whatever the others' answers become."""
        room = self.spec.cache_tokens
        if room is None:
            return True
        cohorts: dict[str, list[int]] = {name: [row.request.longest]}
        for other in self._rows.values():  # those taken in this step as well
            cohorts.setdefault(self._cohort_of(other), []).append(other.request.longest)
        return sum(max(longest) * len(longest) for longest in cohorts.values()) <= room

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
        """Choose every row's next token.

        Args:
            step: as `next` made it.
            logits: per batch, float32 [b, V] of the last position.
        """
        from kt_ray.generate.sampling import sample

        tokens: list[Token] = []
        for batch, logits_BV in zip(step.batches, logits, strict=True):
            if batch.fresh:
                self._cohorts.setdefault(batch.cohort, []).extend(batch.rows)
            tokens += sample([self._rows[number] for number in batch.rows], logits_BV)
        for token in tokens:
            if token.finish:
                self._leave(token.request)
        return tokens
