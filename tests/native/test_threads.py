"""The engine's threads: who runs where, what happens to errors, forks and memory."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from kt_ray.native import Engine, _native
from tests.helpers import engine_cases
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


def test_busy_is_cpu_time_not_the_time_a_call_was_outstanding() -> None:
    pool = _native.ThreadPool(2, [])
    pool.run(2, lambda index, thread: time.sleep(0.2))
    assert pool.busy_seconds < 0.1
    before = pool.busy_seconds

    def compute(index: int, thread: int) -> None:
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass

    pool.run(4, compute)
    assert 0.19 < pool.busy_seconds - before < 0.6


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


def test_phases_follow_each_other() -> None:
    """Every task of a phase is done before one of the next begins; an error ends all threads' waiting."""
    pool = _native.ThreadPool(3, [])
    lock, log = threading.Lock(), []

    def task(index: int, thread: int) -> None:
        with lock:
            log.append(("begin", index))
        time.sleep(0.002 * (index % 3))
        with lock:
            log.append(("end", index))

    ends = [0, 4, 4, 5, 12]
    pool.run(12, task, ends)
    assert sorted(log) == sorted((what, index) for what in ("begin", "end") for index in range(12))
    for end in ends:
        before = [at for at, (what, index) in enumerate(log) if what == "end" and index < end]
        after = [at for at, (what, index) in enumerate(log) if what == "begin" and index >= end]
        assert not before or not after or max(before) < min(after), end

    def failing(index: int, thread: int) -> None:
        time.sleep(0.01)
        if index == 0:
            raise KeyError("the first")
        assert index < 4

    for _ in range(5):
        with pytest.raises(KeyError, match="the first"):
            pool.run(12, failing, ends)
    log.clear()
    pool.run(12, task, ends)
    assert len(log) == 24


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


def test_fewer_threads_than_cpus_take_the_first_of_the_list() -> None:
    """A plan lists a CPU of every core before their siblings, which may be numbered 0, 1 | 2, 3. Those that
    are not pinned move among all of the list."""
    cpus = sorted(os.sched_getaffinity(0), reverse=True)
    if len(cpus) < 2:
        pytest.skip("this process may use one CPU only")
    for given, pinned, own in ((cpus, True, cpus[:1]), (cpus[1:], False, cpus[1:])):
        before = set(os.listdir("/proc/self/task"))
        with Engine("reference", 1, given, pinned=pinned) as engine:
            assert engine.cpus == tuple(given)
            masks = []
            for thread in set(os.listdir("/proc/self/task")) - before:
                with contextlib.suppress(ProcessLookupError):  # another's, that has just ended
                    masks.append(os.sched_getaffinity(int(thread)))
            assert [mask for mask in masks if mask != set(cpus)] == [set(own)]
        assert os.sched_getaffinity(0) == set(cpus)


def test_idle_threads_sleep() -> None:
    """Less than 1 % of one CPU for four threads, in a process that does nothing else."""
    out = in_child(
        """
import time, torch
from kt_ray.native import Engine
from tests.helpers.native import Shape, make_case
with Engine("reference", threads=4) as engine:
    make_case(Shape(), torch.float32).run(engine)
    make_case(Shape(tokens=2), torch.float32).forward(engine)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(1)
    print(time.process_time() - before)
"""
    )
    assert float(out) < 0.01


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


def test_a_fork_in_the_middle_of_a_call_leaves_the_child_usable() -> None:
    """Another thread's call holds the engine's locks when it happens, and never lets go in the child."""
    out = in_child(
        """
import os, signal, threading, torch
from kt_ray.native import Engine
from tests.helpers.native import Shape, make_case
small = make_case(Shape(), torch.float32)
large = make_case(Shape(tokens=400, hidden=256, inter=256), torch.float32)
engine, stop = Engine("reference", threads=2), threading.Event()
want = small.run(engine)

def caller():
    while not stop.is_set():
        large.run(engine)

thread = threading.Thread(target=caller)
thread.start()
codes = []
for _ in range(8):
    before = engine.calls
    while engine.calls == before:  # just after one call: almost surely within the next
        pass
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            small.run(engine)
        except RuntimeError as error:
            told = "forked child" in str(error)
        engine.close()
        with Engine("reference", threads=1) as own:
            got = own.forward(small.weights, small.x, small.ids, small.weights_TK, lora=small.lora)[0]
        os._exit(7 if told and torch.equal(got, want["y"]) else 1)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
stop.set()
thread.join()
print(set(codes))
"""
    )
    assert out.split() == ["{7}"]


@pytest.mark.skipif(engine_cases.compiler() is None, reason="no C++ compiler")
def test_a_fork_while_buffers_are_taken_leaves_the_child_usable(tmp_path: Path) -> None:
    """In C++, where another thread can be made to hold the mutex at that moment."""
    target = tmp_path / "fork_test"
    sources = (engine_cases.DRIVER.parent / "fork_test.cpp", engine_cases.SOURCES / "buffers.cpp")
    command = (engine_cases.compiler(), "-std=c++20", "-O1", "-I", engine_cases.SOURCES, *sources)
    engine_cases.run([*map(str, command), "-pthread", "-o", str(target)])
    assert engine_cases.run([str(target)]) == "child ok\n"


