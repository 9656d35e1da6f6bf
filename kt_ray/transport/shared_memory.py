"""Shared memory that one actor writes and its peers on the same node map, and the doorbell that tells them.

Each segment of an arena is an anonymous memory file (`memfd_create`): peers open it as
`/proc/<pid>/fd/<fd>`, so nothing ever lies in /dev/shm that a crash could leave behind, and the
container's /dev/shm limit does not apply. The object store would touch fresh pages for every
message; segments are reused, so their pages stay warm. Segments are sealed against a change of size, so
a mapping that was checked once can never lose its pages.

The doorbell carries small frames from actor to actor, past Ray. Every actor listens at one anonymous pipe,
which its peers open in the same way: no port, no file, and the kernel lets in processes of the same user and
PID namespace only. Writes of up to PIPE_BUF bytes are whole or do not happen (POSIX), so all peers share the
pipe, and one that is killed leaves no half of a frame. Ringing never waits and never raises: a frame that is
too large, finds the pipe full or nobody at its end is the caller's to send another way, in any order.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import mmap
import os
import secrets
import select
import stat
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kt_ray.gpu import PageLock
from kt_ray.timeline import name_thread

logger = logging.getLogger(__name__)

ALIGNMENT = 64  # bytes; torch's own CPU allocator aligns to this, and kernels may depend on it
MIN_SEGMENT = 1 << 20

Block = tuple[int, int, int]  # segment, offset, bytes


@dataclass(frozen=True)
class TensorRef:
    """Where a tensor lies: segment path, its inode and size, offset in bytes, dtype name, shape."""

    path: str
    inode: int
    segment_bytes: int
    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * int(getattr(torch, self.dtype).itemsize)


def _round_up(value: int, to: int) -> int:
    return (value + to - 1) // to * to


class _Segment:
    def __init__(self, size: int, name: str) -> None:
        self.size = _round_up(size, mmap.PAGESIZE)
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.size)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self.path = f"/proc/{os.getpid()}/fd/{self.fd}"
        self.inode = os.fstat(self.fd).st_ino
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
    """First-fit allocation over segments. Not thread-safe: one writer, its compute thread.

    The first segment is reserved at the start, as large as the plan says that messages get. More are made
    only if that is too little. Between passes everything is free again, so an arena is never larger than the
    pass that needed most made it: beyond what is reserved, twice that pass's bytes, and what first fit loses
    between blocks.

    Args:
        name: of the segments, as /proc shows them.
        lock: page-locks segments that hold pinned tensors.
    """

    def __init__(self, name: str, lock: PageLock | None = None) -> None:
        self._name = name
        self._lock = lock or PageLock()
        self._segments: list[_Segment] = []
        self._reserved = 0  # bytes

    def reserve(self, size: int, *, pinned: bool = False, resident: bool = False) -> TensorRef:
        """Make the first segment, before anything is allocated.

        Args:
            pinned: page-lock it for CUDA. resident: touch its pages, as a peer will page-lock them: they then
                lie on the node of this process.

        Returns:
            All of it, for peers.
        """
        assert not self._segments, "reserve() comes first"
        segment = self._new_segment(max(1, size))
        self._reserved = segment.size
        whole = _view(segment.map, 0, torch.uint8, (segment.size,))
        if resident:
            whole.zero_()
        if pinned:
            self._lock.register(_address(segment.map), segment.size)
        return TensorRef(segment.path, segment.inode, segment.size, 0, "uint8", tuple(whole.shape))

    def _new_segment(self, size: int) -> _Segment:
        segment = _Segment(size, f"kt_ray-{self._name}-{len(self._segments)}")
        self._segments.append(segment)
        return segment

    @property
    def bytes(self) -> int:
        return sum(segment.size for segment in self._segments)

    def alloc(
        self, shape: Sequence[int], dtype: torch.dtype, *, pinned: bool = False
    ) -> tuple[torch.Tensor, TensorRef, Block]:
        """Memory for a tensor: a view to fill, its reference for peers, and the block for `free`.

        Args:
            pinned: page-lock its segment for CUDA, if it is not yet.
        """
        shape = tuple(shape)
        size = max(ALIGNMENT, _round_up(math.prod(shape) * dtype.itemsize, ALIGNMENT))
        for index, segment in enumerate(self._segments):  # noqa: B007 (used after the loop)
            offset = segment.take(size)
            if offset is not None:
                break
        else:
            index = len(self._segments)
            # Doubling keeps the number of segments small whatever the sizes are.
            segment = self._new_segment(max(size, MIN_SEGMENT, self.bytes - self._reserved))
            offset = segment.take(size)
            assert offset is not None
        if pinned:
            self._lock.register(_address(segment.map), segment.size)
        name = str(dtype).removeprefix("torch.")
        ref = TensorRef(segment.path, segment.inode, segment.size, offset, name, shape)
        return _view(segment.map, offset, dtype, shape), ref, (index, offset, size)

    def write(self, tensor: torch.Tensor) -> tuple[TensorRef, Block]:
        """Copy a tensor in. Returns its reference and the block for `free`."""
        view, ref, block = self.alloc(tuple(tensor.shape), tensor.dtype)
        view.copy_(tensor)
        return ref, block

    def free(self, block: Block) -> None:
        index, offset, size = block
        self._segments[index].give(offset, size)

    def close(self) -> None:
        """Let go of the memory; it is gone when the last peer has unmapped it."""
        self._lock.close()
        for segment in self._segments:
            os.close(segment.fd)
        self._segments.clear()
        self._reserved = 0


class ArenaReader:
    """Maps peers' segments on first use and keeps them mapped. Any thread may read.

    Args:
        lock: page-lock what is mapped, for copies to CUDA; None = do not.
    """

    def __init__(self, lock: PageLock | None = None) -> None:
        self._lock = lock
        # Messages come in several threads: a segment mapped twice would stay page-locked after it is gone.
        self._mapping = threading.Lock()
        # By inode, too: a restarted peer may get the same process id and file number again.
        self._maps: dict[tuple[str, int], mmap.mmap] = {}

    def read(self, ref: TensorRef) -> torch.Tensor:
        """A tensor on the peer's memory: read it before the peer may reuse it.

        Raises:
            RuntimeError: the memory is gone, was replaced, or is smaller than the tensor needs.
        """
        with self._mapping:
            mapped = self._maps.get((ref.path, ref.inode))
            if mapped is None:
                mapped = self._maps[ref.path, ref.inode] = self._map(ref)
        if ref.offset < 0 or ref.offset + ref.nbytes > len(mapped):
            raise RuntimeError(
                f"a peer's message lies outside its shared memory {ref.path}: bytes {ref.offset} to "
                f"{ref.offset + ref.nbytes} of {len(mapped)}"
            )
        return _view(mapped, ref.offset, getattr(torch, ref.dtype), ref.shape)

    def _map(self, ref: TensorRef) -> mmap.mmap:
        try:
            fd = os.open(ref.path, os.O_RDWR)
        except OSError as error:
            raise RuntimeError(f"a peer's shared memory {ref.path} cannot be opened: {error}") from error
        try:
            status = os.fstat(fd)
            if status.st_ino != ref.inode:
                raise RuntimeError(f"{ref.path} is no longer the shared memory that a message lies in")
            if status.st_size < ref.segment_bytes:
                raise RuntimeError(
                    f"a peer's shared memory {ref.path} has {status.st_size} bytes, its message says "
                    f"{ref.segment_bytes}"
                )
            mapped = mmap.mmap(fd, ref.segment_bytes)
        finally:
            os.close(fd)
        if self._lock is not None:
            self._lock.register(_address(mapped), len(mapped))
        return mapped

    def forget(self) -> None:
        """Unmap everything (what tensors still show goes with them): peers may have been replaced."""
        with self._mapping:
            if self._lock is not None:
                self._lock.close()
            self._maps.clear()


def _address(mapped: mmap.mmap) -> int:
    return torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()


def _view(mapped: mmap.mmap, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=offset).view(shape)


PIPE_BYTES = 1 << 20  # some thousand frames; what an unprivileged user may have
_TOKEN_BYTES = 8
_LENGTH = struct.Struct("<I")
_HEAD = _TOKEN_BYTES + _LENGTH.size
FRAME_BYTES = select.PIPE_BUF - _HEAD  # the largest frame
_PATIENCE = 10.0  # seconds that `close` waits for the frame in progress


@dataclass(frozen=True)
class DoorbellAddress:
    """Where to ring: the pipe's path and inode, and what its frames begin with."""

    path: str
    inode: int
    token: bytes


