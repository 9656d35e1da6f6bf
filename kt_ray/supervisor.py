"""trainer.restarts: a small process that starts a training run or a server again after its driver died.

It loads neither torch nor Ray and holds nothing of the run, so what kills the driver (memory, a lost raylet
or GCS, a mistaken kill) leaves it alone. The driver is a child in a session of its own; signals are passed on
to it, and it gets SIGTERM should the supervisor die first. The child writes a byte into a pipe every few
seconds: a driver that is frozen is killed and started again like one that died.

`<run directory>/supervisor.log` says what happened to a training run.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kt_ray.checkpoint_dirs import MANIFEST, step_of
from kt_ray.config import resume_line
from kt_ray.config.mapping import load, with_keys
from kt_ray.config.schema import Config
from kt_ray.errors import BAD_INPUT, BUG, INTERRUPTED, OK, STOPPED, Stopped, UserError
from kt_ray.runs.rundir import (
    checkpoint_to_resume,
    directory_of,
    find_checkpoints,
    is_run,
    plain,
    resumed_step,
)
from kt_ray.train.stop_signals import SAME

LOG = "supervisor.log"
BEAT = 5.0  # seconds between the driver's signs of life
SILENCE = 180.0  # seconds without one after which the driver counts as frozen
FIRST_WAIT, LONGEST_WAIT = 5.0, 300.0  # seconds before a restart; doubled while nothing is gained
SAME_FAULT = 5  # failures in a row, nothing gained in between, that end it: the next one would be the same
SERVED = 60.0  # seconds for which a server has to answer to have gained something
_FD = "KT_RAY_SUPERVISOR_FD"
# What a driver writes into the pipe: it lives; its server answers; it ends by itself.
_ALIVE, _READY, _REPORT = b".", b"r", b"e"
_ENTRY = """
import sys
sys.path.insert(0, sys.argv[1])
from kt_ray.cli import supervised
sys.exit(supervised())
"""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def supervise(config: Config) -> int:
    """Run the training or the server of `config` in a child until it is done. Returns its exit code.

    Raises:
        UserError: there is nothing to resume from, or run.root cannot be written.
        Stopped, KeyboardInterrupt: a signal came.
    """
    if config.mode == "serve":
        return ServerSupervisor(config).run()
    try:
        supervisor = TrainingSupervisor(config)
    except OSError as error:
        raise UserError(
            "the run directory cannot be made",
            where=config.run.root,
            observed=error.strerror or str(error),
            remedy="set run.root to a directory that you may write to",
        ) from error
    return supervisor.run()


@dataclass(frozen=True)
class _End:
    """How a driver ended."""

    code: int  # exit code; negative: a signal's number
    frozen: bool
    own_fault: bool  # it ended by itself
    served: float | None  # seconds since its server first answered; None: it never did
    seconds: float

    def __str__(self) -> str:
        if self.frozen:
            return f"was frozen for {SILENCE:.0f} s"
        if self.code < 0:
            return f"died ({signal.Signals(-self.code).name})"
        return "was stopped" if self.code in (STOPPED, INTERRUPTED) else f"failed (exit code {self.code})"


class Supervisor(ABC):
    """Starts drivers one after the other.

    Args:
        config: checked and settled.
        command: of a driver; it reads its configuration as JSON from standard input.
        silence, first_wait: see the constants.
    """

    def __init__(
        self,
        config: Config,
        command: list[str] | None = None,
        silence: float = SILENCE,
        first_wait: float = FIRST_WAIT,
    ) -> None:
        root = str(Path(__file__).resolve().parents[1])
        self._command = command or [sys.executable, "-c", _ENTRY, root]
        self._silence = silence
        self._first_wait = first_wait
        self._config = config
        self._began = time.monotonic()
        self._first_step = 0
        self._keeps_placement = False  # the next driver
        self._asked = 0  # signals that asked to end, those within SAME seconds as one
        self._asked_at = -SAME  # time.monotonic() of the last that counted
        self._wake = threading.Event()  # set by the first
        self._child: subprocess.Popen[str] | None = None
        self._reported = False
        self._answers_since: float | None = None
        self._log: list[str] = []

    def run(self) -> int:
        """Until a driver has finished, was refused its input, or a signal came. Returns the exit code."""
        handlers = {
            number: signal.signal(number, self._pass_on)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        try:
            return self._run()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _run(self) -> int:
        restarts, in_vain, same_fault = 0, 0, 0
        while True:
            end = self._drive(self._next())
            gained = self._gained(end)
            if end.code == OK or (end.code == BAD_INPUT and self._refused(gained)):
                return end.code
            if self._asked:
                if end.code == STOPPED:  # it has said itself how to go on
                    raise Stopped("supervisor: ended with its driver")
                raise KeyboardInterrupt
            in_vain = 0 if gained else in_vain + 1
            same_fault = same_fault + 1 if end.own_fault and not gained else 0
            what = f"the driver {end} after {end.seconds:.0f} s{self._at()}"
            if restarts >= self._config.trainer.restarts:
                self._say(f"{what}; all {restarts} restarts are used up (trainer.restarts)")
                return self._given_up(end)
            if same_fault >= SAME_FAULT:
                self._say(f"{what}; {SAME_FAULT} failures, nothing gained in between: not started again")
                return self._given_up(end)
            restarts += 1
            wait = min(LONGEST_WAIT, self._first_wait * 2 ** min(99, max(0, in_vain - 1)))
            limit = self._config.trainer.restarts
            self._say(f"{what}; restart {restarts} of {limit} in {wait:.0f} s{self._source()}")
            if self._wake.wait(wait):
                raise Stopped(f"supervisor: ended before the restart{self._way_on(': ')}")

    def _given_up(self, end: _End) -> int:
        if way_on := self._way_on(""):
            self._say(way_on)
        return end.code if end.code > 0 else BUG

    # -- what is supervised -------------------------------------------------------------------

    @abstractmethod
    def _next(self) -> Config:
        """The configuration of the next driver."""

    @abstractmethod
    def _gained(self, end: _End) -> bool:
        """Whether the driver that has just ended did something for its user."""

    @abstractmethod
    def _refused(self, gained: bool) -> bool:
        """Whether the bad input that ended it is what the user alone can mend."""

    def _at(self) -> str:
        """How far the run is, as the end of a clause."""
        return ""

    def _source(self) -> str:
        """What the next driver goes on from, as the end of a clause."""
        return ""

    def _way_on(self, before: str) -> str:
        """`before` and the command that goes on, if there is anything to go on from."""
        return ""

    def _say(self, line: str) -> None:
        """On standard error."""
        stamp = f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S}"
        self._log.append(f"{stamp} {line}\n")
        with contextlib.suppress(OSError):
            print(f"supervisor: {line}", file=sys.stderr, flush=True)

    # -- one driver ---------------------------------------------------------------------------

    def _drive(self, config: Config) -> _End:
        """Start a driver and wait for its end."""
        start = time.monotonic()
        ours, theirs = os.pipe()
        with open(ours, "rb", buffering=0) as beats:
            try:
                child = self._child = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    text=True,
                    pass_fds=(theirs,),
                    env={**os.environ, _FD: str(theirs)},
                    start_new_session=True,
                )
            except OSError as error:  # memory, or numbers of processes, have run out
                self._say(f"the driver cannot be started: {error.strerror}")
                return _End(BUG, False, False, None, time.monotonic() - start)
            finally:
                os.close(theirs)
            if self._asked:  # the signal came before there was anybody to pass it on to
                child.send_signal(signal.SIGTERM)
            job = {
                "config": plain(config),
                "program": resume_line.program,
                "argv": sys.argv,
                "began": self._began,
                "first_step": self._first_step,
                "keeps_placement": self._keeps_placement,
                "parent": os.getpid(),
            }
            with contextlib.suppress(BrokenPipeError):
                assert child.stdin is not None
                child.stdin.write(json.dumps(job))
                child.stdin.close()
            frozen = self._frozen(child, beats)
            if frozen:
                child.kill()
            code = child.wait()
            now = time.monotonic()
            served = None if self._answers_since is None else now - self._answers_since
            return _End(code, frozen, self._reported, served, now - start)

    def _frozen(self, child: subprocess.Popen[str], beats: Any) -> bool:
        """Wait until the driver ends (False), or is silent for too long (True)."""
        self._reported, self._answers_since = False, None
        with selectors.DefaultSelector() as selector:
            selector.register(beats, selectors.EVENT_READ)
            looked, silent = time.monotonic(), 0.0
            while child.poll() is None:
                ready = selector.select(timeout=1.0)
                # Only time in which this process ran, too: a host that was suspended blames nobody.
                looked, passed = time.monotonic(), time.monotonic() - looked
                silent += min(passed, 2.0)
                if ready:
                    heard_now = beats.read(4096)
                    self._reported = self._reported or _REPORT in heard_now
                    if _READY in heard_now:
                        self._answers_since = time.monotonic()
                    if not heard_now:
                        child.wait()  # it closed the pipe: it is ending
                        return False
                    silent = 0.0
                elif silent > self._silence:
                    return True
        return False

    def _pass_on(self, number: int, _frame: Any) -> None:
        self._wake.set()
        now = time.monotonic()
        if now - self._asked_at < SAME:
            return
        self._asked_at = now
        self._asked += 1
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(number if self._asked < 3 else signal.SIGKILL)


class TrainingSupervisor(Supervisor):
    """Of a run: what it has saved and where it is are read from its directory.

    Attributes:
        path: the run directory.
    """

    def __init__(self, config: Config, *args: Any, **options: Any) -> None:
        self.path = directory_of(config)
        named = with_keys(config, {"run.name": self.path.name, "run.root": str(self.path.parent)})
        super().__init__(named, *args, **options)
        self._marker = self._file("config.yaml")
        self._present = self._saved()  # by earlier commands
        # Written whole each time: a run that begins anew clears its directory.
        self._earlier = "" if config.run.overwrite else self._text()
        self._first_step = resumed_step(self._config)
        self._figures = self._file("metrics.jsonl")
        self._taken = 0  # the most that drivers of ours had taken, 0 = none has gone on
        self._away = False  # the disk of the directory, when the present driver was started
        self._begun = False  # by a driver of ours before the present one: its input was good

    def _gained(self, end: _End) -> bool:
        before, self._taken = self._reached, max(self._taken, self._steps())
        return self._reached > before and not self._away

    @property
    def _reached(self) -> int:
        """Steps that the run has taken, as far as is known."""
        return self._taken or self._first_step

    def _refused(self, gained: bool) -> bool:
        return gained or not (self._begun or self._away)

    def _at(self) -> str:
        return f", at step {self._reached}"

    def _source(self) -> str:
        source = None
        with contextlib.suppress(UserError, OSError):  # the next driver says it
            source = checkpoint_to_resume(self._next())
        return f", from {source.name if source else 'the beginning (no checkpoint yet)'}"

    def _way_on(self, before: str) -> str:
        with contextlib.suppress(OSError):
            if not find_checkpoints(self.path):
                return ""
        return f"{before}to go on: {resume_line.resume_line(self.path)}"

    def _next(self) -> Config:
        """From the newest checkpoint, if there is one."""
        present = self._file("config.yaml")
        ours = self._ours()
        # Or no driver has come as far as to make it.
        self._away = self._child is not None and (present is None or ours is None)
        self._begun = self._begun or present not in (None, self._marker)
        if self._away:  # the next driver finds it, or is refused until the disk is back
            return with_keys(self._config, {"run.overwrite": False})
        if not self._begun:
            return self._config
        if ours:
            self._keeps_placement = self._config.rule.experts.placement != "contiguous"
            return with_keys(self._config, {"trainer.resume": "latest", "run.overwrite": False})
        resume = self._config.trainer.resume
        if resume is not None and (resume == "latest" or self.path in Path(resume).parents):
            return self._config  # the same run, from the checkpoint that was named
        # What lies there is ours: a driver of ours wrote config.yaml, after all checks.
        return with_keys(self._config, {"run.overwrite": True})

    def _saved(self) -> set[tuple[Path, int]]:
        """The run's checkpoints; one that is written again is another."""
        return {(path, (path / MANIFEST).stat().st_mtime_ns) for path in find_checkpoints(self.path)}

    def _ours(self) -> set[tuple[Path, int]] | None:
        """Those that drivers of ours have saved; None = the disk that holds them is away."""
        checkpoints = self.path / "checkpoints"
        if os.path.lexists(checkpoints) and not os.path.isdir(checkpoints):  # a link to another disk
            return None
        try:
            return self._saved() - self._present
        except OSError:
            return None

    def _file(self, name: str) -> tuple[int, int] | None:
        """Which file of this name lies in the run directory; every run writes config.yaml anew."""
        try:
            stat = (self.path / name).stat()
        except OSError:
            return None
        return stat.st_ino, stat.st_mtime_ns

    def _steps(self) -> int:
        """Steps that figures and checkpoints of our drivers know of; not what lay there before."""
        saved = max((step_of(path.name) or 0 for path, _ in self._ours() or ()), default=0)
        if self._file("metrics.jsonl") == self._figures:
            return saved
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            lines = (self.path / "metrics.jsonl").read_bytes().splitlines()
            for line in reversed(lines):
                if line.endswith(b"}"):
                    return max(saved, int(json.loads(line).get("step") or 0))
        return saved

    def _text(self) -> str:
        """supervisor.log as it is."""
        with contextlib.suppress(OSError):
            return (self.path / LOG).read_text(encoding="utf-8", errors="replace")
        return ""

    def _say(self, line: str) -> None:
        """In supervisor.log as well."""
        super()._say(line)
        with contextlib.suppress(OSError):  # a full disk: the lines come with the next one
            if is_run(self.path):
                (self.path / LOG).write_text(self._earlier + "".join(self._log), encoding="utf-8")


