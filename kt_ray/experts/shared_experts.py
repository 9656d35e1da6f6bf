"""Weights and LoRA of one expert actor, read by attention workers of its host where they lie.

The actor keeps them in one anonymous file in memory (`kt_ray.native.MemoryFile`). It exports where in the
file each tensor begins; a worker opens the export and has the same tensors on its own mapping of the same
pages. So a worker sees every update of the LoRA, without a message.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kt_ray.native import ExpertLora, ExpertMatrix, ExpertWeights, MemoryFile
from kt_ray.native.pages import map_whole

Adapter = bool | str  # True = the LoRA that is trained, else the name of a kept one
PART = 1 << 30  # bytes: what is page-locked at once takes less than a second


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor lies in the file: bytes from its beginning, dtype's name, shape, strides in elements."""

    offset: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Laid:
    """An `ExpertWeights`, `ExpertMatrix` or `ExpertLora`, its tensors by their places."""

    kind: type[ExpertWeights | ExpertMatrix | ExpertLora]
    fields: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class ExportedExperts:
    """What another process of the host needs to read an actor's experts. Picklable, without any weights.

    Attributes:
        rank: of the actor.
        path, name, inode, size: of its file in memory.
        weights: MoE layer -> global ids in local order, and what the engine computes from.
        adapters: True and the names of kept ones -> MoE layer -> LoRA of those experts.
    """

    rank: int
    path: str
    name: str
    inode: int
    size: int
    weights: Mapping[int, tuple[tuple[int, ...], Laid]]
    adapters: Mapping[Adapter, Mapping[int, Laid]]


def put_into(file: MemoryFile, weights: ExpertWeights) -> ExpertWeights:
    """The same weights, with a copy in the file of each tensor that lies elsewhere (small ones: biases)."""

    def put(tensor: Tensor) -> Tensor:
        if file.offset(tensor) is not None:
            return tensor
        return file.allocate(tensor.shape, tensor.dtype).copy_(tensor)

    placed: ExpertWeights = _with_tensors(weights, put)
    return placed


def export_experts(
    file: MemoryFile,
    rank: int,
    weights: Mapping[int, tuple[tuple[int, ...], ExpertWeights]],
    adapters: Mapping[Adapter, Mapping[int, ExpertLora]],
) -> ExportedExperts:
    """Where these tensors lie, all of them in the file; arguments as the fields of `ExportedExperts`."""
    return ExportedExperts(
        rank,
        file.path,
        file.name,
        file.inode,
        file.size,
        {layer: (ids, _laid(file, own)) for layer, (ids, own) in weights.items()},
        {name: {layer: _laid(file, own) for layer, own in of.items()} for name, of in adapters.items()},
    )


class OpenExperts:
    """An actor's experts, as tensors on this process's mapping of their memory: to be read, never written.

    Args:
        exported: of the actor.
        before: an earlier export of the same actor, open in this process: of a file that has not grown since
            the same mapping is used.

    Attributes:
        memory: uint8, the whole file; all tensors are views of it.
        parts: the whole of it in pieces of whole pages, PART or more bytes each, that no layer lies across.
        weights: MoE layer -> global ids in local order, and their weights.
        adapters: True and the names of kept ones -> MoE layer -> LoRA.

    Raises:
        RuntimeError: the memory is gone, is another's, or is smaller than the export says.
    """

    def __init__(self, exported: ExportedExperts, before: OpenExperts | None = None) -> None:
        self.exported = exported
        self._resident = 0
        same = before is not None and before.maps(exported)
        self.memory: Tensor = before.memory if before is not None and same else _mapped(exported)
        self.parts: list[Tensor] = (
            before.parts if before is not None and same else _parts(self.memory, exported)
        )
        self.weights: dict[int, tuple[tuple[int, ...], ExpertWeights]] = {
            layer: (ids, _opened(laid, self.memory)) for layer, (ids, laid) in exported.weights.items()
        }
        self.adapters: dict[Adapter, dict[int, ExpertLora]] = {
            name: {layer: _opened(laid, self.memory) for layer, laid in of.items()}
            for name, of in exported.adapters.items()
        }

    def maps(self, exported: ExportedExperts) -> bool:
        """Whether this mapping serves another export of the actor: of a file that has not grown since."""
        return _file(self.exported) == _file(exported)

    @property
    def resident_bytes(self) -> int:
        """What of the mapping counts as this process's resident memory: pages that it has read or locked."""
        if self._resident < self.memory.numel():  # the kernel counts pages: seconds for 600 GB
            self._resident = self._count_resident()
        return self._resident

    def _count_resident(self) -> int:
        first, resident, inside = self.memory.data_ptr(), 0, False
        for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(" ")
            if not key.endswith(":"):  # the head of a mapping: its first and last address
                start, _, stop = key.partition("-")
                inside = first <= int(start, 16) and int(stop, 16) <= first + self.memory.numel()
            elif inside and key == "Rss:":
                resident += int(value.split()[0]) << 10
        return resident


