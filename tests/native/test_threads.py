"""The engine's threads: who runs where, what happens to errors, forks and memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from kt_ray.native import Engine, _native
from tests.helpers.native import Shape, make_case


def test_every_task_runs_once() -> None:
    pool = _native.ThreadPool(3, [])
    lock, seen = threading.Lock(), []

    def task(index: int, thread: int) -> None:
        with lock:
            seen.append((index, thread))

    for count in (0, 1, 2, 57):
        seen.clear()
        pool.run(count, task)
        assert sorted(i for i, _ in seen) == list(range(count))
        assert all(0 <= t < 3 for _, t in seen)
    assert pool.threads == 3
    assert pool.busy_seconds > 0


def test_an_error_in_a_thread_surfaces_and_the_pool_goes_on() -> None:
    pool = _native.ThreadPool(2, [])

    def task(index: int, thread: int) -> None:
        if index == 5:
            raise KeyError("task five")

    for _ in range(3):
        with pytest.raises(KeyError, match="task five"):
            pool.run(20, task)
    done: list[int] = []
    pool.run(4, lambda index, thread: done.append(index))
    assert sorted(done) == [0, 1, 2, 3]


def test_threads_are_pinned_to_the_given_cpus() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    cpu = allowed[-1]
    pool = _native.ThreadPool(2, [cpu])
    masks: list[set[int]] = []
    # A thread's own mask: 0 means the calling thread.
    pool.run(8, lambda index, thread: masks.append(os.sched_getaffinity(0)))
    assert masks == [{cpu}] * 8
    assert sorted(os.sched_getaffinity(0)) == allowed
    with Engine("reference", cpus=[cpu, 100_000]) as engine:
        assert (engine.cpus, engine.threads) == ((cpu,), 1)


def test_idle_threads_sleep() -> None:
    with Engine("reference", threads=2) as engine:
        make_case(Shape(), torch.float32).run(engine)
        time.sleep(0.05)
        before = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.1


def test_closing_ends_the_threads() -> None:
    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    before = threads()
    engines = [Engine("reference", threads=3) for _ in range(4)]
    assert threads() == before + 12
    for engine in engines:
        engine.close()
    assert threads() == before


def test_engines_and_callers_do_not_disturb_each_other() -> None:
    case = make_case(Shape(tokens=60), torch.float32)
    engines = [Engine("reference", threads=2) for _ in range(2)]
    want = case.run(engines[0])
    results: list[bool] = []

    def caller(engine: Engine) -> None:
        for _ in range(5):
            got = case.run(engine)
            results.append(all(torch.equal(got[name], want[name]) for name in want))

    callers = [threading.Thread(target=caller, args=(engines[i % 2],)) for i in range(4)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    assert results == [True] * 20
    assert engines[0].calls == 2 + 20
    for engine in engines:
        engine.close()


def in_child(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_forked_child_is_told_and_can_exit() -> None:
    out = in_child(
        """
import gc, os, torch
from kt_ray.native import Engine
from tests.helpers.native import Shape, make_case
case = make_case(Shape(), torch.float32)
engine = Engine("reference", threads=2)
case.run(engine)
child = os.fork()
if child == 0:
    try:
        case.run(engine)
    except RuntimeError as error:
        engine.close()
        del engine
        gc.collect()
        with Engine("reference", threads=1) as own:
            case.run(own)
        os._exit(7 if "forked child" in str(error) else 1)
    os._exit(2)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
case.run(engine)
print(engine.calls)
"""
    )
    assert out.split() == ["7", "4"]


def test_no_memory_for_scratch_names_layer_and_expert() -> None:
    """A panel is 16 columns wide and as deep as H: 256 MiB here, beside weights of 48 MiB."""
    out = in_child(
        """
import resource, torch
from kt_ray.native import Engine, ExpertWeights
H = 2**22
weights = ExpertWeights(torch.ones(1, 1, H), torch.ones(1, 1, H), torch.ones(1, H, 1), 12, (34,))
x, ids, w = torch.ones(1, H), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
engine = Engine("reference", threads=1)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 200 * 2**20,) * 2)
try:
    engine.forward(weights, x, ids, w)
except MemoryError as error:
    print(error)
"""
    )
    assert out.startswith("layer 12, expert 34, gate and up: cannot allocate"), out
    assert "bytes of scratch for a thread" in out


def test_activations_are_reused() -> None:
    case = make_case(Shape(tokens=200, hidden=128, inter=128), torch.float32)
    with Engine("reference", threads=1) as engine:
        for _ in range(3):
            case.run(engine)
        held = engine.scratch_bytes
        for _ in range(5):
            case.run(engine)
        assert engine.scratch_bytes == held
        _, saved = engine.forward(case.weights, case.x, case.ids, case.weights_TK, lora=case.lora)
        kept = saved.bytes
        del saved
        assert kept > case.x.numel() * 4
        assert engine.scratch_bytes == held


def test_activations_outlive_their_engine() -> None:
    case = make_case(Shape(), torch.float32)
    engine = Engine("reference", threads=1)
    _, saved = engine.forward(case.weights, case.x, case.ids, case.weights_TK, lora=case.lora)
    engine.close()
    del engine
    assert saved.bytes > 0
    saved.release()
    assert saved.bytes == 0
