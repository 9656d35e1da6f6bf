"""How an actor sends: the interface, and the in-process implementation.

A port belongs to one actor. `send` hands one message to one or more actors and returns at once;
the payload must not change until the receivers are done with it, which the port tracks by a
*lease*: the sender calls `release(lease)` when the protocol proves that every receiver has read
the tensors (a reply has come, or the pass is over).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kt_ray.actors.mailbox import Address, Message

Lease = int


class Port(Protocol):
    """Sends messages on behalf of one actor."""

    def send(self, to: Sequence[Address], message: Message) -> Lease:
        """Send to every address; the tensors stay valid for them until `release`."""
        ...

    def release(self, lease: Lease) -> None:
        """All receivers of that send are done with its tensors."""
        ...

    def release_all(self) -> None:
        """Between passes: nothing sent so far is still being read."""
        ...


class LocalPort:
    """Same process: receivers get the very tensors, so there is nothing to release."""

    def __init__(self, deliver: Mapping[Address, Callable[[Message], None]]) -> None:
        self._deliver = deliver

    def send(self, to: Sequence[Address], message: Message) -> Lease:
        for address in to:
            self._deliver[address](message)
        return 0

    def release(self, lease: Lease) -> None:
        pass

    def release_all(self) -> None:
        pass
