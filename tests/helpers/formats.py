"""Stored matrices for tests: random bytes, or random values quantised."""

from __future__ import annotations

import torch
from torch import Tensor

from kt_ray.native.matrix import FORMATS, GGUF_BLOCKS, ExpertMatrix

__all__ = ["FORMATS", "GGUF_BLOCKS", "random_matrix"]


def random_matrix(
    format: str,
    shape: tuple[int, int, int],
    generator: torch.Generator,
    *,
    block: tuple[int, int] | None = (128, 128),
    group: int | None = None,
    scales: torch.dtype = torch.float32,
) -> ExpertMatrix:
    """Every element random bits (no NaN), scales and block factors between 2^-8 and 2^-6 or so.

    Args:
        format: one of `FORMATS`.
        shape: (E, N, K).
        generator: of the random numbers.
        block: fp8 only: rows and columns of a scale, None = per row.
        group: int8, int4 and uint4 only: columns of a scale, None = all.
        scales: their type; mxfp4's are always uint8.
    """

    def bits(*size: int) -> Tensor:
        return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)

    def factors(*size: int) -> Tensor:
        if scales == torch.uint8:
            return torch.randint(119, 122, size, dtype=torch.uint8, generator=generator)
        return ((1 + torch.rand(size, generator=generator)) / 256).to(scales)

    experts, n, k = shape
    if format == "fp8":
        data = bits(*shape)
        data[(data & 127) == 127] = 0  # NaN
        rows, columns = (1, k) if block is None else block
        values = data.view(torch.float8_e4m3fn)
        return ExpertMatrix.fp8(values, factors(experts, -(-n // rows), -(-k // columns)), (rows, columns))
    if format == "mxfp4":
        exponents = torch.randint(119, 123, (experts, n, k // 32), dtype=torch.uint8, generator=generator)
        return ExpertMatrix.mxfp4(bits(experts, n, k // 32, 16), exponents)
    if format == "int8":
        return ExpertMatrix.int8(bits(*shape).view(torch.int8), factors(experts, n, k // (group or k)))
    if format == "nvfp4":
        own = bits(experts, n, k // 16)
        own[(own & 127) == 127] = 0  # NaN
        of_matrices = (1 + torch.rand(experts, generator=generator)) / 2**14
        return ExpertMatrix.nvfp4(bits(experts, n, k // 2), own.view(torch.float8_e4m3fn), of_matrices)
    if format in ("int4", "uint4"):
        packed, groups = bits(experts, n, k // 2).view(torch.int32), k // (group or k)
        own = factors(experts, n, groups)
        if format == "int4":
            return ExpertMatrix.int4(packed, own)
        return ExpertMatrix.uint4(packed, own, bits(experts, n, groups) & 15)
    elements, size = GGUF_BLOCKS[format]
    blocks = bits(experts, n, k // elements, size)
    # The high byte of every half: 2^-8 to 2^-6, or 2^-14 to 2^-12 where 6 bits of scale come on top.
    first = 0x14 if elements == 256 else 0x1C
    places = {"q5_1": (1, 3), "q4_k": (1, 3), "q5_k": (1, 3), "q6_k": (209,)}.get(format, (1,))
    for place in places:
        high = torch.randint(0, 8, blocks.shape[:-1], dtype=torch.uint8, generator=generator)
        blocks[..., place] = high + first
    return ExpertMatrix.gguf(format, blocks.flatten(2))
