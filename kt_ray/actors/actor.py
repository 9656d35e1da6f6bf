"""What both kinds of actors share: a mailbox, a port, and their status."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from typing import Any

from kt_ray.placement.plan_types import Plan
from kt_ray.transport.messages import Address, Mailbox, Message, Port


class PlainActor(ABC):
    """A plain class; Ray or a thread calls it. Methods here may run beside the compute thread.

    Args:
        title: for people ("expert actor 1").
        timeout: seconds to wait for a message before giving the pass up.

    Attributes:
        port: sends messages; set before the first pass.
        doing: what the compute thread is doing now.
        load_progress: (layer, bytes done, bytes in total).
        reborn: restarted after a death: its weights are loaded, its trained state is lost. It computes
            nothing until the state is restored.
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
        """As `load`, for an actor that replaces a dead one."""
        facts = self.load()
        self.reborn = True
        return facts

    def committed(self) -> int | None:
        """Number of optimizer steps in this actor's state; None = its state is lost."""
        return None if self.reborn else self._committed + 1

    def deliver(self, message: Message) -> None:
        """Take a message from a peer."""
        self.mailbox.put(message)

    def abort(self, reason: str) -> None:
        """Another actor failed: end the wait for a message with an error."""
        self.mailbox.fail(reason)

    def status(self) -> str:
        """One line for people: what it does, and what it waits for."""
        waiting = self.mailbox.waiting_for
        return f"{self.title}: {self.doing}" + (f", waiting for {waiting}" if waiting else "")

    def progress(self) -> tuple[int, int, int]:
        """How far loading is."""
        return self.load_progress

    def check_restored(self) -> None:
        """Raises RuntimeError on a restarted actor: it must not continue from its initial adapter."""
        if self.reborn:
            raise RuntimeError(
                f"{self.title} was restarted: its weights are loaded again, its trained state is lost; "
                "restore a checkpoint first"
            )


def worker_of_layer(plan: Plan, layer: int, replica: int) -> Address:
    """The attention worker that computes a layer of a replica."""
    for worker in plan.workers:
        if worker.replica == replica and worker.layers[0] <= layer < worker.layers[1]:
            return ("worker", worker.rank)
    raise ValueError(f"no worker of replica {replica} owns layer {layer}")
