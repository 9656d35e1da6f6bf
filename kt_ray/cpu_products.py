"""torch's products of bfloat16 matrices on a CPU where torch has no fast ones.

oneDNN multiplies bfloat16 from AVX-512 on. On older CPUs torch's own loops do, at 0.3 to 20 GFLOP/s where
float32 has 170 (benchmarks/cpu_products.py). So there the operands are widened to float32, block by block,
and the products rounded once: what bfloat16 products with float32 sums are, added up in another order.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

_aten = torch.ops.aten
_BLOCK = 1 << 20  # elements that are widened at a time: 4 MiB, which a last-level cache holds
_WIDTH = 64  # columns that a block has at least
# With fewer rows than that, reading the other operand once is all there is to do, and torch's loop over the
# contraction does it well if the operand lies along that.
_FEW_ROWS = 8

_library: torch.library.Library | None = None  # registered as long as this lives


def multiplies_bfloat16() -> bool:
    """Whether torch has fast products of bfloat16 on this CPU."""
    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def widen_products() -> None:
    """Widen bfloat16 products of CPU tensors in this process from now on, if torch has no fast ones."""
    global _library
    if _library is not None or multiplies_bfloat16():
        return
    _library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that kernels are replaced
        for product in (mm, addmm, bmm, baddbmm):
            _library.impl(product.__name__, product, "CPU")


def mm(a: Tensor, b: Tensor) -> Tensor:
    """a [n, k] b [k, m]: as torch.mm."""
    out = a.new_empty((a.shape[0], b.shape[1]))
    return _products(out, a, b) if _widened(a, b) else _aten.mm.out(a, b, out=out)


def addmm(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta c + alpha a b: as torch.addmm."""
    out = a.new_empty((a.shape[0], b.shape[1]))
    if not _widened(a, b) or c.dtype != a.dtype:
        return _aten.addmm.out(c, a, b, beta=beta, alpha=alpha, out=out)
    return _products(out, a, b, c.expand_as(out), beta, alpha)


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """a [B, n, k] b [B, k, m]: as torch.bmm."""
    out = a.new_empty((*a.shape[:2], b.shape[2]))
    return _batches(out, a, b) if _widened(a, b) else _aten.bmm.out(a, b, out=out)


def baddbmm(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta c + alpha a b of every matrix of a batch: as torch.baddbmm."""
    out = a.new_empty((*a.shape[:2], b.shape[2]))
    if not _widened(a, b) or c.dtype != a.dtype:
        return _aten.baddbmm.out(c, a, b, beta=beta, alpha=alpha, out=out)
    return _batches(out, a, b, c.expand_as(out), beta, alpha)


def _widened(a: Tensor, b: Tensor) -> bool:
    """What torch refuses is left to it."""
    if not a.dtype == b.dtype == torch.bfloat16 or a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2]:
        return False
    return a.shape[-2] >= _FEW_ROWS or b.stride(-2) != 1


def _products(
    out: Tensor, a: Tensor, b: Tensor, c: Tensor | None = None, beta: float = 1, alpha: float = 1
) -> Tensor:
    depth = max(1, a.shape[1])
    for rows in _blocks(len(a), max(_WIDTH, _BLOCK // depth)):
        x = a[rows].float()
        for columns in _blocks(b.shape[1], max(_WIDTH, _BLOCK // depth)):
            w = b[:, columns].float()
            y = x.new_empty((x.shape[0], w.shape[1]))
            if c is None:
                _aten.mm.out(x, w, out=y)
            else:
                _aten.addmm.out(c[rows, columns].float(), x, w, beta=beta, alpha=alpha, out=y)
            out[rows, columns] = y
    return out


def _batches(
    out: Tensor, a: Tensor, b: Tensor, c: Tensor | None = None, beta: float = 1, alpha: float = 1
) -> Tensor:
    largest = max(1, *(tensor[0].numel() for tensor in (a, b, out))) if len(out) else 1
    if largest > _BLOCK:  # one by one, in blocks
        for i in range(len(out)):
            _products(out[i], a[i], b[i], None if c is None else c[i], beta, alpha)
        return out
    for some in _blocks(len(out), _BLOCK // largest):
        x, w = a[some].float(), b[some].float()
        y = x.new_empty((*x.shape[:2], w.shape[2]))
        if c is None:
            _aten.bmm.out(x, w, out=y)
        else:
            _aten.baddbmm.out(c[some].float(), x, w, beta=beta, alpha=alpha, out=y)
        out[some] = y
    return out


def _blocks(count: int, size: int) -> Iterator[slice]:
    for begin in range(0, count, size):
        yield slice(begin, min(count, begin + size))
