"""A linear module whose frozen weight stays as the checkpoint stores it.

The weight is dequantised at each use, forward and backward, to the type of the input: it exists in full
only while it is multiplied with. The numbers are those of a module that was dequantised when loaded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kt_ray.native import ExpertMatrix
from kt_ray.native.matrix import dequantize


def dequantized(matrix: ExpertMatrix, device: torch.device | str) -> Tensor:
    """Float32 values [E, N, K] of a matrix with scales, computed on `device`."""
    assert matrix.scales is not None, "checkpoints of this project's formats have scales"
    return dequantize(
        matrix.format, matrix.data.to(device), matrix.scales.to(device), matrix.shape, matrix.scale_block
    )


class QuantizedLinear(nn.Linear):
    """y = x Wᵀ + b with W [N, K] kept quantised and frozen.

    Args:
        matrix: W as a stack of one, [1, N, K]: fp8, mxfp4, int8 or int4.
        dtype: of `weight`, when something asks for the weight itself.
        device: where it is held.
    """

    values: Tensor  # bytes (int4: words) as stored
    scales: Tensor  # as stored, [blocks of rows, blocks of columns]

    def __init__(self, matrix: ExpertMatrix, dtype: torch.dtype, device: torch.device | str) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would make a weight
        assert matrix.scales is not None
        _, self.out_features, self.in_features = matrix.shape
        self.format, self.block, self.dtype = matrix.format, matrix.scale_block, dtype
        # as integers, which Module.float() and the like leave alone
        data = matrix.data if matrix.data.dtype == torch.int32 else matrix.data.view(torch.uint8)
        self.register_buffer("values", data[0].to(device), persistent=False)
        self.register_buffer("scales", matrix.scales[0].to(device), persistent=False)
        self.register_parameter("bias", None)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """W [N, K] dequantised: for whoever multiplies with it himself."""
        return self.dequantize(self.dtype)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """W [N, K] in `dtype`."""
        types = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
        values = self.values.view(types.get(self.format, self.values.dtype))
        shape = (1, self.out_features, self.in_features)
        return dequantize(self.format, values[None], self.scales[None], shape, self.block)[0].to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N] in the type of x."""
        y: Tensor = _Multiply.apply(x, self)
        return y

    def input_gradient(self, dy: Tensor, rows: slice = slice(None)) -> Tensor:
        """dy W[rows] [M, K] of the gradient dy [M, rows] at the output, in its type."""
        return dy @ self.dequantize(dy.dtype)[rows]


class _Multiply(torch.autograd.Function):
    """Keeps no weight for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: QuantizedLinear) -> Tensor:
        ctx.linear = linear
        return nn.functional.linear(x, linear.dequantize(x.dtype), linear.bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (dy,) = grads
        dx = ctx.linear.input_gradient(dy.reshape(-1, dy.shape[-1]))
        return dx.view(*dy.shape[:-1], dx.shape[1]), None
