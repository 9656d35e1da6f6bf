"""How experts travel from host memory to the lane's device, and what they are there.

An expert's tensors are views: rows of a slab, halves of a fused projection, every second row of an
interleaved one. What is copied are the stretches of memory that they lie in, so a fused or interleaved
expert goes in one piece, as its bytes are, and the same views are cut out again on the device. The copies of
all experts of a layer are laid out alike, so several, one after the other, are views of one more dimension.
Nothing is dequantised on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from kt_ray.experts.lane_formats import matrix_values
from kt_ray.experts.lane_math import PROJECTIONS, DeviceExperts
from kt_ray.gpu import driver
from kt_ray.native import ExpertFormula, ExpertLora, ExpertMatrix, ExpertWeights
from kt_ray.native.dropout_hash import DOWN, GATE, UP

_ALIGN = 256  # bytes; more than any element
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
    on_device: bool = False

    @property
    def carried(self) -> int:
        return sum(s.source.numel() for s in self.stretches)

    def copy_into(self, buffer: Tensor, copy: Copy) -> None:
        """Copy to the beginning of `buffer` (uint8, at least nbytes)."""
        for s in self.stretches:
            copy(buffer[s.at : s.at + s.source.numel()], s.source)

    def copied(self, memory: Tensor, copy: Copy) -> Parcel:
        """Copy to the beginning of a device's memory; returns the copy, in one stretch."""
        self.copy_into(memory, copy)
        return Parcel((_Stretch(memory[: self.nbytes], 0),), self.views, self.nbytes, on_device=True)


