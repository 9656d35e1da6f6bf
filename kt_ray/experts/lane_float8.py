"""Matrices rounded to FP8 for the lane's products (rule.experts.gpu_products=float8): docs/numerics.md."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kt_ray.gpu import driver

KIND = torch.float8_e4m3fn
LARGEST = 448.0  # of its values
# Cards' FP8 products want as many columns of both operands, and rows of the second (torch._scaled_mm).
MULTIPLE = 16
_LEAST = torch.tensor(torch.finfo(torch.float32).tiny)


class Rounded(NamedTuple):
    """values [..., rows, k] in FP8, row by row; scale [..., rows] float32, by which each row is to be
    multiplied."""

    values: Tensor
    scale: Tensor


def multiplies(inner: int, outer: int) -> bool:
    """Whether FP8 products of such a shape exist: [n, inner] by [inner, outer]; others stay in bfloat16.

    The same on every device, so that a stand-in computes what a card does.
    """
    return inner % MULTIPLE == 0 and outer % MULTIPLE == 0


def rounded(matrix: Tensor) -> Rounded:
    """A matrix [..., rows, k] in FP8, every row by its own scale: its largest magnitude becomes 448.

    A row of zeros stays one. A row with an infinity or NaN becomes NaN throughout.
    """
    largest = torch.linalg.vector_norm(matrix, ord=torch.inf, dim=-1, dtype=torch.float32)
    # The least normal number more, which only shows where a scale would be 0 or flushed to it; in one kernel.
    scale = torch.add(_LEAST, largest, alpha=1 / LARGEST)
    values = torch.empty(matrix.shape, dtype=KIND, device=matrix.device)
    torch.div(matrix, scale.unsqueeze(-1), out=values)  # one pass, which also turns a transposed one around
    return Rounded(values, scale)


def product8(a: Rounded, b: Rounded) -> Tensor:
    """a [B, n, k] by the transposed b [B, m, k]: [B, n, m] float32 that was rounded to bfloat16."""
    return driver().product8(a.values, a.scale, b.values, b.scale)
