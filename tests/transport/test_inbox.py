"""Tokens on their way to the driver: in order, whatever way they take."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from kt_ray.generate.requests import Token
from kt_ray.transport.inbox import Inbox, Outbox
from kt_ray.transport.shared_memory import FRAME_BYTES, Ringer


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    made = Inbox()
    made.expect(3)
    yield made
    made.close()


def drain(inbox: Inbox, outbox: Outbox) -> list[Token]:
    """All tokens up to the end."""
    tokens, more = [], True
    while more:
        found, more = inbox.take(3, 5.0, lambda: outbox.take(0.0))
        assert found or not more, "nothing came"
        tokens += found
    return tokens


def test_tokens_come_in_order_and_then_the_end(inbox: Inbox) -> None:
    outbox = Outbox(3)
    assert outbox.open(inbox.address) and inbox.has(3) and not inbox.has(0)
    sent = [Token(request, step) for step in range(50) for request in range(4)]
    for step in range(50):
        outbox.put(sent[4 * step : 4 * step + 4])
    outbox.close()
    assert drain(inbox, outbox) == sent
    assert outbox.take(0.0) == ([], False)
    assert outbox.open(inbox.address)  # the next session
    outbox.put(sent[:1])
    outbox.close()
    outbox.close()  # an abort, too
    assert drain(inbox, outbox) == sent[:1]


def test_many_at_once_and_one_that_is_too_large_for_the_pipe(
    inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    rung: list[int] = []
    ring = Ringer.ring
    monkeypatch.setattr(
        Ringer, "ring", lambda self, frame: bool(rung.append(len(frame)) or ring(self, frame))
    )
    outbox = Outbox(3)
    outbox.open(inbox.address)
    many = [Token(request, 7, logprob=-0.5) for request in range(300)]
    large = Token(300, 7, top=tuple((i, -float(i)) for i in range(1000)))
    outbox.put([*many, large, Token(301, 8)])
    outbox.close()
    assert drain(inbox, outbox) == [*many, large, Token(301, 8)]
    assert len(rung) > 4 and max(rung) <= FRAME_BYTES


def test_a_full_pipe_is_waited_for(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    outbox = Outbox(3)
    outbox.open(inbox.address)
    tries: list[bytes] = []
    ring = Ringer.ring

    def full_at_first(self: Ringer, frame: bytes) -> bool:
        tries.append(frame)
        return len(tries) > 3 and ring(self, frame)

    monkeypatch.setattr(Ringer, "ring", full_at_first)
    outbox.put([Token(1, 2)])
    outbox.close()
    assert drain(inbox, outbox) == [Token(1, 2)] and len(tries) == 5
    monkeypatch.setattr("kt_ray.transport.inbox._PATIENCE", 0.01)
    monkeypatch.setattr(Ringer, "ring", lambda self, frame: False)
    outbox.open(inbox.address)
    with pytest.raises(RuntimeError, match="takes no tokens"):
        outbox.put([Token(1, 2)])


def test_who_cannot_ring_is_asked(inbox: Inbox) -> None:
    outbox = Outbox(0)
    elsewhere = dataclasses.replace(inbox.address, path="/proc/1/fd/nowhere")
    for address in (elsewhere, None):
        assert not outbox.open(address)
        outbox.put([Token(1, 2)])
        assert outbox.take(0.0) == ([Token(1, 2)], True)
        assert outbox.take(0.0) == ([], True)
        outbox.close()
        assert outbox.take(5.0) == ([], False)


def test_a_stranger_who_rings_ends_the_session_with_an_error(inbox: Inbox) -> None:
    outbox = Outbox(3)
    outbox.open(dataclasses.replace(inbox.address, token=b"wrong..."))
    outbox.put([Token(1, 2)])
    with pytest.raises(RuntimeError, match="stranger"):
        for _ in range(20):
            inbox.take(3, 0.5, lambda: ([], True))
