"""Memory for weights: huge pages where the kernel has them."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20


def allocate(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised, contiguous CPU tensor for weights: 2 MiB aligned, in huge pages where possible.

    A decoded panel touches as many rows of a matrix as it is wide, each in a page of its own where pages
    have 4 KiB: address translation then costs about a fifth of a backward pass. From 2 MiB on, tensors
    get a private mapping of their own that asks for huge pages (transparent_hugepage `madvise` or
    `always`; elsewhere it silently has normal ones); smaller ones are torch's. The memory goes back to
    the system with the last tensor that shares it.

    NUMA: nothing is touched here. A page comes from the node that the memory policy of the first thread
    to write to it says, by default the node on which that thread runs.

    Args:
        shape: sizes, not negative.
        dtype: any torch type.

    Raises:
        MemoryError: no address space.
    """
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
