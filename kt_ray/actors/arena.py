"""Shared memory that one actor writes and its peers on the same node map.

Each segment is an anonymous memory file (`memfd_create`): peers open it as
`/proc/<pid>/fd/<fd>`, so nothing ever lies in /dev/shm that a crash could leave behind, and the
container's /dev/shm limit does not apply. The object store would touch fresh pages for every
message; segments are reused, so their pages stay warm.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import torch

ALIGNMENT = 64  # bytes; torch's own CPU allocator aligns to this, and kernels may depend on it
MIN_SEGMENT = 1 << 20


@dataclass(frozen=True)
class TensorRef:
    """Where a tensor lies: segment path, segment size and offset in bytes, dtype name, shape."""

    path: str
    segment_bytes: int
    offset: int
    dtype: str
    shape: tuple[int, ...]


def _round_up(value: int, to: int) -> int:
    return (value + to - 1) // to * to


class _Segment:
    def __init__(self, size: int, name: str) -> None:
        self.size = _round_up(size, mmap.PAGESIZE)
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC)
        os.ftruncate(self.fd, self.size)
        self.path = f"/proc/{os.getpid()}/fd/{self.fd}"
        self.map = mmap.mmap(self.fd, self.size)
        self.free: list[tuple[int, int]] = [(0, self.size)]  # (offset, bytes), sorted, coalesced

    def take(self, size: int) -> int | None:
        for i, (offset, length) in enumerate(self.free):
            if length >= size:
                if length == size:
                    del self.free[i]
                else:
                    self.free[i] = (offset + size, length - size)
                return offset
        return None

    def give(self, offset: int, size: int) -> None:
        merged: list[tuple[int, int]] = []
        for start, length in sorted([*self.free, (offset, size)]):
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self.free = merged


class Arena:
    """First-fit allocation over growing segments. Not thread-safe: one writer, its compute thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._segments: list[_Segment] = []

    @property
    def bytes(self) -> int:
        return sum(segment.size for segment in self._segments)

    def write(self, tensor: torch.Tensor) -> tuple[TensorRef, tuple[int, int, int]]:
        """Copy a tensor in. Returns its reference and the block (segment, offset, bytes) for `free`."""
        size = max(ALIGNMENT, _round_up(tensor.numel() * tensor.element_size(), ALIGNMENT))
        for index, segment in enumerate(self._segments):  # noqa: B007 (used after the loop)
            offset = segment.take(size)
            if offset is not None:
                break
        else:
            index = len(self._segments)
            # Doubling keeps the number of segments small whatever the sizes are.
            segment = _Segment(max(size, MIN_SEGMENT, self.bytes), f"kt_ray-{self._name}-{index}")
            self._segments.append(segment)
            offset = segment.take(size)
            assert offset is not None
        if tensor.numel():
            view = _view(segment.map, offset, tensor.dtype, tuple(tensor.shape))
            view.copy_(tensor)
        ref = TensorRef(
            segment.path, segment.size, offset, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        )
        return ref, (index, offset, size)

    def free(self, block: tuple[int, int, int]) -> None:
        index, offset, size = block
        self._segments[index].give(offset, size)


class ArenaReader:
    """Maps peers' segments on first use and keeps them mapped."""

    def __init__(self) -> None:
        self._maps: dict[str, mmap.mmap] = {}

    def forget(self) -> None:
        """Unmap everything (what tensors still show goes with them): peers may have been replaced."""
        self._maps.clear()

    def read(self, ref: TensorRef) -> torch.Tensor:
        """A tensor on the peer's memory: read it before the peer may reuse it."""
        mapped = self._maps.get(ref.path)
        if mapped is None:
            fd = os.open(ref.path, os.O_RDWR)
            try:
                mapped = mmap.mmap(fd, ref.segment_bytes)
            finally:
                os.close(fd)
            self._maps[ref.path] = mapped
        return _view(mapped, ref.offset, getattr(torch, ref.dtype), ref.shape)


def _view(mapped: mmap.mmap, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    count = 1
    for extent in shape:
        count *= extent
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=offset).view(shape)
