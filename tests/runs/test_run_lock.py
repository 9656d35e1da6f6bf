"""One process at a time writes a run directory: whoever comes second is told who holds it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kt_ray.errors import UserError
from kt_ray.runs import run_lock
from kt_ray.runs.run_lock import RunLock, locked, require_free
from kt_ray.runs.rundir import RunDir, refuse_taken
from kt_ray.tracking.jsonl import JsonlTracker, read_jsonl

HOLD = """
import sys, time
from pathlib import Path
from kt_ray.runs.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Any:
    """A process that holds the lock of tmp_path/a."""
    (tmp_path / "a").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "a")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_the_second_is_told_who_holds_it_and_a_killed_holder_holds_nothing(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    run = tmp_path / "a"
    for take in (RunLock, require_free):
        with pytest.raises(UserError, match="another run writes this directory") as caught:
            take(run)
        assert f"process {holder.pid} on {socket.gethostname()}" in str(caught.value)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    require_free(run)
    lock = RunLock(run)
    assert json.loads((run / ".lock").read_text())["pid"] == os.getpid() and lock.note == ""
    lock.release()
    lock.release()
    assert (run / ".lock").read_text() == ""


@pytest.mark.parametrize("how", ["overwrite", "resume", "fresh"])
def test_nothing_of_a_live_run_is_touched(
    tmp_path: Path, holder: subprocess.Popen[str], make_config: Any, how: str
) -> None:
    run = tmp_path / "a"
    partial = run / "checkpoints" / ".step_000002.partial"
    partial.mkdir(parents=True)
    whole = run / "checkpoints" / "step_000001"
    whole.mkdir()
    (whole / "manifest.json").write_text("{}")
    (run / "config.yaml").write_text("seed: 1\n")
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    settings = {"overwrite": {"overwrite": True}, "resume": {"resume": "latest"}, "fresh": {}}[how]
    config = make_config(tmp_path, name="a", **settings)
    for attempt in (refuse_taken, RunDir.create):
        with pytest.raises(UserError, match="another run writes this directory"):
            attempt(config)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_a_file_system_without_locks_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    lock = RunLock(tmp_path)
    assert "keeps no locks (No locks available)" in lock.note and str(tmp_path) in lock.note
    lock.release()
    # On this host the file itself tells.
    (tmp_path / ".lock").write_text(json.dumps({"host": socket.gethostname(), "pid": os.getppid()}))
    with pytest.raises(UserError, match=f"process {os.getppid()} on"):
        RunLock(tmp_path)
    for stale in ({"host": socket.gethostname(), "pid": 2**30}, {"host": "other", "pid": 1}, [], "x"):
        (tmp_path / ".lock").write_text(json.dumps(stale))
        lock = RunLock(tmp_path)
        assert lock.note
        lock.release()


@pytest.mark.parametrize("option", ["nolock", "local_lock=all", "local_lock=none", "localflock", ""])
def test_locks_that_stay_on_this_host_are_no_guard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(
        "22 1 0:21 / / rw - ext4 /dev/sda rw\n"
        f"36 22 0:40 / {tmp_path} rw,relatime shared:1 - nfs4 server:/x rw,vers=4.2,{option}\n"
    )
    monkeypatch.setattr(run_lock, "MOUNTS", table)
    # flock was granted: nobody of this host holds it, whatever process has the number now.
    (tmp_path / ".lock").write_text(json.dumps({"host": socket.gethostname(), "pid": os.getppid()}))
    lock = RunLock(tmp_path)
    lock.release()
    note = lock.note
    assert bool(note) == (option not in ("", "local_lock=none"))
    assert not note or f"mounted with {option}" in note


def test_a_run_whose_directory_was_removed_makes_it_again_but_takes_no_other_runs(
    tmp_path: Path, make_config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunDir.create(make_config(tmp_path, name="a"))
    figures = JsonlTracker()
    figures.start(run.path, {})
    run.regain()
    assert not caplog.records
    began = (run.path / "config.yaml").read_text()
    shutil.rmtree(run.path)
    figures.log(1, {"loss": 1.0})
    assert "its lines wait" in caplog.text and not run.path.exists()
    run.regain()
    figures.log(2, {"loss": 2.0})
    assert [record["step"] for record in read_jsonl(run.path / "metrics.jsonl")] == [1, 2]
    assert (run.path / "config.yaml").read_text() == began and "is made again" in caplog.text
    with pytest.raises(UserError, match="another run writes this directory"):
        RunLock(run.path)
    for _ in range(2):  # also after a try that failed
        (run.path / ".lock").unlink()
        (run.path / ".lock").write_text('{"host": "x", "pid": 7}\n')
        with pytest.raises(UserError, match=r"another run's now.*process 7 on x"):
            run.regain()
        (run.path / ".lock").write_text("")  # it has ended
        with pytest.raises(UserError, match="another run's now"):
            run.regain()
    (run.path / "metrics.jsonl").unlink()
    (run.path / "metrics.jsonl").write_text("theirs")
    figures.log(3, {"loss": 3.0})
    figures.finish("failed")
    assert "lines that are lost: 1: [Errno 17]" in caplog.text
    assert (run.path / "metrics.jsonl").read_text() == "theirs"
    run.close()


def test_a_directory_that_cannot_be_written_is_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="the directory cannot be written"), locked(tmp_path / "file" / "a"):
        raise AssertionError("not reached")
