"""What both kinds of actors have: a mailbox, a port, and answers for those who ask how it goes."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from typing import Any

from kt_ray.transport.mailbox import Mailbox, Message
from kt_ray.transport.port import Port


class PlainActor(ABC):
    """A plain class; Ray or a thread calls it. Methods here may run beside the compute thread.

    Args:
        title: for people ("expert actor 1").
        timeout: seconds to wait for a message before giving the pass up.

    Attributes:
        port: how it sends; set before the first pass.
        doing: what the compute thread is at.
        load_progress: (layer, bytes done, bytes in total).
        reborn: restarted after a death: its weights are back, what it had trained is not. It computes
            nothing until its state was given back.
    """

    def __init__(self, title: str, timeout: float) -> None:
        self.title = title
        self.timeout = timeout
        self.mailbox = Mailbox(title)
        self.port: Port | None = None
        self.host_name = socket.gethostname()
        self.doing = "starting"
        self.load_progress = (0, 0, 0)
        self.reborn = False
        self._committed = -1  # the last step whose gradients were applied

    @abstractmethod
    def load(self) -> dict[str, Any]:
        """Read weights, make LoRA. Returns facts about this actor for env.json."""

    def load_again(self) -> dict[str, Any]:
        """As `load`, in the place of an actor that died."""
        facts = self.load()
        self.reborn = True
        return facts

    def committed(self) -> int | None:
        """Number of updates behind the state that this actor holds; None = it holds none."""
        return None if self.reborn else self._committed + 1

    def deliver(self, message: Message) -> None:
        """Take a message from a peer."""
        self.mailbox.put(message)

    def abort(self, reason: str) -> None:
        """Another actor failed: wake whoever waits for a message."""
        self.mailbox.fail(reason)

    def status(self) -> str:
        """One line for a report: what it does, and what it waits for."""
        waiting = self.mailbox.waiting_for
        return f"{self.title}: {self.doing}" + (f", waiting for {waiting}" if waiting else "")

    def progress(self) -> tuple[int, int, int]:
        """How far loading is."""
        return self.load_progress

    def check_restored(self) -> None:
        """A restarted actor must not go on from its initial adapter as if nothing had happened."""
        if self.reborn:
            raise RuntimeError(
                f"{self.title} was restarted: its weights are loaded again, what it had trained is lost; "
                "restore a checkpoint first"
            )