def pack(tensors: Mapping[str, Tensor], *, apart: bool = False) -> Parcel:
    """What to copy for these tensors (of any strides, in any storages); apart: each of them by itself."""
    spans = []
    for name, t in tensors.items():
        last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        start = int(t.storage_offset()) * t.element_size()
        spans.append((t.untyped_storage().data_ptr(), start, start + (last + 1) * t.element_size(), name))
    stretches: list[_Stretch] = []
    views: dict[str, _View] = {}
    at, storage, low, high = 0, -1, 0, 0
    members: list[str] = []

    def close() -> None:
        nonlocal at
        if not members:
            return
        # Where elements of all types are aligned.
        begin = low - low % max(tensors[name].element_size() for name in members)
        source = torch.empty(0, dtype=torch.uint8, device=tensors[members[0]].device)
        source.set_(tensors[members[0]].untyped_storage(), begin, (high - begin,), (1,))
        stretches.append(_Stretch(source, at))
        for name in members:
            t = tensors[name]
            byte = at + int(t.storage_offset()) * t.element_size() - begin
            views[name] = _View(t.dtype, tuple(t.shape), tuple(t.stride()), byte // t.element_size())
        at += _aligned(high - begin)

    for place, start, stop, name in sorted(spans):
        if place == storage and start <= high and not apart:
            high = max(high, stop)
            members.append(name)
            continue
        close()
        storage, low, high, members = place, start, stop, [name]
    close()
    return Parcel(tuple(stretches), views, at)


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


@dataclass(frozen=True)
class PackedExperts:
    """Experts of a layer whose copies are laid out alike: parcels by id, in host memory or on the device."""

    parcels: Mapping[int, Parcel]

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
        """The same on a device, each in one stretch."""
        made = {}
        for e, parcel in self.parcels.items():
            memory = torch.empty(parcel.nbytes, dtype=torch.uint8, device=device)
            made[e] = parcel.copied(memory, Tensor.copy_)
        return PackedExperts(made)

    def copy_into(self, buffer: Tensor, experts: Sequence[int]) -> dict[str, Tensor]:
        """Start to copy experts one after the other into `buffer`; returns their tensors, [B, ...] each."""
        for number, e in enumerate(experts):
            copy = Tensor.copy_ if self.parcels[e].on_device else driver().copy_in
            self.parcels[e].copy_into(buffer[number * self.nbytes :], copy)
        return self._cut(buffer, experts[0], len(experts))

    def in_place(self, expert: int) -> dict[str, Tensor]:
        """The tensors, [1, ...] each, of an expert that lies in one stretch."""
        return self._cut(self.parcels[expert].stretches[0].source, expert, 1)

    def _cut(self, memory: Tensor, expert: int, count: int) -> dict[str, Tensor]:
        made = {}
        for name, view in self.parcels[expert].views.items():
            empty = torch.empty(0, dtype=view.dtype, device=memory.device)
            stride = (self.nbytes // empty.element_size(), *view.stride)
            offset = view.offset + memory.storage_offset() // empty.element_size()  # memory is bytes
            made[name] = empty.set_(memory.untyped_storage(), offset, (count, *view.size), stride)
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
        self._free = list(range(places + ahead))
        self._here: dict[int, dict[int, tuple[Parcel, int]]] = {}  # layer -> what is here, in which place

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
            self._free += [place for _, place in self._here.pop(other).values()]
        carried = self._bring(layer, host, experts, self._places, device)
        here = self._here[layer]
        carried += sum(host.parcels[e].carried for e in experts if e not in here)
        return PackedExperts({e: here[e][0] if e in here else host.parcels[e] for e in experts}), carried

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
            memory, parcel = self._place(self._free[0], device), host.parcels[e]
            here[e] = parcel.copied(memory, driver().copy_in), self._free.pop(0)
            carried += parcel.carried
        return carried

    def _place(self, number: int, device: torch.device) -> Tensor:
        if self._memory is None:
            size = (self._places + self._ahead) * self._nbytes
            self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        return self._memory[number * self._nbytes : (number + 1) * self._nbytes]

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
        """Matrices by name, each with one of every local expert under its id."""


class JoinedLora:
    """Several owners' experts of a layer, one owner's after the other's."""

    def __init__(self, parts: Sequence[ExpertLora]) -> None:
        self.scale = parts[0].scale
        self._named = {name: _Joined([part.named()[name] for part in parts]) for name in parts[0].named()}

    def named(self) -> Mapping[str, _Joined]:
        return self._named


class _Joined:
    """Tensors [E_i, ...] as one [E, ...] that only gives single rows."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self._parts = parts

    def __getitem__(self, expert: int) -> Tensor:
        for part in self._parts:
            if expert < len(part):
                return part[expert]
            expert -= len(part)
        raise IndexError("there are fewer experts")


def adapter_bytes(lora: Adapter | None, experts: int) -> int:
    """What `copy_adapter` takes for so many experts."""
    named = {} if lora is None else lora.named()
    return sum(_aligned(experts * t[0].nbytes) for t in named.values())


def copy_adapter(lora: Adapter | None, buffer: Tensor, experts: Sequence[int]) -> dict[str, Tensor]:
    """Start to copy adapters of some local experts; returns them [B, ...], "lora_" before each name."""
    made, at = {}, 0
    for name, t in ({} if lora is None else lora.named()).items():
        first = t[experts[0]]
        size = len(experts) * first.nbytes
        copy = buffer[at : at + size].view(first.dtype).view(len(experts), *first.shape)
        for place, e in zip(copy, experts, strict=True):
            driver().copy_in(place, t[e])
        made[f"lora_{name}"] = copy
        at += _aligned(size)
    return made


def expert_tensors(weights: ExpertWeights, expert: int) -> dict[str, Tensor]:
    """The frozen tensors of one local expert, views of the whole's."""
    found: dict[str, Tensor] = {}
    for name in PROJECTIONS.values():
        projection = getattr(weights, name)
        if isinstance(projection, ExpertMatrix):
            found[name] = projection.data[expert]
            if projection.scales is not None:
                found[f"{name}_scales"] = projection.scales[expert]
        elif projection is not None:
            found[name] = projection[expert]
        bias = getattr(weights, f"{name}_bias")
        if bias is not None:
            found[f"{name}_bias"] = bias[expert]
    return found


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

    def unpack(self, tensors: Mapping[str, Tensor], scale: float, *, float8: bool = False) -> DeviceExperts:
        """A batch's numbers, from its tensors [B, ...] on the device; scale: of the adapter. float8: whether
        frozen products are computed in FP8."""
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
        lora = {n.removeprefix("lora_"): t for n, t in tensors.items() if n.startswith("lora_")}
        return DeviceExperts(matrices, biases, self.formula, lora, scale, float8)
