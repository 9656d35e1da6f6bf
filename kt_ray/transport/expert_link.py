"""An attention worker's conversation with all expert actors: the `Exchange` of kt_ray.model.

Actors that share the worker's memory read all tokens of a group where they lie. To the others only the
rows travel that have at least one of their experts; their answers are spread over zeros, so the sums are
the same bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from kt_ray.timeline import Recorder
from kt_ray.transport.mailbox import Address, Mailbox, Message
from kt_ray.transport.port import Lease, Port

ANSWERS = {"forward": ("y",), "backward": ("dx", "dw")}  # tensors of a reply, by direction

Held = Callable[[int, int], Sequence[int]]
"""(layer, rank of an expert actor) -> global ids of the experts that it computes there."""


@dataclass
class _Routed:
    """A group's tokens of one layer: how many, and which rows went to which far actor (others got all)."""

    tokens: int
    rows: dict[int, torch.Tensor] = field(default_factory=dict)


class MessageExchange:
    """Sends tokens to the expert actors and adds their answers in float32, in rank order.

    Args:
        mailbox, port: the worker's own.
        replica: the worker's replica: expert actors wait for one message from each.
        experts: number of expert actors.
        number: of the pass; part of every tag.
        timeout: seconds to wait for an answer.
        held: which experts an actor has, for those out of shared memory's reach.
        num_experts: of a layer.
        device: where the stage computes; answers are brought there.
        overlap: False = `submit_*` waits for the answer, so that neither side works beside the other.
        recorder: of the worker's pass.

    Attributes:
        adapter: whether the experts' LoRA takes part in what is submitted, or which (generation changes it).
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
        held: Held,
        num_experts: int,
        device: torch.device | str = "cpu",
        overlap: bool = True,
        recorder: Recorder | None = None,
    ) -> None:
        self.seconds_waiting = 0.0
        self.adapter: bool | str = True
        self._mailbox = mailbox
        self._port = port
        self._replica = replica
        self._experts: list[Address] = [("experts", rank) for rank in range(experts)]
        self._sharing = [address for address in self._experts if port.shares(address)]
        self._number = number
        self._timeout = timeout
        self._held = held
        self._num_experts = num_experts
        self._device = torch.device(device)
        self._leases: dict[tuple[str, int, int], list[Lease]] = {}
        self._routed: dict[tuple[int, int], _Routed] = {}
        self._tables: dict[tuple[int, int], torch.Tensor] = {}
        self._copies: dict[int, torch.cuda.Event] = {}  # group -> end of copies out of its last answers
        self._overlap = overlap
        self._recorder = recorder or Recorder()
        self._answers: dict[tuple[str, int, int], list[torch.Tensor]] = {}  # without overlap

    def go_on(self, number: int) -> None:
        """The next pass or step, with the same settings: what was asked before has been answered."""
        self.finish()
        self._number = number

    def alloc(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory for a tensor to submit: shared if an expert actor reads it there; page-locked for CUDA."""
        pinned = self._device.type == "cuda"
        if self._sharing:
            return self._port.alloc(shape, dtype, pinned=pinned)
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=pinned)

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
        routed = self._routed[layer, group] = _Routed(x.shape[0])
        for address in self._experts:
            if address not in self._sharing:
                rows = self._table(layer, address[1])[ids.long()].any(dim=1).nonzero().flatten()
                if rows.numel() < x.shape[0]:
                    routed.rows[address[1]] = rows
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
        del self._routed[layer, group]
        return dx, dw

    def finish(self) -> None:
        """End of the pass: wait until the device has read every answer, which then may be overwritten."""
        for group in list(self._copies):
            self._copies.pop(group).synchronize()

    def _table(self, layer: int, rank: int) -> torch.Tensor:
        """bool [E + 1]: the experts of an actor (id E means no expert)."""
        table = self._tables.get((layer, rank))
        if table is None:
            table = self._tables[layer, rank] = torch.zeros(self._num_experts + 1, dtype=torch.bool)
            table[list(self._held(layer, rank))] = True
        return table

    def _submit(self, direction: str, layer: int, group: int, tensors: dict[str, torch.Tensor]) -> None:
        tag = (direction, self._number, layer, group, self._replica)
        rows = self._routed[layer, group].rows
        # This message tells the actors that their last answer of this group was read.
        if group in self._copies:
            self._copies.pop(group).synchronize()
        facts = {} if self.adapter is True else {"adapter": self.adapter}
        with self._recorder.span(f"submit {direction}", "transfer", layer, group):
            whole = [address for address in self._experts if address[1] not in rows]
            leases = []
            for rank, chosen in rows.items():
                part = {name: tensor.index_select(0, chosen) for name, tensor in tensors.items()}
                leases.append(self._port.send([("experts", rank)], Message(tag, part, facts)))
            if whole:
                leases.append(self._port.send(whole, Message(tag, tensors, facts)))
            self._leases[direction, layer, group] = leases
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
                parts = [self._whole(layer, group, rank, reply.tensors[name]) for name in names]
                if rank == 0:
                    sums = parts
                else:
                    for total, part in zip(sums, parts, strict=True):
                        total.add_(part)
            if self._device.type == "cuda":
                self._copies[group] = torch.cuda.Event()
                self._copies[group].record()
            for lease in self._leases.pop((direction, layer, group)):
                self._port.release(lease)
        self.seconds_waiting += time.monotonic() - start
        return sums

    def _whole(self, layer: int, group: int, rank: int, part: torch.Tensor) -> torch.Tensor:
        """An answer for all tokens, on the device; from rank 0 in memory of its own, as it is added to."""
        routed = self._routed[layer, group]
        rows = routed.rows.get(rank)
        # Never the answer itself where it will be changed: it lies in memory that its sender uses again.
        part = part.to(self._device, non_blocking=True, copy=rank == 0 and rows is None)
        if rows is None:
            return part
        full = torch.zeros(routed.tokens, *part.shape[1:], dtype=part.dtype, device=self._device)
        return full.index_copy_(0, rows.to(self._device), part)
