"""Memory for weights: huge pages where the kernel has them, and files in memory that others can map."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import mmap
import os
import re
import secrets
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SHARED_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_MADV_COLLAPSE = 25  # Linux 6.1; Python has no name for it
_MAP_FIXED = 0x10
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")  # the first line of one in smaps
_HUGE = ("AnonHugePages", "ShmemPmdMapped", "FilePmdMapped")  # in it
_inside = threading.local()  # .file: where `allocate` of this thread takes memory from


def allocate(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised, contiguous CPU tensor for weights: 2 MiB aligned, in huge pages where possible.

    A decoded panel touches as many rows of a matrix as it is wide, each in a page of its own where pages
    have 4 KiB: address translation then costs about a fifth of a backward pass. From 2 MiB on, tensors
    get a private mapping of their own that asks for huge pages (transparent_hugepage `madvise` or
    `always`; elsewhere it silently has normal ones); smaller ones are torch's. The memory goes back to
    the system with the last tensor that shares it. Within `allocating` it is a `MemoryFile`'s.

    NUMA: nothing is touched here. A page comes from the node that the memory policy of the first thread
    to write to it says, by default the node on which that thread runs.

    Args:
        shape: sizes, not negative.
        dtype: any torch type.

    Raises:
        MemoryError: no address space.
    """
    file: MemoryFile | None = getattr(_inside, "file", None)
    if file is not None:
        return file.allocate(shape, dtype)
    size = math.prod(shape) * dtype.itemsize
    if size < HUGE_PAGE:
        return torch.empty(*shape, dtype=dtype, device="cpu")
    try:
        # Untouched address space is free: room to begin on a boundary.
        mapping = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"cannot allocate {size} bytes for weights: {error.strerror}") from error
    start = -torch.frombuffer(mapping, dtype=torch.uint8).data_ptr() % HUGE_PAGE
    with contextlib.suppress(OSError, AttributeError):  # a kernel, or a Python, without it
        mapping.madvise(mmap.MADV_HUGEPAGE, start, size)
    return torch.frombuffer(mapping, dtype=torch.uint8, count=size, offset=start).view(dtype).view(*shape)


def in_huge_pages(tensor: Tensor) -> bool | None:
    """Whether most of the mapping that a tensor lies in has huge pages by now.

    None = it is smaller than one, or the kernel does not say.
    """
    if tensor.nbytes < HUGE_PAGE:
        return None
    address = tensor.data_ptr()
    sizes: dict[str, int] = {}
    inside = False
    with contextlib.suppress(OSError), open("/proc/self/smaps", encoding="ascii", errors="replace") as lines:
        for line in lines:
            if head := _MAPPING.match(line):
                if inside:
                    break
                inside = int(head[1], 16) <= address < int(head[2], 16)
            elif inside:
                name, _, value = line.partition(":")
                if value.endswith("kB\n"):
                    sizes[name] = int(value.split()[0])
    if not sizes.get("Rss"):
        return None
    return sum(sizes.get(name, 0) for name in _HUGE) * 2 >= sizes["Rss"]


