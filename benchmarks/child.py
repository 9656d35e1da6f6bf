"""A process that holds one implementation and runs it when asked, one JSON line per question and answer.

While others are measured it is stopped (SIGSTOP): its threads cannot spin, its memory stays.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Message = dict[str, Any]


class ChildError(RuntimeError):
    """What a child answered instead, or how it ended."""


class Child:
    """The parent's side.

    Args:
        command: the program and its arguments.
        environment: added to this process's.
        log: file for what it writes besides.
    """

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self._log, self._left = log, b""
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=os.environ | environment,
            )

    def ask(self, question: Message, timeout: float = 1800.0) -> Message:
        """Send a question, wait for the answer.

        Raises:
            ChildError: it answered with an error, ended, or took longer than `timeout` seconds.
        """
        self.tell(question)
        return self.answer(timeout)

    def tell(self, question: Message) -> None:
        """Send a question; `answer` fetches what it says, so that several may work at once."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer says why
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()

    def answer(self, timeout: float = 1800.0) -> Message:
        """Wait for the answer to the oldest question. Raises ChildError as `ask` does."""
        answer: Message = json.loads(self._line(timeout))
        if "error" in answer:
            raise ChildError(answer["error"])
        return answer

    def _line(self, timeout: float) -> bytes:
        assert self._process.stdout is not None
        deadline, pipe = time.monotonic() + timeout, self._process.stdout.fileno()
        while b"\n" not in self._left:
            wait = deadline - time.monotonic()
            if wait <= 0 or not select.select([pipe], [], [], wait)[0]:
                self.close()
                raise ChildError(f"no answer within {timeout:.0f} s")
            read = os.read(pipe, 65536)
            if not read:
                code = self._process.wait()
                how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
                last = self._log.read_text(errors="replace").strip().splitlines()[-3:]
                raise ChildError(f"ended with {how}: {' | '.join(last)}")
            self._left += read
        line, _, self._left = self._left.partition(b"\n")
        return line

    def pause(self) -> None:
        """Stop all its threads."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)

    def close(self) -> None:
        """End it. Idempotent."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()


def serve(answer: Callable[[Message], Message]) -> None:
    """The child's side: answer each line of standard input until it ends.

    Whatever else the process prints goes to standard error. An exception becomes {"error": ...}, after
    which the child goes on. Dies with its parent, stopped or not.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            reply = answer(json.loads(line))
            reply["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        out.write(json.dumps(reply) + "\n")


def serve_built(build: Callable[[], Callable[[Message], Message]]) -> None:
    """`serve`, with what `build` makes on the first question, so that its failure is an answer.

    A question {"build": true} asks for no more than that.
    """
    built: list[Callable[[Message], Message]] = []

    def answer(question: Message) -> Message:
        if not built:
            built.append(build())
        return {} if question.get("build") else built[0](question)

    serve(answer)
