"""Where the hidden states before a stage's layers wait for backward: on its device, or in host memory.
Handed results (kt_ray/model/handed_results.py) wait with them.

With rule.activations=host a GPU holds the hidden states of the micro-batches that it works on, and no others:
each is copied out behind the computation and back ahead of it, by streams of their own, from and to
page-locked memory. On the CPU, the stand-in, both copies happen at once.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from kt_ray.gpu import PageLock, aligned, driver, whole_pages


class Kept(Protocol):
    """A hidden state that waits."""

    def fetch(self) -> None:
        """Begin to bring it back, if it is away: it will be taken soon."""

    def take(self) -> Tensor:
        """It, on the stage's device; may be called again."""


class KeptOnDevice:
    """A hidden state that stays on the stage's device."""

    def __init__(self, hidden: Tensor) -> None:
        self._hidden = hidden

    def fetch(self) -> None: ...

    def take(self) -> Tensor:
        return self._hidden


class HostShelf:
    """Host memory for the hidden states of one pass at a time; later passes use it again.

    Args:
        remedy: what a user does where so much memory cannot be page-locked.
        most: bytes up to which it may take more than a pass asks for.

    Raises:
        RuntimeError: by `clear`, where CUDA refuses to page-lock it.
    """

    def __init__(
        self, device: torch.device, remedy: str = "set rule.activations=micro_batch", *, most: int = 0
    ) -> None:
        self.device, self.most = device, most
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self._lock = PageLock(remedy=f"raise it, or {remedy}")
        self.driver = driver()
        queues = self.driver.queues(device)
        self._writing: Any = self.driver.stream(device, "shelf out") if queues else None
        self._reading: Any = self.driver.stream(device, "shelf in") if queues else None

    @property
    def nbytes(self) -> int:
        """Of the largest pass so far."""
        return self._memory.numel()

    def clear(self, shapes: list[tuple[int, ...]], dtype: torch.dtype, handed: Sequence[int] = ()) -> None:
        """Begin a pass that keeps a hidden state of each of these shapes, at most; earlier ones are gone.

        Args:
            handed: bytes of handed results, of two tensors at most each.
        """
        size = sum(aligned(math.prod(shape) * dtype.itemsize) for shape in shapes)
        size += sum(aligned(result) + aligned(1) for result in handed)
        self._used = 0
        if self._writing is not None:  # a pass that was given up may still read
            self._writing.wait_stream(self._reading)
        if size <= self.nbytes:
            return
        self.close()
        # Rows differ in length from pass to pass, and page-locking takes long: a little more than asked for.
        size = max(size, min(self.most, self.nbytes + self.nbytes // 4))
        self._memory = torch.empty(0, dtype=torch.uint8)  # freed before there is more
        memory = whole_pages(size)
        if self.device.type == "cuda":
            self._lock.register(memory.data_ptr(), size)
        self._memory = memory

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for one of them, to write and read in place."""
        size = math.prod(shape) * dtype.itemsize
        at, self._used = self._used, self._used + aligned(size)
        if self._used > self.nbytes:
            raise RuntimeError(f"{self._used} bytes of hidden states, {self.nbytes} were asked for")
        return self._memory[at : at + size].view(dtype).view(tuple(shape))

    def keep(self, hidden: Tensor) -> Kept:
        """Copy a hidden state out; the device's memory is free again once that is done."""
        host = self.room(hidden.shape, hidden.dtype)
        if self._writing is None:
            host.copy_(hidden)
            return _KeptOnHost(self, host, None)
        self._writing.wait_stream(self.driver.current(self.device))
        with self.driver.using(self._writing):
            self.driver.copy_out(host, hidden)
        self.driver.used_by(self._writing, hidden)
        return _KeptOnHost(self, host, self._writing.record_event())

    def read(self, host: Tensor, written: Any) -> tuple[Tensor, Any]:
        """A copy on the device, and the event after which it is complete."""
        if self._reading is None:
            return host.clone(), None
        self._reading.wait_event(written)
        # The host is ahead of the device: without this all of a group could be on its way at once.
        self._reading.wait_stream(self.driver.current(self.device))
        with self.driver.using(self._reading):
            hidden = self.driver.upload(host, self.device, copy=True)
        return hidden, self._reading.record_event()

    def close(self) -> None:
        """Give the page-lock back, before the memory goes."""
        if self._writing is not None:
            self._writing.synchronize()
            self._reading.synchronize()
        self._lock.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # CUDA may be gone already
            self.close()


class _KeptOnHost:
    """A hidden state in the shelf's memory; written: the event after which it is there."""

    def __init__(self, shelf: HostShelf, host: Tensor, written: Any) -> None:
        self._shelf, self._host, self._written = shelf, host, written
        self._coming: tuple[Tensor, Any] | None = None

    def fetch(self) -> None:
        if self._coming is None:
            self._coming = self._shelf.read(self._host, self._written)

    def take(self) -> Tensor:
        self.fetch()
        assert self._coming is not None
        (hidden, arrived), self._coming = self._coming, None
        if arrived is not None:
            stream = self._shelf.driver.current(self._shelf.device)
            stream.wait_event(arrived)
            self._shelf.driver.used_by(stream, hidden)
        return hidden
