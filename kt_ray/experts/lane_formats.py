"""Matrices of experts as numbers on the lane's device, out of the bytes that their checkpoint stores.

Values are those of docs/numerics.md: the format's own definition in float32, by the same operations as the
engine's decoders, so the same float32 numbers. `kt_ray.native.matrix` has them for formats with separate
scales; the blocks of GGUF types, which its reference takes apart with numpy, are taken apart here in torch,
which also works on a GPU. E experts, N rows, K columns, B blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kt_ray.native.matrix import GGUF_BLOCKS, dequantize


def matrix_values(
    format: str, data: Tensor, scales: Tensor | None, shape: tuple[int, int], block: tuple[int, int]
) -> Tensor:
    """Values [E, N, K] in float32 of matrices in any quantised format, on the device of `data`.

    Args:
        format: one of `kt_ray.native.matrix.FORMATS`.
        data: [E, N, ...] as `ExpertMatrix.data`. scales: as `ExpertMatrix.scales`; None for GGUF types.
        shape: (N, K). block: as `ExpertMatrix.scale_block`.
    """
    if scales is not None:
        return dequantize(format, data, scales, (len(data), *shape), block)
    size = GGUF_BLOCKS[format][1]
    return _GGUF[format](data.reshape(-1, size)).reshape(len(data), *shape)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The half-precision number at byte `at` of every block, [B, 1] float32."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """[B, n, m] bytes to [B, n, 2, m]: all low halves, then all high ones."""
    return torch.stack((packed & 15, packed >> 4), -2)


def _bits(packed: Tensor) -> Tensor:
    """[B, n] bytes to [B, n, 8], lowest bit first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(-1) >> shifts) & 1


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float() * _half(blocks, 0)


def _q4_0(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, 2:].unsqueeze(1)).flatten(1)
    return _half(blocks, 0) * (codes.float() - 8)


def _five_bits(blocks: Tensor, at: int) -> Tensor:
    """Codes [B, 32]: fifth bits in 4 bytes from `at`, nibbles in the 16 after them."""
    high = _bits(blocks[:, at : at + 4]).flatten(1)
    return _nibbles(blocks[:, at + 4 :].unsqueeze(1)).flatten(1) | high << 4


def _q5_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_five_bits(blocks, 2).float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _five_bits(blocks, 4).float() + _half(blocks, 2)


def _scaled_k(blocks: Tensor, codes: Tensor) -> Tensor:
    """d s q - m_d m of codes [B, 8, 32]: s and m of six bits, packed into the 12 bytes from the fourth."""
    packed = blocks[:, 4:16]
    low, mid, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    s = torch.cat((low & 63, high & 15 | (low >> 2) & 48), 1).float()
    m = torch.cat((mid & 63, high >> 4 | (mid >> 2) & 48), 1).float()
    factor, offset = _half(blocks, 0) * s, _half(blocks, 2) * m
    return factor.unsqueeze(-1) * codes.float() - offset.unsqueeze(-1)


def _q4_k(blocks: Tensor) -> Tensor:
    return _scaled_k(blocks, _nibbles(blocks[:, 16:].unflatten(1, (4, 32))).flatten(1, 2))


def _q5_k(blocks: Tensor) -> Tensor:
    high = _bits(blocks[:, 16:48]).mT  # [B, 8, 32]: bit j belongs to the j-th 32 elements
    return _scaled_k(blocks, _nibbles(blocks[:, 48:].unflatten(1, (4, 32))).flatten(1, 2) | high << 4)


def _q6_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, :128].unflatten(1, (2, 64))).reshape(-1, 8, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    high = ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3).reshape(-1, 8, 32)
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    codes = (low | high << 4).float() - 32
    return (_half(blocks, 208) * scales).unsqueeze(-1) * codes.reshape(-1, 16, 16)


_GGUF: dict[str, Callable[[Tensor], Tensor]] = {
    "q8_0": _q8_0,
    "q4_0": _q4_0,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
}
