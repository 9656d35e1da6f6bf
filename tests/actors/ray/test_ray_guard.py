"""SIGKILL of a driver: nothing of the Ray that it started stays, and nothing else is touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from kt_ray.actors.ray import ray_guard
from kt_ray.actors.ray.ray_guard import VARIABLE, RayGuard, guarded
from tests.helpers.ray_place import REPO, Place, free_ports, gone, ray_place, until

DRIVER = """
import subprocess, sys, time
from kt_ray.actors.ray.ray_guard import RayGuard
guard = RayGuard()
# A child that is Ray's, one of its own without the mark, and one that the driver started for itself.
with guard.own_ray():
    ours = subprocess.Popen([sys.executable, "-c", %r], stdout=subprocess.PIPE, text=True)
other = subprocess.Popen(["sleep", "60"])
print(ours.pid, int(ours.stdout.readline()), other.pid, guard._process.pid, flush=True)
time.sleep(60)
"""
RAYS = """
import os, subprocess, time
bare = {k: v for k, v in os.environ.items() if k != %r}
print(subprocess.Popen(["sleep", "60"], env=bare, start_new_session=True).pid, flush=True)
time.sleep(60)
"""


def test_a_killed_drivers_marked_processes_and_their_descendants_end() -> None:
    code = DRIVER % (RAYS % VARIABLE)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=REPO
    ) as driver:
        assert driver.stdout is not None
        ours, below, other, guard = map(int, driver.stdout.readline().split())
        try:
            driver.kill()
            driver.wait(10)
            until(lambda: gone(ours) and gone(below) and gone(guard), 60, every=0.1)
            assert not gone(other)  # not Ray's
        finally:
            for pid in (ours, below, other, guard):
                if not gone(pid):
                    os.kill(pid, signal.SIGKILL)


def test_a_descendant_whose_parent_is_gone_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel kills a raylet with the driver; what the raylet started has no mark."""
    clock = [0.0]
    driver = os.getppid()
    environment = {**os.environ, VARIABLE: "a mark of this test"}
    command = [sys.executable, "-S", "-c", RAYS % VARIABLE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as ours:
        assert ours.stdout is not None
        below = int(ours.stdout.readline())

        def sleep(seconds: float) -> None:
            clock[0] += seconds
            if clock[0] > 2.0 and ours.poll() is None:  # the guard has looked
                ours.kill()
                ours.wait(10)
                monkeypatch.setattr(os, "getppid", lambda: driver + 1)

        monkeypatch.setattr(ray_guard, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: clock[0]))
        ray_guard.watch(driver, "a mark of this test")
    assert gone(below)


def test_a_process_id_that_was_used_again_is_left_alone() -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        assert guarded("no such mark", {(child.pid, 0)}) == set()
        field = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
        assert guarded("no such mark", {(child.pid, int(field))}) == {(child.pid, int(field))}
    finally:
        child.kill()
        child.wait()


def test_an_orderly_end_ends_the_guard_and_the_mark_stays_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "outer")
    guard = RayGuard()
    with guard.own_ray():
        assert os.environ[VARIABLE] not in ("", "outer")
    assert os.environ[VARIABLE] == "outer"
    pid = guard._process.pid
    guard.end()
    assert gone(pid)


@pytest.fixture
def place() -> Iterator[Place]:
    with ray_place() as made:
        yield made


@pytest.mark.ray
@pytest.mark.exhaustive
def test_nothing_of_a_killed_run_stays(place: Place, tmp_path: Path) -> None:
    """The driver alone gets the signal, in mid-run; dashboard and agents included."""
    before = set(os.listdir("/dev/shm"))
    run = place.path / "runs" / "a"
    arguments = ["data.limit=40", "run.name=a", "trainer.max_steps=2000", "eval.after_training=0"]
    arguments += ["trainer.eval_every=0", f"cluster.dashboard_port={free_ports(1)[0]}"]
    process = place.launch(*arguments, log=tmp_path / "output")

    def stepped() -> bool:
        assert process.poll() is None, (tmp_path / "output").read_text()
        return (run / "metrics.jsonl").exists()

    until(stepped, 240)
    time.sleep(2.5)
    of_it = [*place.processes(), *psutil.Process(process.pid).children(recursive=True)]
    assert len(of_it) > 10  # the driver, its guard, Ray's own, the actors
    process.kill()
    process.wait(10)
    until(lambda: all(gone(p.pid) for p in of_it), 60)
    assert place.left(5.0) == []
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "kt_ray" in name or "plasma" in name}


def test_what_a_failed_start_left_is_ended_and_nothing_else() -> None:
    guard = RayGuard()
    command = ["sleep", "60"]
    with guard.own_ray():
        left = subprocess.Popen(command)
    with subprocess.Popen(command) as other:
        try:
            guard.sweep()
            assert left.wait(60) == -signal.SIGKILL and other.poll() is None
            assert guard._process.poll() is None  # the next attempt is guarded, too
        finally:
            other.kill()
            guard.end()
