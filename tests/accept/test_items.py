"""Items: a result each, whatever happens; programs that take too long; what a later round takes over."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil

from kt_ray.accept.items import (
    CannotRunError,
    Claim,
    Directory,
    Found,
    Item,
    OutOfTimeError,
    Result,
    Task,
    do,
)


def item_of(run, missing: str = "") -> Item:
    return Item("fast", "thing", "A thing", run, missing)


def test_results_are_kept_and_read_again(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    claims = [Claim("pass", "a", "1", "1", "README.md"), Claim("warn", "b", "2", "1", "README.md")]
    found = Found(claims, {"Table": [("x", "y"), ("1", "2")]}, ["a note"], [{"ms": 1.5}])
    result = do(item_of(lambda task: found), directory, 5)
    assert result.status == "warn" and result.claims == tuple(claims)
    again = directory.read("fast", "thing")
    assert isinstance(again, Result) and again.claims == result.claims and again.records == [{"ms": 1.5}]
    (tmp_path / "fast" / "thing.json").write_text('{"section": ')
    assert directory.read("fast", "thing") is None and directory.read("fast", "other") is None


def test_an_item_that_breaks_fails_and_says_why(tmp_path: Path) -> None:
    def broken(task: Task) -> Found:
        raise ZeroDivisionError("by zero")

    result = do(item_of(broken), Directory(tmp_path), 5)
    assert result.status == "fail" and "ZeroDivisionError: by zero" in result.claims[0].found


def test_what_was_not_done_is_no_failure(tmp_path: Path) -> None:
    def late(task: Task) -> Found:
        raise OutOfTimeError("too late")

    def large(task: Task) -> Found:
        raise CannotRunError("needs 9 TiB")

    directory = Directory(tmp_path)
    assert do(item_of(late), directory, 5).status == "cut"
    assert do(item_of(late), directory, 0).notes == ("no time was left for it",)
    result = do(item_of(large), directory, 5)
    assert (result.status, result.notes) == ("skip", ("needs 9 TiB",))
    result = do(item_of(late, missing="no GPU"), directory, 5)
    assert (result.status, result.notes) == ("skip", ("no GPU",))
    assert do(item_of(lambda task: Found(cut=True)), directory, 5).status == "cut"


def test_a_program_that_takes_too_long_ends_with_all_it_started(tmp_path: Path) -> None:
    """Its children, too, and what it printed until then is kept."""
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    task = Task(tmp_path / "thing", 2)
    begun = time.monotonic()
    assert task.run([sys.executable, "-c", program]) is None
    assert time.monotonic() - begun < 60
    pid = int(task.log.read_text().splitlines()[-1])
    child = [psutil.Process(pid)] if psutil.pid_exists(pid) else []
    assert all(p.status() == psutil.STATUS_ZOMBIE for p in psutil.wait_procs(child, timeout=5)[1])
    assert (
        task.run(
            [sys.executable, "-c", "import os, sys; sys.exit(int(os.environ['CODE']))"], 60, {"CODE": "3"}
        )
        == 3
    )