def test_a_forked_child_can_drop_what_the_parent_saved() -> None:
    """While the parent takes and gives buffers, and reads what was saved."""
    out = in_child(
        """
import os, signal, threading, torch
from kt_ray.native import Engine
from tests.helpers.native import Shape, make_case
case = make_case(Shape(tokens=100), torch.float32)
engine, stop = Engine("reference", threads=2), threading.Event()
_, saved = engine.forward(case.weights, case.x, case.ids, case.weights_TK, lora=case.lora)

def caller():
    while not stop.is_set():
        engine.backward(case.weights, saved, case.dy, lora=case.lora)

thread = threading.Thread(target=caller)
thread.start()
codes = []
for _ in range(20):
    before = engine.calls
    while engine.calls == before:
        pass
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        asked = saved.bytes > 0 and engine.busy_seconds == 0
        saved.release()
        asked = asked and saved.bytes == 0 and engine.scratch_bytes >= 0
        del saved, engine
        os._exit(7 if asked else 1)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
stop.set()
thread.join()
print(set(codes))
"""
    )
    assert out.split() == ["{7}"]


def test_releasing_waits_for_a_backward_that_reads() -> None:
    case = make_case(Shape(tokens=1500, hidden=256, inter=256), torch.float32)
    with Engine("reference", threads=1) as engine:
        want = case.run(engine)
        for _ in range(3):
            _, saved = engine.forward(case.weights, case.x, case.ids, case.weights_TK, lora=case.lora)
            results: list[torch.Tensor] = []
            before, calls = engine.busy_seconds, engine.calls

            def backward(saved: _native.Saved = saved, into: list[torch.Tensor] = results) -> None:
                into.extend(engine.backward(case.weights, saved, case.dy, lora=case.lora))

            thread = threading.Thread(target=backward)
            thread.start()
            while engine.busy_seconds == before:  # its first phase is over, the long ones are not
                time.sleep(0)
            assert engine.calls == calls
            saved.release()
            assert engine.calls == calls + 1
            thread.join()
            assert torch.equal(results[0], want["dx"])
            assert torch.equal(results[1], want["dw"])
            assert saved.bytes == 0
            with pytest.raises(ValueError, match="saved: was released"):
                backward()


def test_ctrl_c_arrives_between_calls() -> None:
    """Within the call it falls into or the next, and the engine goes on."""
    out = in_child(
        """
import os, signal, threading, time, torch
from kt_ray.native import Engine
from tests.helpers.native import Shape, make_case
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts with it ignored
case = make_case(Shape(tokens=64, hidden=128, inter=128), torch.float32)
engine = Engine("reference", threads=2)
want = case.run(engine)
seen = []

def press():
    while engine.calls < 8:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)
    seen.append(engine.calls)

thread = threading.Thread(target=press)
thread.start()
try:
    while True:
        engine.forward(case.weights, case.x, case.ids, case.weights_TK, lora=case.lora, save=False)
except KeyboardInterrupt:
    at = engine.calls
thread.join()
got = case.run(engine)
print(8 <= at <= seen[0] + 2, all(torch.equal(got[name], want[name]) for name in want))
"""
    )
    assert out.split() == ["True", "True"]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU")
def test_two_processes_on_cpus_of_their_own() -> None:
    """Each process's engine runs on its CPUs only, and computes what it computes alone."""
    program = """
import hashlib, os, sys, torch
from kt_ray.native import Engine
from tests.helpers.native import Shape, make_case
before = set(os.listdir("/proc/self/task"))
engine = Engine("reference", threads=2, cpus=[int(sys.argv[1])])
workers = set(os.listdir("/proc/self/task")) - before
case = make_case(Shape(tokens=200, hidden=128, inter=128), torch.float32)
digests = set()
print("ready", flush=True)
sys.stdin.readline()
for _ in range(10):
    got = case.run(engine)
    digests.add(hashlib.sha256(b"".join(got[name].numpy().tobytes() for name in sorted(got))).hexdigest())
masks = {cpu for worker in workers for cpu in os.sched_getaffinity(int(worker))}
print(len(workers), *masks, *digests)
"""
    cpus = sorted(os.sched_getaffinity(0))[:2]
    children = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(cpu)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for cpu in cpus
    ]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    said = []
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    for child in children:
        said.append(child.communicate(timeout=120)[0].split())
        assert child.returncode == 0
    assert [words[:2] for words in said] == [["2", str(cpu)] for cpu in cpus]
    assert said[0][2:] == said[1][2:]
    assert len(said[0]) == 3


@pytest.mark.parametrize(
    ("T", "I", "H", "said"),
    [  # a panel is 16 columns wide and as deep as H: 256 MiB, beside weights of 48 MiB
        (1, 1, 2**22, ("layer 12, expert 34, gate and up: cannot allocate", "bytes of scratch for a thread")),
        (50_000, 4096, 16, ("layer 12: cannot allocate", "bytes for activations")),
    ],
)
def test_no_memory_for_a_call_names_where(T: int, I: int, H: int, said: tuple[str, str]) -> None:
    out = in_child(
        f"""
import resource, torch
from kt_ray.native import Engine, ExpertWeights
T, I, H = {T}, {I}, {H}
weights = ExpertWeights(torch.ones(1, I, H), torch.ones(1, I, H), torch.ones(1, H, I), 12, (34,))
x, ids, w = torch.ones(T, H), torch.zeros(T, 1, dtype=torch.int64), torch.ones(T, 1)
engine = Engine("reference", threads=1)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 200 * 2**20,) * 2)
try:
    engine.forward(weights, x, ids, w)
except MemoryError as error:
    print(error)
"""
    )
    assert out.startswith(said[0]) and said[1] in out, out


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
