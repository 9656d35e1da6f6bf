"""The coordinator's book: who runs, who waits, who has left."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kt_ray.generate.batcher import Batcher
from kt_ray.generate.requests import Request, Sampling, SessionSpec, Step


def schedule(
    max_rows: int = 4, prefill_tokens: int = 100, joint: bool = True, cache_tokens: int | None = None
) -> Batcher:
    return Batcher(SessionSpec(1, max_rows, prefill_tokens, pad_id=9, cache_tokens=cache_tokens), joint)


def request(length: int, new: int = 3, adapter: bool = True) -> Request:
    return Request(tuple(range(1, length + 1)), Sampling(max_new_tokens=new), adapter)


def advance(book: Batcher, step: Step) -> list[tuple[int, str]]:
    """Everybody gets token 5."""
    logits = []
    for batch in step.batches:
        values = torch.zeros(len(batch.rows), 8)
        values[:, 5] = 1
        logits.append(values)
    return [(t.request, t.finish) for t in book.advance(step, logits)]


def test_rows_are_read_in_padded_on_the_left_and_go_on_together() -> None:
    book = schedule()
    book.add(0, request(2))
    book.add(1, request(4, new=2))
    first = book.next()
    (batch,) = first.batches
    assert batch.fresh and batch.ids.tolist() == [[9, 9, 1, 2], [1, 2, 3, 4]]
    assert batch.lengths.tolist() == [2, 4]
    assert advance(book, first) == [(0, ""), (1, "")]
    second = book.next()
    assert not second.batches[0].fresh and second.batches[0].ids.tolist() == [[5], [5]]
    assert advance(book, second) == [(0, ""), (1, "length")]
    third = book.next()
    assert third.drop == (1,) and third.batches[0].rows == (0,)
    assert advance(book, third) == [(0, "length")]
    last = book.next()
    assert last.drop == (0,) and not last.batches and not book.busy


def test_requests_join_while_others_run_and_wait_for_room() -> None:
    book = schedule(max_rows=2)
    for number in range(3):
        book.add(number, request(3, new=2))
    assert advance(book, book.next()) == [(0, ""), (1, "")]
    assert advance(book, book.next()) == [(0, "length"), (1, "length")]
    step = book.next()
    assert step.drop == (0, 1) and step.batches[0].rows == (2,) and step.batches[0].fresh


def test_prompts_of_one_step_are_bounded_but_a_long_one_passes() -> None:
    book = schedule(prefill_tokens=8)
    for number, length in enumerate((20, 3, 3, 3)):
        book.add(number, request(length))
    assert [b.rows for b in book.next().batches] == [(0,)]


def test_padding_counts() -> None:
    book = schedule(prefill_tokens=8)
    for number, length in enumerate((2, 5)):  # 7 tokens, but 10 with padding
        book.add(number, request(length))
    assert [b.rows for b in book.next().batches] == [(0,)]


def test_adapter_on_and_off_are_two_batches() -> None:
    book = schedule()
    book.add(0, request(2))
    book.add(1, request(2, adapter=False))
    assert [(b.cohort, b.adapter, b.rows) for b in book.next().batches] == [
        ("adapter", True, (0,)),
        ("base", False, (1,)),
    ]


def test_rows_that_cannot_share_a_cache_are_batches_of_one() -> None:
    book = schedule(joint=False)
    book.add(0, request(2))
    book.add(1, request(3))
    step = book.next()
    assert [b.rows for b in step.batches] == [(0,), (1,)]
    advance(book, step)
    assert [(b.rows, b.fresh) for b in book.next().batches] == [((0,), False), ((1,), False)]


def test_cancelling() -> None:
    book = schedule(max_rows=1)
    book.add(0, request(2))
    book.add(1, request(2))
    advance(book, book.next())
    assert [(t.request, t.finish) for t in book.cancel(1)] == [(1, "cancelled")]  # it waited
    assert [(t.request, t.finish) for t in book.cancel(0)] == [(0, "cancelled")]  # it ran
    assert book.cancel(0) == [] and book.next().drop == (0,) and not book.busy
    assert book.cancel(7) == []  # before it came
    assert [t.finish for t in book.add(7, request(2))] == ["cancelled"] and not book.busy


def test_what_is_remembered_of_requests_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kt_ray.generate.batcher._KEPT", 10)
    book = schedule()
    for number in range(0, 60, 2):
        assert book.cancel(number) == []  # each before it came
        assert [t.finish for t in book.add(number, request(2))] == ["cancelled"]
        assert len(book._unwanted) == 0
        assert book.cancel(number + 1) == []  # never comes
        assert book._unwanted.pop(number + 1)
    assert len(book._seen) == 10 and 58 in book._seen and 0 not in book._seen
    for number in range(100, 150):
        book.cancel(number)
    assert len(book._unwanted) == 10
    assert [t.finish for t in book.add(149, request(2))] == ["cancelled"] and book.add(100, request(2)) == []


def test_rows_wait_until_the_caches_have_room_for_their_longest_answers() -> None:
    book = schedule(cache_tokens=21)
    book.add(0, request(2))  # 5 at the most
    book.add(1, request(4))  # 7: both rows are as wide then, 14
    book.add(2, request(2))  # 21
    book.add(3, request(2, adapter=False))  # a batch of its own, 26
    step = book.next()
    assert [b.rows for b in step.batches] == [(0, 1, 2)]
    for _ in range(3):
        ended = advance(book, step)
        step = book.next()
    assert [finish for _, finish in ended] == ["length"] * 3 and [b.rows for b in step.batches] == [(3,)]


def test_a_request_that_never_fits_or_has_bad_settings_ends_alone() -> None:
    book = schedule(cache_tokens=8)
    (token,) = book.add(0, request(6))
    assert (token.request, token.finish) == (0, "error") and "9 tokens" in token.error
    wrong = replace(request(2), sampling=Sampling(max_new_tokens=2, temperature=0.5, min_p=0.5))
    object.__setattr__(wrong.sampling, "min_p", 7.0)  # as if it had come without its checks
    (token,) = book.add(1, wrong)
    assert token.finish == "error" and "min_p" in token.error
    assert not book.busy
