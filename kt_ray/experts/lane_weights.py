"""How one expert travels from host memory to the lane's device, and what it is there.

An expert's tensors are views: rows of a slab, halves of a fused projection, every second row of an
interleaved one. What is copied are the stretches of memory that they lie in, so a fused or interleaved
expert goes in one piece, as its bytes are, and the same views are cut out again on the device. Nothing is
dequantised on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kt_ray.experts.lane_formats import matrix_values
from kt_ray.experts.lane_math import PROJECTIONS, DeviceExpert
from kt_ray.native import ExpertFormula, ExpertLora, ExpertMatrix, ExpertWeights
from kt_ray.native.dropout_hash import DOWN, GATE, UP

_ALIGN = 256  # bytes; more than any element
_BEFORE = 16  # a stretch begins at a multiple of this in its storage: every element type divides it


@dataclass(frozen=True)
class _Stretch:
    """Bytes [start, stop) of one host storage, and where the copy of them begins."""

    source: Tensor
    start: int
    stop: int
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
    """One expert's stretches of host memory and the views in their copy.

    Attributes:
        nbytes: of the copy, gaps for alignment included.
        carried: bytes that travel.
    """

    stretches: tuple[_Stretch, ...]
    views: Mapping[str, _View]
    nbytes: int

    @property
    def carried(self) -> int:
        return sum(s.stop - s.start for s in self.stretches)

    def copy_into(self, buffer: Tensor, *, non_blocking: bool) -> dict[str, Tensor]:
        """Copy into `buffer` (uint8, at least nbytes); returns the expert's tensors as views of it."""
        for s in self.stretches:
            raw = torch.empty(0, dtype=torch.uint8).set_(
                s.source.untyped_storage(), s.start, (s.stop - s.start,), (1,)
            )
            buffer[s.at : s.at + raw.numel()].copy_(raw, non_blocking=non_blocking)
        made = {}
        for name, view in self.views.items():
            empty = torch.empty(0, dtype=view.dtype, device=buffer.device)
            made[name] = empty.set_(buffer.untyped_storage(), view.offset, view.size, view.stride)
        return made


def pack(tensors: Mapping[str, Tensor]) -> Parcel:
    """What to copy for these host tensors (of any strides, in any storages)."""
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
        stretches.append(_Stretch(tensors[members[0]], low, high, at))
        for name in members:
            t = tensors[name]
            byte = at + int(t.storage_offset()) * t.element_size() - low
            views[name] = _View(t.dtype, tuple(t.shape), tuple(t.stride()), byte // t.element_size())
        at += -(-(high - low) // _ALIGN) * _ALIGN

    for place, start, stop, name in sorted(spans):
        if place == storage and start <= high:
            high = max(high, stop)
            members.append(name)
            continue
        close()
        storage, low, high, members = place, start - start % _BEFORE, stop, [name]
    close()
    return Parcel(tuple(stretches), views, at)


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


def lora_tensors(lora: ExpertLora | None, expert: int) -> dict[str, Tensor]:
    """The adapter of one local expert, "lora_" before each name."""
    return {} if lora is None else {f"lora_{name}": t[expert] for name, t in lora.named().items()}


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
    def gated(self) -> bool:
        return GATE in self.stored

    def unpack(self, tensors: Mapping[str, Tensor], scale: float) -> DeviceExpert:
        """An expert's numbers, from its tensors on the device; scale: of its adapter."""
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
        return DeviceExpert(matrices, biases, self.formula, lora, scale)
