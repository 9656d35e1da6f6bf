"""An attention worker's conversation with all expert actors: the `Exchange` of kt_ray.model."""

from __future__ import annotations

import time

import torch

from kt_ray.actors.mailbox import Address, Mailbox, Message
from kt_ray.actors.port import Lease, Port
from kt_ray.timeline import Recorder

ANSWERS = {"forward": ("y",), "backward": ("dx", "dw")}  # tensors of a reply, by direction


class MessageExchange:
    """Sends tokens to every expert actor and adds their answers in float32, in rank order.

    Args:
        mailbox, port: the worker's own.
        replica: the worker's replica: expert actors wait for one message from each.
        experts: number of expert actors.
        number: of the pass; part of every tag.
        timeout: seconds to wait for an answer.
        overlap: False = `submit_*` waits for the answer, so that neither side works beside the other.
        recorder: of the worker's pass.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        port: Port,
        *,
        replica: int,
        experts: int,
        number: int,
        timeout: float,
        overlap: bool = True,
        recorder: Recorder | None = None,
    ) -> None:
        self.seconds_waiting = 0.0
        self._mailbox = mailbox
        self._port = port
        self._replica = replica
        self._experts: list[Address] = [("experts", rank) for rank in range(experts)]
        self._number = number
        self._timeout = timeout
        self._overlap = overlap
        self._recorder = recorder or Recorder()
        self._leases: dict[tuple[str, int, int], Lease] = {}
        self._answers: dict[tuple[str, int, int], list[torch.Tensor]] = {}  # without overlap

    def submit_forward(
        self,
        layer: int,
        group: int,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        keys: torch.Tensor,
        keep: bool,
    ) -> None:
        """Tokens of one group: x [T, H], global expert ids and weights [T, K], dropout keys [T]."""
        tensors = {"x": x, "ids": ids.to(torch.int32), "weights": weights.float(), "keys": keys}
        self._submit("forward", layer, group, tensors)

    def join_forward(self, layer: int, group: int) -> torch.Tensor:
        """y [T, H] float32, summed over expert actors."""
        (y,) = self._join("forward", layer, group)
        return y

    def submit_backward(self, layer: int, group: int, dy: torch.Tensor) -> None:
        """Gradient of y [T, H]; the expert actors kept the rest."""
        self._submit("backward", layer, group, {"dy": dy.float()})

    def join_backward(self, layer: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(dx [T, H], d(router weights) [T, K]) float32, summed over expert actors."""
        dx, dw = self._join("backward", layer, group)
        return dx, dw

    def _submit(self, direction: str, layer: int, group: int, tensors: dict[str, torch.Tensor]) -> None:
        tag = (direction, self._number, layer, group, self._replica)
        with self._recorder.span(f"submit {direction}", "transfer", layer, group):
            self._leases[direction, layer, group] = self._port.send(self._experts, Message(tag, tensors))
        if not self._overlap:
            self._answers[direction, layer, group] = self._receive(direction, layer, group)

    def _join(self, direction: str, layer: int, group: int) -> list[torch.Tensor]:
        if not self._overlap:
            return self._answers.pop((direction, layer, group))
        return self._receive(direction, layer, group)

    def _receive(self, direction: str, layer: int, group: int) -> list[torch.Tensor]:
        names = ANSWERS[direction]
        start = time.monotonic()
        with self._recorder.span(f"add {direction}", "transfer", layer, group):
            sums: list[torch.Tensor] = []
            for _, rank in self._experts:
                tag = ("reply", direction, self._number, layer, group, rank)
                with self._recorder.span(f"experts-{rank} {direction}", "wait", layer, group):
                    reply = self._mailbox.take(tag, self._timeout)
                if rank == 0:
                    # A copy: the reply lies in memory that the expert actor will use again.
                    sums = [reply.tensors[name].clone() for name in names]
                else:
                    for total, name in zip(sums, names, strict=True):
                        total.add_(reply.tensors[name])
            self._port.release(self._leases.pop((direction, layer, group)))
        self.seconds_waiting += time.monotonic() - start
        return sums
