"""Values of random weights: bytes drawn once into a pool per kind, from which each tensor takes its own.

A value depends on the seed, the tensor's name and the place in the tensor, not on shards or on how much is
read at once. So a checkpoint of holes that are filled while reading (`kt_ray.tools random --sparse`) has the
values of one that is written out. They are about N(0, 0.02), as in a freshly initialised model.
"""

from __future__ import annotations

import ctypes
import math
import threading
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

STD = 0.02
POOL = (1 << 22) - 3  # elements; odd, so that the rows of a long matrix do not repeat
# What one step of a code is worth, so that the values have STD.
FP8_STEP, INT8_STEP, INT4_STEP, MXFP4_EXPONENT = STD / 64, STD / 32, STD / 3, 120  # 2^-7


class Fill(NamedTuple):
    """Where a tensor's values come from. start: its first byte in its file."""

    kind: str
    seed: int
    start: int

    @classmethod
    def parse(cls, text: str, start: int) -> Fill:
        """What a file's header says, "KIND:SEED". Raises ValueError."""
        kind, _, seed = text.partition(":")
        if kind not in _DRAW:
            raise ValueError(f"unknown fill {text!r}")
        return cls(kind, int(seed), start)

    def pieces(self, name: str, element: int, start: int, nbytes: int) -> Iterator[Tensor]:
        """The bytes of a tensor, or of a part of it, piece by piece.

        Args:
            name: of the tensor.
            element: bytes of an element.
            start: where the part lies in the file, in bytes; whole elements from the tensor's beginning.
        """
        pool = _pool(self.kind, self.seed)
        first = zlib.crc32(f"{self.seed}:{name}".encode()) + (start - self.start) // element
        place = first % (len(pool) // element) * element
        while nbytes:
            piece = pool[place : place + nbytes]
            yield piece
            nbytes -= len(piece)
            place = 0

    def into(self, view: memoryview, name: str, element: int, start: int) -> None:
        """`pieces` into memory; other threads of the interpreter run meanwhile."""
        if not view:
            return
        target = ctypes.addressof(ctypes.c_char.from_buffer(view))
        for piece in self.pieces(name, element, start, len(view)):
            # Not copy_: readers are threads already, and torch's own would spin against them.
            ctypes.memmove(target, piece.data_ptr(), len(piece))
            target += len(piece)


_drawing = threading.Lock()


def _pool(kind: str, seed: int) -> Tensor:
    """Drawn once, however many readers ask for it at the same time."""
    with _drawing:
        return _drawn(kind, seed)


@cache
def _drawn(kind: str, seed: int) -> Tensor:
    return _DRAW[kind](POOL, torch.Generator().manual_seed(seed)).contiguous().view(torch.uint8)


def _normal(count: int, generator: torch.Generator, step: float, limit: float) -> Tensor:
    """N(0, STD) in steps of `step`, float32, clamped to ± limit steps."""
    return torch.randn(count, generator=generator).mul_(STD / step).clamp_(-limit, limit)


def _around(value: float, dtype: torch.dtype) -> Callable[[int, torch.Generator], Tensor]:
    """Scales within a fifth of `value`."""
    return lambda count, generator: (torch.rand(count, generator=generator) * 0.4 + 0.8).mul_(value).to(dtype)


def _int4(count: int, generator: torch.Generator) -> Tensor:
    """Two codes a byte."""
    codes = _normal(2 * count, generator, INT4_STEP, 7.0).round_().add_(8).to(torch.uint8)
    return codes[0::2] | codes[1::2] << 4


def _mxfp4(count: int, generator: torch.Generator) -> Tensor:
    """Two E2M1 codes a byte; of the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 the nearest one."""
    values = _normal(2 * count, generator, 2.0 ** (MXFP4_EXPONENT - 127), 6.0)
    bounds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    codes = (
        torch.bucketize(values.abs(), bounds, right=True).to(torch.uint8) | (values < 0).to(torch.uint8) << 3
    )
    return codes[0::2] | codes[1::2] << 4


_DRAW: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "normal": lambda count, generator: _normal(count, generator, 1.0, math.inf).bfloat16(),
    "fp8": lambda count, generator: _normal(count, generator, FP8_STEP, 448.0).to(torch.float8_e4m3fn),
    "int8": lambda count, generator: _normal(count, generator, INT8_STEP, 127.0).round_().to(torch.int8),
    "int4": lambda count, generator: _int4(4 * count, generator),  # eight codes an int32
    "mxfp4": _mxfp4,
    "fp8_scales": _around(FP8_STEP, torch.float32),
    "int8_scales": _around(INT8_STEP, torch.bfloat16),
    "int4_scales": _around(INT4_STEP, torch.bfloat16),
    "mxfp4_scales": lambda count, generator: torch.full((count,), MXFP4_EXPONENT, dtype=torch.uint8),
    "ones": lambda count, generator: torch.ones(count, dtype=torch.bfloat16),
    "zeros": lambda count, generator: torch.zeros(count * 2, dtype=torch.bfloat16),  # also float32
}
