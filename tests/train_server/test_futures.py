"""Promises: how long outcomes stay."""

from __future__ import annotations

import asyncio

import pytest

from kt_ray.train_server import futures
from kt_ray.train_server.futures import Failure, Promise, Promises, Reply


def made(promises: Promises, name: str, size: int = 0) -> Promise:
    promise = Promise(name, "model")
    promises.add(promise)
    if size:
        promises.settle(promise, Reply(b"0" * size))
    return promise


def test_the_first_outcome_counts_and_wakes_who_waits() -> None:
    promises = Promises()
    promise = made(promises, "a")

    async def wait() -> object:
        assert await promise.wait(0.01) is None
        asyncio.get_running_loop().call_later(0.01, promises.settle, promise, Failure("first"))
        return await promise.wait(10)

    assert asyncio.run(wait()) == Failure("first")
    promises.settle(promise, Failure("second"))
    assert promise.outcome == Failure("first")


def test_outcomes_beyond_the_memory_go_those_that_were_fetched_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures, "KEPT_BYTES", 250)
    promises = Promises()
    made(promises, "a", 100)
    promises.fetched(made(promises, "b", 100))
    made(promises, "c", 100)
    assert [promises.get(name) is not None for name in "abc"] == [True, False, True]


def test_outcomes_go_in_time_and_what_is_pending_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    promises = Promises()
    pending = made(promises, "a")
    monkeypatch.setattr(futures, "KEPT", -1.0)
    promises.fetched(made(promises, "b", 10))
    made(promises, "c", 10)
    promises.sweep()
    assert [promises.get(name) is not None for name in "abc"] == [True, False, True]
    promises.settle(pending, Failure("x"))
    promises.drop_owner("model")
    promises.sweep()
    assert len(promises) == 0
