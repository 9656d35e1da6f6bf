"""Random experts in every weight format, made of raw bytes as checkpoints hold them.

Nothing is quantised here: the bytes themselves are random (with scales that give numbers of about
1 / sqrt(inputs)), so that every code, every bit of a packed scale and scales of zero occur.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kt_ray.native import ExpertMatrix, ExpertWeights
from tests.helpers.native import Case, Shape, make_case


@dataclass(frozen=True)
class Variant:
    """A format with the sizes and types of its scales.

    Attributes:
        format: its name.
        multiple: H and I must be multiples of it.
        block: rows and columns that one scale covers; None = all.
        scales: dtype of the scales; uint8 = powers of two (ue8m0); None = inside the blocks.
    """

    format: str
    multiple: int = 1
    block: tuple[int | None, int | None] = (1, None)
    scales: torch.dtype | None = None


VARIANTS = {
    "fp8-128x128": Variant("fp8", 1, (128, 128), torch.float32),
    "fp8-128x128-ue8m0": Variant("fp8", 1, (128, 128), torch.uint8),
    "fp8-channel": Variant("fp8", 1, (1, None), torch.bfloat16),
    "mxfp4": Variant("mxfp4", 32, (1, 32), torch.uint8),
    "int8-channel": Variant("int8", 1, (1, None), torch.float32),
    "int8-128": Variant("int8", 128, (1, 128), torch.bfloat16),
    "int4-32": Variant("int4", 32, (1, 32), torch.bfloat16),
    "int4-128": Variant("int4", 128, (1, 128), torch.float16),
    "nvfp4": Variant("nvfp4", 32, (None, None), torch.float32),
    "uint4-32": Variant("uint4", 32, (1, 32), torch.float16),
    "uint4-128": Variant("uint4", 128, (1, 128), torch.bfloat16),
    **{name: Variant(name, 32) for name in ("q8_0", "q4_0", "q5_0", "q5_1")},
    **{name: Variant(name, 256) for name in ("q4_k", "q5_k", "q6_k")},
}

# GGUF blocks: elements, bytes, where the half-precision factors stand, and each one's part of the
# block's scale. A negative second factor centres formats whose codes are unsigned.
_GGUF: dict[str, tuple[int, int, dict[int, float]]] = {
    "q8_0": (32, 34, {0: 1 / 74}),
    "q4_0": (32, 18, {0: 1 / 4.6}),
    "q5_0": (32, 22, {0: 1 / 9.2}),
    "q5_1": (32, 24, {0: 1 / 9.2, 2: -15.5 / 9.2}),
    "q4_k": (256, 144, {0: 1 / 220, 2: 7.5 / 220}),
    "q5_k": (256, 176, {0: 1 / 450, 2: 15.5 / 450}),
    "q6_k": (256, 210, {208: 1 / 1370}),
}


def _gguf(name: str, e: int, n: int, k: int, g: torch.Generator) -> ExpertMatrix:
    elements, size, factors = _GGUF[name]
    blocks = torch.randint(0, 256, (e, n, k // elements, size), generator=g, dtype=torch.uint8)
    scale = (0.5 + torch.rand(e, n, k // elements, generator=g)) / math.sqrt(k)
    scale[0, 0, 0] = 0
    for at, factor in factors.items():
        blocks[..., at : at + 2] = (scale * factor).half()[..., None].view(torch.uint8)
    return ExpertMatrix(name, blocks.flatten(2), (e, n, k))


def _codes(name: str, e: int, n: int, k: int, g: torch.Generator) -> tuple[Tensor, float]:
    """Random codes of a format with separate scales, and the root mean square of their values."""
    if name == "fp8":
        # Every finite code, subnormals included; 0x7F and 0xFF are NaN.
        codes = torch.randint(0, 127, (e, n, k), generator=g, dtype=torch.uint8)
        codes |= torch.randint(0, 2, (e, n, k), generator=g, dtype=torch.uint8) << 7
        return codes.view(torch.float8_e4m3fn), 118.0
    if name == "mxfp4":
        return torch.randint(0, 256, (e, n, k // 2), generator=g, dtype=torch.uint8), 2.9
    if name == "int8":
        return torch.randint(-128, 128, (e, n, k), generator=g, dtype=torch.int8), 74.0
    if name == "nvfp4":
        blocks = torch.randint(0, 256, (e, n, k // 32, 18), generator=g, dtype=torch.uint8)
        blocks[..., :2] %= 127  # no NaN, and scales have no signs
        return blocks, 2.9 * 118
    words = torch.randint(-(2**31), 2**31, (e, n, k // 8), generator=g, dtype=torch.int64)
    return words.to(torch.int32), 6.5 if name == "uint4" else 4.6


def random_matrix(variant: Variant, e: int, n: int, k: int, g: torch.Generator) -> ExpertMatrix:
    """One projection of e experts, [n, k] each."""
    if variant.scales is None:
        return _gguf(variant.format, e, n, k, g)
    data, size = _codes(variant.format, e, n, k, g)
    rows, cols = variant.block[0] or n, variant.block[1] or k
    grid = e, math.ceil(n / rows), math.ceil(k / cols)
    if variant.scales == torch.uint8:
        exponent = 127 + round(math.log2(1 / (size * math.sqrt(k))))
        scales = torch.randint(exponent - 1, exponent + 2, grid, generator=g).to(torch.uint8)
    else:
        scales = ((0.5 + torch.rand(grid, generator=g)) / (size * math.sqrt(k))).to(variant.scales)
        scales[0, -1, -1] = 0
        if variant.format == "uint4":
            zeros = torch.randint(0, 16, grid, generator=g).to(variant.scales)
            scales = torch.cat((scales, zeros), 2)
    return ExpertMatrix(variant.format, data, (e, n, k), scales, (rows, cols))


def tensors_of(weights: ExpertWeights) -> list[Tensor]:
    """Every tensor that holds weights, as bytes."""
    found: list[Tensor | None] = []
    for projection in (weights.gate, weights.up, weights.down):
        if isinstance(projection, ExpertMatrix):
            found += [projection.data, projection.scales]
        else:
            found.append(projection)
    return [t.contiguous().view(torch.uint8) for t in found if t is not None]


def quantised_case(
    shape: Shape, gate: str, up: str | None = None, down: str | None = None, **arguments: object
) -> Case:
    """`make_case` with the projections' weights in formats: names of VARIANTS, or "bf16" for a plain one.

    Args:
        shape: sizes, multiples of what the formats need.
        gate, up, down: formats; by default the gate's for all three.
        arguments: of `make_case`.
    """
    case = make_case(shape, torch.bfloat16, **arguments)  # type: ignore[arg-type]
    g = torch.Generator().manual_seed(31)
    e, h, i = shape.experts, shape.hidden, shape.inter
    sizes: dict[str, tuple[str, int, int]] = {
        "gate": (gate, i, h),
        "up": (up or gate, i, h),
        "down": (down or gate, h, i),
    }
    matrices = {
        name: random_matrix(VARIANTS[variant], e, n, k, g)
        for name, (variant, n, k) in sizes.items()
        if variant != "bf16"
    }
    case.weights = replace(case.weights, **matrices)
    return case
