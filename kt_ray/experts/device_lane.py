"""One device of a lane: experts computed on a GPU (or a stand-in) while the CPU computes the rest.

Two kinds of experts are computed here. *Resident* ones live in the device's memory, in the checkpoint's
format, and nowhere else. *Streamed* ones live in host memory like all others and are copied for one call,
into one of two buffers by turns. Which ones, the caller says. Experts are computed in batches
(`lane_share.batches`): the kernels of several small ones are dispatched once, and the next batch is copied
while one is computed.
Adapters and what backward needs stay on the host. So do tokens, or they stay on the device: as the lane is an
expert actor's, or of the attention worker on that device. See docs/streaming.md.

Legend: T tokens, K slots per token, R rows, U tokens with a row here, H hidden size, I intermediate size.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kt_ray.experts.lane_device import LaneDevice
from kt_ray.experts.lane_math import (
    BatchLora,
    Masks,
    Projected,
    backward,
    project_in,
    project_out,
)
from kt_ray.experts.lane_routing import Routed, RowPart, add_part, route
from kt_ray.experts.lane_weights import (
    Adapter,
    DeviceLora,
    HeldExperts,
    LayerKind,
    PackedExperts,
    adapter_bytes,
    expert_tensors,
)
from kt_ray.gpu_turns import pass_on, turn
from kt_ray.native import DropoutSpec, ExpertWeights
from kt_ray.native.dropout_hash import dropout_hash
from kt_ray.optim.optimizers import use_torch_threads
from kt_ray.placement.lane_share import ahead_experts, batch_size, batches

Following = tuple[int, Sequence[int]]
"""(layer, local ids) of experts that are needed next."""
Room = Callable[[Sequence[int], str, Sequence[int]], Tensor]
"""(local ids of a batch, name of a matrix, shape [B, ...]) -> float32 host memory for its gradients."""


@dataclass
class LaneSaved:
    """What backward needs of one forward, in host memory.

    x: [T, H], which all devices share; None where no backward follows. x_there: the mark after which it is
    complete. pairs: for each part of the rows [rows, P I], gate and up as stored; empty with "recompute".
    """

    device: int  # which of the lane's
    routed: Routed
    x: Tensor | None
    keys: Tensor
    dropout: DropoutSpec | None
    pairs: list[Tensor] = field(default_factory=list)
    x_there: Any = None

    @property
    def bytes(self) -> int:
        """Without x."""
        return sum(t.nbytes for t in (self.keys, *self.pairs)) + self.routed.nbytes


@dataclass(frozen=True)
class LaneForward:
    """y [U, H] float32 of the tokens `tokens` [U], without the other experts' part.

    Of a lane whose tokens stay on the device: y [T, H] there, of all tokens.
    """

    y: Tensor
    tokens: Tensor
    saved: LaneSaved | None


@dataclass(frozen=True)
class LaneBackward:
    """dx [U, H] of `tokens`; dw [R] of `slots` (t * K + k); lora: of every batch local ids [B] and gradients
    [B, ...] by name, on the host. float32.

    Of a lane whose tokens stay on the device: there dx [T, H] of all of them, and dw."""

    dx: Tensor
    tokens: Tensor
    dw: Tensor
    slots: Tensor
    lora: tuple[tuple[Tensor, Mapping[str, Tensor]], ...]


class LaneInput(NamedTuple):
    """A forward call: arguments as `LocalExperts.forward` has them. The tensors must not change before its
    results are there.

    x: parts [T_i, H], on the host, or where tokens stay on the device. ready: the mark there after which they
    are complete. counts: rows of every local id. kept: where x lies when backward comes; None = none follows.
    keys: unchanged until then, too. following: what is carried after all that the call needs.
    """

    x: Sequence[Tensor]
    ids: Tensor
    weights: Tensor
    lora: Adapter | None
    dropout: DropoutSpec | None
    keys: Tensor
    kept: Tensor | None
    counts: Sequence[int]
    ready: Any = None
    following: Following | None = None


class _Buffer:
    """Device memory for one batch at a time, and the mark after which it may be overwritten."""

    def __init__(self) -> None:
        self.bytes: Tensor | None = None
        self.free: Any = None


@dataclass
class _Layer:
    """number: in the model. kind: of its experts. ids: global id of every local one. streamable: those in
    host memory. resident: those on the device. owners: local ids of each that gradients go to; no batch has
    two's. ahead: those that may be there before a forward's first call."""

    number: int
    kind: LayerKind
    ids: tuple[int, ...]
    streamable: PackedExperts
    resident: PackedExperts
    owners: tuple[range, ...]
    ahead: tuple[int, ...]

    def order(self, chosen: Iterable[int], counts: Sequence[int]) -> list[tuple[int, ...]]:
        """Batches of these experts: residents, which lie elsewhere than the others, then what may be there,
        then the rest."""
        some, early = list(chosen), set(self.ahead)
        kinds = [[e for e in some if e in self.resident.parcels]]
        for first in (True, False):
            kinds += [[e for e in some if e in own and (e in early) == first] for own in self.owners]
        return [batch for own in kinds for batch in batches(own, counts, self.kind.params)]


class DeviceLane:
    """What one device computes of the calls of an expert actor, or of the attention worker there.

    Args:
        number: of the lane's devices. device: "cuda:i" or "cpu".
        threads: torch threads of the stand-in on the CPU. A GPU's thread sorts rows alone: the engine needs
            the other cores.
        recompute: keep x only and compute gate and up again in backward.
        held: carried experts of a layer that stay on the device until another layer's are carried. ahead:
            those that are carried before it is their layer's turn.
        stays: whether tokens are on the device before and after a call.
        float8: whether frozen products are computed in FP8.

    Attributes:
        seconds: spent in calls so far. carried: bytes of experts copied to the device so far.
        resident_bytes: of the experts that stay on the device.

    Raises:
        UserError: this process sees no such GPU, or one without FP8 products that are asked for.
    """

    def __init__(
        self,
        number: int,
        device: str,
        threads: int,
        *,
        recompute: bool,
        held: int = 0,
        ahead: int = 0,
        stays: bool = False,
        float8: bool = False,
    ) -> None:
        self.number = number
        self.device = LaneDevice(device, float8=float8)
        self._float8 = float8
        self.seconds = 0.0
        self.carried = 0
        self.resident_bytes = 0
        self._recompute = recompute
        self._stays = stays
        self._layers: dict[int, _Layer] = {}
        self._buffers = (_Buffer(), _Buffer())
        self._turn = 0
        self._adapters: Tensor | None = None
        self._ahead = ahead
        self._held = HeldExperts(held, ahead)
        # Built on its own thread: torch's thread count is a property of the calling thread.
        threads = 1 if self.device.is_cuda else threads
        self._pool = ThreadPoolExecutor(
            1, thread_name_prefix="lane", initializer=use_torch_threads, initargs=(threads,)
        )

    def add_layer(
        self,
        layer: int,
        ids: Sequence[int],
        others: Sequence[ExpertWeights],
        resident: ExpertWeights | None,
        own: Sequence[int],
    ) -> None:
        """Take a layer's weights.

        Args:
            ids: global id of every local one: first those of `others`, then those of `resident`.
            others: host weights that any call may carry here, of each owner. resident: of all devices; own:
                which of them are copied to this one.
        """
        first, streamable, owners = 0, dict[int, dict[str, Tensor]](), []
        for weights in others:
            streamable |= {first + e: expert_tensors(weights, e) for e in range(weights.E)}
            owners.append(range(first, first + weights.E))
            first += weights.E
        held = PackedExperts({})
        if resident is not None:
            held = PackedExperts.of({first + e: expert_tensors(resident, e) for e in own})
            held = held.moved_to(self.device.device)
            self.resident_bytes += held.nbytes * len(held.parcels)
        some = resident if not others else others[0]
        assert some is not None, "a layer without experts"
        host, ahead = PackedExperts.of(streamable), ahead_experts(owners, self._ahead)
        self._held.fit(host)
        self._layers[layer] = _Layer(layer, LayerKind.of(some), tuple(ids), host, held, tuple(owners), ahead)

    def drop_layers(self) -> None:
        """Forget all weights; nothing reads them any more."""
        self.device.drain()
        self._layers.clear()

    def kind(self, layer: int) -> LayerKind:
        """Of a layer's experts."""
        return self._layers[layer].kind

    def ahead_of(self, layer: int) -> tuple[int, ...]:
        """Local ids of the experts of a layer that are carried ahead of a forward."""
        return self._layers[layer].ahead

    def resident_here(self, layer: int) -> Iterable[int]:
        """Local ids of the experts of a layer that stay on this device."""
        return self._layers[layer].resident.parcels.keys()

    def forward(self, layer: int, experts: Sequence[int], call: LaneInput) -> Future[LaneForward]:
        """Start the forward of `experts`, each with a row."""
        return self._pool.submit(self._timed, self._forward, layer, experts, call)

    def backward(
        self,
        layer: int,
        saved: LaneSaved,
        dy: Sequence[Tensor],
        lora: Adapter | None,
        *,
        ready: Any = None,
        room: Room | None = None,
        following: Following | None = None,
        input_grad: bool = True,
    ) -> Future[LaneBackward]:
        """Start the backward of a kept forward.

        Args:
            dy: parts [T_i, H], float32, where x was. ready, following: as of `LaneInput`. room: for the
                adapters' gradients; None = memory of torch's. input_grad: whether dx is wanted; else it is
                [U, 0].
        """
        more = (ready, room, following, input_grad)
        return self._pool.submit(self._timed, self._backward, layer, saved, dy, lora, *more)

    def _timed(self, work: Callable[..., Any], *args: Any) -> Any:
        start = time.monotonic()
        try:
            with torch.no_grad(), turn(self.device.device):
                made = work(*args)
        except BaseException:
            self.device.drain()  # the next call may overwrite what is still computed from
            raise
        self.seconds += time.monotonic() - start
        return made

    def _forward(self, layer: int, own: Sequence[int], call: LaneInput) -> LaneForward:
        here, lora, device = self._layers[layer], call.lora, self.device
        device.compute_after(call.ready)
        with device.computing():
            x = self._with_empty(call.x, here.kind.compute, self._stays)  # on its way while rows are sorted
        routed = route(call.ids, call.weights, here.order(own, call.counts), len(here.ids))
        saved = LaneSaved(self.number, routed, call.kept, call.keys, call.dropout)
        if self._stays and call.kept is not None:
            device.return_after(device.computed())
            with device.returning():
                device.copy_out(call.kept, x[:-1])
                saved.x_there = device.returned()
        with device.computing():
            rows, keys = _DeviceRows.of(routed, self.device), self._keys(saved)
            y = torch.zeros(x[:-1].shape, dtype=torch.float32, device=device.device)
        leaving = _Leaving(device)
        for i, tensors, adapters in self._carry(here, routed.batches, lora, call.following):
            with device.computing():
                experts = here.kind.unpack(tensors, next(adapters, None), float8=self._float8)
                for part in routed.parts[i]:
                    masks = self._masks(here, saved, layer, i, keys, part, rows)
                    pair, *_ = project_in(experts, rows.of_part(x, part), masks)
                    out = project_out(experts, pair, masks)
                    add_part(y, out, rows.bags(part), rows.weight_of(part))
                    if call.kept is not None and not self._recompute:
                        leaving.add(saved, rows.real(pair, part))
            del experts  # before there are the next batch's
        leaving.end()
        with device.computing():
            result = y if self._stays else device.download(self._reached(y, routed))
            device.compute_after(saved.x_there)  # x is free, and there, when the call ends
        device.finish()
        return LaneForward(result, routed.tokens, None if call.kept is None else saved)

    def _backward(
        self,
        layer: int,
        saved: LaneSaved,
        dy: Sequence[Tensor],
        lora: Adapter | None,
        ready: Any,
        room: Room | None,
        following: Following | None,
        input_grad: bool,
    ) -> LaneBackward:
        here, routed, device = self._layers[layer], saved.routed, self.device
        assert saved.x is not None, "the forward was kept"
        device.compute_after(ready)
        with device.computing():
            x, rows = self._with_empty([saved.x], here.kind.compute), _DeviceRows.of(routed, device)
            keys, upstream = self._keys(saved), self._with_empty(dy, torch.float32, self._stays)
            shape = (len(upstream) - 1, upstream.shape[1] if input_grad else 0)
            dx = torch.zeros(shape, dtype=torch.float32, device=device.device)
            dw = torch.empty(len(routed.slots), dtype=torch.float32, device=device.device)
        grads: list[tuple[Tensor, Mapping[str, Tensor]]] = []
        coming = _Coming(device, saved)
        for i, tensors, adapters in self._carry(here, routed.batches, lora, following):
            with device.computing():
                experts = here.kind.unpack(tensors, next(adapters, None), float8=self._float8)
                own: dict[str, Tensor] = {}
                for part in routed.parts[i]:
                    masks = self._masks(here, saved, layer, i, keys, part, rows)
                    part_x = rows.of_part(x, part)
                    if self._recompute:
                        projected = project_in(experts, part_x, masks)
                    else:
                        projected = Projected(rows.at_places(coming.take(), part))
                    given = (experts, part_x, projected, rows.of_part(upstream, part), rows.weight_of(part))
                    made = backward(*given, masks, input_grad=input_grad)
                    if made.dx is not None:
                        add_part(dx, made.dx, rows.bags(part), None)
                    rows.real(made.dw, part, out=dw[part.rows])
                    own = {name: t + own[name] if own else t for name, t in made.lora.items()}
                del experts  # before there are the next batch's
                if own:
                    batch = routed.batches[i]
                    made_host = {name: self._gradient(batch, name, t, room) for name, t in own.items()}
                    grads.append((torch.tensor(batch), made_host))
        with device.computing():
            del upstream  # before there is another of its size
            results = dx, dw
            if not self._stays:
                results = device.download(self._reached(dx, routed)), device.download(dw)
        device.finish()
        return LaneBackward(results[0], routed.tokens, results[1], routed.slots.long(), tuple(grads))

    def _gradient(self, batch: Sequence[int], name: str, values: Tensor, room: Room | None) -> Tensor:
        """[B, ...] in host memory."""
        if room is None:
            return self.device.download(values)
        host = room(batch, name, values.shape)
        self.device.copy_out(host, values)
        return host

    def _reached(self, rows: Tensor, routed: Routed) -> Tensor:
        """Those of tokens that have a row here."""
        return rows if len(routed.tokens) == len(rows) else rows[self.device.upload(routed.tokens)]

    def _with_empty(self, parts: Sequence[Tensor], dtype: torch.dtype, there: bool = False) -> Tensor:
        """A call's rows on the device and a row of zeros after them, for places without a row. there: the
        parts are on the device."""
        ends = list(accumulate(map(len, parts), initial=0))
        made = torch.empty((ends[-1] + 1, *parts[0].shape[1:]), dtype=dtype, device=self.device.device)
        for part, start, end in zip(parts, ends, ends[1:], strict=False):
            if there:
                self.device.reads(part)
                made[start:end].copy_(part)
            else:
                self.device.copy_in(made[start:end], part)
        made[-1] = 0
        return made

    def _keys(self, saved: LaneSaved) -> Tensor | None:
        """The keys of dropout on the device; None without dropout."""
        wanted = saved.dropout is not None and saved.dropout.p > 0
        return self._with_empty([saved.keys], saved.keys.dtype) if wanted else None

    def _carry(
        self,
        here: _Layer,
        order: Sequence[Sequence[int]],
        lora: Adapter | None,
        following: Following | None,
    ) -> Iterator[tuple[int, dict[str, Tensor], Iterator[BatchLora]]]:
        """(number, tensors on the device) of one batch after the other, the next one's copy under way; behind
        the last one's, the copies of those that follow. And adapters, of which each batch takes the next."""
        adapters = self._fetch_adapter(lora, order)
        waiting: tuple[int, dict[str, Tensor], _Buffer, Any] | None = None
        for i in range(len(order) + 1):
            coming = None
            if i < len(order):
                tensors, buffer = self._fetch(here, order[i])
                coming = i, tensors, buffer, self.device.copied()
            elif following is not None:
                layer, experts = following
                with self.device.copying():
                    host = self._layers[layer].streamable
                    self.carried += self._held.bring_ahead(layer, host, experts, self.device.device)
            if waiting is not None:
                number, tensors, buffer, ready = waiting
                self.device.compute_after(ready)
                yield number, tensors, adapters
                pass_on()
                buffer.free = self.device.computed()
            waiting = coming

    def _fetch_adapter(self, lora: Adapter | None, order: Sequence[Sequence[int]]) -> Iterator[BatchLora]:
        """Start to copy a call's adapters, into memory that nothing is computed from any more."""
        if lora is None:
            return iter(())
        room = adapter_bytes(lora)
        with self.device.copying():
            if self._adapters is None or self._adapters.numel() < room:
                self._adapters = torch.empty(room, dtype=torch.uint8, device=self.device.device)
            there = DeviceLora(lora, self._adapters, order)
        self.carried += there.carried
        return there.batches(self.device)

    def _fetch(self, here: _Layer, experts: Sequence[int]) -> tuple[dict[str, Tensor], _Buffer]:
        """Start to copy a batch's weights into a buffer, one expert's after the other's. Those that lie so on
        the device already stay where they are."""
        buffer = self._buffers[self._turn]
        self._turn = 1 - self._turn
        with self.device.copying():
            held = here.resident
            if experts[0] not in held.parcels:
                host = here.streamable
                held, carried = self._held.get(here.number, host, experts, self.device.device)
                self.carried += carried
            there = held.in_place(experts)
            if there is not None:
                return there, buffer
            room = held.nbytes * min(batch_size(1, here.kind.params), len(here.ids))
            if buffer.bytes is None or buffer.bytes.numel() < room:
                self.device.finish()  # what it held may still be computed from
                buffer.bytes = torch.empty(room, dtype=torch.uint8, device=self.device.device)
            self.device.copy_after(buffer.free)
            return held.copy_into(buffer.bytes, experts, self.device), buffer

    def _masks(
        self,
        here: _Layer,
        saved: LaneSaved,
        layer: int,
        i: int,
        keys: Tensor | None,
        part: RowPart,
        rows: _DeviceRows,
    ) -> Masks | None:
        """Dropout masks at a part's places of the i-th batch; None without dropout."""
        if keys is None:
            return None
        assert saved.dropout is not None
        spec, own = saved.dropout, rows.of_part(keys, part)
        experts = [here.ids[e] for e in saved.routed.batches[i]]
        made: dict[int, Tensor] = {}

        def mask(projection: int, features: int) -> Tensor:
            if projection not in made:
                hashes = dropout_hash(spec, layer, experts, projection, own, features)
                made[projection] = (hashes >= int(spec.p * 2**32)).float() / (1 - spec.p)
            return made[projection]

        return mask

    def facts(self) -> dict[str, Any]:
        """For env.json."""
        return {
            "device": str(self.device.device),
            "resident_bytes": self.resident_bytes,
            "carried_bytes": self.carried,
            "busy_seconds": self.seconds,
        }

    def close(self) -> None:
        """End the thread and give the memory back. Idempotent."""
        self._pool.shutdown(wait=True)
        self.device.drain()
        self._layers.clear()
        self._held.close()
        self._buffers, self._adapters = (_Buffer(), _Buffer()), None


