"""trainer.restarts: a driver that died is started again, one that was refused its input is not."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kt_ray import supervisor
from kt_ray.config.mapping import load
from kt_ray.errors import Stopped
from kt_ray.runs.rundir import find_checkpoints
from kt_ray.supervisor import LOG, ServerSupervisor, TrainingSupervisor
from tests.helpers.composing import compose
from tests.helpers.descriptors import descriptors, left_open

ROOT = Path(__file__).resolve().parents[1]
# A driver that does what the test says: one list of words per start.
DRIVER = """
import json, os, signal, sys, time
from pathlib import Path
from kt_ray.train.stop_signals import stop_signals
acts, here = json.loads(sys.argv[1]), Path(sys.argv[2])
job = json.load(sys.stdin)
with (here / "starts").open("a") as file:
    file.write(json.dumps(job) + "\\n")
number = len((here / "starts").read_text().splitlines()) - 1
run = Path(job["config"]["run"]["root"], job["config"]["run"]["name"])
fd = int(os.environ["KT_RAY_SUPERVISOR_FD"])
for word in acts[number].split():
    what, _, value = word.partition("=")
    if what == "begin":
        run.mkdir(parents=True, exist_ok=True)
        (run / ".new").write_text(f"seed: {number}")
        os.replace(run / ".new", run / "config.yaml")
    elif what == "step":
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": int(value)}) + "\\n")
    elif what == "save":
        path = run / "checkpoints" / f"step_{int(value):06d}"
        path.mkdir(parents=True)
        (path / "manifest.json").write_text("{}")
    elif what == "move":  # a disk goes, or comes back
        before, after = value.split(":")
        os.rename(run.parent / before, run.parent / after)
    elif what == "link":
        (run / "checkpoints").symlink_to(value)
    elif what == "beat":
        os.write(fd, b".")
        time.sleep(float(value))
    elif what == "kill":
        os.kill(os.getpid(), int(value))
    elif what == "wait":  # for a signal, then some more
        with stop_signals() as stop:
            (here / "waiting").touch()
            while not stop:
                time.sleep(0.02)
            time.sleep(float(value))
    elif what == "ready":
        os.write(fd, b"r")
        time.sleep(float(value))
    elif what == "exit":
        os.write(fd, b"e")
        sys.exit(int(value))
    elif what == "end":  # as Ray ends a process that has lost its GCS
        os._exit(int(value))
"""


class Place:
    """A supervisor over scripted drivers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run = path / "runs" / "a"

    def go(self, acts: list[str], *settings: str, **options: Any) -> int:
        config = compose([f"run.root={self.path / 'runs'}", "run.name=a", "trainer.restarts=9", *settings])
        command = [sys.executable, "-c", DRIVER, json.dumps(acts), str(self.path)]
        return TrainingSupervisor(config, command, **{"first_wait": 0.01, **options}).run()

    def serve(self, acts: list[str], *settings: str) -> int:
        config = compose(
            ["mode=serve", "run.name=a", f"run.root={self.path}", "trainer.restarts=9", *settings]
        )
        command = [sys.executable, "-c", DRIVER, json.dumps(acts), str(self.path)]
        return ServerSupervisor(config, command, first_wait=0.01).run()

    def starts(self) -> list[tuple[str | None, bool]]:
        """trainer.resume and run.overwrite of each driver."""
        return [(job["trainer"]["resume"], job["run"]["overwrite"]) for job in self.configs()]

    def configs(self) -> list[dict[str, Any]]:
        """The configuration of each driver."""
        return [job["config"] for job in self.jobs()]

    def jobs(self) -> list[dict[str, Any]]:
        """What each driver was given."""
        return [json.loads(line) for line in (self.path / "starts").read_text().splitlines()]

    def log(self) -> str:
        return (self.run / LOG).read_text()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_from_the_last_checkpoint_after_every_kind_of_death(place: Place, capfd: Any) -> None:
    code = place.go(
        [
            "begin step=1 kill=9",  # before the first checkpoint: from the start
            "begin step=1 step=2 save=2 step=3 kill=11",
            "begin step=3 exit=1",
            "begin step=4 save=4 exit=75",  # somebody stopped the driver, not the supervisor
            "begin exit=0",
        ]
    )
    assert code == 0
    assert place.starts() == [(None, False), (None, True), *[("latest", False)] * 3]
    log = place.log()
    assert "the driver died (SIGKILL) after" in log and "at step 1; restart 1 of 9" in log
    assert "from the beginning (no checkpoint yet)" in log
    assert "died (SIGSEGV)" in log and "restart 2 of 9 in 0 s, from step_000002" in log
    assert "failed (exit code 1)" in log and "was stopped" in log
    assert capfd.readouterr().err.count("supervisor: ") == 4


