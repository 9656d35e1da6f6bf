"""How experts travel from host memory to the lane's device, and what they are there.

An expert's tensors are views: rows of a slab, halves of a fused projection, every second row of an
interleaved one. What is copied are the stretches of memory that they lie in, so a fused or interleaved
expert goes in one piece, as its bytes are, and the same views are cut out again on the device. The copies of
all experts of a layer are laid out alike, so several, one after the other, are views of one more dimension.
Nothing is dequantised on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from kt_ray.experts.lane_device import LaneDevice
from kt_ray.experts.lane_float8 import multiplies
from kt_ray.experts.lane_formats import matrix_values
from kt_ray.experts.lane_math import PROJECTIONS, BatchLora, DeviceExperts
from kt_ray.gpu import driver
from kt_ray.native import ExpertFormula, ExpertLora, ExpertMatrix, ExpertWeights
from kt_ray.native.dropout_hash import DOWN, GATE, UP

_ALIGN = 256  # bytes; more than any element
# Bytes that a link copies while a thread starts one more copy (20 microseconds at 25 GB/s).
_COPY_BYTES = 1 << 19
Copy = Callable[[Tensor, Tensor], object]  # (to, source)


@dataclass(frozen=True)
class _Stretch:
    """Bytes of one storage, uint8, and where the copy of them begins."""

    source: Tensor
    at: int


@dataclass(frozen=True)
class _View:
    """A tensor inside a stretch."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # in elements, from the beginning of the copy


@dataclass(frozen=True)
class Parcel:
    """One expert's stretches of memory and the views in their copy.

    Attributes:
        nbytes: of the copy, gaps for alignment included.
        carried: bytes that travel.
    """

    stretches: tuple[_Stretch, ...]
    views: Mapping[str, _View]
    nbytes: int

    @property
    def carried(self) -> int:
        return sum(s.source.numel() for s in self.stretches)

    def copy_into(self, buffer: Tensor, copy: Copy) -> None:
        """Copy to the beginning of `buffer` (uint8, at least nbytes)."""
        for s in self.stretches:
            copy(buffer[s.at : s.at + s.source.numel()], s.source)


