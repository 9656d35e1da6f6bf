"""The lane: some of a layer's experts computed on GPUs (or stand-ins) while the engine computes the rest.

Two kinds of experts are computed here. *Resident* ones live in the device's memory, in the checkpoint's
format, and nowhere else. *Streamed* ones live in host memory like all others and are copied for one call,
into one of two buffers by turns, while the expert before is computed. Which ones, the caller asks `choose`.
Adapters, gradients and what backward needs stay on the host: they belong to the actor, whatever computes.

Every device has its part of the experts, a thread and two buffers of its own (`DeviceLane`); the caller adds
the parts to what the engine computed, in the order of the devices. See docs/gpu_lane.md.
Legend: T tokens, K slots per token, R rows, U tokens with a row here, H hidden size, I intermediate size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from kt_ray.experts.lane_device import LaneDevice, PinnedWeights
from kt_ray.experts.lane_math import Masks, backward, project_in, project_out
from kt_ray.experts.lane_routing import Routed, add_rows, route
from kt_ray.experts.lane_weights import LayerKind, expert_tensors, lora_tensors, pack
from kt_ray.native import DropoutSpec, ExpertLora, ExpertWeights
from kt_ray.native.dropout_hash import dropout_hash
from kt_ray.optim.optimizers import use_torch_threads
from kt_ray.placement.lane_share import dealt, streamed_experts
from kt_ray.placement.plan_types import LanePlan


@dataclass
class LaneSaved:
    """What backward needs of one forward, in host memory.

    x: [U, H] as stored. gates, ups: for each part of the rows [rows, I] as stored; empty with "recompute".
    """

    device: int  # which of the lane's
    routed: Routed
    x: Tensor
    keys: Tensor
    dropout: DropoutSpec | None
    shape: tuple[int, int]  # T, K
    gates: list[Tensor | None] = field(default_factory=list)
    ups: list[Tensor] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        kept = [t for t in (self.x, self.keys, *self.gates, *self.ups) if t is not None]
        return sum(t.nbytes for t in kept) + self.routed.nbytes


@dataclass(frozen=True)
class LaneForward:
    """y [U, H] float32 of the tokens `tokens` [U], without the other experts' part."""

    y: Tensor
    tokens: Tensor
    saved: LaneSaved | None


@dataclass(frozen=True)
class LaneBackward:
    """dx [U, H] of `tokens`; dw [R] of `slots` (t * K + k); lora: (local id, gradients by name). float32."""

    dx: Tensor
    tokens: Tensor
    dw: Tensor
    slots: Tensor
    lora: tuple[tuple[int, Mapping[str, Tensor]], ...]