@pytest.mark.parametrize(("code", "starts"), [(0, 1), (2, 1)])
def test_an_end_and_a_refusal_are_final(place: Place, code: int, starts: int) -> None:
    assert place.go([f"exit={code}"] * 3) == code
    assert len(place.starts()) == starts and not (place.run / LOG).exists()


def test_a_restart_keeps_the_placement_of_experts(place: Place) -> None:
    """Placed anew by load they would add up in another order, and nobody asked for that. The run's
    configuration stays its user's."""
    assert place.go(["begin kill=9", "begin save=1 kill=9", "begin exit=0"]) == 0
    assert [job["keeps_placement"] for job in place.jobs()] == [False, False, True]
    assert {config["rule"]["experts"]["placement"] for config in place.configs()} == {"auto"}
    last = json.dumps({**place.jobs()[-1], "parent": os.getpid()})
    driver = "from kt_ray.supervisor import *; as_child(lambda c: print(as_placed(c).rule.experts.placement))"
    with open(os.devnull, "wb") as pipe:
        child = subprocess.run(
            [sys.executable, "-c", driver],
            input=last,
            capture_output=True,
            text=True,
            env={**os.environ, "KT_RAY_SUPERVISOR_FD": str(pipe.fileno())},
            pass_fds=[pipe.fileno()],
        )
    assert child.stdout == "kept\n", child.stderr


def test_contiguous_experts_need_no_word_to_stay(place: Place) -> None:
    contiguous = "rule.experts.placement=contiguous"
    assert place.go(["begin save=1 kill=9", "begin exit=0"], contiguous) == 0
    assert not any(job["keeps_placement"] for job in place.jobs())


def test_restarts_are_counted(place: Place, capfd: Any) -> None:
    acts = ["begin save=1 kill=9", "begin step=2 kill=9", "begin step=3 kill=9", "exit=0"]
    assert place.go(acts, "trainer.restarts=2") == 1
    assert len(place.starts()) == 3
    assert "all 2 restarts are used up (trainer.restarts)" in place.log()
    assert f"to go on: python launch.py resume={place.run}" in place.log()


def test_the_same_fault_again_and_again_ends_it(place: Place) -> None:
    assert place.go(["begin save=1 exit=1", *["exit=1"] * 8]) == 1
    assert len(place.starts()) == 6
    assert "5 failures, nothing gained in between: not started again" in place.log()


def test_what_is_missing_for_a_while_is_waited_for(place: Place) -> None:
    """Input that was good once: the disk is full, or a network disk is away, when the run starts again."""
    assert place.go(["begin save=1 kill=9", "exit=2", "exit=2", "begin step=2 exit=0"]) == 0
    assert "failed (exit code 2)" in place.log()


