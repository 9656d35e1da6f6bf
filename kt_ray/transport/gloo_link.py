"""Tensors between actors through gloo (torch.distributed): TCP that receives into place.

Every actor of the plan is one rank of a separate group (not torch's default group), so several
may live in a process, and a new one can be made when actors were replaced. A Ray call announces each message
(tag numbers, dtypes, shapes) and the tensors follow.
"""

from __future__ import annotations

import datetime
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

_TAGS = 1 << 30  # gloo's tags are 32 bits wide
_Gloo: Any = ProcessGroupGloo  # torch's stubs know only part of it


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of a group find each other.

    host, port: of a `MeetingPoint`. number: of the group, so that stragglers of an older one stay out.
    """

    host: str
    port: int
    number: int


class MeetingPoint:
    """A store that ranks meet at; lives in one actor's process.

    Args:
        host: this node's address as the others see it.
    """

    def __init__(self, host: str) -> None:
        self._store = TCPStore(host, 0, None, True, wait_for_workers=False)
        self._host = host
        self._number = 0

    def next(self) -> Meeting:
        """For one more group."""
        self._number += 1
        return Meeting(self._host, int(self._store.port), self._number)


class GlooLink:
    """One rank of a group. The constructor blocks until all ranks have joined.

    Args:
        meeting: as all ranks were told.
        rank, size: of this actor and of the group.
        host: this node's address as the others see it.
        timeout: seconds that a transfer may take.
        failed: called with the reason when a send does not arrive.
    """

    def __init__(
        self,
        meeting: Meeting,
        rank: int,
        size: int,
        host: str,
        timeout: float,
        failed: Callable[[str], None],
    ) -> None:
        limit = datetime.timedelta(seconds=timeout)
        store = TCPStore(meeting.host, meeting.port, None, False, limit)
        options = _Gloo._Options()
        options._devices = [_Gloo.create_device(hostname=host)]
        options._timeout = limit
        self._group = _Gloo(PrefixStore(str(meeting.number), store), rank, size, options)
        self._failed = failed
        self._next_tag = 0
        self._closed = False
        # Works that need waiting for, in the order they were begun: sends, whose tensors must live so long,
        # and receipts, which go to their mailbox in order.
        self._sends: queue.SimpleQueue[tuple[Any, torch.Tensor, int] | None] = queue.SimpleQueue()
        self._receipts: queue.SimpleQueue[tuple[list[Any], Callable[[Exception | None], None]] | None]
        self._receipts = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=target, name=f"gloo-{rank}", daemon=True)
            for target in (self._finish_sends, self._finish_receipts)
        ]
        for thread in self._threads:
            thread.start()

    def send(self, to: int, tensor: torch.Tensor) -> int:
        """Begin to send a contiguous CPU tensor, unchanged meanwhile; returns the tag to announce."""
        tag = self._next_tag
        self._next_tag = (tag + 1) % _TAGS
        self._sends.put((self._group.send([_bytes(tensor)], to, tag), tensor, to))
        return tag

    def receive(
        self,
        source: int,
        tensors: Sequence[tuple[int, torch.Tensor]],
        done: Callable[[Exception | None], None],
    ) -> None:
        """Fill (tag, tensor) pairs from a rank; `done` is called in another thread, in order of the calls."""
        works = [self._group.recv([_bytes(tensor)], source, tag) for tag, tensor in tensors]
        self._receipts.put((works, done))

    def close(self) -> None:
        """Drop the connections; what is under way fails, silently here."""
        self._closed = True
        self._sends.put(None)
        self._receipts.put(None)
        self._group.abort()

    def _finish_sends(self) -> None:
        while (item := self._sends.get()) is not None:
            work, _, to = item
            try:
                work.wait()
            except RuntimeError as error:
                if not self._closed:
                    self._failed(f"a tensor did not get to rank {to} through gloo: {error}")

    def _finish_receipts(self) -> None:
        while (item := self._receipts.get()) is not None:
            works, done = item
            problem: Exception | None = None
            for work in works:
                try:
                    work.wait()
                except RuntimeError as error:
                    problem = error
            if not self._closed:
                done(problem)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Gloo knows few dtypes; bytes are the same for all."""
    return tensor.reshape(-1).view(torch.uint8)