class ServerSupervisor(Supervisor):
    """Of mode=serve: a server that has answered for a while is started again as it was."""

    _answered = False  # one of its drivers

    def _next(self) -> Config:
        return self._config

    def _gained(self, end: _End) -> bool:
        self._answered = self._answered or end.served is not None
        return end.served is not None and end.served > SERVED

    def _refused(self, gained: bool) -> bool:
        return not self._answered


def note_ready() -> None:
    """A supervised driver: its server answers."""
    if _pipe is not None:
        with contextlib.suppress(OSError):
            os.write(_pipe, _READY)


_pipe: int | None = None  # of a supervised driver
began: float | None = None  # of a supervised driver: time.monotonic() of the supervisor's start
first_step = 0  # and the steps that its run had taken by then
_keeps_placement = False  # and whether experts stay where its run's drivers before it had them


def as_placed(config: Config) -> Config:
    """The configuration to place experts by; what a user asked for stays in the run's config.yaml.

    Bit for bit: experts that a restart placed anew by load would add up in another order.
    """
    return with_keys(config, {"rule.experts.placement": "kept"}) if _keeps_placement else config


def as_child(run: Callable[[Config], int]) -> int:
    """A driver's side: read the configuration from standard input, and give signs of life meanwhile.

    Args:
        run: trains, and turns what is raised into an exit code.
    """
    global _pipe, began, first_step, _keeps_placement
    job = json.load(sys.stdin)
    fd = _pipe = int(os.environ.pop(_FD))
    os.set_inheritable(fd, False)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != job["parent"]:
        return INTERRUPTED

    def beat() -> None:
        with contextlib.suppress(OSError):
            while True:
                os.write(fd, _ALIVE)
                time.sleep(BEAT)

    threading.Thread(target=beat, name="kt-beat", daemon=True).start()
    resume_line.program = job["program"]
    sys.argv = job["argv"]  # for env.json, and trackers that keep it
    began, first_step, _keeps_placement = job["began"], job["first_step"], job["keeps_placement"]
    code = run(load(job["config"]))
    with contextlib.suppress(OSError):
        os.write(fd, _REPORT)
    return code