@pytest.mark.parametrize(
    ("goes", "comes", "overwrite"),
    [
        ("move=a:away", "move=away:a", False),
        ("move=a:away", "move=away:a", True),
        ("move=a/checkpoints:away link=../disk", "move=away:disk", False),
        ("stale", "back", False),
    ],
)
def test_what_a_disk_that_is_away_holds_is_not_overwritten(
    place: Place, monkeypatch: pytest.MonkeyPatch, goes: str, comes: str, overwrite: bool
) -> None:
    """The directory, its checkpoints on another disk, or a network disk whose server does not answer."""
    if overwrite:  # there was a run before
        place.run.mkdir(parents=True)
        (place.run / "config.yaml").touch()

    def find(run: Path) -> list[Path]:
        starts = place.path / "starts"
        if goes == "stale" and starts.exists() and len(place.starts()) < 2:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(run))
        return find_checkpoints(run)

    monkeypatch.setattr(supervisor, "find_checkpoints", find)
    acts = [f"begin step=1 save=1 step=2 {goes} kill=9", f"{comes} exit=2", "begin step=2 exit=0"]
    assert place.go(acts, f"run.overwrite={overwrite}") == 0
    assert place.starts() == [(None, overwrite), (None, False), ("latest", False)]


def test_a_refused_step_is_final(place: Place) -> None:
    """A loss that is not finite comes again."""
    assert place.go(["begin save=1 kill=9", "begin step=2 exit=2", "exit=0"]) == 2


def test_deaths_from_outside_are_not_the_same_fault(place: Place) -> None:
    assert place.go(["begin save=1 end=1", *["end=1"] * 6, "exit=0"]) == 0
    assert len(place.starts()) == 8


def test_a_frozen_driver_is_killed_and_started_again(place: Place) -> None:
    acts = ["begin save=1 beat=0.2 beat=0.2 beat=0.2 kill=19", "exit=0"]
    assert place.go(acts, silence=4.0) == 0  # more than a driver's start takes on a busy machine
    assert place.starts()[1] == ("latest", False) and "the driver was frozen for" in place.log()


@pytest.mark.parametrize(
    "acts", [["kill=9", "kill=9", "exit=2"], ["move=a:away kill=9", "move=away:a exit=2", "exit=2"]]
)
def test_another_run_of_the_name_is_never_overwritten(place: Place, acts: list[str]) -> None:
    """It died before it had looked at the directory, which holds somebody's run without a checkpoint, on a
    disk that may be away meanwhile."""
    place.run.mkdir(parents=True)
    (place.run / "config.yaml").write_text("seed: 7")
    (place.run / "metrics.jsonl").write_text('{"step": 5}\n')
    assert place.go(acts) == 2
    assert place.starts() == [(None, False)] * 3


