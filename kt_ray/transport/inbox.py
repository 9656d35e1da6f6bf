"""Generated tokens on their way to the driver: through its doorbell, from coordinators on the same node.

A Ray call per token costs several milliseconds of CPU on both sides, in the very process that computes the
next one. The driver polls coordinators on other nodes by calls (`Outbox.take`).
"""

from __future__ import annotations

import pickle
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from kt_ray.generate.requests import Token
from kt_ray.transport.shared_memory import Doorbell, DoorbellAddress, Ringer

_PATIENCE = 10.0  # seconds to wait on a full pipe: the driver reads it in a separate thread

TokenBatch = tuple[list[Token], bool]  # tokens, and whether more can come


class Inbox:
    """The driver's side of one session."""

    def __init__(self) -> None:
        self._frames: dict[int, queue.SimpleQueue[TokenBatch | None]] = {}
        self._problem: str | None = None
        self._bell = Doorbell(self._put, self._fail)

    @property
    def address(self) -> DoorbellAddress:
        return self._bell.address

    def expect(self, rank: int) -> None:
        """A worker that can ring; before it does."""
        self._frames[rank] = queue.SimpleQueue()

    def has(self, rank: int) -> bool:
        """Whether that worker's tokens come here."""
        return rank in self._frames

    def take(self, rank: int, timeout: float, fetch: Callable[[], TokenBatch]) -> TokenBatch:
        """As `Outbox.take`.

        Args:
            fetch: asks the worker for what was too large to come through the pipe.
        """
        if self._problem is not None:
            raise RuntimeError(f"generated tokens were lost: {self._problem}")
        try:
            batch = self._frames[rank].get(timeout=timeout)
        except queue.Empty:
            return [], True
        # The end comes through the pipe in any case: behind what is still in it.
        return (fetch()[0], True) if batch is None else batch

    def close(self) -> None:
        self._bell.close()

    def _put(self, frame: bytes) -> None:
        rank, batch = pickle.loads(frame)
        self._frames[rank].put(batch)

    def _fail(self, problem: str) -> None:
        self._problem = problem


class Outbox:
    """Tokens on their way to the driver: through its doorbell, or fetched from another thread."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._tokens: deque[Token] = deque()
        self._closed = False
        self._changed = threading.Condition()
        self._ringer: Ringer | None = None

    def open(self, address: DoorbellAddress | None) -> bool:
        """Begin a session. Returns whether the doorbell at `address` can be rung; None = do not try."""
        with self._changed:
            self._tokens.clear()
            self._closed = False
            self._hang_up()
            if address is not None:
                try:
                    self._ringer = Ringer(address)
                except OSError:  # on another node, or in another container
                    return False
            return self._ringer is not None

    def put(self, tokens: list[Token]) -> None:
        with self._changed:
            if self._ringer is not None:
                if tokens:
                    self._ring(tokens, more=True)
                return
            self._tokens.extend(tokens)
            self._changed.notify_all()

    def close(self) -> None:
        """No more will come in this session."""
        with self._changed:
            if self._ringer is not None and not self._closed:
                self._ring([], more=False)
                self._hang_up()
            self._closed = True
            self._changed.notify_all()

    def take(self, timeout: float) -> TokenBatch:
        """All tokens there are, after waiting up to `timeout` seconds for one; and whether more can come."""
        with self._changed:
            if not self._tokens and not self._closed:
                self._changed.wait(timeout)
            tokens = list(self._tokens)
            self._tokens.clear()
            return tokens, not self._closed

    def _ring(self, tokens: list[Token], *, more: bool) -> None:
        """One frame, or several where they are too large; what one frame cannot hold waits to be fetched."""
        assert self._ringer is not None
        frame = pickle.dumps((self._rank, (tokens, more)), pickle.HIGHEST_PROTOCOL)
        if not self._ringer.fits(frame):
            if len(tokens) > 1:
                half = len(tokens) // 2
                self._ring(tokens[:half], more=True)
                self._ring(tokens[half:], more=more)
                return
            self._tokens.extend(tokens)
            frame = pickle.dumps((self._rank, None), pickle.HIGHEST_PROTOCOL)
        deadline = time.monotonic() + _PATIENCE
        while not self._ringer.ring(frame):
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"the driver takes no tokens: its pipe is full or gone after {_PATIENCE} s"
                )
            time.sleep(0.001)

    def _hang_up(self) -> None:
        if self._ringer is not None:
            self._ringer.close()
            self._ringer = None
