"""Continuous batching: which rows wait, which run, what the next step is. Plain Python, no waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from kt_ray.generate.requests import Batch, Request, Resumed, SessionSpec, Step, Token
from kt_ray.generate.sampling import RowSampler, failed, sample

_KEPT = 100_000  # numbers of requests: a server runs for months


class _Recent(dict[int, bool]):
    """The last numbers that were added, each with True."""

    def add(self, number: int) -> None:
        self[number] = True
        if len(self) > _KEPT:
            del self[next(iter(self))]


_Key = tuple[bool | str, tuple[int, ...]]  # adapter and prompt


@dataclass
class _Kept:
    """A prompt whose cache the stages keep, as the next that waits has the same one."""

    key: _Key
    logits_1V: Tensor | None = None  # of its last token, once it is computed


class Batcher:
    """Requests join and leave between steps; those that wait are taken in the order they came.

    A prompt is computed once for all that ask it next to one another. Where they do not all run at the same
    time, its cache is kept for those that wait, if `SessionSpec.cache_tokens` has room beside the rows'.

    Args:
        spec: of the session.
        joint: rows of the same adapter share one cache; False = only those that began together with the
            same prompt do (families whose caches cannot be put together).
    """

    def __init__(self, spec: SessionSpec, joint: bool) -> None:
        self.spec = spec
        self.joint = joint
        self.steps = 0
        self._waiting: deque[RowSampler] = deque()
        self._rows: dict[int, RowSampler] = {}
        self._cohorts: dict[str, list[int]] = {}  # in the order of their caches' rows
        self._drop: list[int] = []
        self._kept: _Kept | None = None
        self._early: list[Token] = []  # of rows that a kept prompt's logits gave a token
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
        drop = tuple(self._drop)
        self._drop.clear()
        resumed = self._resume()
        running = [self._running(name, rows) for name, rows in self._cohorts.items()]
        taken = self._taken()
        kept, self._kept = self._kept, self._to_keep(taken)
        fresh = [self._read_in(name, rows) for name, rows in taken.items()]
        forget = kept is not None and self._kept is not kept
        step = Step(self.steps, drop, resumed, forget, (*running, *fresh))
        self.steps += 1
        return step

    def _resume(self) -> Resumed | None:
        """Rows that wait for what is kept begin, as many as there is room for; where the first token is an
        answer's last, it needs no cache."""
        kept, begun = self._kept, []
        while kept and self._waiting and _key(self._waiting[0]) == kept.key and self._has_room():
            row = self._waiting.popleft()
            assert kept.logits_1V is not None, "the prompt is not computed yet"
            self._early += sample([row], kept.logits_1V)
            if not self._early[-1].finish:
                self._rows[row.number] = row
                begun.append(row)
        if kept is None or not begun:
            return None
        name = self._cohort_of(begun[0])
        numbers = tuple(row.number for row in begun)
        self._cohorts.setdefault(name, []).extend(numbers)
        return Resumed(name, numbers, len(kept.key[1]))

    def _to_keep(self, taken: dict[str, list[RowSampler]]) -> _Kept | None:
        """What the first row that waits will go on from, if it is here and there is room for it."""
        if not self._waiting:
            return None
        key, room = _key(self._waiting[0]), self.spec.cache_tokens
        held = self._padded(self._rows.values(), lambda request: request.longest)
        if room is not None and held + len(key[1]) > room:
            return None
        if self._kept is not None and self._kept.key == key:
            return self._kept
        return _Kept(key) if any(_key(row) == key for rows in taken.values() for row in rows) else None

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
        first: dict[_Key, RowSampler] = {}
        taken: dict[str, list[RowSampler]] = {}
        while self._waiting and self._has_room():
            row, key = self._waiting[0], _key(self._waiting[0])
            if key not in first:
                width = self._padded([*first.values(), row], lambda request: len(request.prompt))
                if first and width > self.spec.prefill_tokens:
                    break
                first[key] = row
            self._rows[row.number] = self._waiting.popleft()
            taken.setdefault(self._cohort_of(first[key]), []).append(row)
        return taken

    def _has_room(self) -> bool:
        """Whether the first row that waits can run: the caches must hold every row to its end, whatever the
        answers become."""
        if len(self._rows) >= self.spec.max_rows:
            return False
        rows, room = [*self._rows.values(), self._waiting[0]], self.spec.cache_tokens
        return room is None or self._padded(rows, lambda request: request.longest) <= room

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
        places: dict[_Key, int] = {}  # of a cohort: the same adapter
        prompts = tuple(places.setdefault(_key(row), len(places)) for row in rows)
        lengths = np.array([len(prompt) for _, prompt in places], dtype=np.int64)
        ids = np.full((len(places), int(lengths.max())), self.spec.pad_id, dtype=np.int64)
        for place, (_, prompt) in zip(ids, places, strict=True):
            place[len(place) - len(prompt) :] = prompt
        numbers = tuple(row.number for row in rows)
        keep = places.get(self._kept.key) if self._kept and self._kept.logits_1V is None else None
        return Batch(name, rows[0].request.adapter, numbers, ids, lengths, True, prompts, keep)

    def advance(self, step: Step, logits: Sequence[Tensor]) -> list[Token]:
        """Choose every row's next token, from float32 logits [b, V] of the last position per batch."""
        tokens: list[Token] = []
        for batch, logits_BV in zip(step.batches, logits, strict=True):
            if batch.keep is not None and self._kept is not None:
                self._kept.logits_1V = logits_BV[batch.keep : batch.keep + 1].clone()
            if batch.fresh:
                self._cohorts.setdefault(batch.cohort, []).extend(batch.rows)
                logits_BV = logits_BV[list(batch.prompts)]
            tokens += sample([self._rows[number] for number in batch.rows], logits_BV)
        for token in tokens:
            if token.finish:
                self._leave(token.request)
        early, self._early = self._early, []
        return early + tokens


def _key(row: RowSampler) -> _Key:
    return row.request.adapter, row.request.prompt
