"""Memory of a process: which NUMA node it comes from, and what stays allocated."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from collections.abc import Iterator

_MPOL_DEFAULT = 0
_MPOL_PREFERRED = 1
_M_MMAP_THRESHOLD = -3  # of malloc.h
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}


@contextlib.contextmanager
def prefer_node(node: int) -> Iterator[None]:
    """Pages that this thread touches inside come from `node` while that node has free memory.

    `node` < 0 or a kernel that refuses leaves the policy as it is: the kernel then
    places a page by its first touch, which is right as well when the process is bound to the node's CPUs.
    """
    active = node >= 0 and _set_mempolicy(_MPOL_PREFERRED, 1 << node)
    try:
        yield
    finally:
        if active:
            _set_mempolicy(_MPOL_DEFAULT, 0)


def _set_mempolicy(mode: int, mask: int) -> bool:
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    bits = ctypes.c_ulong(mask)
    pointer = ctypes.byref(bits) if mask else None
    return bool(libc.syscall(number, mode, pointer, ctypes.sizeof(bits) * 8) == 0)


def give_back_freed_memory() -> bool:
    """Have the C library return freed tensors of 1 MiB and more to the system at once.

    By itself glibc keeps freed blocks of up to 32 MiB for later: 0.7 GB in an attention worker of a 16 B
    model. Each block then has to be zeroed by the kernel again, which costs time (docs/performance.md has how
    much), so only plans that are short of memory ask for it.

    Returns:
        Whether the C library takes the setting.
    """
    try:
        return bool(ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20))
    except AttributeError:  # not glibc
        return False


def bound_compiled_products(*, tight: bool) -> None:
    """Bound what oneDNN keeps of compiled matrix products; a setting of the user's environment stays.

    For bfloat16 on a CPU torch has oneDNN compile a product for every new shape, that is, every length of
    row: about 0.6 MB and 0.2 to 0.5 ms each. Two caches keep 1,024 of them each, oneDNN's and, in front of
    it, torch's ideep's. A product that one drops may live on in the other, so memory can reach twice the
    bound. The second cache saves next to nothing where the first one hits, so it is cut. The first keeps its
    bound, 0.6 GB, since compiling in every step is slow in a small model; only for plans that are short of
    memory it is cut, to 80 MB.

    Both are read at a process's first such product: to be called before that.

    Args:
        tight: the plan is short of memory.
    """
    os.environ.setdefault("LRU_CACHE_CAPACITY", "64")
    if (
        tight and "DNNL_PRIMITIVE_CACHE_CAPACITY" not in os.environ
    ):  # its older name, which oneDNN reads as well
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")


def bind_to_cpus(cpus: tuple[int, ...]) -> None:
    """Restrict this process to `cpus` (those of them it may use), before anything is allocated."""
    allowed = set(cpus) & os.sched_getaffinity(0)
    if allowed:
        os.sched_setaffinity(0, allowed)
