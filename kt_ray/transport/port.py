"""How an actor sends: the interface, and the in-process implementation.

A port belongs to one actor. `send` hands one message to one or more actors and returns at once;
the payload must not change until the receivers are done with it, which the port tracks by a
*lease*: the sender calls `release(lease)` when the protocol proves that every receiver has read
the tensors (a reply has come, or the pass is over).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from kt_ray.transport.mailbox import Address, Message

Lease = int


class Port(Protocol):
    """Sends messages on behalf of one actor."""

    def shares(self, address: Address) -> bool:
        """Whether that actor reads this one's memory: a message to it costs no copy per receiver."""
        ...

    def alloc(self, shape: Sequence[int], dtype: torch.dtype, *, pinned: bool = False) -> torch.Tensor:
        """Memory for a tensor that will be sent: filled in place, it travels to sharers without a copy.

        Belongs to the message it is sent in, and is free again when that send's lease is released, or, never
        sent, at `release_all`.

        Args:
            pinned: page-locked, for copies from and to CUDA.
        """
        ...

    def send(self, to: Sequence[Address], message: Message) -> Lease:
        """Send to every address; the tensors stay valid for them until `release`."""
        ...

    def release(self, lease: Lease) -> None:
        """All receivers of that send are done with its tensors."""
        ...

    def release_all(self) -> None:
        """Between passes: nothing sent so far is still being read."""
        ...

    def close(self) -> None:
        """Give back what the port holds; it sends nothing afterwards."""
        ...


class LocalPort:
    """Same process: receivers get the very tensors, so there is nothing to release."""

    def __init__(self, deliver: Mapping[Address, Callable[[Message], None]]) -> None:
        self._deliver = deliver

    def shares(self, address: Address) -> bool:
        return True

    def alloc(self, shape: Sequence[int], dtype: torch.dtype, *, pinned: bool = False) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=pinned)

    def send(self, to: Sequence[Address], message: Message) -> Lease:
        for address in to:
            self._deliver[address](message)
        return 0

    def release(self, lease: Lease) -> None:
        pass

    def release_all(self) -> None:
        pass

    def close(self) -> None:
        pass
