"""Items: a result each, whatever happens; programs that take too long; what a later round takes over."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kt_ray.accept.items import (
    REPO,
    CannotRunError,
    Claim,
    Directory,
    Found,
    Item,
    OutOfTimeError,
    Result,
    Task,
    complete,
)
from tests.helpers.ray_place import gone, until


def item_of(run, missing: str = "") -> Item:
    return Item("fast", "thing", "A thing", run, missing)


def test_results_are_kept_and_read_again(tmp_path: Path) -> None:
    directory = Directory(tmp_path)
    claims = [Claim("pass", "a", "1", "1", "README.md"), Claim("warn", "b", "2", "1", "README.md")]
    found = Found(claims, {"Table": [("x", "y"), ("1", "2")]}, ["a note"], [{"ms": 1.5}])
    result = complete(item_of(lambda task: found), directory, 5)
    assert (result.status, result.cut) == ("warn", False) and result.claims == tuple(claims)
    again = directory.read("fast", "thing")
    assert isinstance(again, Result) and again.claims == result.claims and again.records == [{"ms": 1.5}]
    (tmp_path / "fast" / "thing.json").write_text('{"section": ')
    assert (
        directory.read("fast", "thing") is None
        and directory.results() == []
        and directory.read("fast", "other") is None
    )


def test_an_item_that_breaks_fails_and_says_why(tmp_path: Path) -> None:
    def broken(task: Task) -> Found:
        raise ZeroDivisionError("by zero")

    result = complete(item_of(broken), Directory(tmp_path), 5)
    assert result.status == "fail" and "ZeroDivisionError: by zero" in result.claims[0].found


def test_what_was_not_done_is_no_failure(tmp_path: Path) -> None:
    def late(task: Task) -> Found:
        raise OutOfTimeError("too late")

    def large(task: Task) -> Found:
        raise CannotRunError("needs 9 TiB")

    directory = Directory(tmp_path)
    assert complete(item_of(late), directory, 5).status == "cut"
    assert complete(item_of(late), directory, 0).notes == ("no time was left for it",)
    result = complete(item_of(large), directory, 5)
    assert (result.status, result.notes) == ("skip", ("needs 9 TiB",))
    result = complete(item_of(late, missing="no GPU"), directory, 5)
    assert (result.status, result.notes) == ("skip", ("no GPU",))
    assert complete(item_of(lambda task: Found(cut=True)), directory, 5).status == "cut"


def test_a_program_that_takes_too_long_ends_with_all_it_started(tmp_path: Path, over_when: Any) -> None:
    """Its children, too, and what it printed until then is kept."""
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    task = Task(tmp_path / "thing", time.monotonic() + 240)
    log, lines = task.log, program.count("\n") + 1  # of the command
    over_when(lambda: log.read_text().count("\n") > lines)
    assert task.run([sys.executable, "-c", program]) is None
    assert task.seconds > 0
    pid = int(log.read_text().splitlines()[-1])
    until(lambda: gone(pid), 60, 0.1)
    late = Task(tmp_path / "thing", time.monotonic())
    assert late.run([sys.executable, "-c", ""]) is None, "nothing is started after its time"


def test_a_program_has_its_environment_and_cpus(tmp_path: Path) -> None:
    program = "import os, sys; sys.exit(int(os.environ['CODE']) + len(os.sched_getaffinity(0)))"
    task = Task(tmp_path / "thing", time.monotonic() + 60)
    assert task.run([sys.executable, "-c", program], {"CODE": "3"}, [0]) == 4


def test_what_is_done_again(tmp_path: Path) -> None:
    """What was cut off, whatever it had found; what could not run; what other options ask for."""
    directory = Directory(tmp_path)
    failed = Claim("fail", "a", "1", "2", "README.md")
    item = item_of(lambda task: Found([failed]))
    assert complete(item, directory, 5).counts_for(item)
    assert not complete(item, directory, 5).counts_for(item._replace(options="kt"))
    cut = complete(item_of(lambda task: Found([failed], cut=True)), directory, 5)
    assert (cut.status, cut.cut, cut.counts_for(item)) == ("fail", True, False)
    assert not complete(item._replace(missing="no GPU"), directory, 5).counts_for(item)


@pytest.mark.parametrize("seconds", [0, 5])
def test_no_time_takes_away_nothing_that_was_found(tmp_path: Path, seconds: float) -> None:
    """Neither before an item nor before it has found anything; of other options nothing stays."""

    def late(task: Task) -> Found:
        raise OutOfTimeError("too late")

    directory = Directory(tmp_path)
    failed = Claim("fail", "a", "1", "2", "README.md")
    first = complete(item_of(lambda task: Found([failed], records=[1], cut=True)), directory, 5)
    assert complete(item_of(late), directory, seconds) == first == directory.read("fast", "thing")
    assert not first.counts_for(item_of(late)), "it is done again"
    assert not complete(item_of(late)._replace(options="kt"), directory, seconds).claims


def test_programs_die_with_the_acceptance(tmp_path: Path) -> None:
    """SIGKILL of the parent: what it had started does not run on."""
    log = tmp_path / "log"
    inner = "import os, time; print('inner', os.getpid(), flush=True); time.sleep(600)"
    outer = (
        "import sys; from pathlib import Path; from kt_ray.accept.items import run_program\n"
        f"run_program([sys.executable, '-c', {inner!r}], Path({str(log)!r}), 600, {{}}, ())"
    )
    parent = subprocess.Popen([sys.executable, "-c", outer], cwd=REPO)
    try:
        found = until(
            lambda: re.search(r"^inner (\d+)", log.read_text(), re.M) if log.exists() else None, 240, 0.1
        )
        child = int(found[1])
    finally:
        parent.kill()
        parent.wait()
    until(lambda: gone(child), 60, 0.1)
