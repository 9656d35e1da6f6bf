"""The one error that a user can cause, how it reads, and with which exit code a program ends by it.

Every message answers four questions: what is wrong, where (file, key, layer, socket), what was
observed against what is required, and which command or key mends it. Ray carries exceptions
between processes by pickling them, so `UserError` rebuilds itself from its fields.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import resource
import sys
import traceback
from collections.abc import Callable

from kt_ray.terminal import close_streams, silence, visible

# Exit codes. STOPPED is EX_TEMPFAIL of sysexits.h: the same command may be run again.
OK, BUG, BAD_INPUT, STOPPED, INTERRUPTED = 0, 1, 2, 75, 130


class UserError(Exception):
    """Bad input from outside: configuration, files, hardware, data.

    Args:
        what: the fault in one clause, no trailing full stop ("lora.rank must be at least 1").
        where: file, key, layer, socket or line the fault sits in ("" when `what` says it).
        observed: the value found (any object; shown with `str`).
        required: what would have been accepted.
        remedy: the command or key that mends it, as an imperative.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        observed: object = None,
        required: object = None,
        remedy: str = "",
    ) -> None:
        self.what = what
        self.where = _cut(where)
        self.observed = None if observed is None else _cut(str(observed))
        self.required = None if required is None else str(required)
        self.remedy = remedy
        super().__init__(self.line())

    def line(self) -> str:
        """The whole message on one line."""
        parts = [self.what]
        if self.where:
            parts.append(f"at {self.where}")
        if self.observed is not None:
            parts.append(f"found {self.observed}")
        if self.required is not None:
            parts.append(f"required {self.required}")
        text = "; ".join(parts)
        if self.remedy:
            text += f". To fix: {self.remedy}"
        # Lines become one; spaces within stay, as a command's or a path's may be two.
        return " ".join(line for part in text.splitlines() if (line := part.strip()))

    def __reduce__(self) -> tuple[object, ...]:
        rest = {name: getattr(self, name) for name in ("where", "observed", "required", "remedy")}
        return functools.partial(type(self), self.what, **rest), ()


class TryAgain(UserError):
    """A run that ended by no fault of its input: the same command, resumed, may go on."""


class Stopped(KeyboardInterrupt):
    """A run that a signal ended: its message says what is saved and how to go on. Ends a whole multirun."""


def _cut(text: str, most: int = 1000) -> str:
    """What a file holds may be long; a line is read by a person."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"


class BadStep(UserError):
    """A training step that must not be applied: its loss or gradients are not finite, or far too large.

    Attributes:
        finite: whether they are at least finite.
    """

    finite = False


def guard(action: Callable[[], int]) -> int:
    """Runs a program's `action` and turns what it raises into a message and an exit code."""
    try:
        return exit_code(action)
    except KeyboardInterrupt as interrupt:
        stopped: BaseException | None = interrupt
        while stopped is not None and not isinstance(stopped, Stopped):
            stopped = stopped.__context__  # an interrupt while all was ended: what is saved, is
        _tell("interrupted" if stopped is None else str(stopped))
        return INTERRUPTED if stopped is None else STOPPED
    finally:
        close_streams()


def exit_code(action: Callable[[], int]) -> int:
    """As `guard`, but an interrupt passes: it ends a whole multirun, not one job of it."""
    try:
        return action()
    except UserError as error:
        return _told(error)
    except BrokenPipeError:  # `… | head`: nobody reads on
        silence(sys.stdout)
        return BUG
    except Exception as error:
        if (refused := refusal(error)) is not None:
            return _told(refused)
        _tell(traceback.format_exc())
        _tell(
            f"error: {type(error).__name__}: this is a bug in kt_ray, not in your input; "
            "please report it with the traceback above and the output of mode=doctor"
        )
        return BUG


def _told(error: UserError) -> int:
    if os.environ.get("KT_RAY_DEBUG") == "1":
        _tell(traceback.format_exc())
    _tell(f"error: {error.line()}")
    return STOPPED if isinstance(error, TryAgain) else BAD_INPUT


def refusal(error: Exception) -> UserError | None:
    """What the system refuses and a user can mend: a home, memory, threads, a disk, a path; else None."""
    if isinstance(error, RuntimeError) and "home directory" in str(error):  # of pathlib
        return UserError(
            "this user has no home directory",
            where="HOME",
            observed="not set, and no such user in the system's list",
            remedy="set HOME to a directory that you may write to",
        )
    if (short := _shortage(error)) is not None:
        return short
    if not isinstance(error, OSError):
        return None
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(
            "a disk is full",
            where=error.filename or "standard output, or a file that was being written",
            observed=error.strerror,
            remedy="free space there, or write to another disk",
        )
    if error.errno == errno.ENAMETOOLONG:
        return UserError(
            "a path is too long for the file system",
            where=str(error.filename or ""),
            observed=error.strerror,
            required="at most 255 bytes between two slashes, and 4,095 in all",
            remedy="correct the key, or the field of a file, that names it",
        )
    if isinstance(error, PermissionError) and error.filename:
        return UserError(
            "this user may not use a file or directory",
            where=str(error.filename),
            observed=error.strerror,
            remedy="ask its owner for access (or that of a directory above it), or name another path",
        )
    return None


def _shortage(error: Exception) -> TryAgain | None:
    """Memory or threads that the system does not give. None = it is none."""
    text = str(error)
    if (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or "DefaultCPUAllocator" in text  # torch's
    ):
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        raised = f"raise the limit on addresses (ulimit -v is {limit >> 10} KiB)"
        freed = "end other programs (see free -g), or allow more (/proc/sys/vm/overcommit_memory)"
        return TryAgain(
            "this process gets no more memory",
            observed=text.rpartition("DefaultCPUAllocator: ")[2] or type(error).__name__,
            required="the memory that mode=plan counts, and what Python and its libraries take beside it",
            remedy=freed if limit == resource.RLIM_INFINITY else raised,
        )
    # of Python's threads; of C++'s, and of new processes
    if text == "can't start new thread" or text.endswith(os.strerror(errno.EAGAIN)):
        return TryAgain(
            "this user gets no more threads or processes",
            observed=text,
            required="a thread for each core of the plan, and some dozens for Python, Ray and libraries",
            remedy="raise the limit (ulimit -u, or --pids-limit of the container), or end other programs",
        )
    return None


def _tell(text: str) -> None:
    """On standard error, as far as that can be written."""
    with contextlib.suppress(OSError):
        print(visible(text), file=sys.stderr)
