"""The lane: some of a layer's experts computed on GPUs (or stand-ins) while the engine computes the rest.

Every device has its part of the experts, a thread and two buffers of its own (`DeviceLane`); the caller adds
the parts to what the engine computed, in the order of the devices. See docs/streaming.md.
Legend: T tokens, K slots per token, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import torch
from torch import Tensor

from kt_ray.experts.device_lane import DeviceLane, LaneBackward, LaneForward, LaneInput, LaneSaved
from kt_ray.experts.lane_device import PinnedWeights
from kt_ray.experts.lane_weights import Adapter, expert_tensors
from kt_ray.gpu import whole_pages
from kt_ray.native import ExpertWeights
from kt_ray.placement.lane_share import dealt, streamed_experts
from kt_ray.placement.plan_types import LanePlan


class Lane:
    """The lane of an expert actor or attention worker: its devices, and what they share.

    Args:
        plan: the devices, the experts that stay there, and how many others are carried there per call.
        threads, recompute, stays: as for `DeviceLane`.

    Attributes:
        parts: one per device. notes: what a user should know (weights that could not be page-locked).

    Raises:
        UserError: as `DeviceLane`.
    """

    def __init__(self, plan: LanePlan, threads: int, *, recompute: bool, stays: bool = False) -> None:
        self.plan = plan
        how: dict[str, Any] = {"held": plan.held, "ahead": plan.ahead, "float8": plan.float8}
        recompute = recompute or plan.recompute
        self.parts = tuple(
            DeviceLane(number, device, threads, recompute=recompute, stays=stays, **how)
            for number, device in enumerate(plan.devices)
        )
        self.notes: list[str] = []
        self._resident = dict(plan.resident)
        self._locked = PinnedWeights(self.parts[0].device)
        self._rooms: dict[tuple[int, int], Tensor] = {}
        self._streamable: dict[int, int] = {}
        # layer and streamed experts of a call
        self._before: tuple[int, tuple[tuple[int, ...], ...]] = (-1, ())

    # -- loading -----------------------------------------------------------------------------

    def resident_of(self, layer: int) -> tuple[int, ...]:
        """Global ids of the experts of a layer that stay on the devices."""
        return self._resident.get(layer, ())

    def add_layer(
        self,
        layer: int,
        ids: Sequence[int],
        others: Sequence[ExpertWeights],
        resident: ExpertWeights | None = None,
    ) -> None:
        """Take a layer's weights.

        Args:
            ids: global id of every local one: first those of `others`, then those of `resident`.
            others: host weights that the engine computes from, too, of each owner. resident: copied to the
                devices; the caller drops them.
        """
        count = 0 if resident is None else resident.E
        for number, part in enumerate(self.parts):
            part.add_layer(layer, ids, others, resident, range(number, count, len(self.parts)))
        self._streamable[layer] = sum(weights.E for weights in others)
        if self.plan.streams:
            self.lock(
                t for weights in others for e in range(weights.E) for t in expert_tensors(weights, e).values()
            )

    def room(self, key: tuple[int, int], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory that the devices copy from, used again when the key (layer, group) comes again.

        It grows to the largest it is asked for. torch's own page-locked memory would take powers of two and
        keep blocks of every size that ever was.
        """
        size = math.prod(shape) * dtype.itemsize
        memory = self._rooms.get(key)
        if memory is None or memory.numel() < size:
            if memory is not None:
                self._locked.remove(memory)
            memory = self._rooms[key] = whole_pages(size)
            self.lock([memory])
        return memory[:size].view(dtype).view(tuple(shape))

    def compute_dtype(self, layer: int) -> torch.dtype:
        """In which the lane multiplies."""
        return self.parts[0].kind(layer).compute

    def lock(self, tensors: Iterable[Tensor], *, parts: bool = False) -> None:
        """Page-lock what calls copy from: the storages of these tensors, or their own bytes alone (parts)."""
        before = self._locked.refusal
        (self._locked.add_parts if parts else self._locked.add)(tensors)
        if self._locked.refusal is not None and before is None:
            self.notes.append(f"lane: host memory stays pageable ({self._locked.refusal}); copies are slower")

    def drop_layers(self) -> None:
        """Forget all weights."""
        for part in self.parts:
            part.drop_layers()
        self._streamable.clear()

    def unlock(self, memory: Tensor) -> None:
        """Of this memory, which goes, nothing is copied any more."""
        self._locked.remove(memory)

    # -- computing ---------------------------------------------------------------------------

    def choose(self, layer: int, counts: Sequence[int], tokens: int) -> tuple[tuple[int, ...], ...]:
        """Local ids that this call computes on every device: resident ones, then streamed ones.

        It depends on the plan, the call's routing and the calls before it in the same pass, which come in a
        planned order: so it is the same everywhere and every time.

        Args:
            counts: rows of every local id. tokens: of the call.
        """
        there = self._before[1] if self.plan.held and self._before[0] == layer else ()
        share, known = self.plan.share(tokens, again=bool(there)), {e for own in there for e in own}
        known |= {e for part in self.parts for e in part.ahead_of(layer)}
        streamed = streamed_experts(counts[: self._streamable[layer]], share, known)
        of_devices = dealt(streamed, counts, len(self.parts), there)
        self._before = (layer, of_devices)
        return tuple(
            (*(e for e in part.resident_here(layer) if counts[e]), *own)
            for part, own in zip(self.parts, of_devices, strict=True)
        )

    def forget_calls(self) -> None:
        """What earlier calls chose does not matter for the next one."""
        self._before = (-1, ())

    def forward(
        self, layer: int, chosen: Sequence[Sequence[int]], call: LaneInput
    ) -> list[Future[LaneForward]]:
        """Start the forward of `chosen` (of `choose`) on every device that has some."""
        return all_started(
            part.forward(layer, own, call) for part, own in zip(self.parts, chosen, strict=True) if own
        )

    def backward(
        self,
        layer: int,
        saved: Sequence[LaneSaved],
        dy: Sequence[Tensor],
        lora: Adapter | None,
        **more: Any,
    ) -> list[Future[LaneBackward]]:
        """Start the backward of kept forwards, each where its forward ran; arguments as for `DeviceLane`."""
        return all_started(self.parts[s.device].backward(layer, s, dy, lora, **more) for s in saved)

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
        self._rooms.clear()


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
