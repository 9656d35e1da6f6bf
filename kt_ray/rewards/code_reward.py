"""The reward of code that passes tests, each answer in a process of its own under limits. No sandbox."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import logging
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from kt_ray.errors import UserError
from kt_ray.evaluate.choice import without_thinking
from kt_ray.rewards.answer_text import last_block
from kt_ray.rewards.completion import Completion, go_on
from kt_ray.rewards.verifiers import NO_REWARD, Verifier, shown

logger = logging.getLogger(__name__)

_CHILD = Path(__file__).with_name("code_child.py")
_NOBODY = 65534
_MOST_AT_ONCE = 32  # each may take Limits.memory
_POLL = 0.5  # seconds
# Another user without a network, whose processes end with the first, and that with the driver: what the
# kernel lets us have, best first. Root itself has no limit on processes; its Python may lie where only root
# can read.
_AS_NOBODY, _NO_NETWORK = f"--reuid={_NOBODY}", "--net"
_NOBODY_S = ("setpriv", _AS_NOBODY, f"--regid={_NOBODY}", "--clear-groups", "--pdeathsig=KILL")
_READING = ("--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search")
_ALONE = ("setpriv", "--pdeathsig=KILL", "unshare", _NO_NETWORK, "--pid", "--fork", "--kill-child")
_AS_USER = [(*_ALONE, "--map-root-user"), ()]
_AS_ROOT = [
    (*_ALONE, *_NOBODY_S),
    (*_ALONE, *_NOBODY_S, *_READING),
    (*_NOBODY_S, *_AS_USER[0]),
    _AS_USER[0],
    _NOBODY_S,
    (*_NOBODY_S, *_READING),
    (),
]
# What each must leave possible; and what it must not hide: the standard library, and what is installed.
_PROBE = """
import decimal, heapq, json, os, threading
assert os.listdir() == []
open("file", "w").close()
thread = threading.Thread(target=print)
thread.start()
thread.join()
"""
_SAME = f"import json\nassert json.__file__ == {json.__file__!r}"
_INSTALLED = "from importlib.util import find_spec\nassert find_spec('numpy')"


_NAME = re.compile(r"[^\W\d]\w*")
_DEFINED = re.compile(r"^[ \t]*(?:(?:async[ ]+)?def|class)[ ]+(\w+)", re.MULTILINE)
_BOUND = re.compile(
    r"^(?:(?:(?:async[ ]+)?def|class)[ ]+(\w+)|(\w+)[ ]*(?::[^=\n]+)?=(?!=))", re.MULTILINE
)  # add = …, too


@dataclass(frozen=True)
class Limits:
    """What one answer may use."""

    wall_seconds: float = 10.0  # with its tests and the start of Python
    cpu_seconds: int = 5  # of each process
    memory: int = 1 << 30  # bytes of address space of each process
    file_size: int = 1 << 20  # bytes of each file
    open_files: int = 64  # of each process
    processes: int = 32  # with their threads, on average over the answers that run at once


class CodeReward(Verifier):
    """The share of the tests that the text's last Python block (or the whole text) passes; nan = none ran.

    The last that defines, or assigns anew, a function or class which the tests name, if there is one.

    Raises:
        UserError: no Python can be started here.
    """

    name = "code"
    required = "tests in Python (assert add(1, 2) == 3), or a list of them of which each counts the same"

    def __init__(self, limits: Limits = Limits()) -> None:
        self._limits = limits
        self._workers = max(1, min(_MOST_AT_ONCE, len(os.sched_getaffinity(0)) - 1))
        self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="code")
        self._launcher = _best_launcher(limits)

    def check_answer(self, answer: Any) -> None:
        tests = _tests(answer)
        statements: list[ast.stmt] = []
        for test in tests:
            if not isinstance(test, str) or not test.strip():
                raise ValueError(shown(test))
            try:
                with warnings.catch_warnings(action="ignore"):
                    statements += ast.parse(test).body
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                raise ValueError(f"{shown(test)}: {error}") from error
        if not tests:
            raise ValueError("an empty list")
        if _only_define(statements):  # which any code would pass
            raise ValueError(f"{shown(answer)}: it defines functions and calls none, so it tests nothing")
        if absent := [name for name in _imported(statements) if not _is_there(name)]:  # no code would pass
            raise ValueError(
                f"{shown(answer)}: it imports {absent[0]}, no module here (the answer is `answer`)"
            )

    def score(self, text: str, answer: Any) -> float:
        text = without_thinking(text)
        tests = _tests(answer)
        named = {*_DEFINED.findall(text)} & {*_NAME.findall("\n".join(tests))}

        def defines(block: str) -> bool:  # an example of its use often follows
            return any((match[1] or match[2]) in named for match in _BOUND.finditer(block))

        code = last_block(text, "python", "py", "python3", wanted=defines)
        code = text if code is None else code
        passed = run_tests(code, tests, self._limits, self._launcher, self._workers)
        return NO_REWARD if passed is None else len(passed) / len(tests)

    def __call__(self, completions: Sequence[Completion], waiting: Callable[[], None] = go_on) -> np.ndarray:
        jobs = [self._pool.submit(self.score, c.judged, c.row["answer"]) for c in completions]
        try:
            while wait(jobs, _POLL, FIRST_EXCEPTION).not_done:
                waiting()
            return np.array([job.result() for job in jobs], dtype=np.float64)
        finally:  # after an interrupt
            for job in jobs:
                job.cancel()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def run_tests(
    code: str, tests: Sequence[str], limits: Limits, launcher: Sequence[str] = (), at_once: int = 1
) -> set[int] | None:
    """The numbers of the tests that pass after `code` in one Python process; None = it did not get that far.

    Args:
        launcher: a command that starts Python with fewer rights.
        at_once: of such processes: the kernel limits a user's, not each one's.
    """
    nobody = _AS_NOBODY in launcher
    secret = secrets.token_hex(16)
    resources = {
        "RLIMIT_CPU": limits.cpu_seconds,
        "RLIMIT_AS": limits.memory,
        "RLIMIT_FSIZE": limits.file_size,
        "RLIMIT_NOFILE": limits.open_files,
        "RLIMIT_NPROC": at_once * limits.processes + _tasks(_NOBODY if nobody else os.getuid()),
        "RLIMIT_CORE": 0,
    }
    job = {
        "code": code,
        "tests": list(tests),
        "limits": resources,
        "seconds": int(limits.wall_seconds) + 1,
        "secret": secret,
    }
    directory = None
    try:
        directory = tempfile.mkdtemp(prefix="kt_ray_code_")
        if nobody:
            os.chown(directory, _NOBODY, _NOBODY)
        with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as report:
            asked.write(json.dumps(job).encode())
            asked.seek(0)
            _run([*launcher, sys.executable, "-I", str(_CHILD)], directory, asked, report, limits)
            report.seek(0)
            lines = report.read().decode(errors="replace").splitlines()
    except OSError as error:  # the temporary directory may be full: other answers' files go with them
        _warn_once(error.strerror or str(error))
        return None
    finally:
        if directory is not None:
            with suppress(RecursionError):
                shutil.rmtree(directory, ignore_errors=True)
    if f"{secret} ready" not in lines:
        return None
    return {number for number in range(len(tests)) if f"{secret} {number}" in lines}


@functools.cache
def _warn_once(reason: str) -> None:
    where = tempfile.tempdir or "no directory for temporary files"
    logger.warning(
        "reward=code: an answer gets no reward, its code cannot be run: %s (files in %s)", reason, where
    )


def _run(command: list[str], directory: str, asked: Any, report: Any, limits: Limits) -> None:
    """Runs a command to its end or for the wall time, and ends its session and all that descends from it."""
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": directory, "TMPDIR": directory}
    process = subprocess.Popen(
        command, stdin=asked, stdout=report, stderr=subprocess.DEVNULL, cwd=directory,
        env=environment | one_thread, start_new_session=True,
    )  # fmt: skip
    try:
        # Not waited for before its group is ended: until then nobody else gets its number.
        ended = os.pidfd_open(process.pid)
        try:
            poll = select.poll()
            poll.register(ended, select.POLLIN)
            poll.poll(limits.wall_seconds * 1000)
        finally:
            os.close(ended)
    finally:
        with suppress(psutil.Error):  # also those that have left its session
            for child in psutil.Process(process.pid).children(recursive=True):
                with suppress(psutil.Error):
                    child.kill()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _tasks(user: int) -> int:
    """Threads of all processes of a user: the kernel limits their sum."""
    found = 0
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.uids().real == user:
                found += process.num_threads()
    return found


def _best_launcher(limits: Limits) -> tuple[str, ...]:
    """The command that takes most rights away from Python and still lets it run; says what it leaves."""
    probe = [_PROBE, _SAME, _INSTALLED]
    usual = run_tests("", probe, limits)
    if usual is None or 0 not in usual:
        raise UserError(
            "reward=code cannot run Python in a process of its own here",
            observed=f"a small program fails within {limits.wall_seconds:g} s and {limits.memory >> 20} MiB",
            remedy="look at the machine's limits (ulimit -a) and at the room in the temporary directory",
        )
    launchers = _AS_ROOT if os.getuid() == 0 else _AS_USER
    launcher = next((one for one in launchers if one and run_tests("", probe, limits, one) == usual), ())
    left = ["write this user's files"] if os.getuid() and _AS_NOBODY not in launcher else []
    if _NO_NETWORK not in launcher:
        left += ["reach the network", "leave processes behind"]
    if os.getuid() == 0 and _AS_NOBODY not in launcher:
        left += ["write root's files", "start any number of processes"]
    if left:
        line = "reward=code: on this machine the code of answers can %s (docs/rewards.md)"
        logger.warning(line, ", ".join(left))
    return launcher


def _only_define(statements: Sequence[ast.stmt]) -> bool:
    """Whether they are definitions, with imports and constants beside them, that nothing calls."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return any(isinstance(one, kinds) for one in statements) and not any(map(_runs, statements))


def _runs(statement: ast.stmt) -> bool:
    """Whether it does something, and not only defines."""
    if isinstance(statement, ast.ClassDef):  # its body runs where it stands
        return bool(statement.decorator_list) or any(map(_runs, statement.body))
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        return bool(statement.decorator_list)
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        return any(isinstance(part, ast.Call) for part in ast.walk(statement))
    if isinstance(statement, ast.Expr):
        return not isinstance(statement.value, ast.Constant)
    return not isinstance(statement, ast.Import | ast.ImportFrom | ast.Pass)


def _imported(statements: Sequence[ast.stmt]) -> list[str]:
    """Modules that the statements themselves import, not those inside of a `try` or a function."""
    names = [alias.name for one in statements if isinstance(one, ast.Import) for alias in one.names]
    return names + [one.module or "" for one in statements if isinstance(one, ast.ImportFrom)]


@functools.cache
def _is_there(module: str) -> bool:
    """Whether the child can import a module, as far as can be known without importing it."""
    root = module.partition(".")[0]
    return root in ("answer", "__main__", "") or importlib.util.find_spec(root) is not None


def _tests(answer: Any) -> list[Any]:
    return answer if isinstance(answer, list) else [answer]