class LaneInput(NamedTuple):
    """A forward call: arguments as `LocalExperts.forward` has them. The tensors must not change before its
    results are there."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    lora: ExpertLora | None
    dropout: DropoutSpec | None
    keys: Tensor
    keep: bool


class _Buffer:
    """Device memory for one expert at a time, and the mark after which it may be overwritten."""

    def __init__(self) -> None:
        self.bytes: Tensor | None = None
        self.free: Any = None


@dataclass
class _Layer:
    """kind: of the layer's experts. streamable: host weights of local ids 0 .. n-1; None = all are resident.

    resident: local id -> tensors on the device. ids: global id of every local one.
    """

    kind: LayerKind
    ids: tuple[int, ...]
    streamable: ExpertWeights | None
    resident: dict[int, dict[str, Tensor]]


class DeviceLane:
    """What one device computes of an expert actor's calls.

    Args:
        number: of the lane's devices. device: "cuda:i" or "cpu".
        threads: torch threads of the stand-in on the CPU.
        recompute: keep x only and compute gate and up again in backward.

    Attributes:
        seconds: spent in calls so far. carried: bytes of experts copied to the device so far.
        resident_bytes: of the experts that stay on the device.

    Raises:
        UserError: this process sees no such GPU.
    """

    def __init__(self, number: int, device: str, threads: int, *, recompute: bool) -> None:
        self.number = number
        self.device = LaneDevice(device)
        self.seconds = 0.0
        self.carried = 0
        self.resident_bytes = 0
        self._recompute = recompute
        self._layers: dict[int, _Layer] = {}
        self._buffers = (_Buffer(), _Buffer())
        self._turn = 0
        # Built on its own thread: torch's thread count is a property of the calling thread.
        self._pool = ThreadPoolExecutor(
            1, thread_name_prefix="lane", initializer=use_torch_threads, initargs=(threads,)
        )

    def add_layer(
        self,
        layer: int,
        ids: Sequence[int],
        others: ExpertWeights | None,
        resident: ExpertWeights | None,
        own: Sequence[int],
    ) -> None:
        """Take a layer's weights.

        Args:
            ids: global id of every local one: first those of `others`, then those of `resident`.
            others: host weights that any call may carry here. resident: of all devices; own: which of them
                are copied to this one.
        """
        first = 0 if others is None else others.E
        weights = resident if others is None else others
        assert weights is not None, "a layer without experts"
        held: dict[int, dict[str, Tensor]] = {}
        for e in own:
            assert resident is not None
            parcel = pack(expert_tensors(resident, e))
            buffer = torch.empty(parcel.nbytes, dtype=torch.uint8, device=self.device.device)
            held[first + e] = parcel.copy_into(buffer, non_blocking=False)
            self.resident_bytes += parcel.nbytes
        self._layers[layer] = _Layer(LayerKind.of(weights), tuple(ids), others, held)

    def resident_here(self, layer: int) -> Iterable[int]:
        """Local ids of the experts of a layer that stay on this device."""
        return self._layers[layer].resident.keys()

    def forward(self, layer: int, experts: Sequence[int], call: LaneInput) -> Future[LaneForward]:
        """Start the forward of `experts`, each with a row."""
        x, ids, weights, lora, dropout, keys, keep = call
        routed = route(ids, weights, experts, len(self._layers[layer].ids))
        whole = len(routed.tokens) == len(x)
        kind = self._layers[layer].kind
        # What is kept for backward is a copy: the caller's x may lie in memory that its sender uses again.
        chosen = x.to(kind.compute, copy=keep) if whole else x[routed.tokens].to(kind.compute)
        saved = LaneSaved(
            self.number, routed, chosen, keys[routed.tokens], dropout, (ids.shape[0], ids.shape[1])
        )
        return self._pool.submit(self._timed, self._forward, layer, saved, lora, keep)

    def backward(
        self, layer: int, saved: LaneSaved, dy: Tensor, lora: ExpertLora | None
    ) -> Future[LaneBackward]:
        """Start the backward of a kept forward; dy [T, H] float32."""
        tokens = saved.routed.tokens
        chosen = dy if len(tokens) == len(dy) else dy[tokens]
        return self._pool.submit(self._timed, self._backward, layer, saved, chosen, lora)

    def _timed(self, work: Callable[..., Any], *args: Any) -> Any:
        start = time.monotonic()
        with torch.no_grad():
            made = work(*args)
        self.seconds += time.monotonic() - start
        return made

    def _forward(self, layer: int, saved: LaneSaved, lora: ExpertLora | None, keep: bool) -> LaneForward:
        here, routed, device = self._layers[layer], saved.routed, self.device
        with device.computing():
            x, at, weight = (device.upload(t) for t in (saved.x, routed.at, routed.weight.unsqueeze(1)))
            y = torch.zeros(x.shape, dtype=torch.float32, device=device.device)
        for i, tensors in self._carry(here, routed.experts, lora):
            with device.computing():
                expert = here.kind.unpack(tensors, 1.0 if lora is None else lora.scale)
                for rows, turns in routed.parts[i]:
                    masks = self._masks(here, saved, layer, i, rows)
                    gate, up = project_in(expert, x[at[rows]], masks)
                    out = project_out(expert, gate, up, masks)
                    add_rows(y, at[rows], weight[rows] * out, turns)
                    if keep and not self._recompute:
                        saved.gates.append(None if gate is None else device.download(gate))
                        saved.ups.append(device.download(up))
        with device.computing():
            result = device.download(y)
        device.finish()
        return LaneForward(result, routed.tokens, saved if keep else None)

    def _backward(self, layer: int, saved: LaneSaved, dy: Tensor, lora: ExpertLora | None) -> LaneBackward:
        here, routed, device = self._layers[layer], saved.routed, self.device
        with device.computing():
            x, at, weight = (device.upload(t) for t in (saved.x, routed.at, routed.weight))
            upstream = device.upload(dy)
            dx = torch.zeros(x.shape, dtype=torch.float32, device=device.device)
            dw = torch.empty(len(routed.slots), dtype=torch.float32, device=device.device)
        grads: list[tuple[int, Mapping[str, Tensor]]] = []
        kept = iter(zip(saved.gates, saved.ups, strict=True))
        for i, tensors in self._carry(here, routed.experts, lora):
            with device.computing():
                expert = here.kind.unpack(tensors, 1.0 if lora is None else lora.scale)
                own: dict[str, Tensor] = {}
                for rows, turns in routed.parts[i]:
                    masks = self._masks(here, saved, layer, i, rows)
                    x_rows = x[at[rows]]
                    if self._recompute:
                        gate, up = project_in(expert, x_rows, masks)
                    else:
                        kept_gate, kept_up = next(kept)
                        gate = None if kept_gate is None else device.upload(kept_gate)
                        up = device.upload(kept_up)
                    made = backward(expert, x_rows, gate, up, upstream[at[rows]], weight[rows], masks)
                    add_rows(dx, at[rows], made.dx, turns)
                    dw[rows] = made.dw
                    own = {name: t + own[name] if own else t for name, t in made.lora.items()}
                if own:
                    grads.append((routed.experts[i], {name: device.download(t) for name, t in own.items()}))
        with device.computing():
            results = device.download(dx), device.download(dw)
        device.finish()
        return LaneBackward(results[0], routed.tokens, results[1], routed.slots, tuple(grads))

    def _carry(
        self, here: _Layer, experts: Sequence[int], lora: ExpertLora | None
    ) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """(number, tensors on the device) of one expert after the other, the next one's copy under way."""
        waiting: tuple[int, dict[str, Tensor], _Buffer, Any] | None = None
        for i in range(len(experts) + 1):
            following = None
            if i < len(experts):
                tensors, buffer = self._fetch(here, experts[i], lora)
                following = i, tensors, buffer, self.device.copied()
            if waiting is not None:
                number, tensors, buffer, ready = waiting
                self.device.compute_after(ready)
                yield number, tensors
                buffer.free = self.device.computed()
            waiting = following

    def _fetch(self, here: _Layer, expert: int, lora: ExpertLora | None) -> tuple[dict[str, Tensor], _Buffer]:
        """Start to copy what of an expert is not on the device: its adapter, and its weights if streamed."""
        resident = here.resident.get(expert)
        own = lora_tensors(lora, expert)
        if resident is None:
            assert here.streamable is not None
            own |= expert_tensors(here.streamable, expert)
        parcel = pack(own)
        buffer = self._buffers[self._turn]
        self._turn = 1 - self._turn
        if buffer.bytes is None or buffer.bytes.numel() < parcel.nbytes:
            self.device.finish()  # what it held may still be computed from
            with self.device.copying():
                buffer.bytes = torch.empty(parcel.nbytes, dtype=torch.uint8, device=self.device.device)
        with self.device.copying():
            self.device.copy_after(buffer.free)
            tensors = parcel.copy_into(buffer.bytes, non_blocking=True)
        self.carried += parcel.carried
        return tensors | (resident or {}), buffer

    def _masks(self, here: _Layer, saved: LaneSaved, layer: int, i: int, rows: slice) -> Masks | None:
        """Dropout masks of these rows of the i-th expert; None without dropout."""
        spec, routed = saved.dropout, saved.routed
        if spec is None or not spec.p:
            return None
        keys = self.device.upload(saved.keys[routed.at[rows]])
        made: dict[int, Tensor] = {}

        def mask(projection: int, features: int) -> Tensor:
            if projection not in made:
                expert = here.ids[routed.experts[i]]
                hashes = dropout_hash(spec, layer, expert, projection, keys, features)
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
        self.device.finish()
        self._layers.clear()
        self._buffers = (_Buffer(), _Buffer())


