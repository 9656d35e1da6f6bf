"""The lane: some of a layer's experts computed on a GPU (or a stand-in) while the engine computes the rest.

Two kinds of experts are computed here. *Resident* ones live in the device's memory, in the checkpoint's
format, and nowhere else. *Streamed* ones live in host memory like all others and are copied for one call,
into one of two buffers by turns, while the expert before is computed. Which ones, the caller asks `choose`.
Adapters, gradients and what backward needs stay on the host: they belong to the actor, whatever computes.

A call runs on the lane's own thread; the caller adds its results to the engine's. See docs/gpu_lane.md.
Legend: T tokens, K slots per token, R rows, U tokens with a row here, H hidden size, I intermediate size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kt_ray.experts.lane_device import LaneDevice, PinnedWeights
from kt_ray.experts.lane_math import Masks, backward, project_in, project_out
from kt_ray.experts.lane_routing import Routed, add_rows, route
from kt_ray.experts.lane_weights import LayerKind, expert_tensors, lora_tensors, pack
from kt_ray.native import DropoutSpec, ExpertLora, ExpertWeights
from kt_ray.native.dropout_hash import dropout_hash
from kt_ray.optim.optimizers import use_torch_threads
from kt_ray.placement.lane_share import streamed_experts
from kt_ray.placement.plan_types import LanePlan


@dataclass
class LaneSaved:
    """What backward needs of one forward, in host memory.

    x: [U, H] as stored. gates, ups: for each expert [rows, I] as stored; empty with "recompute".
    """

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
    """One expert actor's lane.

    Args:
        plan: its device, the experts that stay there, and how many others are carried there per call.
        threads: torch threads of the stand-in on the CPU.
        recompute: keep x only and compute gate and up again in backward.

    Attributes:
        seconds: spent in calls so far. carried: bytes of experts copied to the device so far.
        resident_bytes: of the experts that stay on the device.
        notes: what a user should know (weights that could not be page-locked).

    Raises:
        UserError: this process sees no such GPU.
    """

    def __init__(self, plan: LanePlan, threads: int, *, recompute: bool) -> None:
        self.plan = plan
        self.device = LaneDevice(plan.device)
        self.seconds = 0.0
        self.carried = 0
        self.resident_bytes = 0
        self.notes: list[str] = []
        self._recompute = recompute
        self._layers: dict[int, _Layer] = {}
        self._resident = dict(plan.resident)
        self._locked = PinnedWeights(self.device)
        self._buffers = (_Buffer(), _Buffer())
        self._turn = 0
        # Built on its own thread: torch's thread count is a property of the calling thread.
        self._pool = ThreadPoolExecutor(
            1, thread_name_prefix="lane", initializer=use_torch_threads, initargs=(threads,)
        )

    # -- loading -----------------------------------------------------------------------------

    def resident_of(self, layer: int) -> tuple[int, ...]:
        """Global ids of the experts of a layer that stay on the device."""
        return self._resident.get(layer, ())

    def add_layer(
        self, layer: int, ids: Sequence[int], others: ExpertWeights | None, resident: ExpertWeights | None
    ) -> None:
        """Take a layer's weights.

        Args:
            ids: global id of every local one: first those of `others`, then those of `resident`.
            others: host weights that the engine computes from, too. resident: copied to the device; the
                caller drops them.
        """
        first = 0 if others is None else others.E
        weights = resident if others is None else others
        assert weights is not None, "a layer without experts"
        held: dict[int, dict[str, Tensor]] = {}
        for e in range(0 if resident is None else resident.E):
            assert resident is not None
            parcel = pack(expert_tensors(resident, e))
            buffer = torch.empty(parcel.nbytes, dtype=torch.uint8, device=self.device.device)
            held[first + e] = parcel.copy_into(buffer, non_blocking=False)
            self.resident_bytes += parcel.nbytes
        self._layers[layer] = _Layer(LayerKind.of(weights), tuple(ids), others, held)
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

    def choose(self, layer: int, counts: Sequence[int], tokens: int) -> tuple[int, ...]:
        """Local ids that this call computes here, in computing order: resident ones, then streamed ones.

        A pure function of the plan and of the call's routing, so the same everywhere and every time.

        Args:
            counts: rows of every local id. tokens: of the call.
        """
        here = self._layers[layer]
        resident = [e for e in here.resident if counts[e]]
        others = 0 if here.streamable is None else here.streamable.E
        return (*resident, *streamed_experts(counts[:others], self.plan.share(tokens)))

    def forward(
        self,
        layer: int,
        experts: Sequence[int],
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        lora: ExpertLora | None,
        dropout: DropoutSpec | None,
        keys: Tensor,
        *,
        keep: bool,
    ) -> Future[LaneForward]:
        """Start the forward of `experts` (of `choose`); arguments as `LocalExperts.forward`.

        The tensors must not change before the result is there.
        """
        routed = route(ids, weights, experts, len(self._layers[layer].ids))
        whole = len(routed.tokens) == len(x)
        kind = self._layers[layer].kind
        # What is kept for backward is a copy: the caller's x may lie in memory that its sender uses again.
        chosen = x.to(kind.compute, copy=keep) if whole else x[routed.tokens].to(kind.compute)
        saved = LaneSaved(routed, chosen, keys[routed.tokens], dropout, (ids.shape[0], ids.shape[1]))
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
            rows = routed.rows(i)
            with device.computing():
                expert = here.kind.unpack(tensors, 1.0 if lora is None else lora.scale)
                masks = self._masks(here, saved, layer, i)
                gate, up = project_in(expert, x[at[rows]], masks)
                out = project_out(expert, gate, up, masks)
                add_rows(y, at[rows], weight[rows] * out, routed.turns[i])
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
        for i, tensors in self._carry(here, routed.experts, lora):
            rows = routed.rows(i)
            with device.computing():
                expert = here.kind.unpack(tensors, 1.0 if lora is None else lora.scale)
                masks = self._masks(here, saved, layer, i)
                x_rows = x[at[rows]]
                if self._recompute:
                    gate, up = project_in(expert, x_rows, masks)
                else:
                    kept = saved.gates[i]
                    gate, up = None if kept is None else device.upload(kept), device.upload(saved.ups[i])
                made = backward(expert, x_rows, gate, up, upstream[at[rows]], weight[rows], masks)
                add_rows(dx, at[rows], made.dx, routed.turns[i])
                dw[rows] = made.dw
                if made.lora:
                    own = {name: device.download(t) for name, t in made.lora.items()}
                    grads.append((routed.experts[i], own))
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

    def _masks(self, here: _Layer, saved: LaneSaved, layer: int, i: int) -> Masks | None:
        """Dropout masks of the i-th expert's rows; None without dropout."""
        spec, routed = saved.dropout, saved.routed
        if spec is None or not spec.p:
            return None
        keys = self.device.upload(saved.keys[routed.at[routed.rows(i)]])
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
            "page_locked_bytes": self._locked.bytes,
            "carried_bytes": self.carried,
            "busy_seconds": self.seconds,
        }

    def close(self) -> None:
        """End the thread and give the memory back. Idempotent."""
        self._pool.shutdown(wait=True)
        self.device.finish()
        self._locked.release()
        self._layers.clear()
        self._buffers = (_Buffer(), _Buffer())