@pytest.mark.parametrize("signals", [1, 3])
def test_signals_are_passed_on_and_end_it(
    place: Place, signals: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several within a second are one request: a Ctrl-C that is held, a job manager that signals a group."""
    monkeypatch.setattr(supervisor, "SAME", 60.0)  # a busy machine may spread them

    def ask() -> None:
        while not (place.path / "waiting").exists():
            time.sleep(0.05)
        for _ in range(signals):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)

    def late(number: int, frame: Any) -> None:
        """A signal that comes after the end; it would end pytest."""

    before = signal.signal(signal.SIGTERM, late)
    thread = threading.Thread(target=ask)
    thread.start()
    try:
        with pytest.raises(Stopped, match="ended with its driver"):
            place.go(["begin save=1 wait=0.5 save=2 exit=75", "exit=0"])
        assert signal.getsignal(signal.SIGTERM) == late
    finally:
        thread.join()
        signal.signal(signal.SIGTERM, before)
    assert find_checkpoints(place.run)[-1].name == "step_000002"
    assert len(place.starts()) == 1


def test_a_signal_between_two_drivers_ends_it_with_the_way_on(place: Place) -> None:
    def ask() -> None:
        while not (place.run / LOG).exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=ask)
    thread.start()
    with pytest.raises(Stopped, match=r"before the restart: to go on: .*resume=.*/runs/a"):
        place.go(["begin save=1 kill=9", "exit=0"], first_wait=60.0)
    thread.join()
    assert len(place.starts()) == 1


def test_a_run_from_another_runs_checkpoint_begins_again(place: Place) -> None:
    """Before its own first checkpoint, when its directory holds figures."""
    checkpoint = place.path / "old" / "step_000100"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    resume = f"trainer.resume={checkpoint}"
    assert place.go(["begin step=101 kill=9", "exit=0"], resume) == 0
    assert place.starts() == [(str(checkpoint), False), (str(checkpoint), True)]
    job = json.loads((place.path / "starts").read_text().splitlines()[1])
    assert load(job["config"]).run.overwrite  # the configuration's own checks let it through


def test_a_run_that_goes_back_goes_back_until_it_has_saved(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints and figures beyond the one that was named go only when the driver begins to train."""
    monkeypatch.setattr(supervisor, "SAME_FAULT", 2)
    for step in (100, 300):
        path = place.run / "checkpoints" / f"step_{step:06d}"
        path.mkdir(parents=True)
        (path / "manifest.json").write_text("{}")
    (place.run / "config.yaml").write_text("seed: 7")
    resume = f"trainer.resume={place.run / 'checkpoints' / 'step_000100'}"
    (place.run / "metrics.jsonl").write_text('{"step": 320}\n')
    acts = ["begin kill=9", "begin step=101 save=110 exit=1", "begin step=111 exit=1", "exit=0"]
    assert place.go(acts, resume) == 0
    assert [start[0] for start in place.starts()] == [resume.partition("=")[2]] * 2 + ["latest"] * 2
    assert re.findall(r"at step (\d+);", place.log()) == ["100", "110", "111"]
    assert "restart 1 of 9 in 0 s, from step_000100" in place.log()


def test_a_run_that_is_replaced_counts_for_nothing(place: Place) -> None:
    """The steps of the run that run.overwrite=true deletes."""
    place.run.mkdir(parents=True)
    (place.run / "config.yaml").write_text("seed: 7")
    (place.run / "metrics.jsonl").write_text('{"step": 1000}\n')
    (place.run / LOG).write_text("old\n")
    acts = ["kill=9", "begin kill=9", "exit=0"]
    assert place.go(acts, "run.overwrite=true") == 0
    assert "at step 0; restart 1" in place.log() and "old" not in place.log()


def test_earlier_lines_of_the_log_stay(place: Place) -> None:
    assert place.go(["begin save=1 kill=9", "exit=0"]) == 0
    (place.path / "starts").unlink()
    assert place.go(["kill=9", "exit=0"], "trainer.resume=latest") == 0
    assert place.log().count("restart 1 of 9") == 2


def test_a_driver_that_cannot_be_started_is_tried_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, popen = itertools.count(), subprocess.Popen

    def refused(*given: Any, **options: Any) -> subprocess.Popen[str]:
        if next(number) == 1:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return popen(*given, **options)

    monkeypatch.setattr(subprocess, "Popen", refused)
    before = descriptors()
    assert place.go(["begin kill=9", "exit=0"]) == 0
    assert "the driver cannot be started: Resource temporarily unavailable" in place.log()
    assert "restart 2 of 9" in place.log() and not left_open(before)


def test_a_thousand_restarts_in_vain_wait_no_longer(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    end = supervisor._End(-9, False, False, None, 0.0)
    monkeypatch.setattr(supervisor.TrainingSupervisor, "_drive", lambda *_: end)
    monkeypatch.setattr(supervisor, "LONGEST_WAIT", 0.0)
    assert place.go([], "trainer.restarts=1100") == 1


def test_a_run_without_a_name_gets_a_directory_of_its_own(place: Place) -> None:
    config = compose([f"run.root={place.path / 'runs'}", "trainer.restarts=1"])
    paths = {TrainingSupervisor(config).path for _ in range(3)}
    assert len(paths) == 3 and all(path.is_dir() for path in paths)


def test_a_driver_gets_the_very_configuration(place: Place, tmp_path: Path) -> None:
    config = compose(["trainer.restarts=1", "lora.rank=16", "optim.betas=[0.8,0.9]", "run.name=a"])
    place.go(["exit=0"], "lora.rank=16", "optim.betas=[0.8,0.9]")
    job = json.loads((tmp_path / "starts").read_text())
    got = load(job["config"])
    assert (got.lora, got.optim, got.trainer.restarts) == (config.lora, config.optim, 9)


def test_every_driver_knows_when_the_command_began_and_what_it_was(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """env.json of the run has the command line that the user typed."""
    monkeypatch.setattr(sys, "argv", ["launch.py", "trainer.restarts=9"])
    driver = """
import os, sys
from kt_ray import supervisor
told = sys.argv[1]
def run(config):
    with open(told, "a") as file:
        print(supervisor.began, supervisor.first_step, *sys.argv, file=file)
    if os.path.getsize(told) < 70:
        os.kill(os.getpid(), 9)
    return 0
sys.exit(supervisor.as_child(run))
"""
    told = place.path / "began"
    checkpoint = place.run / "checkpoints" / "step_000007"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    resumed = ("run.name=a", "trainer.restarts=9", "trainer.resume=latest")
    config = compose([f"run.root={place.path / 'runs'}", *resumed])
    before = time.monotonic()
    supervisor = TrainingSupervisor(config, [sys.executable, "-c", driver, str(told)], first_wait=0.01)
    after = time.monotonic()
    assert supervisor.run() == 0
    lines = told.read_text().splitlines()
    began, step, *command = lines[0].split()
    assert len(lines) > 1 and len(set(lines)) == 1 and before <= float(began) <= after and step == "7"
    assert command == sys.argv
    aside = checkpoint.rename(checkpoint.with_name("superseded_step_000007_2"))
    best = aside.with_name("best")
    best.symlink_to(aside.name)
    for path in (aside, best):
        named = compose([f"run.root={place.path / 'runs'}", "run.name=a", f"trainer.resume={path}"])
        assert TrainingSupervisor(named)._first_step == 7


def test_a_server_that_answered_is_started_again_as_it_was(
    place: Place, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever ended it: exit code 2 is how a server says that Ray is gone."""
    monkeypatch.setattr("kt_ray.supervisor.SERVED", 0.0)
    name = "serve.name=mine"
    assert place.serve(["ready=0 kill=9", "exit=2", "ready=0 exit=2", "end=1", "ready=0 exit=0"], name) == 0
    configs = place.configs()
    assert len(configs) == 5 and all(config == configs[0] for config in configs)
    assert configs[0]["serve"]["name"] == "mine" and configs[0]["mode"] == "serve"
    err = capfd.readouterr().err
    assert err.count("supervisor: the driver") == 4 and "restart 4 of 9 in 0 s\n" in err
    assert not (place.path / LOG).exists()


def test_a_server_that_never_answered_was_refused(place: Place) -> None:
    assert place.serve(["kill=9", "exit=2", "exit=0"]) == 2
    assert len(place.starts()) == 2


def test_a_server_that_ends_itself_each_time_is_given_up(place: Place) -> None:
    assert place.serve(["ready=0 exit=1"] * 9) == 1
    assert len(place.starts()) == 5


def test_loading_is_no_service(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that loads for long and fails as soon as it answers gains nothing."""
    monkeypatch.setattr("kt_ray.supervisor.SERVED", 0.3)
    assert place.serve(["beat=0.5 ready=0 exit=1"] * 9) == 1
    assert len(place.starts()) == 5


def test_the_parent_loads_no_torch_and_no_ray(tmp_path: Path) -> None:
    code = "import sys, kt_ray.cli; print(*(name in sys.modules for name in ('torch', 'ray')))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
