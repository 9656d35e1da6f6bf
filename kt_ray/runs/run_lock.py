"""One process at a time writes a run directory.

An flock on "<run directory>/.lock", held for the process's life: the kernel drops it with the process,
however that ends, so no stale lock is ever in the way. The file names the holder for the message. NFS (from
version 3 on, on Linux) and Lustre pass the lock to their server unless they are mounted otherwise. Where they
are, or where a file system knows no locks, `RunLock.note` says so: only what the file says is left to go by.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from kt_ray.errors import UserError

FILE = ".lock"
logger = logging.getLogger(__name__)
MOUNTS = Path("/proc/self/mountinfo")
# Mount options by which locks stay on this host. man 5 nfs; man 8 mount.lustre.
_OWN_LOCKS = {"nolock", "local_lock=all", "local_lock=flock", "localflock"}


class RunLock:
    """Held from its creation until `release`, or the process's end.

    Args:
        run: the run directory, which exists.
        key: that names another directory.

    Attributes:
        note: what the lock cannot guard against; "" = it guards against every process of every host.

    Raises:
        UserError: another process holds it.
        OSError: the directory cannot be written.
    """

    def __init__(self, run: Path, key: str = "run.name") -> None:
        self.path = run / FILE
        self._key = key
        self._take()

    def _take(self) -> None:
        run, key = self.path.parent, self._key
        self.note = ""
        self._file = self.path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(self._file)
            self._file.close()
            raise _held(run, holder, key) from None
        except OSError as error:  # ENOLCK, ENOSYS, EOPNOTSUPP: go by what the file says of this host
            holder = _holder(self._file)
            if holder.get("host") == socket.gethostname() and _alive(holder.get("pid")):
                self._file.close()
                raise _held(run, holder, key) from None
            self._note(run, f"the file system keeps no locks ({error.strerror})")
        else:
            if own := _OWN_LOCKS & _mount_options(run):
                self._note(run, f"the file system is mounted with {', '.join(sorted(own))}")
        self._text = json.dumps({"host": socket.gethostname(), "pid": os.getpid()}) + "\n"
        self._write(self._text)

    def regain(self) -> None:
        """Lock again where the file is gone: somebody removed it, or the whole directory, which is made anew.

        Raises:
            UserError: the directory is another run's now, which may have ended since.
            OSError: the directory cannot be written.
        """
        if self.note:
            return  # another host may have written the file
        try:
            with self.path.open(encoding="utf-8") as file:
                same = not self._file.closed and os.path.sameopenfile(file.fileno(), self._file.fileno())
                if same or file.read() == self._text:
                    return
                holder = _holder(file)
        except FileNotFoundError:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file.close()
            self._take()
            return
        except (OSError, UnicodeDecodeError):
            return  # which says nothing
        who = f"of process {holder['pid']} on {holder['host']}" if {"pid", "host"} <= holder.keys() else "new"
        raise UserError(
            "the run directory was removed, and is another run's now",
            where=str(self.path.parent),
            observed=f"{FILE} is {who}",
            required="the one that this run made",
            remedy="move that run away: this one then makes its directory again",
        )

    def release(self) -> None:
        """Let others write the directory. Safe to call twice."""
        if not self._file.closed:
            with contextlib.suppress(OSError):
                self._write("")
            self._file.close()

    def _note(self, run: Path, why: str) -> None:
        self.note = f"{why}: nothing keeps another host from writing {run} at the same time"

    def _write(self, text: str) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._file.write(text)
        self._file.flush()


def require_free(run: Path) -> None:
    """Look early, before the minutes that a model's checks take; the lock itself comes later.

    Raises:
        UserError: another process holds the lock of a run directory.
    """
    if (run / FILE).is_file():
        with contextlib.suppress(OSError):
            RunLock(run).release()


@contextlib.contextmanager
def locked(directory: Path, key: str = "run.name") -> Iterator[None]:
    """Hold the lock of a directory, which is made if need be, in the block.

    Args:
        key: as `RunLock`.

    Raises:
        UserError: another process holds it, or the directory cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = RunLock(directory, key)
    except OSError as error:
        raise UserError(
            "the directory cannot be written",
            where=str(directory),
            observed=error.strerror or str(error),
            remedy="set run.root and run.name to a directory that you may write to",
        ) from error
    if lock.note:
        logger.warning("%s", lock.note)
    try:
        yield
    finally:
        lock.release()


def _holder(file: TextIO) -> dict[str, Any]:
    file.seek(0)
    try:
        value = json.load(file)
    except (ValueError, RecursionError, OSError):
        return {}
    return value if isinstance(value, dict) else {}


def _held(run: Path, holder: dict[str, Any], key: str) -> UserError:
    who = f"process {holder['pid']} on {holder['host']}" if {"pid", "host"} <= holder.keys() else "a process"
    return UserError(
        "another run writes this directory",
        where=str(run),
        observed=f"{who} holds {FILE}",
        required="one process at a time",
        remedy=f"wait until it has ended or end it, or choose another {key}",
    )


def _alive(pid: Any) -> bool:
    return isinstance(pid, int) and pid != os.getpid() and Path(f"/proc/{pid}").exists()


def _mount_options(path: Path) -> set[str]:
    """Options of the file system that holds `path`: the last mount point above it in /proc/self/mountinfo."""
    best, options = "", ""
    with contextlib.suppress(OSError):
        for line in MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines():
            fields, _, rest = line.partition(" - ")
            point = fields.split()[4].encode().decode("unicode_escape")
            if path.resolve().is_relative_to(point) and len(point) >= len(best):
                best, options = point, f"{fields.split()[5]},{rest.split()[-1]}"
    return set(options.split(","))
