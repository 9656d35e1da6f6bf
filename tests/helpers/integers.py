"""Test data out of integers alone: the same bits on every machine.

torch's own `randn` and `uniform_` round differently with its instruction set (torch.backends.cpu); numpy
promises the raw output of its bit generators, and what follows here is exact or rounds once.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def integers(name: str, shape: Sequence[int], below: int) -> Tensor:
    """int64 in [0, below), below <= 2**32: a pure function of the arguments."""
    raw = np.random.PCG64(zlib.crc32(name.encode())).random_raw(int(np.prod(shape)))
    return torch.from_numpy((raw >> 32).astype(np.int64) % below).view(*shape)


def uniform(name: str, shape: Sequence[int], bound: float = 1.0) -> Tensor:
    """float32, even in [-bound, bound): multiples of 2**-23, times `bound` rounded to float32."""
    return (integers(name, shape, 1 << 24) - (1 << 23)).to(torch.float32) * 2.0**-23 * bound
