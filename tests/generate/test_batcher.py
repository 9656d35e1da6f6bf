"""The coordinator's book: who runs, who waits, who has left."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kt_ray.generate.batcher import Batcher
from kt_ray.generate.requests import Request, Resumed, Sampling, SessionSpec, Step


def schedule(
    max_rows: int = 4, prefill_tokens: int = 100, joint: bool = True, cache_tokens: int | None = None
) -> Batcher:
    return Batcher(SessionSpec(1, max_rows, prefill_tokens, pad_id=9, cache_tokens=cache_tokens), joint)


def request(length: int, new: int = 3, adapter: bool = True, *, first: int = 1) -> Request:
    return Request(tuple(range(first, first + length)), Sampling(max_new_tokens=new), adapter)


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
        book.add(number, request(3, new=2, first=1 + number))
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


def test_the_same_prompt_is_read_in_once() -> None:
    """Of the same adapter; it counts once towards prefill_tokens."""
    book = schedule(prefill_tokens=8, max_rows=8)
    for number, length in enumerate((4, 4, 3, 4, 3)):
        book.add(number, request(length))
    book.add(5, request(3, adapter=False))
    step = book.next()
    (batch,) = step.batches
    assert batch.rows == (0, 1, 2, 3, 4) and batch.prompts == (0, 0, 1, 0, 1) and batch.keep is None
    assert batch.ids.tolist() == [[1, 2, 3, 4], [9, 1, 2, 3]] and batch.lengths.tolist() == [4, 3]
    assert step.prompt_tokens == (7, 11)
    logits = torch.eye(8)[[5, 6]]
    assert [(t.request, t.token) for t in book.advance(step, [logits])] == list(enumerate((5, 5, 6, 5, 6)))
    running, base = book.next().batches
    assert running.rows == (0, 1, 2, 3, 4) and not running.fresh
    assert base.rows == (5,) and base.ids.tolist() == [[1, 2, 3]]


def test_a_prompt_is_kept_for_requests_that_wait() -> None:
    book = schedule(max_rows=2)
    for number in range(4):
        book.add(number, request(3, new=1 + number))
    book.add(4, request(2, new=2))
    first = book.next()
    assert first.batches[0].rows == (0, 1) and first.batches[0].keep == 0
    assert advance(book, first) == [(0, "length"), (1, "")]
    second = book.next()  # request 2 begins with its second token: its first came of the kept logits
    assert second.resumed == Resumed("adapter", (2,), 3) and not second.forget
    assert [(b.rows, b.fresh) for b in second.batches] == [((1, 2), False)]
    assert second.batches[0].ids.tolist() == [[5], [5]] and second.prompt_tokens == (0, 3)
    assert advance(book, second) == [(2, ""), (1, "length"), (2, "")]
    third = book.next()
    assert third.resumed == Resumed("adapter", (3,), 3) and third.forget
    assert advance(book, third) == [(3, ""), (2, "length"), (3, "")]
    assert [b.rows for b in book.next().batches] == [(3,), (4,)]


def test_a_row_that_ends_with_its_first_token_takes_nothing_of_what_is_kept() -> None:
    book = schedule(max_rows=1)
    for number in range(3):
        book.add(number, request(3, new=1))
    assert advance(book, book.next()) == [(0, "length")]
    step = book.next()
    assert step.resumed is None and not step.batches and step.forget
    assert advance(book, step) == [(1, "length"), (2, "length")] and not book.busy


@pytest.mark.parametrize(("cache_tokens", "kept"), [(9, True), (8, False)])
def test_a_prompt_is_kept_only_where_the_caches_have_room_beside_the_rows(
    cache_tokens: int, kept: bool
) -> None:
    book = schedule(cache_tokens=cache_tokens)
    for number in range(2):
        book.add(number, request(3))  # 6 at the most
    step = book.next()
    assert step.batches[0].rows == (0,) and (step.batches[0].keep is not None) == kept
    for _ in range(3):
        advance(book, step)
        step = book.next()
    assert (step.resumed is not None) == kept and step.batches[0].fresh == (not kept)


def test_rows_that_cannot_share_a_cache_with_others_do_so_from_the_same_prompt() -> None:
    book = schedule(joint=False, max_rows=3)
    for number, length in enumerate((3, 3, 2, 2)):
        book.add(number, request(length, new=2))
    step = book.next()
    assert [(b.cohort, b.rows, b.keep) for b in step.batches] == [("row 0", (0, 1), None), ("row 2", (2,), 0)]
    advance(book, step)
    advance(book, book.next())
    step = book.next()
    assert step.resumed == Resumed("row 3", (3,), 2) and [b.rows for b in step.batches] == [(3,)]


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
