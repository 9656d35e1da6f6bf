"""What an acceptance is made of: items of sections, their results, and the directory that keeps them.

accept/<host>-<date>/
  machine.json            what was found here
  <section>/<item>.json   a result, written as soon as the item has ended
  <section>/<item>.log    what its programs printed
  page.md  page.html      everything on one page, written again after each item
  report.tar.gz           results, page and logs without personal data, for a bug report
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from kt_ray.config.secret_values import hidden_arguments
from kt_ray.disk import write_atomic
from kt_ray.doctor.check import FAIL, PASS, WARN

SKIP, CUT = "skip", "cut"  # cannot run here; not run, or not to its end, for want of time
# Section -> its share of the minutes. What a section leaves is the next one's.
SHARES = {"here": 0.04, "right": 0.36, "fast": 0.25, "runs": 0.35}
QUICK = "quick"
REPO = Path(__file__).resolve().parents[2]
GRACE = 10.0  # seconds that a program has to end after SIGTERM
_PDEATHSIG = 1  # PR_SET_PDEATHSIG


class Claim(NamedTuple):
    """Something that README or docs promise, and what was found here."""

    status: str  # pass, warn or fail
    text: str
    found: str
    required: str
    page: str  # where it is promised


@dataclass(frozen=True)
class Result:
    """What an item found."""

    section: str
    item: str
    title: str
    status: str = PASS
    cut: bool = False  # the clock ended it, whatever it had found by then
    options: str = ""  # the item's
    commit: str = ""
    seconds: float = 0.0
    claims: tuple[Claim, ...] = ()
    # Title -> rows, of which the first is the header.
    tables: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    records: Any = None  # the programs' own figures, as they wrote them

    def counts_for(self, item: Item) -> bool:
        """Whether an acceptance that goes on need not do the item again."""
        return not self.cut and self.status in (PASS, WARN, FAIL) and self.options == item.options

    @classmethod
    def read(cls, file: Path) -> Result:
        """Of a file that `Directory.write` wrote. Raises OSError, ValueError, TypeError."""
        values = json.loads(file.read_text(encoding="utf-8"))
        values["claims"] = tuple(Claim(*claim) for claim in values["claims"])
        return cls(**{**values, "notes": tuple(values["notes"])})


class OutOfTimeError(Exception):
    """An item's time is over before there is anything to keep."""


class CannotRunError(Exception):
    """An item turns out to be too much for this machine."""


class Task(NamedTuple):
    """How an item is run: where its files go, and until when."""

    file: Path  # <section>/<item>, without an ending
    deadline: float  # by time.monotonic()

    @property
    def log(self) -> Path:
        return self.file.with_suffix(".log")

    @property
    def seconds(self) -> float:
        """What is left."""
        return self.deadline - time.monotonic()

    def run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        cpus: Sequence[int] = (),
    ) -> int | None:
        """Run a program of this checkout, output into the log; its exit code, None = the time was over.

        Args:
            cpus: that it may use, and that its memory then lies beside; () = those of this process.
        """
        if self.seconds <= 0:
            return None
        return run_program(command, self.log, self.seconds, environment or {}, cpus)


class Found(NamedTuple):
    """What running an item gave; `Result` without the item's name."""

    claims: Iterable[Claim] = ()
    tables: Mapping[str, Sequence[Sequence[str]]] = {}
    notes: Iterable[str] = ()
    records: Any = None
    cut: bool = False


class Item(NamedTuple):
    """One thing to do."""

    section: str
    name: str
    title: str
    run: Callable[[Task], Found]
    missing: str = ""  # why it cannot be done here; "" = it can
    least: float = 0.0  # seconds below which it gives nothing; other items then wait
    options: str = ""  # keys of accept that its result depends on


@dataclass(frozen=True)
class Directory:
    """An acceptance on disk."""

    path: Path

    def task(self, item: Item, seconds: float) -> Task:
        folder = self.path / item.section
        folder.mkdir(parents=True, exist_ok=True)
        return Task(folder / item.name, time.monotonic() + seconds)

    def write(self, result: Result) -> None:
        folder = self.path / result.section
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(dataclasses.asdict(result), indent=1, ensure_ascii=False, default=str)
        write_atomic(folder / f"{result.item}.json", text + "\n")

    def read(self, section: str, name: str) -> Result | None:
        """None = there is no result, or a damaged one, which is then made again."""
        with suppress(OSError, ValueError, TypeError, KeyError):
            return Result.read(self.path / section / f"{name}.json")
        return None

    def results(self) -> list[Result]:
        """Every result that is kept, section by section."""
        names = ((s, file.stem) for s in SHARES for file in sorted((self.path / s).glob("*.json")))
        found = [self.read(section, name) for section, name in names]
        return [result for result in found if result is not None]


def complete(item: Item, directory: Directory, seconds: float, commit: str = "") -> Result:
    """Run an item and keep its result. An item that breaks fails; the others go on.

    Where the clock leaves no time to find anything, what an earlier round has found stays.
    """
    result = Result(item.section, item.name, item.title, options=item.options, commit=commit)
    if item.missing:
        result = dataclasses.replace(result, status=SKIP, notes=(item.missing,))
    elif seconds <= 0:
        result = dataclasses.replace(result, status=CUT, cut=True, notes=("no time was left for it",))
    else:
        begun = time.monotonic()
        result = _guarded(item, directory.task(item, seconds), result)
        result = dataclasses.replace(result, seconds=round(time.monotonic() - begun, 1))
    if result.status == CUT and not result.records:
        old = directory.read(item.section, item.name)
        if old is not None and old.cut and old.options == item.options and (old.claims or old.records):
            result = old
    directory.write(result)
    return result


def _guarded(item: Item, task: Task, result: Result) -> Result:
    try:
        found = item.run(task)
    except OutOfTimeError as error:
        found = Found(notes=[str(error)], cut=True)
    except CannotRunError as error:
        return dataclasses.replace(result, status=SKIP, notes=(str(error),))
    except Exception as error:  # the acceptance must finish its round
        claim = Claim(FAIL, item.title, f"{type(error).__name__}: {error}", "an item that ends", "")
        return dataclasses.replace(result, status=FAIL, claims=(claim,))
    claims = tuple(found.claims)
    kinds = {claim.status for claim in claims}
    status = next((kind for kind in (FAIL, WARN) if kind in kinds), CUT if found.cut else PASS)
    rest = {name: getattr(found, name) for name in ("tables", "records", "cut")}
    return dataclasses.replace(result, status=status, claims=claims, notes=tuple(found.notes), **rest)


def run_program(
    command: Sequence[str],
    log: Path,
    seconds: float,
    environment: Mapping[str, str],
    cpus: Sequence[int],
) -> int | None:
    """Run a program in a session of its own, output behind what `log` holds; None = it took too long."""

    def prepare() -> None:
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGTERM)  # dies with this process, however that ends
        if cpus:
            os.sched_setaffinity(0, cpus)

    with log.open("ab") as out:
        out.write(f"$ {' '.join(hidden_arguments(command))}\n".encode())
        out.flush()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=REPO,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
            start_new_session=True,
            preexec_fn=prepare,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the program, which ends what it started; then SIGKILL to all that is left of its session."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    left = [other for other in psutil.process_iter() if _session(other.pid) == process.pid]
    for other in left:
        with suppress(psutil.Error):
            other.kill()
    process.wait()
    psutil.wait_procs(left, timeout=GRACE)  # their memory is the next item's


def _session(pid: int) -> int | None:
    with suppress(OSError):
        return os.getsid(pid)
    return None
