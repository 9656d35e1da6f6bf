"""What a campaign of `chaos.py` does to processes, files and the clock, as far as the machine allows it."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import random
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil

TOKEN = "KT_RAY_CHAOS"  # an environment variable that all processes of a campaign inherit
# What happens to a training, to what, and how often in relation to the others.
TRAINING: dict[tuple[str, str], int] = {
    ("SIGKILL", "actor"): 6,
    ("SIGTERM", "actor"): 2,
    ("pause", "actor"): 2,
    ("freeze", "actor"): 1,
    ("memory", "actor"): 2,
    ("SIGKILL", "driver"): 3,
    ("SIGTERM", "driver"): 3,
    ("pause", "driver"): 1,
    ("memory", "driver"): 1,
    ("SIGKILL", "raylet"): 2,
    ("SIGKILL", "gcs"): 2,
    ("SIGKILL", "dashboard"): 1,
    ("full", "disk"): 3,
    ("read_only", "disk"): 2,
    ("torn", "checkpoint"): 2,
    ("gone", "model"): 2,
    ("changed", "model"): 1,
    ("jump", "clock"): 3,
    ("second", "driver"): 1,
}
# Faults that take something of the user's: the run may end with exit code 2 and one line that says so.
TOLD = {
    "full": ("no room", "cannot be written", "No space left"),
    "read_only": ("cannot be written", "cannot be removed", "not permitted", "not writable"),
    "gone": ("config.json", "model.safetensors", "tokenizer"),
    "changed": ("not those that this run began with", "belongs to another model"),
}
PAUSE = (5.0, 30.0)  # seconds of a process that goes on afterwards
SHORT = (2.0, 12.0)  # seconds of a disk or a model that is not there
MEMORY = 24 << 20  # bytes that a process may still take before the kernel kills it
LEAVES = 30.0  # seconds in which everything of a run must have gone
CLOCK = 3600.0  # seconds that the clock jumps at most, either way
CGROUPS = (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max"))
# The wall clock of every process that loads this is off by the nanoseconds in the file $KT_RAY_CLOCK.
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
static volatile int64_t *off;
__attribute__((constructor)) static void start(void) {
  const char *path = getenv("KT_RAY_CLOCK");
  int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  void *at = fd < 0 ? MAP_FAILED : mmap(0, 8, PROT_READ, MAP_SHARED, fd, 0);
  if (at != MAP_FAILED) off = at;
}
int clock_gettime(clockid_t id, struct timespec *ts) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int rc = real(id, ts);
  if (!rc && off && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) {
    int64_t ns = ts->tv_nsec + *off % 1000000000;
    ts->tv_sec += *off / 1000000000 + (ns >= 1000000000) - (ns < 0);
    ts->tv_nsec = ns + (ns < 0) * 1000000000 - (ns >= 1000000000) * 1000000000;
  }
  return rc;
}
int gettimeofday(struct timeval *restrict tv, void *restrict tz) {
  struct timespec ts;
  int rc = clock_gettime(CLOCK_REALTIME, &ts);
  (void)tz;
  tv->tv_sec = ts.tv_sec, tv->tv_usec = ts.tv_nsec / 1000;
  return rc;
}
time_t time(time_t *out) {
  struct timespec ts;
  clock_gettime(CLOCK_REALTIME, &ts);
  if (out) *out = ts.tv_sec;
  return ts.tv_sec;
}
"""


