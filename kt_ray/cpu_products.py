"""torch's products of bfloat16 matrices on a CPU where torch has no fast ones.

oneDNN multiplies bfloat16 from AVX-512 on. On older CPUs torch's own loops do, at 0.3 to 20 GFLOP/s where
float32 has 140 (benchmarks/cpu_products.py). So there the operands are widened to float32, block by block,
and the products rounded once: what bfloat16 products with float32 sums are, added up in another order.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

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
        for name, kernel in {"mm": mm, "addmm": addmm, "bmm": bmm, "baddbmm": baddbmm}.items():
            _library.impl(name, kernel, "CPU")


def _product(torchs: Any, dims: int) -> Callable[[Tensor, Tensor], Tensor]:
    """torch's own product of two matrices (dims 2) or two batches of them (3), bfloat16 widened."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        if _widened(a, b, dims):
            return _rounded(a, b)
        made: Tensor = torchs.out(a, b, out=_result(a, b))
        return made

    return product


def _sum(torchs: Any, dims: int) -> Callable[..., Tensor]:
    """The same of torch's own beta c + alpha a b."""

    def added(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        if _widened(a, b, dims) and c.dtype == a.dtype:
            return _rounded(a, b, c, beta, alpha)
        made: Tensor = torchs.out(c, a, b, beta=beta, alpha=alpha, out=_result(a, b))
        return made

    return added


mm, bmm = _product(_aten.mm, 2), _product(_aten.bmm, 3)
addmm, baddbmm = _sum(_aten.addmm, 2), _sum(_aten.baddbmm, 3)


def _widened(a: Tensor, b: Tensor, dims: int) -> bool:
    """What torch refuses is left to it."""
    if not a.dtype == b.dtype == torch.bfloat16 or not a.dim() == b.dim() == dims:
        return False
    if a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2]:
        return False
    return a.shape[-2] >= _FEW_ROWS or b.stride(-2) != 1


def _result(a: Tensor, b: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=dtype)


def _rounded(a: Tensor, b: Tensor, c: Tensor | None = None, beta: float = 1, alpha: float = 1) -> Tensor:
    """A product, or one of a batch, in blocks that are small enough."""
    if max(a.numel(), b.numel(), a.numel() // max(1, a.shape[-1]) * b.shape[-1]) <= _BLOCK:
        return _sums(a, b, c, beta, alpha).bfloat16()
    out = _result(a, b)
    c = None if c is None else c.expand_as(out)
    if a.dim() == 3:
        for i in range(len(a)):
            out[i] = _rounded(a[i], b[i], None if c is None else c[i], beta, alpha)
        return out
    width = max(_WIDTH, _BLOCK // max(1, a.shape[1]))
    for rows in _blocks(len(a), width):
        x = a[rows].float()
        for columns in _blocks(b.shape[1], width):
            some = None if c is None else c[rows, columns]
            out[rows, columns] = _sums(x, b[:, columns], some, beta, alpha)
    return out


def _sums(a: Tensor, b: Tensor, c: Tensor | None, beta: float, alpha: float) -> Tensor:
    """The same in float32, all at once."""
    out = _result(a, b, torch.float32)
    if c is None:
        plain = _aten.mm if a.dim() == 2 else _aten.bmm
        return plain.out(a.float(), b.float(), out=out)
    added = _aten.addmm if a.dim() == 2 else _aten.baddbmm
    return added.out(c.float(), a.float(), b.float(), beta=beta, alpha=alpha, out=out)


def _blocks(count: int, size: int) -> Iterator[slice]:
    for begin in range(0, count, size):
        yield slice(begin, min(count, begin + size))