class Doorbell:
    """Receives frames in its own thread until `close`.

    Args:
        take: called with each frame, in that thread.
        lost: called with the reason when a frame cannot be taken.
    """

    def __init__(self, take: Callable[[bytes], None], lost: Callable[[str], None]) -> None:
        self._take, self._lost = take, lost
        self._read, self._write = os.pipe2(os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # the user's share of pipes is used up: it stays small
            fcntl.fcntl(self._write, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        os.set_blocking(self._write, False)
        token = secrets.token_bytes(_TOKEN_BYTES)
        inode = os.fstat(self._write).st_ino
        self.address = DoorbellAddress(f"/proc/{os.getpid()}/fd/{self._write}", inode, token)
        self._closed = False
        self._thread = threading.Thread(target=self._listen, name="doorbell", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        name_thread("kt-doorbell")  # not the compute thread's name, which its CPU time is counted by
        rest = b""
        while not self._closed:
            data = rest + os.read(self._read, 1 << 16)
            begin = 0
            while not self._closed and len(data) - begin >= _HEAD:
                if not data.startswith(self.address.token, begin):
                    self._lost(
                        "a stranger rang its doorbell: a frame without its token "
                        f"({len(data) - begin} bytes dropped)"
                    )
                    begin = len(data)
                    break
                (size,) = _LENGTH.unpack_from(data, begin + _TOKEN_BYTES)
                end = begin + _HEAD + size
                if end > len(data):
                    break
                self._take_one(data[begin + _HEAD : end])
                begin = end
            rest = data[begin:]

    def _take_one(self, frame: bytes) -> None:
        try:
            self._take(frame)
        except Exception as error:  # nobody waits for this thread: the compute thread must hear of it
            logger.exception("a message was lost")
            self._lost(f"could not take a message: {type(error).__name__}: {error}")

    def close(self) -> None:
        """Stop listening. `Ringer.ring` then returns False."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(BlockingIOError):  # full: then the thread is about to read, and look
            os.write(self._write, b"\0" * _HEAD)
        self._thread.join(_PATIENCE)
        os.close(self._write)
        if not self._thread.is_alive():  # else it still uses it
            os.close(self._read)


class Ringer:
    """Rings one peer's doorbell. Not thread-safe.

    Raises:
        OSError: the peer cannot be reached this way: it is gone, another user's, or in another container.
    """

    def __init__(self, address: DoorbellAddress) -> None:
        self._fd = os.open(address.path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        status = os.fstat(self._fd)
        # A process id that was used again, or means somebody else here.
        if not stat.S_ISFIFO(status.st_mode) or status.st_ino != address.inode:
            os.close(self._fd)
            raise FileNotFoundError(f"{address.path} is not the peer's pipe")
        self._token = address.token

    @staticmethod
    def fits(frame: bytes) -> bool:
        """Whether a frame is small enough."""
        return len(frame) <= FRAME_BYTES

    def ring(self, frame: bytes) -> bool:
        """Whether the frame is in the peer's pipe; False = send it another way."""
        if not self.fits(frame):
            return False
        try:
            os.write(self._fd, self._token + _LENGTH.pack(len(frame)) + frame)
        except (BlockingIOError, BrokenPipeError):
            return False
        return True

    def close(self) -> None:
        os.close(self._fd)
