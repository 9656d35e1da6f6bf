"""An attention worker's two conversations during a pass or a step of generation.

`ExpertLink` is the conversation with all expert actors. Actors that share the worker's memory read all tokens
of a group where they lie. To the others only the rows travel that have at least one of their experts; their
answers are spread over zeros, so the sums are the same bit for bit. `StageLink` is the conversation with the
neighbouring stages: hidden states one way, gradients back.

Shapes: T valid tokens of a group, H hidden, K experts per token, E experts of a layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kt_ray.gpu import aside, driver
from kt_ray.timeline import SpanRecorder
from kt_ray.transport.messages import Address, Lease, Mailbox, Message, Port

ANSWERS = {"forward": ("y",), "backward": ("dx", "dw")}  # tensors of a reply, by direction

ExpertsOf = Callable[[int, int], Sequence[int]]
"""(layer, rank of an expert actor) -> global ids of the experts that it computes there."""


@dataclass
class _Routed:
    """A group's tokens of one layer: how many, and which rows went to which far actor (others got all)."""

    tokens: int
    rows: dict[int, Tensor] = field(default_factory=dict)


class _Link:
    """What both conversations need.

    Args:
        mailbox, port: the worker's own.
        number: of the pass; part of every tag.
        device: where the stage computes; what comes is brought there.
        recorder: of the worker's pass.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        port: Port,
        *,
        number: int,
        device: str = "cpu",
        recorder: SpanRecorder | None = None,
    ) -> None:
        self._mailbox = mailbox
        self._port = port
        self._number = number
        self._device = torch.device(device)
        self._recorder = recorder or SpanRecorder()


class ExpertLink(_Link):
    """Sends tokens to the expert actors and adds their answers in float32, in rank order.

    Args:
        replica: the worker's replica: expert actors wait for one message from each.
        experts: ranks of the expert actors, ascending.
        experts_of: which experts an actor computes, for those out of shared memory's reach.
        num_experts: of a layer.
        overlap: False = `submit_*` waits for the answer, so that neither side works beside the other.
        later: what is still on its way to the host is sent by a thread of its own, and the worker goes on.
            False = it waits: for a single token that is sooner.
        sums: device on which answers are added up; None = the stage's.

    Attributes:
        adapter: whether the experts' LoRA takes part in what is submitted, or which (generation changes it).
        joined: whether the actors may let what is submitted wait for other replicas' tokens of the layer (as
            well).
    """

    def __init__(
        self,
        mailbox: Mailbox,
        port: Port,
        *,
        replica: int,
        experts: Sequence[int],
        experts_of: ExpertsOf,
        num_experts: int,
        overlap: bool = True,
        later: bool = True,
        sums: str | None = None,
        **common: Any,
    ) -> None:
        super().__init__(mailbox, port, **common)
        self.seconds_waiting = 0.0
        self._sums = self._device if sums is None else torch.device(sums)
        self.adapter: bool | str = True
        self.joined = False
        self._replica = replica
        self._experts: list[Address] = [("experts", rank) for rank in experts]
        self._sharing = [address for address in self._experts if port.shares(address)]
        self._experts_of = experts_of
        self._num_experts = num_experts
        self._overlap = overlap
        self._leases: dict[tuple[str, int, int], list[Lease]] = {}
        self._routed: dict[tuple[int, int], _Routed] = {}
        self._tables: dict[tuple[int, int], Tensor] = {}
        self._later = later
        self._ready: Any = None  # the event after which what is submitted next is on the host
        self._sender: ThreadPoolExecutor | None = None
        self._sending: dict[tuple[str, int, int], Future[None]] = {}
        self._copies: dict[int, Any] = {}  # group -> end of copies out of its last answers
        self._answers: dict[tuple[str, int, int], list[Tensor]] = {}  # without overlap
        self._gradients: dict[int, list[list[Lease]]] = {}  # by group, of layers in the order of backward

    def begin(self, number: int) -> None:
        """Begin the next step, with the same settings. Everything submitted before has been answered."""
        self.finish()
        self._number = number

    def alloc(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for a tensor to submit: shared if an expert actor reads it there; page-locked for CUDA."""
        pinned = self._device.type == "cuda"
        if self._sharing:
            return self._port.alloc(shape, dtype, pinned=pinned)
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=pinned)

    def after(self, ready: Any) -> None:
        """What is submitted next is still on its way to the host, until the event `ready`."""
        if self._later:
            self._ready = ready
        else:
            ready.synchronize()

    def submit_forward(
        self,
        layer: int,
        group: int,
        x_TH: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        keys_T: Tensor,
        keep: bool,
        elsewhere: Sequence[int] = (),
    ) -> None:
        """Send the tokens of one group: global expert ids, routing weights, dropout keys; elsewhere: rows of
        every expert that are not among these."""
        self._routed[layer, group] = _Routed(x_TH.shape[0])
        tensors = {"x": x_TH, "ids": ids_TK, "weights": weights_TK, "keys": keys_T}
        self._submit("forward", layer, group, tensors, elsewhere)

    def join_forward(self, layer: int, group: int) -> Tensor:
        """y_TH float32, summed over expert actors."""
        (y_TH,) = self._join("forward", layer, group)
        return y_TH

    def submit_backward(self, layer: int, group: int, dy_TH: Tensor) -> None:
        """Send the gradient of y; the expert actors kept the rest."""
        self._submit("backward", layer, group, {"dy": dy_TH})

    def join_backward(self, layer: int, group: int) -> tuple[Tensor, Tensor]:
        """(dx_TH, gradient of the routing weights dw_TK) float32, summed over expert actors."""
        dx_TH, dw_TK = self._join("backward", layer, group)
        del self._routed[layer, group]
        # An actor adds a layer's gradients after its answer for the group's next one, so now at most the last
        # layer's are not yet read.
        sent = self._gradients.get(group, [])
        while len(sent) > 1:
            for lease in sent.pop(0):
                self._port.release(lease)
        return dx_TH, dw_TK

    def submit_gradients(self, layer: int, group: int, of_actors: Mapping[int, dict[str, Tensor]]) -> None:
        """Send gradients of expert LoRA that this worker computed for its own tokens, after the group's
        backward was joined.

        Args:
            of_actors: rank -> "ids", int64 [n] local ids, and float32 [n, ...] by matrix, in memory of
                `alloc`; empty where this worker computed none of its experts.
        """
        tag = ("lane gradients", self._number, layer, group, self._replica)
        leases = [
            self._port.send([("experts", rank)], Message(tag, tensors)) for rank, tensors in of_actors.items()
        ]
        self._gradients.setdefault(group, []).append(leases)

    def finish(self) -> None:
        """End of the pass: wait until the device has read every answer; then they may change."""
        for group in list(self._copies):
            self._copies.pop(group).synchronize()

    def close(self) -> None:
        """Nothing is sent any more, whether or not the pass came to its end."""
        if self._sender is not None:
            self._sender.shutdown(cancel_futures=True)
            self._sender = None

    def _route(self, layer: int, group: int, ids_TK: Tensor) -> None:
        """Find the rows that go to actors out of shared memory's reach."""
        routed = self._routed[layer, group]
        for address in self._experts:
            if address not in self._sharing:
                rows = self._table(layer, address[1])[ids_TK.long()].any(dim=1).nonzero().flatten()
                if rows.numel() < routed.tokens:
                    routed.rows[address[1]] = rows

    def _table(self, layer: int, rank: int) -> Tensor:
        """bool [E + 1]: the experts of an actor (id E means no expert)."""
        table = self._tables.get((layer, rank))
        if table is None:
            table = self._tables[layer, rank] = torch.zeros(self._num_experts + 1, dtype=torch.bool)
            table[list(self._experts_of(layer, rank))] = True
        return table

    def _submit(
        self,
        direction: str,
        layer: int,
        group: int,
        tensors: dict[str, Tensor],
        elsewhere: Sequence[int] = (),
    ) -> None:
        facts: dict[str, Any] = {} if self.adapter is True else {"adapter": self.adapter}
        if self.joined:
            facts["joined"] = True
        if elsewhere:
            facts["elsewhere"] = list(elsewhere)
        # The message tells the actors that their last answer of this group was read.
        events = [e for e in (self._copies.pop(group, None), self._ready) if e is not None]
        self._ready = None
        with self._recorder.span(f"submit {direction}", "transfer", layer, group):
            if events and self._later:
                if self._sender is None:
                    self._sender = ThreadPoolExecutor(1, thread_name_prefix="sender")
                call = self._sender.submit(self._send, direction, layer, group, tensors, facts, events)
                self._sending[direction, layer, group] = call
            else:
                self._send(direction, layer, group, tensors, facts, events)
        if not self._overlap:
            self._answers[direction, layer, group] = self._receive(direction, layer, group)

    def _send(
        self,
        direction: str,
        layer: int,
        group: int,
        tensors: dict[str, Tensor],
        facts: dict[str, Any],
        events: Sequence[Any],
    ) -> None:
        """Send a group's tensors once these events are reached."""
        for event in events:
            event.synchronize()
        if direction == "forward":
            self._route(layer, group, tensors["ids"])
        tag, rows = (direction, self._number, layer, group, self._replica), self._routed[layer, group].rows
        whole = [address for address in self._experts if address[1] not in rows]
        leases = []
        for rank, chosen in rows.items():
            part = {name: tensor.index_select(0, chosen) for name, tensor in tensors.items()}
            leases.append(self._port.send([("experts", rank)], Message(tag, part, facts)))
        if whole:
            leases.append(self._port.send(whole, Message(tag, tensors, facts)))
        self._leases[direction, layer, group] = leases

    def _join(self, direction: str, layer: int, group: int) -> list[Tensor]:
        if not self._overlap:
            return self._answers.pop((direction, layer, group))
        return self._receive(direction, layer, group)

    def _receive(self, direction: str, layer: int, group: int) -> list[Tensor]:
        names = ANSWERS[direction]
        start = time.monotonic()
        with self._recorder.span(f"add {direction}", "transfer", layer, group):
            sending = self._sending.pop((direction, layer, group), None)
            if sending is not None:
                with self._recorder.span(f"sent {direction}", "wait", layer, group):
                    sending.result()
            sums: list[Tensor] = []
            # Copied and added while the device computes what it was given before.
            with aside(self._sums, "answers") as stream:
                for _, rank in self._experts:
                    tag = ("reply", direction, self._number, layer, group, rank)
                    with self._recorder.span(f"experts-{rank} {direction}", "wait", layer, group):
                        reply = self._mailbox.take(tag)
                    parts = [
                        self._whole(layer, group, rank, reply.tensors[name], own=not sums) for name in names
                    ]
                    if not sums:
                        sums = parts
                    else:
                        for total, part in zip(sums, parts, strict=True):
                            total.add_(part)
                if stream is not None:
                    self._copies[group] = driver().mark(self._sums)
            if stream is not None:
                computing = driver().current(self._sums)
                computing.wait_event(self._copies[group])
                driver().used_by(computing, *sums)
            for lease in self._leases.pop((direction, layer, group)):
                self._port.release(lease)
        self.seconds_waiting += time.monotonic() - start
        return sums

    def _whole(self, layer: int, group: int, rank: int, part: Tensor, *, own: bool) -> Tensor:
        """An answer for all tokens, where sums are. own: a float32 copy, as others will be added to it."""
        routed = self._routed[layer, group]
        rows = routed.rows.get(rank)
        if rows is None and not own:
            return driver().upload(part, self._sums)
        if rows is None:
            # Never the answer itself, which will be changed: it lies in memory that its sender uses again.
            rounded = part.dtype != torch.float32  # then the change of type copies, where the sums are
            return driver().upload(part, self._sums, copy=not rounded).float()
        full = torch.zeros(routed.tokens, *part.shape[1:], dtype=torch.float32, device=self._sums)
        part = driver().upload(part, self._sums).float()
        return full.index_copy_(0, rows.to(self._sums), part)


