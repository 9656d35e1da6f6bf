"""Weights and LoRA of one expert actor, read by attention workers of its host where they lie.

The actor keeps them in anonymous files in memory (`kt_ray.native.MemoryFile`): one for the weights and the
LoRA that is trained, one for each copy of the LoRA that it keeps. It exports where in its file each tensor
begins; a worker opens the export and has the same tensors on its own mappings of the same pages. So a worker
sees every update of the LoRA, without a message, and a new copy needs no new mapping of the weights.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
class ExportedFile:
    """A file in memory: what another process opens, by what it knows that this is it, and its bytes."""

    path: str
    name: str
    inode: int
    size: int


@dataclass(frozen=True)
class ExportedExperts:
    """What another process of the host needs to read an actor's experts. Picklable, without any weights.

    Attributes:
        rank: of the actor.
        files: that of weights and trained LoRA, then those of kept copies and of copies not needed now.
        weights: MoE layer -> global ids in local order, and what the engine computes from.
        adapters: True and the names of kept ones -> number of the file, MoE layer -> LoRA of those experts.
    """

    rank: int
    files: tuple[ExportedFile, ...]
    weights: Mapping[int, tuple[tuple[int, ...], Laid]]
    adapters: Mapping[Adapter, tuple[int, Mapping[int, Laid]]]


def put_into(file: MemoryFile, weights: ExpertWeights) -> ExpertWeights:
    """The same weights, with a copy in the file of each tensor that lies elsewhere (small ones: biases)."""

    def put(tensor: Tensor) -> Tensor:
        if file.offset(tensor) is not None:
            return tensor
        return file.allocate(tensor.shape, tensor.dtype).copy_(tensor)

    placed: ExpertWeights = _with_tensors(weights, put)
    return placed


def export_experts(
    files: Sequence[MemoryFile],
    rank: int,
    weights: Mapping[int, tuple[tuple[int, ...], ExpertWeights]],
    adapters: Mapping[Adapter, tuple[MemoryFile, Mapping[int, ExpertLora]]],
) -> ExportedExperts:
    """Where these tensors lie, all of them in their file; arguments as the fields of `ExportedExperts`."""
    return ExportedExperts(
        rank,
        tuple(ExportedFile(file.path, file.name, file.inode, file.size) for file in files),
        {layer: (ids, _laid(files[0], own)) for layer, (ids, own) in weights.items()},
        {
            name: (files.index(file), {layer: _laid(file, own) for layer, own in of.items()})
            for name, (file, of) in adapters.items()
        },
    )


class OpenFile:
    """A file of an actor, on a mapping of this process.

    Args:
        file: of expert actor `rank`. extents: as `_extents` gives them, of what lies in it.

    Attributes:
        memory: uint8, the whole file.
        parts: the whole of it in pieces of whole pages, PART or more bytes each, that no layer lies across.

    Raises:
        RuntimeError: as `OpenExperts`.
    """

    def __init__(self, file: ExportedFile, rank: int, extents: Iterable[tuple[int, int]]) -> None:
        self.memory = _mapped(file, rank)
        self.parts = _parts(self.memory, extents)
        self._resident = 0

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


class OpenExperts:
    """An actor's experts, as tensors on this process's mappings of their memory: to be read, never written.

    Args:
        exported: of the actor.
        known: files that this process has open.

    Attributes:
        files: one or more; all tensors are views of their memory.
        weights: MoE layer -> global ids in local order, and their weights; in the first file.
        adapters: True and the names of kept ones -> MoE layer -> LoRA.

    Raises:
        RuntimeError: the memory is gone, is another's, or is smaller than the export says.
    """

    def __init__(
        self, exported: ExportedExperts, known: Mapping[ExportedFile, OpenFile] | None = None
    ) -> None:
        self.exported, known = exported, known or {}
        self.files: dict[ExportedFile, OpenFile] = {
            file: known.get(file) or OpenFile(file, exported.rank, _extents(exported, number))
            for number, file in enumerate(exported.files)
        }
        memories = [opened.memory for opened in self.files.values()]
        self.weights: dict[int, tuple[tuple[int, ...], ExpertWeights]] = {
            layer: (ids, _opened(laid, memories[0])) for layer, (ids, laid) in exported.weights.items()
        }
        self.adapters: dict[Adapter, dict[int, ExpertLora]] = {
            name: {layer: _opened(laid, memories[number]) for layer, laid in of.items()}
            for name, (number, of) in exported.adapters.items()
        }

    @property
    def of_weights(self) -> ExportedFile:
        """The file that the weights lie in."""
        return self.exported.files[0]

    @property
    def resident_bytes(self) -> int:
        """What of the mappings counts as this process's resident memory."""
        return sum(opened.resident_bytes for opened in self.files.values())


def _parts(memory: Tensor, extents: Iterable[tuple[int, int]]) -> list[Tensor]:
    cuts, reached = [0], 0
    for begin, end in sorted(extents):
        if begin >= max(reached, cuts[-1] + PART) and begin % mmap.PAGESIZE == 0:
            cuts.append(begin)
        reached = max(reached, end)
    ends = [*cuts[1:], memory.numel()]
    return [memory[begin:end] for begin, end in zip(cuts, ends, strict=True)]


def _extents(exported: ExportedExperts, number: int) -> Iterator[tuple[int, int]]:
    """Of the actor's file of that number: first byte of every layer's weights, and of every layer's LoRA, and
    the one after its last. What lies together there may be copied at once."""

    def of(place: Any) -> Iterator[tuple[int, int]]:
        if isinstance(place, Laid):
            for _, value in place.fields:
                yield from of(value)
        elif isinstance(place, TensorPlace):
            dtype: torch.dtype = getattr(torch, place.dtype)
            last = sum((n - 1) * step for n, step in zip(place.shape, place.stride, strict=True))
            yield place.offset, place.offset + (last + 1) * dtype.itemsize

    layers = [weights for _, weights in exported.weights.values()] if number == 0 else []
    for file, adapter in exported.adapters.values():
        layers += adapter.values() if file == number else ()
    for layer in layers:
        begins, ends = zip(*of(layer), strict=True)
        yield min(begins), max(ends)


def _mapped(file: ExportedFile, rank: int) -> Tensor:
    path, whose = file.path, f"memory of expert actor {rank}'s weights"
    try:
        fd = os.open(path, os.O_RDWR)
    except OSError as error:
        raise RuntimeError(f"the {whose}, {path}, cannot be opened: {error.strerror}") from error
    try:
        status, found = os.fstat(fd), os.readlink(f"/proc/self/fd/{fd}")
        if status.st_ino != file.inode or not found.startswith(f"/memfd:{file.name}"):
            raise RuntimeError(f"{path} is no longer the {whose}: it is {found}")
        if status.st_size < file.size:
            raise RuntimeError(
                f"the {whose}, {path}, has {status.st_size} bytes, its export says {file.size}"
            )
        return map_whole(fd, file.size)
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