class _Leaving:
    """Gates and ups on their way to the host, behind the computation. Those of two parts are on the device at
    once: the computing queue, which has their memory next, waits for older ones."""

    def __init__(self, device: LaneDevice) -> None:
        self._device = device
        self._parts: deque[tuple[Tensor, Any]] = deque()

    def add(self, saved: LaneSaved, pair: Tensor) -> None:
        """Start to copy a part's, just computed."""
        device = self._device
        device.return_after(device.computed())
        with device.returning():
            saved.pairs.append(device.download(pair))
        self._parts.append((pair, device.returned()))
        if len(self._parts) > 1:
            self._wait()

    def end(self) -> None:
        """The computing queue goes on once all are there."""
        while self._parts:
            self._wait()

    def _wait(self) -> None:
        self._device.compute_after(self._parts[0][1])
        self._parts.popleft()  # only now: the memory is free for what is computed next


class _Coming:
    """Kept gates and ups on their way back, those of the next part while one is computed."""

    def __init__(self, device: LaneDevice, saved: LaneSaved) -> None:
        self._device = device
        self._left = iter(saved.pairs)
        self._next = self._start()

    def take(self) -> Tensor:
        """The next part's, for the computing queue."""
        assert self._next is not None, "there are as many parts as in forward"
        pair, ready = self._next
        self._next = self._start()
        self._device.compute_after(ready)
        return pair

    def _start(self) -> tuple[Tensor, Any] | None:
        device, kept = self._device, next(self._left, None)
        if kept is None:
            return None
        with device.computing():  # whose memory it is, before and afterwards
            made = torch.empty(kept.shape, dtype=kept.dtype, device=device.device)
        device.copy_after(device.computed())
        with device.copying():
            device.copy_in(made, kept)
        return made, device.copied()