def pack(tensors: Mapping[str, Tensor], *, apart: bool = False) -> Parcel:
    """What to copy for these tensors (of any strides, in any storages), in their order; apart: each of them
    by itself."""
    spans = []
    for name, t in tensors.items():
        last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        start = int(t.storage_offset()) * t.element_size()
        spans.append((t.untyped_storage().data_ptr(), start, start + (last + 1) * t.element_size(), name))
    together: list[list[str]] = []
    extents: list[tuple[int, int]] = []  # first byte of a storage, and the one after the last
    storage = -1
    for place, start, stop, name in sorted(spans):
        if place == storage and start - extents[-1][1] < _ALIGN and not apart:
            together[-1].append(name)
            extents[-1] = extents[-1][0], max(extents[-1][1], stop)
        else:
            storage = place
            together.append([name])
            extents.append((start, stop))
    number = {name: n for n, name in enumerate(tensors)}
    stretches: list[_Stretch] = []
    views: dict[str, _View] = {}
    at = 0
    for names, (low, high) in sorted(
        zip(together, extents, strict=True), key=lambda own: min(number[name] for name in own[0])
    ):
        # Where elements of all types are aligned.
        begin = low - low % max(tensors[name].element_size() for name in names)
        source = torch.empty(0, dtype=torch.uint8, device=tensors[names[0]].device)
        source.set_(tensors[names[0]].untyped_storage(), begin, (high - begin,), (1,))
        stretches.append(_Stretch(source, at))
        for name in names:
            t = tensors[name]
            byte = at + int(t.storage_offset()) * t.element_size() - begin
            views[name] = _View(t.dtype, tuple(t.shape), tuple(t.stride()), byte // t.element_size())
        at += _aligned(high - begin)
    return Parcel(tuple(stretches), views, at)


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


@dataclass(frozen=True)
class PackedExperts:
    """Experts of a layer whose copies are laid out alike.

    Attributes:
        parcels: by id, what to copy. places: of those that are on the device, where in `memory` they are:
            uint8 [places, at least nbytes].
    """

    parcels: Mapping[int, Parcel]
    places: Mapping[int, int] = field(default_factory=dict)
    memory: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Of one expert's copy."""
        return next((parcel.nbytes for parcel in self.parcels.values()), 0)

    @classmethod
    def of(cls, tensors: Mapping[int, Mapping[str, Tensor]]) -> PackedExperts:
        """Experts by id, of their tensors by name."""
        parcels = {e: pack(own) for e, own in tensors.items()}
        if any(p.views != other.views for p, other in pairwise(parcels.values())):
            parcels = {e: pack(own, apart=True) for e, own in tensors.items()}
        return cls(parcels)

    def moved_to(self, device: torch.device) -> PackedExperts:
        """The same on a device only."""
        memory = torch.empty((len(self.parcels), self.nbytes), dtype=torch.uint8, device=device)
        made = {}
        for (e, parcel), place in zip(self.parcels.items(), memory, strict=True):
            parcel.copy_into(place, Tensor.copy_)
            made[e] = replace(parcel, stretches=())
        return PackedExperts(made, {e: number for number, e in enumerate(made)}, memory)

    def in_place(self, experts: Sequence[int]) -> dict[str, Tensor] | None:
        """Tensors, [B, ...] each, of experts that lie one after the other on the device; else None."""
        first = self.places.get(experts[0])
        if first is None or any(self.places.get(e) != first + n for n, e in enumerate(experts)):
            return None
        assert self.memory is not None
        return self._cut(self.memory[first:], experts)

    def copy_into(self, buffer: Tensor, experts: Sequence[int], device: LaneDevice) -> dict[str, Tensor]:
        """Start to copy experts one after the other into `buffer`; returns their tensors, [B, ...] each."""
        to = buffer[: len(experts) * self.nbytes].view(len(experts), self.nbytes)
        if self.memory is not None and all(e in self.places for e in experts):
            words = self.memory.view(torch.int64)[:, : self.nbytes // 8]  # _ALIGN is a multiple
            places = device.numbers([self.places[e] for e in experts])
            torch.index_select(words, 0, places, out=to.view(torch.int64))
            return self._cut(to, experts)
        for e, own in zip(experts, to, strict=True):
            if e in self.places and self.memory is not None:
                own.copy_(self.memory[self.places[e], : self.nbytes])
            else:
                self.parcels[e].copy_into(own, driver().copy_in)
        return self._cut(to, experts)

    def _cut(self, memory: Tensor, experts: Sequence[int]) -> dict[str, Tensor]:
        """memory: uint8 [at least B, at least nbytes]."""
        made = {}
        for name, view in self.parcels[experts[0]].views.items():
            size = view.dtype.itemsize
            offset = view.offset + int(memory.storage_offset()) // size
            empty = torch.empty(0, dtype=view.dtype, device=memory.device)
            shape, stride = (len(experts), *view.size), (memory.stride(0) // size, *view.stride)
            made[name] = empty.set_(memory.untyped_storage(), offset, shape, stride)
        return made


class HeldExperts:
    """Carried experts that stay on a device: a layer's next call need not carry them again, and those of the
    next layer may come while this one is computed.

    A call of a layer gives the places of all others back. What was computed from them is done by then: the
    lane's thread waits for the device at the end of every call.

    Args:
        places: that a layer takes at most. ahead: places beside them, for another layer's.
    """

    def __init__(self, places: int, ahead: int = 0) -> None:
        self._places, self._ahead = places, ahead
        self._nbytes = 0  # of a place
        self._memory: Tensor | None = None
        self._free = list(range(places + ahead))  # ascending: a batch's experts come to lie side by side
        self._here: dict[int, dict[int, int]] = {}  # layer -> what is here, in which place

    def fit(self, host: PackedExperts) -> None:
        """A layer's weights are new: places take its experts, too, and none of them is here."""
        self._nbytes, self._memory = max(self._nbytes, host.nbytes), None
        self._forget()

    def get(
        self, layer: int, host: PackedExperts, experts: Sequence[int], device: torch.device
    ) -> tuple[PackedExperts, int]:
        """A layer's experts: on the device where they are there, or begin to be copied to a free place there,
        else in host memory. And the bytes that are carried."""
        for other in [other for other in self._here if other != layer]:
            self._free = sorted([*self._free, *self._here.pop(other).values()])
        carried = self._bring(layer, host, experts, self._places, device)
        here = self._here[layer]
        carried += sum(host.parcels[e].carried for e in experts if e not in here)
        return PackedExperts(host.parcels, here, self._memory), carried

    def bring_ahead(
        self, layer: int, host: PackedExperts, experts: Sequence[int], device: torch.device
    ) -> int:
        """Begin to copy these experts of a layer that is to be computed next, as many as there is room for;
        returns the bytes that are carried."""
        return self._bring(layer, host, experts, self._ahead, device)

    def _bring(
        self, layer: int, host: PackedExperts, experts: Sequence[int], most: int, device: torch.device
    ) -> int:
        here, carried = self._here.setdefault(layer, {}), 0
        for e in experts:
            if e in here or len(here) >= most or not self._free:
                continue
            if self._memory is None:
                size = (self._places + self._ahead, self._nbytes)
                self._memory = torch.empty(size, dtype=torch.uint8, device=device)
            here[e] = self._free.pop(0)
            host.parcels[e].copy_into(self._memory[here[e]], driver().copy_in)
            carried += host.parcels[e].carried
        return carried

    def _forget(self) -> None:
        self._here.clear()
        self._free = list(range(self._places + self._ahead))

    def close(self) -> None:
        """Give the memory back."""
        self._memory = None
        self._forget()


class Adapter(Protocol):
    """LoRA of a layer's experts: `ExpertLora`, or several one after another."""

    @property
    def scale(self) -> float: ...

    def named(self) -> Mapping[str, Any]:
        """Matrices by name, [E, ...] of every local expert, or `Joined`."""


@dataclass(frozen=True)
class Joined:
    """Tensors [E_i, ...], one after the other."""

    parts: tuple[Tensor, ...]


class JoinedLora:
    """Several owners' experts of a layer, one owner's after the other's."""

    def __init__(self, parts: Sequence[ExpertLora]) -> None:
        self.scale = parts[0].scale
        names = parts[0].named()
        self._named = {name: Joined(tuple(part.named()[name] for part in parts)) for name in names}

    def named(self) -> Mapping[str, Joined]:
        return self._named


def adapter_shapes(lora: Adapter | None) -> dict[str, tuple[int, ...]]:
    """Of one expert's matrices, by name."""
    return {name: tuple(_parts(t)[0].shape[1:]) for name, t in ({} if lora is None else lora.named()).items()}


_TOGETHER = {
    "in_a": ("gate_a", "up_a"),
    "in_b": ("gate_b", "up_b"),
    "down_a": ("down_a",),
    "down_b": ("down_b",),
}


def _together(lora: Adapter) -> dict[str, list[tuple[Tensor, ...]]]:
    """Matrices that one kernel takes experts from: by name, those of each projection, of each owner."""
    named = lora.named()
    return {key: [_parts(named[name]) for name in names if name in named] for key, names in _TOGETHER.items()}


def adapter_bytes(lora: Adapter | None) -> int:
    """What `DeviceLora` takes."""
    every = {} if lora is None else _together(lora)
    return sum(_aligned(sum(t.nbytes for parts in group for t in parts)) for group in every.values())


class DeviceLora:
    """LoRA of a layer's experts on the device, of which batches are taken.

    Args:
        lora: on the host; some of it begins to be copied, by the current queue.
        buffer: uint8, at least adapter_bytes.
        order: local ids of each batch.

    Attributes:
        carried: bytes that are copied. Experts between two that are wanted are copied, too, where that is
            faster than another copy.
    """

    def __init__(self, lora: Adapter, buffer: Tensor, order: Sequence[Sequence[int]]) -> None:
        self.scale, self.carried = lora.scale, 0
        self._made: dict[str, Tensor] = {}  # [P E, ...], one projection's after the other's
        wanted, at = sorted(e for batch in order for e in batch), 0
        for key, group in _together(lora).items():
            first = group[0][0]
            size = sum(t.nbytes for parts in group for t in parts)
            to = buffer[at : at + size].view(first.dtype).view(-1, *first.shape[1:])
            self._made[key] = to
            at += _aligned(size)
            for matrices, own in zip(group, to.chunk(len(group)), strict=True):
                self._copy(matrices, own, wanted)
        self._inputs = len(_together(lora)["in_a"])
        self._experts = len(self._made["down_a"])
        self._order = order

    def _copy(self, parts: Sequence[Tensor], to: Tensor, wanted: Sequence[int]) -> None:
        begin = 0
        for part in parts:
            end = begin + len(part)
            own = [e - begin for e in wanted if begin <= e < end]
            for run in _runs(own, _COPY_BYTES // part[0].nbytes if own else 0):
                source = part[run.start : run.stop]
                driver().copy_in(to[begin + run.start : begin + run.stop], source)
                self.carried += source.nbytes
            begin = end

    def batches(self, device: LaneDevice) -> Iterator[BatchLora]:
        """Of every batch, by the queue that is current at the first one, once all that is copied is there."""
        apart = [[[p * self._experts + e for e in own] for p in range(self._inputs)] for own in self._order]
        by_batch = [e for own in self._order for e in own]
        by_expert = [e for of_batch in apart for of_expert in zip(*of_batch, strict=True) for e in of_expert]
        by_projection = [e for of_batch in apart for own in of_batch for e in own]
        at = device.numbers([*by_batch, *by_expert, *by_projection])
        count, inputs, made = len(by_batch), self._inputs, self._made
        own, by_expert_at, by_projection_at = at.split((count, inputs * count, inputs * count))
        sizes = [len(batch) for batch in self._order]
        in_a = made["in_a"].index_select(0, by_expert_at).view(count, -1, made["in_a"].shape[-1])
        in_b = made["in_b"].index_select(0, by_projection_at).split([inputs * size for size in sizes])
        down_a, down_b = (made[name].index_select(0, own).split(sizes) for name in ("down_a", "down_b"))
        of_batches = zip(sizes, in_a.split(sizes), in_b, down_a, down_b, strict=True)
        for size, a, b, a_down, b_down in of_batches:
            yield BatchLora(a, b.view(inputs, size, *b.shape[1:]), a_down, b_down, self.scale)


def _parts(matrices: Tensor | Joined) -> tuple[Tensor, ...]:
    return matrices.parts if isinstance(matrices, Joined) else (matrices,)


def _runs(numbers: Sequence[int], gap: int) -> list[range]:
    """Ascending numbers in runs, those that leave out at most `gap` in one."""
    made: list[range] = []
    for n in numbers:
        if made and n - made[-1].stop <= gap:
            made[-1] = range(made[-1].start, n + 1)
        else:
            made.append(range(n, n + 1))
    return made


def expert_tensors(weights: ExpertWeights, expert: int) -> dict[str, Tensor]:
    """The frozen tensors of one local expert, views of the whole's; matrices first."""
    found: dict[str, Tensor] = {}
    more: dict[str, Tensor] = {}
    for name in PROJECTIONS.values():
        projection = getattr(weights, name)
        if isinstance(projection, ExpertMatrix):
            found[name] = projection.data[expert]
            if projection.scales is not None:
                more[f"{name}_scales"] = projection.scales[expert]
        elif projection is not None:
            found[name] = projection[expert]
        bias = getattr(weights, f"{name}_bias")
        if bias is not None:
            more[f"{name}_bias"] = bias[expert]
    return found | more


@dataclass(frozen=True)
class _Stored:
    """How one projection is stored; an empty format is a plain tensor."""

    format: str
    shape: tuple[int, int]
    block: tuple[int, int]


@dataclass(frozen=True)
class LayerKind:
    """What all experts of a layer have in common: how to make numbers of their bytes."""

    stored: Mapping[int, _Stored]
    compute: torch.dtype
    formula: ExpertFormula

    @classmethod
    def of(cls, weights: ExpertWeights) -> LayerKind:
        stored = {}
        for number, name in PROJECTIONS.items():
            projection = getattr(weights, name)
            if projection is None:
                continue
            shape = (int(projection.shape[1]), int(projection.shape[2]))
            if isinstance(projection, ExpertMatrix):
                stored[number] = _Stored(projection.format, shape, projection.scale_block)
            else:
                stored[number] = _Stored("", shape, (1, shape[1]))
        plain = weights.formats[-1] == "f32"
        formula = ExpertFormula(weights.activation, weights.alpha, weights.limit)
        return cls(stored, torch.float32 if plain else torch.bfloat16, formula)

    @property
    def hidden(self) -> int:
        return self.stored[UP].shape[1]

    @property
    def inter(self) -> int:
        return self.stored[UP].shape[0]

    @property
    def params(self) -> int:
        """Of one expert."""
        return sum(rows * columns for rows, columns in (s.shape for s in self.stored.values()))

    @property
    def gated(self) -> bool:
        return GATE in self.stored

    def unpack(
        self, tensors: Mapping[str, Tensor], lora: BatchLora | None, *, float8: bool = False
    ) -> DeviceExperts:
        """A batch's numbers, from its tensors [B, ...] on the device. float8: whether frozen products are
        computed in FP8."""
        matrices, biases = {}, {}
        for number in (GATE, UP, DOWN):
            if number not in self.stored:
                continue
            kind, name = self.stored[number], PROJECTIONS[number]
            data = tensors[name]
            if kind.format:
                data = matrix_values(kind.format, data, tensors.get(f"{name}_scales"), kind.shape, kind.block)
            matrices[number] = data.to(self.compute)
            if f"{name}_bias" in tensors:
                biases[number] = tensors[f"{name}_bias"]
        rounds = float8 and multiplies(self.hidden, self.inter)
        joined = None if rounds else _joined(matrices)
        return DeviceExperts(matrices, biases, self.formula, lora, float8, joined)


def _joined(matrices: Mapping[int, Tensor]) -> Tensor | None:
    """Gate and up [B, I, H] as one matrix [B, 2 I, H], if the second follows the first in memory."""
    gate, up = matrices.get(GATE), matrices[UP]
    if gate is None or gate.untyped_storage().data_ptr() != up.untyped_storage().data_ptr():
        return None
    count, inter, hidden = gate.shape
    if up.stride() != gate.stride() or up.storage_offset() != gate.storage_offset() + inter * gate.stride(1):
        return None
    return gate.as_strided((count, 2 * inter, hidden), gate.stride())
