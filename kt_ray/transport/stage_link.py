"""An attention worker's conversation with the stages beside it: hidden states one way, gradients back."""

from __future__ import annotations

import torch

from kt_ray.timeline import Recorder
from kt_ray.transport.mailbox import Address, Mailbox, Message
from kt_ray.transport.port import Lease, Port


class StageLink:
    """One pass of one worker. Tensors to send, and those received, are on the stage's device.

    Args:
        mailbox, port: the worker's own.
        rank: the worker's; its neighbours' are one less and one more.
        number: of the pass; part of every tag.
        timeout: seconds to wait for a message.
        device: where the stage computes.
        recorder: of the worker's pass.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        port: Port,
        *,
        rank: int,
        number: int,
        timeout: float,
        device: str,
        recorder: Recorder,
    ) -> None:
        self._mailbox = mailbox
        self._port = port
        self._rank = rank
        self._number = number
        self._timeout = timeout
        self._device = torch.device(device)
        self._recorder = recorder
        self._leases: dict[int, Lease] = {}  # group -> its hidden states sent to the next stage
        self._reads: list[torch.cuda.Event] = []  # ends of copies out of other stages' memory

    def send_hidden(self, group: int, tensors: list[torch.Tensor]) -> None:
        self._leases[group] = self._send("hidden", group, self._rank + 1, tensors)

    def receive_hidden(self, group: int) -> list[torch.Tensor]:
        return self._receive("hidden", group)

    def send_grad(self, group: int, tensors: list[torch.Tensor]) -> None:
        self._send("grad", group, self._rank - 1, tensors)  # its lease ends with the pass

    def receive_grad(self, group: int) -> list[torch.Tensor]:
        found = self._receive("grad", group)
        # A gradient comes from what was sent: the next stage has read the group's hidden states.
        self._port.release(self._leases.pop(group))
        return found

    def finish(self) -> None:
        """End of the pass: wait until the device has read what came, which then may be overwritten."""
        while self._reads:
            self._reads.pop().synchronize()

    def _send(self, what: str, group: int, to: int, tensors: list[torch.Tensor]) -> Lease:
        address: Address = ("worker", to)
        if self._device.type == "cuda":
            host = [
                self._port.alloc(t.shape, t.dtype, pinned=True)
                if self._port.shares(address)
                else torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
                for t in tensors
            ]
            for target, t in zip(host, tensors, strict=True):
                target.copy_(t, non_blocking=True)
            _mark().synchronize()
            tensors = host
        named = {str(i): t for i, t in enumerate(tensors)}
        with self._recorder.span(f"send {what}", "transfer", group=group):
            return self._port.send([address], Message((what, self._number, group), named))

    def _receive(self, what: str, group: int) -> list[torch.Tensor]:
        """Copies: what came may lie in memory that its sender uses again."""
        with self._recorder.span(f"stage {what}", "wait", group=group):
            message = self._mailbox.take((what, self._number, group), self._timeout)
        found = [
            message.tensors[str(i)].to(self._device, non_blocking=True, copy=True)
            for i in range(len(message.tensors))
        ]
        if self._device.type == "cuda":
            self._reads.append(_mark())
        return found


def _mark() -> torch.cuda.Event:
    """An event after all that this stream was given so far."""
    event = torch.cuda.Event()
    event.record()
    return event