class _DeviceRows(NamedTuple):
    """A call's `Routed` on the device."""

    at: Tensor
    weight: Tensor
    spread: Tensor
    bag_places: Tensor
    bag_starts: Tensor
    bag_tokens: Tensor

    @classmethod
    def of(cls, routed: Routed, device: LaneDevice) -> _DeviceRows:
        """In one copy, by the current queue."""
        host = [getattr(routed, name) for name in cls._fields]
        sizes = [len(t) for t in host]
        whole = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=device.is_cuda)
        torch.cat([t.view(torch.int32) for t in host], out=whole)
        parts = device.upload(whole).split(sizes)
        return cls(*(part.view(t.dtype) for part, t in zip(parts, host, strict=True)))

    def of_part(self, values: Tensor, part: RowPart) -> Tensor:
        """[B, n, ...] at a part's places, out of [T + 1, ...]."""
        found = values.index_select(0, self.at[part.places])
        return found.view(len(part.counts), -1, *values.shape[1:])

    def weight_of(self, part: RowPart) -> Tensor:
        """[B, n]."""
        return self.weight[part.places].view(len(part.counts), -1)

    def bags(self, part: RowPart) -> tuple[Tensor, Tensor, Tensor]:
        """Places, starts and tokens."""
        return self.bag_places[part.rows], self.bag_starts[part.bags], self.bag_tokens[part.bags]

    def real(self, values: Tensor, part: RowPart, out: Tensor | None = None) -> Tensor:
        """[R', ...] of a part's rows, out of [B, n, ...] at its places."""
        flat = values.flatten(0, 1)
        if part.full:
            return flat if out is None else out.copy_(flat)
        return torch.index_select(flat, 0, self.spread[part.rows], out=out)

    def at_places(self, rows: Tensor, part: RowPart) -> Tensor:
        """[B, n, P I] at a part's places, zeros where there is no row, out of [R', P I]."""
        shape = len(part.counts), part.width, rows.shape[1]
        if part.full:
            return rows.view(shape)
        made = rows.new_zeros(shape[0] * shape[1], shape[2])
        return made.index_copy_(0, self.spread[part.rows].long(), rows).view(shape)
