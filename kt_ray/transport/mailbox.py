"""Where messages for an actor wait until its compute thread wants them.

Every exchange between actors is a one-way message with a unique tag; no actor method waits on
another actor's method. A wait has a deadline and says what it waited for; `fail` wakes every
waiter when a peer has died.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import torch

Tag = tuple[Any, ...]
Address = tuple[str, int]  # ("worker", rank) or ("experts", rank)


@dataclass
class Message:
    """A tag, tensors by name (on the CPU), and small picklable facts."""

    tag: Tag
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


class Aborted(RuntimeError):
    """The pass was given up because another actor failed; that actor's error is the cause."""


class Stalled(RuntimeError):
    """A message did not come before the deadline."""


class Mailbox:
    """Messages by tag. `put` from any thread, `take` from the compute thread."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.waiting_for: Tag | None = None
        self.seconds_waited = 0.0
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
        """Messages that have come and were not taken yet."""
        return len(self._messages)

    def take(self, tag: Tag, timeout: float) -> Message:
        """Wait up to `timeout` seconds for the message and remove it."""
        start = time.monotonic()
        with self._changed:
            self.waiting_for = tag
            try:
                while tag not in self._messages:
                    if self._failure is not None:
                        raise Aborted(self._failure)
                    left = timeout - (time.monotonic() - start)
                    if left <= 0:
                        others = sorted(map(str, self._messages))
                        raise Stalled(
                            f"{self.owner} waited {timeout:.0f} s for message {tag} (trainer.step_timeout); "
                            f"{len(others)} other messages are waiting: {others[:4]}"
                        )
                    self._changed.wait(left)
                return self._messages.pop(tag)
            finally:
                self.waiting_for = None
                self.seconds_waited += time.monotonic() - start

    def take_first(self, kinds: tuple[str, ...], timeout: float | None) -> Message | None:
        """The oldest message whose tag begins with one of `kinds`, removed.

        Args:
            timeout: seconds to wait for one; 0 = only look, None = for ever.

        Returns:
            None when there is none after that time.
        """
        start = time.monotonic()
        with self._changed:
            self.waiting_for = kinds
            try:
                while True:
                    if self._failure is not None:
                        raise Aborted(self._failure)
                    tag = next((tag for tag in self._messages if tag[0] in kinds), None)
                    if tag is not None:
                        return self._messages.pop(tag)
                    left = None if timeout is None else timeout - (time.monotonic() - start)
                    if left is not None and left <= 0:
                        return None
                    self._changed.wait(left)
            finally:
                self.waiting_for = None
                self.seconds_waited += time.monotonic() - start

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