class Lane:
    """One expert actor's lane: its devices, and what they share.

    Args:
        plan: the devices, the experts that stay there, and how many others are carried there per call.
        threads, recompute: as for `DeviceLane`.

    Attributes:
        parts: one per device. notes: what a user should know (weights that could not be page-locked).

    Raises:
        UserError: this process sees no such GPU.
    """

    def __init__(self, plan: LanePlan, threads: int, *, recompute: bool) -> None:
        self.plan = plan
        self.parts = tuple(
            DeviceLane(number, device, threads, recompute=recompute)
            for number, device in enumerate(plan.devices)
        )
        self.notes: list[str] = []
        self._resident = dict(plan.resident)
        self._locked = PinnedWeights(self.parts[0].device)
        self._streamable: dict[int, int] = {}

    # -- loading -----------------------------------------------------------------------------

    def resident_of(self, layer: int) -> tuple[int, ...]:
        """Global ids of the experts of a layer that stay on the devices."""
        return self._resident.get(layer, ())

    def add_layer(
        self, layer: int, ids: Sequence[int], others: ExpertWeights | None, resident: ExpertWeights | None
    ) -> None:
        """Take a layer's weights.

        Args:
            ids: global id of every local one: first those of `others`, then those of `resident`.
            others: host weights that the engine computes from, too. resident: copied to the devices; the
                caller drops them.
        """
        count = 0 if resident is None else resident.E
        for number, part in enumerate(self.parts):
            part.add_layer(layer, ids, others, resident, range(number, count, len(self.parts)))
        self._streamable[layer] = 0 if others is None else others.E
        if others is not None and self.plan.streams:
            self._lock(t for e in range(others.E) for t in expert_tensors(others, e).values())

    def lock(self, lora: ExpertLora) -> None:
        """Page-lock a layer's adapter, which every call copies from."""
        self._lock(lora.tensors())

    def _lock(self, tensors: Any) -> None:
        before = self._locked.refusal
        self._locked.add(tensors)
        if self._locked.refusal is not None and before is None:
            self.notes.append(f"lane: host memory stays pageable ({self._locked.refusal}); copies are slower")

    # -- computing ---------------------------------------------------------------------------

    def choose(self, layer: int, counts: Sequence[int], tokens: int) -> tuple[tuple[int, ...], ...]:
        """Local ids that this call computes on every device, in computing order: resident ones, then
        streamed ones.

        A pure function of the plan and of the call's routing, so the same everywhere and every time.

        Args:
            counts: rows of every local id. tokens: of the call.
        """
        streamed = streamed_experts(counts[: self._streamable[layer]], self.plan.share(tokens))
        return tuple(
            (*(e for e in part.resident_here(layer) if counts[e]), *own)
            for part, own in zip(self.parts, dealt(streamed, counts, len(self.parts)), strict=True)
        )

    def forward(
        self, layer: int, chosen: Sequence[Sequence[int]], call: LaneInput
    ) -> list[Future[LaneForward]]:
        """Start the forward of `chosen` (of `choose`) on every device that has some."""
        return all_started(
            part.forward(layer, own, call) for part, own in zip(self.parts, chosen, strict=True) if own
        )

    def backward(
        self, layer: int, saved: Sequence[LaneSaved], dy: Tensor, lora: ExpertLora | None
    ) -> list[Future[LaneBackward]]:
        """Start the backward of kept forwards, each where its forward ran; dy [T, H] float32."""
        return all_started(self.parts[s.device].backward(layer, s, dy, lora) for s in saved)

    @property
    def carried(self) -> int:
        """Bytes of experts copied to the devices so far."""
        return sum(part.carried for part in self.parts)

    def facts(self) -> dict[str, Any]:
        """For env.json."""
        return {
            "page_locked_bytes": self._locked.bytes,
            "devices": [part.facts() for part in self.parts],
        }

    def close(self) -> None:
        """End the threads and give the memory back. Idempotent."""
        for part in self.parts:
            part.close()
        self._locked.release()


T = TypeVar("T")


def all_started(parts: Iterable[Future[T]]) -> list[Future[T]]:
    """The futures; should one not start, those before it are awaited: they read the caller's tensors."""
    started: list[Future[T]] = []
    try:
        started.extend(parts)
    except BaseException:
        wait(started)
        raise
    return started
