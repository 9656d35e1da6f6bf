"""A small process that outlives the driver for a moment: it ends what stays of the Ray that the driver began.

A driver that gets SIGKILL cannot shut its Ray down, and Ray's processes do not all notice. The guard is a
child of the driver in a session of its own. When the driver is gone, it kills the processes that
`own_ray` marked by a variable in their environment, and their descendants: nothing else is touched, whatever
it is called. `RayGuard.end` comes after an orderly shutdown.

The guard runs this file as a script, so only Python's own library is imported here.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

VARIABLE = "KT_RAY_GUARD"  # in the environment of the processes that belong to a guard
_LOOK = 0.5  # seconds between looks at the driver
_LONGEST = 60.0  # seconds between looks at the processes
_PATIENCE = 30.0  # seconds in which all processes must be gone

Process = tuple[int, int]  # process id, and start time in clock ticks: ids are used again


class RayGuard:
    """The driver's hold on its guard."""

    def __init__(self) -> None:
        self._token = secrets.token_hex(16)
        unmarked = {name: value for name, value in os.environ.items() if name != VARIABLE}
        # No streams: whoever reads the driver's output would wait for the guard, too.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), self._token],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=unmarked,
            cwd="/",
        )

    @contextlib.contextmanager
    def own_ray(self) -> Iterator[None]:
        """Processes that are started in the block are the guard's."""
        outer = os.environ.get(VARIABLE)
        os.environ[VARIABLE] = self._token
        try:
            yield
        finally:
            if outer is None:
                del os.environ[VARIABLE]
            else:
                os.environ[VARIABLE] = outer

    def sweep(self) -> None:
        """End what a start that failed has left running."""
        _end_all(self._token, set())

    def end(self) -> None:
        """Nothing is left to guard."""
        self._process.kill()
        self._process.wait()


def _parent_and_start(pid: int) -> tuple[int, int] | None:
    """None = it is gone, or has ended and waits for its parent."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else (int(fields[1]), int(fields[19]))


def _processes() -> dict[int, tuple[int, int]]:
    """Process id -> parent, start time."""
    ids = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return {pid: found for pid in ids if (found := _parent_and_start(pid)) is not None}


def _marked(pid: int, mark: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark in file.read().split(b"\0")
    except OSError:  # gone, or another user's
        return False


def guarded(token: str, known: set[Process]) -> set[Process]:
    """The processes that carry the mark and their descendants, and those of `known` that still run.

    Some of Ray's processes overwrite their environment with a title, so descendants are remembered.
    """
    processes = _processes()
    mark = f"{VARIABLE}={token}".encode()
    chosen = {pid for pid, start in known if pid in processes and processes[pid][1] == start}
    chosen |= {pid for pid in processes if pid not in chosen and _marked(pid, mark)}
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in processes.items():
        children.setdefault(parent, []).append(pid)
    todo = list(chosen)
    while todo:
        for pid in children.get(todo.pop(), ()):
            if pid not in chosen:
                chosen.add(pid)
                todo.append(pid)
    return {(pid, processes[pid][1]) for pid in chosen}


def watch(driver: int, token: str) -> None:
    """Until the driver has ended; then until all that it started is gone."""
    known: set[Process] = set()
    pause, due = 1.0, time.monotonic() + 1.0
    while os.getppid() == driver:
        time.sleep(_LOOK)
        if time.monotonic() >= due:
            known = guarded(token, known)
            pause = min(_LONGEST, 2 * pause)
            due = time.monotonic() + pause
    _end_all(token, known)


def _end_all(token: str, known: set[Process]) -> None:
    """Kill the processes that are `guarded`, until there are none."""
    end = time.monotonic() + _PATIENCE
    while (known := guarded(token, known)) and time.monotonic() < end:
        for pid, start in known:
            if (_parent_and_start(pid) or (0, -1))[1] == start:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK)


if __name__ == "__main__":
    watch(int(sys.argv[1]), sys.argv[2])