class Faults:
    """The faults of one campaign, drawn from a seed. Each returns what it hit, "" if there was nothing.

    Attributes:
        kinds: what may be drawn here, with its weight; left_out: what this machine does not allow, and why.
        environment: of the processes that are to be hurt.
    """

    def __init__(
        self,
        work: Path,
        model: Path,
        seed: int,
        kinds: Mapping[tuple[str, str], int],
        *,
        own_disk: bool = False,
    ) -> None:
        """
        Args:
            work: the campaign's directory; model: a copy of the model's directory.
            kinds: as TRAINING; own_disk: whether work/runs may be filled.
        """
        self.work, self.model = work, model
        self.random = random.Random(seed)
        self.environment = {**os.environ, TOKEN: str(work), "KT_RAY_CACHE": str(work / "cache")}
        self.second_driver: Callable[[Path], str] = lambda _run: ""
        self.left_out: dict[str, str] = {}
        if not own_disk:
            self.left_out["full"] = "no right to mount a tmpfs"
        self._cgroup = _cgroup(work.name)
        if self._cgroup is None:
            self.left_out["memory"] = "no right to make a memory cgroup"
        self._clock = self._shim()
        if self._clock is None:
            self.left_out["jump"] = "no C compiler"
        if not _immutable(work / "probe", True):
            self.left_out["read_only"] = "no right to make a directory immutable"
        _immutable(work / "probe", False)
        self.kinds = {kind: weight for kind, weight in kinds.items() if kind[0] not in self.left_out}

    def close(self) -> None:
        """Leave nothing behind on the machine."""
        if self._cgroup is not None:
            with contextlib.suppress(OSError):
                self._cgroup[0].rmdir()

    def strike(self, run: Path) -> tuple[str, str, str]:
        """Do one fault to a run: (what, to what, what was hit)."""
        kinds = list(self.kinds)
        what, target = self.random.choices(kinds, weights=[self.kinds[k] for k in kinds])[0]
        return what, target, getattr(self, f"_{what}", self._signal)(run, what, target)

    # -- processes ----------------------------------------------------------------------------

    def _victim(self, run: Path, target: str) -> psutil.Process | None:
        victims = self.processes(run, target)
        return self.random.choice(victims) if victims else None

    def _signal(self, run: Path, what: str, target: str) -> str:
        victim = self._victim(run, target)
        if victim is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                name = described(victim)
                victim.send_signal(getattr(signal, what))
                return name
        return ""

    def _freeze(self, run: Path, _what: str, target: str) -> str:
        return self._signal(run, "SIGSTOP", target)

    def _pause(self, run: Path, _what: str, target: str) -> str:
        victim, seconds = self._victim(run, target), self.random.uniform(*PAUSE)
        if victim is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                name = described(victim)
                victim.suspend()
                time.sleep(seconds)
                victim.resume()
                return f"{name} for {seconds:.0f} s"
        return ""

    def _memory(self, run: Path, _what: str, target: str) -> str:
        """A process may take a little more memory; the kernel kills it for the rest, if it wants any."""
        victim = self._victim(run, target)
        if victim is None or self._cgroup is None:
            return ""
        group, limit = self._cgroup
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            name, home = described(victim), _memory_group(victim.pid)
            (group / limit).write_text(str(MEMORY))
            (group / "cgroup.procs").write_text(str(victim.pid))
            for _ in range(100):
                time.sleep(0.2)
                if not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE:
                    return f"{name}: killed"
            (home / "cgroup.procs").write_text(str(victim.pid))
            return f"{name}: {MEMORY >> 20} MB were enough"
        return ""

    def _second(self, run: Path, _what: str, _target: str) -> str:
        return self.second_driver(run) if self.processes(run, "driver") else ""

    # -- files --------------------------------------------------------------------------------

    def _full(self, _run: Path, _what: str, _target: str) -> str:
        seconds = self.random.uniform(*SHORT)
        filler = self.work / "runs" / "filler"
        for step in (bytes(1 << 20), b"x"):
            with contextlib.suppress(OSError), filler.open("ab", buffering=0) as file:
                while True:
                    file.write(step)
        time.sleep(seconds)
        filler.unlink(missing_ok=True)
        return f"for {seconds:.0f} s"

    def _read_only(self, run: Path, _what: str, _target: str) -> str:
        """No file can be made, renamed or removed in a directory of the run."""
        places = [p for p in (run, run / "checkpoints", run / "adapter") if p.is_dir()]
        if not places:
            return ""
        place, seconds = self.random.choice(places), self.random.uniform(*SHORT)
        if not _immutable(place, True):
            return ""
        time.sleep(seconds)
        _immutable(place, False)
        return f"{place.relative_to(self.work)} for {seconds:.0f} s"

    def _torn(self, run: Path, _what: str, _target: str) -> str:
        """The newest checkpoint loses its end, as after a power cut, and the driver dies."""
        checkpoints = sorted((run / "checkpoints").glob("step_*"))
        drivers = self.processes(run, "driver")
        if not checkpoints or not drivers:
            return ""
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            drivers[0].kill()
            drivers[0].wait(10)
            file = self.random.choice(sorted(p for p in checkpoints[-1].iterdir() if p.is_file()))
            size = self.random.randrange(file.stat().st_size)
            os.truncate(file, size)
            return f"{checkpoints[-1].name}/{file.name} at byte {size}"
        return ""

    def _gone(self, run: Path, _what: str, _target: str) -> str:
        """A file of the model is away for a while, and somebody who must read it starts meanwhile."""
        file = self.model / self.random.choice(["config.json", "model.safetensors", "tokenizer.json"])
        aside = file.with_suffix(".bak")
        file.rename(aside)
        try:
            return self._meanwhile(run, file.name)
        finally:
            aside.rename(file)

    def _changed(self, run: Path, _what: str, _target: str) -> str:
        """Other weights of the same shapes lie in the model's place for a while. A run that has saved nothing
        starts from what is there: nothing tells it that these are others."""
        if not any((run / "checkpoints").glob("step_*")):
            return ""
        file = self.model / "model.safetensors"
        aside, other = file.with_suffix(".bak"), file.with_suffix(".new")
        content = bytearray(file.read_bytes())
        start = 8 + struct.unpack("<Q", content[:8])[0]
        content[start::2] = bytes(byte ^ 1 for byte in content[start::2])
        other.write_bytes(content)
        shutil.copy2(file, aside)
        other.rename(file)
        try:
            return self._meanwhile(run, file.name)
        finally:
            aside.rename(file)

    def _meanwhile(self, run: Path, what: str) -> str:
        victim, seconds = (
            (self._victim(run, "actor") or self._victim(run, "driver")),
            self.random.uniform(*PAUSE),
        )
        if victim is None:
            return ""
        name = described(victim)
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
        time.sleep(seconds)
        return f"{what} for {seconds:.0f} s, {name} killed"

    # -- the clock ----------------------------------------------------------------------------

    def _shim(self) -> mmap.mmap | None:
        source, library, clock = (self.work / name for name in ("clock.c", "clock.so", "clock"))
        source.write_text(SHIM)
        command = ["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(source), "-ldl"]
        if not shutil.which("cc") or subprocess.run(command, check=False).returncode != 0:
            return None
        clock.write_bytes(bytes(8))
        self.environment |= {"LD_PRELOAD": str(library), "KT_RAY_CLOCK": str(clock)}
        with clock.open("r+b") as file:
            return mmap.mmap(file.fileno(), 8)

    def _jump(self, _run: Path, _what: str, _target: str) -> str:
        assert self._clock is not None
        if not self.all():
            return ""
        seconds = self.random.uniform(-CLOCK, CLOCK)
        self._clock[:] = struct.pack("<q", struct.unpack("<q", self._clock[:])[0] + int(seconds * 1e9))
        return f"{seconds:+.0f} s"

    # -- who is who ---------------------------------------------------------------------------

    def processes(self, run: Path, target: str) -> list[psutil.Process]:
        if target == "driver":
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, psutil.NoSuchProcess):
                driver = psutil.Process(int(json.loads((run / ".lock").read_text())["pid"]))
                return [driver] if self._is_ours(driver) else []
            return []
        marks = {
            "actor": ("ray::RayActor", "ray::worker", "ray::experts"),
            "raylet": ("raylet/raylet",),
            "gcs": ("gcs_server",),
            "dashboard": ("dashboard.py", "ray-dashboard", "ray::Dashboard"),
        }[target]
        return [p for p in self.all() if any(mark in command_of(p)[:400] for mark in marks)]

    def all(self) -> list[psutil.Process]:
        """Processes of this campaign, however far they have gone from their parents."""
        return list(self._all())

    def _all(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if self._is_ours(process):
                    yield process

    def _is_ours(self, process: psutil.Process) -> bool:
        if process.status() == psutil.STATUS_ZOMBIE or process.pid == os.getpid():
            return False
        return f"{TOKEN}={self.work}".encode() in Path(f"/proc/{process.pid}/environ").read_bytes()


def command_of(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def described(process: psutil.Process) -> str:
    words = command_of(process).split()
    name = next((Path(w).name for w in words if "ray" in w or "gcs" in w or "launch" in w), "python")
    return f"{name[:40]} ({process.pid})"


def _memory_group(pid: int) -> Path:
    """The memory cgroup that a process is in."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            return Path(CGROUPS[0][0] + path)
        unified = path
    return Path(CGROUPS[1][0] + unified)


def _cgroup(name: str) -> tuple[Path, str] | None:
    """A new memory cgroup and its file for the limit, where this process may make one."""
    for root, limit in CGROUPS:
        group = Path(root) / name
        with contextlib.suppress(OSError):
            group.mkdir()
            if (group / limit).exists() and os.access(group / limit, os.W_OK):
                return group, limit
            group.rmdir()
    return None


def _immutable(place: Path, on: bool) -> bool:
    """chattr +i: a directory in which even root makes nothing. Whether it worked."""
    place.mkdir(exist_ok=True)
    command = ["chattr", "+i" if on else "-i", str(place)]
    return bool(shutil.which("chattr")) and subprocess.run(command, capture_output=True).returncode == 0


def still_running(harm: Faults) -> Iterator[str]:
    """Processes of a campaign that should have gone; they are killed."""
    deadline = time.monotonic() + LEAVES
    while (alive := harm.all()) and time.monotonic() < deadline:
        time.sleep(0.5)
    if alive:
        yield f"still running: {[described(p) for p in alive][:6]}"
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
