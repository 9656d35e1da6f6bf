"""Turns among threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from kt_ray import gpu_turns as turns
from kt_ray.transport.messages import Mailbox, Message

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Devices of these tests need turns. Afterwards nobody has one."""
    monkeypatch.setattr(turns, "COMPUTES_LATER", {"cpu"})
    yield
    assert not turns._waiting and not turns._taken


def started(*calls: object) -> list[threading.Thread]:
    """Each in a thread of its own, waiting for its turn before the next one comes."""
    threads = []
    for call in calls:
        thread = threading.Thread(target=call, daemon=True)  # type: ignore[arg-type]
        before = len(turns._waiting)
        thread.start()
        while len(turns._waiting) == before:
            time.sleep(0.001)
        threads.append(thread)
    return threads


def ended(threads: list[threading.Thread]) -> bool:
    for thread in threads:
        thread.join(20)
    return not any(thread.is_alive() for thread in threads)


def test_first_come_first_served() -> None:
    order: list[int] = []

    def take(number: int) -> None:
        with turns.turn(CPU), turns.turn(CPU):
            order.append(number)

    with turns.turn(CPU):
        threads = started(*(lambda n=n: take(n) for n in range(4)))  # type: ignore[misc]
        assert order == []
    assert ended(threads) and order == [0, 1, 2, 3]


def test_who_passes_a_turn_on_comes_after_those_who_wait() -> None:
    order: list[str] = []

    def other() -> None:
        with turns.turn(CPU):
            order.append("other")

    with turns.turn(CPU):
        threads = started(other)
        turns.pass_on()
        order.append("own")
        turns.pass_on()  # to nobody
    assert ended(threads) and order == ["other", "own"]


def test_who_waits_for_a_message_has_no_turn() -> None:
    mailbox = Mailbox("worker-0")

    def send() -> None:
        with turns.turn(CPU):
            mailbox.put(Message(("x", 1)))

    with turns.turn(CPU):
        threads = started(send)
        assert mailbox.take(("x", 1), timeout=20).tag == ("x", 1)
        assert turns._holds()
    assert ended(threads)


def test_an_error_ends_a_turn_and_its_pause() -> None:
    with pytest.raises(ValueError, match="inside"), turns.turn(CPU), turns.paused():
        raise ValueError("inside")


def test_other_devices_need_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "COMPUTES_LATER", {"cuda"})
    with turns.turn(CPU):
        assert not turns._taken
