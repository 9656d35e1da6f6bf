"""Messages between actors: the mailbox they are taken out of, and the port they are sent through.

Every message goes one way and has a unique tag; no actor method waits on another actor's method. It waits in
the receiver's mailbox until the compute thread takes it. A wait has no deadline: the mailbox says what is
waited for, and the driver judges by that whether anybody is stuck; `fail` wakes every waiter when a peer has
died.

A port belongs to one actor. `send` hands one message to one or more actors and returns at once. The payload
must not change until the receivers are done with it. The port tracks this by a *lease*: the sender calls
`release(lease)` when the protocol proves that every receiver has read the tensors (a reply has come, or the
pass is over).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from kt_ray.gpu_turns import paused
from kt_ray.pulse import beat

Tag = tuple[Any, ...]
Address = tuple[str, int]  # ("worker", rank) or ("experts", rank)
Lease = int


@dataclass
class Message:
    """A tag, tensors by name (on the CPU), and small picklable facts."""

    tag: Tag
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


class Aborted(RuntimeError):
    """The pass was aborted because another actor failed; that actor's error is the cause."""


class Stalled(RuntimeError):
    """A message did not come before the deadline."""


class Mailbox:
    """Messages by tag. `put` from any thread, `take` from the compute thread.

    Attributes:
        waiting_for: what the compute thread waits for, if it does.
        idle: that may never come, and nobody is stuck for it.
    """

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.waiting_for: Tag | None = None
        self.idle = False
        self._messages: dict[Tag, Message] = {}
        self._failure: str | None = None
        self._changed = threading.Condition()

    def put(self, message: Message) -> None:
        with self._changed:
            if message.tag in self._messages:
                raise RuntimeError(f"{self.owner}: a second message with tag {message.tag}")
            self._messages[message.tag] = message
            self._changed.notify_all()

    def __len__(self) -> int:
        """Messages that wait to be taken."""
        return len(self._messages)

    def take(self, tag: Tag, timeout: float | None = None, *, idle: bool = False) -> Message:
        """Wait for the message and remove it.

        Args:
            timeout: seconds (measurements, tests); None = until the message comes or `fail` is called.
            idle: it may never come.
        """
        message = self._wait(tag, lambda: tag if tag in self._messages else None, timeout, idle)
        if message is None:
            others = sorted(map(str, list(self._messages)))
            raise Stalled(
                f"{self.owner} waited {timeout:.0f} s for message {tag}; "
                f"{len(others)} other messages are waiting: {others[:4]}"
            )
        return message

    def take_first(self, kinds: tuple[str, ...], timeout: float | None) -> Message | None:
        """The oldest message whose tag begins with one of `kinds`, removed.

        Args:
            timeout: seconds to wait for one; 0 = only look, None = for ever.

        Returns:
            None when there is none after that time.
        """

        def oldest() -> Tag | None:
            if self._failure is not None:  # even if there are messages: the session is over
                raise Aborted(self._failure)
            return next((tag for tag in self._messages if tag[0] in kinds), None)

        return self._wait(kinds, oldest, timeout, True)

    def _wait(
        self, what: Tag, choose: Callable[[], Tag | None], timeout: float | None, idle: bool
    ) -> Message | None:
        start = time.monotonic()
        with paused(), self._changed:
            self.waiting_for, self.idle = what, idle
            try:
                while (tag := choose()) is None:
                    if self._failure is not None:
                        raise Aborted(self._failure)
                    remaining = None if timeout is None else timeout - (time.monotonic() - start)
                    if remaining is not None and remaining <= 0:
                        return None
                    self._changed.wait(remaining)
                beat()
                return self._messages.pop(tag)
            finally:
                self.waiting_for = None

    def fail(self, reason: str) -> None:
        """Wake every waiter, now and later, with `Aborted(reason)`."""
        with self._changed:
            self._failure = reason
            self._changed.notify_all()

    def clear(self) -> None:
        """Forget messages and a failure: a new attempt starts."""
        with self._changed:
            self._messages.clear()
            self._failure = None


class Port(Protocol):
    """Sends messages on behalf of one actor."""

    def shares(self, address: Address) -> bool:
        """Whether that actor reads this one's memory: a message to it costs no copy per receiver."""
        ...

    def alloc(self, shape: Sequence[int], dtype: torch.dtype, *, pinned: bool = False) -> torch.Tensor:
        """Memory for a tensor that will be sent: filled in place, it travels to sharers without a copy.

        Sent as a whole or in slices, each once: it is free again when all of it was sent and the leases of
        these sends are released, or, never sent, at `release_all`.

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