class StageLink(_Link):
    """Sends and receives for one worker. Tensors are on the stage's device.

    Args:
        rank: the worker's; its neighbours' are one less and one more.

    Attributes:
        seconds: spent sending, and waiting for other stages.
    """

    def __init__(self, mailbox: Mailbox, port: Port, *, rank: int, **common: Any) -> None:
        super().__init__(mailbox, port, **common)
        self.seconds = 0.0
        self._rank = rank
        self._leases: dict[int, Lease] = {}  # group -> its hidden states sent to the next stage
        self._reads: list[Any] = []  # ends of copies out of other stages' memory

    def begin(self, number: int) -> None:
        """Begin the next step. Everything sent before has been read."""
        self.finish()
        self._leases.clear()
        self._number = number

    def send_hidden(self, group: int, tensors: list[Tensor]) -> None:
        self._leases[group] = self._send("hidden", group, self._rank + 1, tensors)

    def receive_hidden(self, group: int) -> list[Tensor]:
        return self._receive("hidden", group)

    def send_grad(self, group: int, tensors: list[Tensor]) -> None:
        self._send("grad", group, self._rank - 1, tensors)  # its lease ends with the pass

    def receive_grad(self, group: int) -> list[Tensor]:
        grads = self._receive("grad", group)
        # A gradient comes from what was sent: the next stage has read the group's hidden states.
        self._port.release(self._leases.pop(group))
        return grads

    def finish(self) -> None:
        """End of the pass: wait until the device has read all received tensors; then they may change."""
        while self._reads:
            self._reads.pop().synchronize()

    def _send(self, what: str, group: int, to: int, tensors: list[Tensor]) -> Lease:
        address: Address = ("worker", to)
        with self._timed():
            if driver().queues(self._device):
                pinned = self._device.type == "cuda"
                host = [
                    self._port.alloc(t.shape, t.dtype, pinned=pinned)
                    if self._port.shares(address)
                    else torch.empty(t.shape, dtype=t.dtype, pin_memory=pinned)
                    for t in tensors
                ]
                for target, t in zip(host, tensors, strict=True):
                    driver().copy_out(target, t)
                driver().mark(self._device).synchronize()
                tensors = host
            named = {str(i): t for i, t in enumerate(tensors)}
            with self._recorder.span(f"send {what}", "transfer", group=group):
                return self._port.send([address], Message((what, self._number, group), named))

    def _receive(self, what: str, group: int) -> list[Tensor]:
        """Copies: the message may lie in memory that its sender uses again."""
        with self._timed():
            with self._recorder.span(f"stage {what}", "wait", group=group):
                message = self._mailbox.take((what, self._number, group))
            copies = [
                driver().upload(message.tensors[str(i)], self._device, copy=True)
                for i in range(len(message.tensors))
            ]
            if driver().queues(self._device):
                self._reads.append(driver().mark(self._device))
            return copies

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.seconds += time.monotonic() - start