def _parts(memory: Tensor, exported: ExportedExperts) -> list[Tensor]:
    cuts, reached = [0], 0
    for begin, end in sorted(_extents(exported)):
        if begin >= max(reached, cuts[-1] + PART) and begin % mmap.PAGESIZE == 0:
            cuts.append(begin)
        reached = max(reached, end)
    ends = [*cuts[1:], memory.numel()]
    return [memory[begin:end] for begin, end in zip(cuts, ends, strict=True)]


def _extents(exported: ExportedExperts) -> Iterator[tuple[int, int]]:
    """First byte of every layer's weights, and of every layer's LoRA, and the one after its last: what lies
    together there may be copied at once."""

    def of(place: Any) -> Iterator[tuple[int, int]]:
        if isinstance(place, Laid):
            for _, value in place.fields:
                yield from of(value)
        elif isinstance(place, TensorPlace):
            dtype: torch.dtype = getattr(torch, place.dtype)
            last = sum((n - 1) * step for n, step in zip(place.shape, place.stride, strict=True))
            yield place.offset, place.offset + (last + 1) * dtype.itemsize

    layers = [weights for _, weights in exported.weights.values()]
    for layer in (*layers, *(lora for adapter in exported.adapters.values() for lora in adapter.values())):
        begins, ends = zip(*of(layer), strict=True)
        yield min(begins), max(ends)


def _file(exported: ExportedExperts) -> tuple[str, str, int, int]:
    return exported.path, exported.name, exported.inode, exported.size


def _mapped(exported: ExportedExperts) -> Tensor:
    path, whose = exported.path, f"memory of expert actor {exported.rank}'s weights"
    try:
        fd = os.open(path, os.O_RDWR)
    except OSError as error:
        raise RuntimeError(f"the {whose}, {path}, cannot be opened: {error.strerror}") from error
    try:
        status, found = os.fstat(fd), os.readlink(f"/proc/self/fd/{fd}")
        if status.st_ino != exported.inode or not found.startswith(f"/memfd:{exported.name}"):
            raise RuntimeError(f"{path} is no longer the {whose}: it is {found}")
        if status.st_size < exported.size:
            raise RuntimeError(
                f"the {whose}, {path}, has {status.st_size} bytes, its export says {exported.size}"
            )
        return map_whole(fd, exported.size)
    finally:
        os.close(fd)


def _laid(file: MemoryFile, held: ExpertWeights | ExpertMatrix | ExpertLora) -> Laid:
    def place(value: Any) -> Any:
        if isinstance(value, ExpertMatrix):
            return _laid(file, value)
        if not isinstance(value, Tensor):
            return value
        offset = file.offset(value)
        assert offset is not None, "it was put into the file"
        dtype = str(value.dtype).removeprefix("torch.")
        return TensorPlace(offset, dtype, tuple(value.shape), tuple(value.stride()))

    return Laid(type(held), tuple((f.name, place(getattr(held, f.name))) for f in fields(held)))


def _opened(laid: Laid, memory: Tensor) -> Any:
    def at(place: Any) -> Any:
        if isinstance(place, Laid):
            return _opened(place, memory)
        if not isinstance(place, TensorPlace):
            return place
        dtype: torch.dtype = getattr(torch, place.dtype)
        return memory.view(dtype).as_strided(place.shape, place.stride, place.offset // dtype.itemsize)

    return laid.kind(**{name: at(value) for name, value in laid.fields})


def _with_tensors(held: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same with `function` applied to every tensor."""
    changed: dict[str, Any] = {}
    for name, value in ((f.name, getattr(held, f.name)) for f in fields(held)):
        if isinstance(value, Tensor):
            changed[name] = function(value)
        elif isinstance(value, ExpertMatrix):
            changed[name] = _with_tensors(value, function)
    return replace(held, **changed)
