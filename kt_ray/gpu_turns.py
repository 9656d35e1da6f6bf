"""Turns to tell GPUs what to do, among the threads of a process.

torch lets go of the interpreter at every operation. Threads that tell GPUs many small ones at once hand it to
and fro, and wake each other, at each of them: together they get less done than one alone
(benchmarks/dispatch_turns.py). So an attention worker tells a micro-batch's layer, and a lane a batch of
experts, in one turn. The GPU computes both at once all the same: it has been told ahead. Nobody waits for
another thread in a turn.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

COMPUTES_LATER = frozenset({"cuda"})  # devices that are told ahead; others compute while they are told
_guard = threading.Lock()  # of the next two
_waiting: deque[threading.Lock] = deque()  # first come, first served
_taken = False
_own = threading.local()  # held: whether this thread has the turn


@contextmanager
def turn(device: torch.device) -> Iterator[None]:
    """Inside, no other thread has a turn. Nothing within another one, and for a device that needs none."""
    if device.type not in COMPUTES_LATER or _holds():
        yield
        return
    _take()
    try:
        yield
    finally:
        _give()


@contextmanager
def paused() -> Iterator[None]:
    """Inside, others may have theirs: this thread waits for something."""
    if not _holds():
        yield
        return
    _give()
    try:
        yield
    finally:
        _take()


def pass_on() -> None:
    """Whoever waits for a turn has it now, before this thread goes on in the next one."""
    if _waiting:
        with paused():
            pass


def _holds() -> bool:
    return getattr(_own, "held", False)


def _take() -> None:
    global _taken
    mine = None
    with _guard:
        if _taken:
            mine = threading.Lock()
            mine.acquire()
            _waiting.append(mine)
        _taken = True
    try:
        if mine is not None:
            mine.acquire()  # until it is handed over
        _own.held = True
    except BaseException:  # an interrupt
        _leave(mine)
        raise


def _leave(mine: threading.Lock | None) -> None:
    """Give up a place in the queue, or the turn that has come meanwhile."""
    with _guard:
        waits = mine in _waiting
        if mine is not None and waits:
            _waiting.remove(mine)
    if not waits:
        _give()


def _give() -> None:
    global _taken
    _own.held = False
    with _guard:
        if _waiting:
            _waiting.popleft().release()
        else:
            _taken = False