class MemoryFile:
    """An anonymous file in memory that tensors lie in, for other processes of this host to map.

    Each tensor has a mapping of its own, at a multiple of the page size, or of 2 MiB from that size on; the
    file grows with them, and what lay there before is not used again. Not thread-safe.

    Args:
        name: begins the file's name.

    Attributes:
        name, path, inode: what another process opens, and by what it knows that this is it. The path lasts as
            long as this object and the tensors.
        size: bytes.
        huge: whether tensors of 2 MiB and more have huge pages, as far as the kernel has any left.
    """

    def __init__(self, name: str) -> None:
        # A name that no other file has: in another container the same path may be a stranger's.
        self.name = f"{name}-{secrets.token_hex(8)}"
        self._fd = os.memfd_create(self.name, os.MFD_CLOEXEC)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        self.inode = os.fstat(self._fd).st_ino
        self.size = 0
        self.huge = True
        self._process = os.getpid()  # a forked child has the file, too
        self._offsets: dict[int, int] = {}  # address of a live mapping -> where it begins in the file

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous CPU tensor of zeros in the file.

        Where the kernel gives shared memory huge pages by itself, nothing is touched here. Else (the setting
        shmem_enabled is `never`) Linux 6.1 and later make them here, under this thread's memory policy.

        Args:
            shape: sizes, not negative.
            dtype: any torch type.

        Raises:
            MemoryError: no address space.
        """
        size = math.prod(shape) * dtype.itemsize
        if size == 0:
            return torch.empty(*shape, dtype=dtype, device="cpu")
        unit = HUGE_PAGE if size >= HUGE_PAGE else mmap.PAGESIZE
        begin, whole = _up(self.size, unit), _up(size, mmap.PAGESIZE)
        try:
            os.ftruncate(self._fd, begin + whole)
            # A page is aligned anyway; what a boundary does not need would be one more area for the kernel.
            room = whole + unit - mmap.PAGESIZE
            mapping = _Mapping(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            start = _show(mapping, self._fd, begin, whole, unit)
        except OSError as error:
            raise MemoryError(f"cannot allocate {size} bytes for weights: {error.strerror}") from error
        self.size = begin + whole
        tensor = torch.frombuffer(mapping, dtype=torch.uint8, count=size, offset=start)
        mapping.start, mapping.shown, mapping.address, mapping.file = start, whole, tensor.data_ptr(), self
        self._offsets[mapping.address] = begin
        if size >= HUGE_PAGE:
            self.huge &= _make_huge(mapping, tensor, start)
        return tensor.view(dtype).view(*shape)

    def offset(self, tensor: Tensor) -> int | None:
        """Where a tensor, or a view of one, begins in the file, in bytes; None = it lies elsewhere."""
        begin = self._offsets.get(tensor.untyped_storage().data_ptr())
        return None if begin is None else begin + int(tensor.storage_offset()) * tensor.element_size()

    def forget(self, mapping: _Mapping) -> None:
        """The last tensor of a mapping is gone: its memory goes back, whoever else has mapped the file."""
        if os.getpid() != self._process:
            return
        del self._offsets[mapping.address]
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_REMOVE, mapping.start, mapping.shown)

    def __del__(self) -> None:
        os.close(self._fd)


class _Mapping(mmap.mmap):
    """Address space of one tensor of a file."""

    file: MemoryFile | None = None
    start = 0  # where the tensor begins, in bytes
    shown = 0  # bytes of the file
    address = 0  # of the tensor

    def __del__(self) -> None:
        if self.file is not None:
            self.file.forget(self)


@contextlib.contextmanager
def allocating(file: MemoryFile | None) -> Iterator[None]:
    """Inside, `allocate` of this thread takes memory from `file`; None = as ever."""
    before, _inside.file = getattr(_inside, "file", None), file
    try:
        yield
    finally:
        _inside.file = before


def map_whole(fd: int, size: int) -> Tensor:
    """The first `size` bytes of a file in memory, uint8, mapped at a multiple of 2 MiB: in huge pages where
    the file has them.

    Raises:
        OSError: no address space.
    """
    mapping = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = _show(mapping, fd, 0, size, HUGE_PAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8, count=size, offset=start)


def _show(mapping: mmap.mmap, fd: int, offset: int, size: int, unit: int) -> int:
    """Let a mapping show `size` bytes of the file, from an address on that is a multiple of `unit`.

    Returns where in the mapping.

    A mapping has huge pages only if its address and its place in the file are multiples of them, and Python
    has no way to say the address.

    Raises:
        OSError: the kernel refuses.
    """
    address = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
    start = -address % unit
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64)
    access, how = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    if libc.mmap(address + start, size, access, how, fd, offset) != address + start:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return start


def _make_huge(mapping: mmap.mmap, tensor: Tensor, start: int) -> bool:
    """Huge pages for a mapping of a file, of 2 MiB or more. Returns whether the kernel is willing."""
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE, start, tensor.numel())
        setting = SHARED_HUGE_PAGES.read_text(encoding="ascii")
        if "[never]" in setting or "[deny]" in setting:
            # Only root can change it, but anyone may ask for pages that are there to be put together.
            mapping.madvise(_MADV_COLLAPSE, start, 0)  # raises where there is no such call
            whole = tensor.numel() // HUGE_PAGE * HUGE_PAGE
            tensor[:whole:HUGE_PAGE] = 0
            mapping.madvise(_MADV_COLLAPSE, start, whole)
    except OSError as error:
        return error.errno in (errno.EAGAIN, errno.ENOMEM)  # none are left
    except AttributeError:  # a Python without it
        return False
    return True


def _up(value: int, to: int) -> int:
    return -(-value // to) * to
