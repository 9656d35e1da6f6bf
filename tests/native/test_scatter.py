"""The phases that add to tokens: tasks of (run of experts, slab of columns), each after those before it."""

from __future__ import annotations

import heapq
import threading
import time

import pytest
import torch

from kt_ray.native import Engine, _native
from tests.helpers.native import EVERY, ISAS, Shape, make_case

Task = tuple[int, int, int]  # slab, run, rows


def makespan(tasks: list[Task], threads: int) -> int:
    """When the last task ends, on threads that take them in order; a row takes a unit of time.

    A thread that has taken a task waits, idle, for the one before it at its slab.
    """
    free, done = [0] * threads, dict.fromkeys({slab for slab, _, _ in tasks}, 0)
    for slab, _, rows in tasks:
        done[slab] = max(heapq.heappop(free), done[slab]) + rows
        heapq.heappush(free, done[slab])
    return max(free)


def busy_share(tasks: list[Task], threads: int) -> float:
    return sum(rows for *_, rows in tasks) / threads / makespan(tasks, threads)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("threads", "hidden", "inter", "experts"),
    [(48, 2048, 1408, 64), (48, 7168, 2048, 256), (32, 2048, 768, 128), (2, 2048, 1408, 64)],
)
def test_tasks_keep_the_threads_of_a_socket_busy(
    isa: str, threads: int, hidden: int, inter: int, experts: int
) -> None:
    """At 48 rows for each expert; with slabs alone, 64 of DeepSeek-V2-Lite, a third of the time was lost."""
    tasks = _native.Engine(isa, threads, []).scatter_tasks(hidden, inter, [48] * experts)
    slabs = 1 + max(slab for slab, _, _ in tasks)
    assert busy_share(tasks, threads) >= (0.98 if experts > 32 else 0.95)
    if (threads, slabs) == (48, 64):
        alone = [(slab, 0, experts * 48) for slab in range(slabs)]
        assert busy_share(alone, threads) == pytest.approx(2 / 3)


@pytest.mark.parametrize("isa", ISAS)
def test_every_row_is_added_once_at_every_slab_run_by_run(isa: str) -> None:
    rows = [0, 3, 700, 1, 0, 48, 90, 5, 0]
    for threads in (1, 2, 7, 48):
        tasks = _native.Engine(isa, threads, []).scatter_tasks(200, 96, rows)
        runs = 1 + max(run for _, run, _ in tasks)
        slabs = 1 + max(slab for slab, _, _ in tasks)
        assert [(slab, run) for slab, run, _ in tasks] == [(s, r) for r in range(runs) for s in range(slabs)]
        for slab in range(slabs):
            assert sum(n for s, _, n in tasks if s == slab) == sum(rows)
        assert (runs > 1) == (threads > 1)


@pytest.mark.parametrize(("isa", "dtype"), EVERY)
def test_runs_change_no_bit(isa: str, dtype: torch.dtype) -> None:
    case = make_case(Shape(tokens=90, experts=9, hidden=136, inter=72), dtype)
    with Engine(isa, threads=1) as engine:
        want = case.run(engine)
    for threads in (2, 5, 16):
        with Engine(isa, threads=threads) as engine:
            got = case.run(engine)
        assert all(torch.equal(got[name], want[name]) for name in want)


def test_turns_are_kept_on_any_number_of_threads() -> None:
    slabs, runs = 3, 40
    for threads in (1, 2, 7):
        turns, pool = _native.Turns(slabs), _native.ThreadPool(threads, [])
        seen: list[list[int]] = [[] for _ in range(slabs)]

        def task(index: int, thread: int) -> None:
            slab, run = index % slabs, index // slabs
            assert turns.wait(slab, run)  # noqa: B023
            seen[slab].append(run)  # noqa: B023
            turns.done(slab, run)  # noqa: B023

        pool.run(slabs * runs, task)
        assert seen == [list(range(runs))] * slabs


@pytest.mark.timeout(60)
def test_a_task_that_fails_leaves_nobody_waiting() -> None:
    turns, pool = _native.Turns(2), _native.ThreadPool(4, [])
    refused: list[int] = []
    begun = threading.Event()

    def task(index: int, thread: int) -> None:
        slab, run = index % 2, index // 2
        if index == 1:
            assert begun.wait(60)
            time.sleep(0.1)  # another waits for it
            turns.fail()
            raise KeyError("task one")
        if index == 3:
            begun.set()
        if not turns.wait(slab, run):
            refused.append(index)
            return
        turns.done(slab, run)

    with pytest.raises(KeyError, match="task one"):
        pool.run(8, task)
    assert 3 in refused
    assert not turns.wait(0, 100)
    turns.done(0, 0)  # of a task that had begun before
    assert not turns.wait(0, 1)
