"""Stored formats of released weights: a float32 matrix -> tensors as stored, and the values they stand for.

Written from the formats' definitions with torch alone, so that tests compare two readings of them.
A key names the parameter ("...q_proj.weight"); every encoder gives the tensors to store and the values.

Legend: N rows, K columns, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 128
_E4M3_MAX = 448.0
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


class Encoded(NamedTuple):
    """Tensors to store by key, and the float32 values [.., N, K] that they stand for."""

    tensors: dict[str, Tensor]
    value: Tensor


Encode = Callable[[str, Tensor], Encoded]


def plain(dtype: torch.dtype) -> Encode:
    """The values themselves, rounded to `dtype`."""

    def encode(key: str, value: Tensor) -> Encoded:
        stored = value.to(dtype)
        return Encoded({key: stored}, stored.float())

    return encode


def _spread(scale: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """One scale per block -> one per element [N, K]."""
    wide = scale.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return wide[..., : shape[-2], : shape[-1]]


def _block_max(value: Tensor, block: tuple[int, int]) -> Tensor:
    rows = [part.abs().amax(0) for part in value.split(block[0], 0)]
    return torch.stack([torch.stack([p.amax() for p in row.split(block[1], 0)]) for row in rows])


def fp8_block(suffix: str = "weight_scale_inv", *, powers: bool = False) -> Encode:
    """E4M3 values and a scale per 128 x 128 block (the last ones smaller).

    Args:
        suffix: of the scales' key.
        powers: scales are powers of two, stored as F8_E8M0 (DeepSeek-V4); else float32.
    """

    def encode(key: str, value: Tensor) -> Encoded:
        scale = _block_max(value, (BLOCK, BLOCK)) / _E4M3_MAX
        if powers:
            scale = torch.exp2(torch.ceil(torch.log2(scale)))
        wide = _spread(scale, (BLOCK, BLOCK), value.shape)
        codes = (value / wide).to(torch.float8_e4m3fn)
        stored = scale.to(torch.float8_e8m0fnu) if powers else scale
        tensors = {key: codes, key.removesuffix("weight") + suffix: stored}
        return Encoded(tensors, codes.float() * wide)

    return encode


def fp8_block_modelopt(key: str, value: Tensor) -> Encoded:
    """ModelOpt's FP8_PB_WO: scales [N / 128, 1, K / 128, 1]."""
    tensors, values = fp8_block("weight_scale")(key, value)
    return Encoded({k: v[:, None, :, None] if "scale" in k else v for k, v in tensors.items()}, values)


def fp8_row(key: str, value: Tensor) -> Encoded:
    """E4M3 values and a bfloat16 scale per row (compressed-tensors "float-quantized", channel)."""
    scale = (value.abs().amax(1, keepdim=True) / _E4M3_MAX).bfloat16()
    codes = (value / scale.float()).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)
    return Encoded({key: codes, f"{key}_scale": scale}, codes.float() * scale.float())


def int8_row(key: str, value: Tensor) -> Encoded:
    """int8 values and a bfloat16 scale per row (compressed-tensors "int-quantized", channel)."""
    scale = (value.abs().amax(1, keepdim=True) / 127).bfloat16()
    codes = (value / scale.float()).round().clamp(-128, 127)
    return Encoded({key: codes.to(torch.int8), f"{key}_scale": scale}, codes * scale.float())


def int4_packed(key: str, value: Tensor) -> Encoded:
    """Eight values + 8 per int32, low bits first, a bfloat16 scale per 32 columns (pack-quantized)."""
    rows, columns = value.shape
    scale = (value.view(rows, -1, 32).abs().amax(2) / 7).bfloat16()
    wide = _spread(scale.float(), (1, 32), value.shape)
    codes = (value / wide).round().clamp(-8, 7)
    nibbles = (codes + 8).to(torch.int64).view(rows, columns // 8, 8)
    words = (nibbles << torch.arange(0, 32, 4)).sum(2)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    tensors = {
        f"{key}_packed": words,
        f"{key}_scale": scale,
        f"{key}_shape": torch.tensor([rows, columns], dtype=torch.int64),
    }
    return Encoded(tensors, codes * wide)


def gptq(key: str, value: Tensor) -> Encoded:
    """Symmetric GPTQ, first version: eight rows of Wᵀ per int32, low bits first, a float16 scale per 32."""
    rows, columns = value.shape
    if columns % 32:  # quantisers leave it as it is
        return plain(torch.bfloat16)(key, value)
    scale = (value.view(rows, -1, 32).abs().amax(2) / 7).half()
    wide = _spread(scale.float(), (1, 32), value.shape)
    codes = (value / wide).round().clamp(-8, 7)
    words = torch.zeros(columns // 8, rows, dtype=torch.int64)
    for k in range(columns):
        words[k // 8] += (codes[:, k] + 8).to(torch.int64) << 4 * (k % 8)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    name = key.removesuffix("weight")
    tensors = {
        f"{name}qweight": words,
        f"{name}scales": scale.t().contiguous(),
        f"{name}qzeros": torch.full((columns // 32, rows // 8), 0x77777777, dtype=torch.int32),
        f"{name}g_idx": torch.arange(columns, dtype=torch.int32) // 32,
    }
    return Encoded(tensors, codes * wide)


def _packed_with_zeros(value: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes from 0 to 15 [N, K], zero points and float16 scales [N, K/32], values: scale (code - zero)."""
    groups = value.view(value.shape[0], -1, 32)
    low, high = groups.amin(2), groups.amax(2)
    scale = ((high - low) / 15).half()
    zero = (-low / scale.float()).round().clamp(1, 15)  # 0 would be stored as -1 by GPTQ
    wide, zeros = (_spread(part, (1, 32), value.shape) for part in (scale.float(), zero))
    codes = ((value / wide).round() + zeros).clamp(0, 15)
    return codes.long(), zero.long(), scale, (codes - zeros) * wide


def _words(codes: Tensor, order: Sequence[int] = range(8)) -> Tensor:
    """Eight neighbours along the last dimension in an int32: from the lowest bits on, in this order."""
    words = torch.zeros(*codes.shape[:-1], codes.shape[-1] // 8, dtype=torch.int64)
    for nibble, place in enumerate(order):
        words += codes[..., place::8] << 4 * nibble
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def gptq_zeros(key: str, value: Tensor) -> Encoded:
    """GPTQ with "sym": false, first version: zero points less 1, eight rows of W in a word."""
    if value.shape[1] % 32:
        return plain(torch.bfloat16)(key, value)
    codes, zero, scale, values = _packed_with_zeros(value)
    name = key.removesuffix("weight")
    tensors = {
        f"{name}qweight": _words(codes).t().contiguous(),
        f"{name}scales": scale.t().contiguous(),
        f"{name}qzeros": _words(zero.t() - 1),
    }
    return Encoded(tensors, values)


def awq(key: str, value: Tensor) -> Encoded:
    """AWQ, version gemm: eight rows of W in a word, in AutoAWQ's order; zero points likewise."""
    if value.shape[1] % 32:
        return plain(torch.bfloat16)(key, value)
    codes, zero, scale, values = _packed_with_zeros(value)
    name, order = key.removesuffix("weight"), (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        f"{name}qweight": _words(codes.t(), order),
        f"{name}scales": scale.t().contiguous(),
        f"{name}qzeros": _words(zero.t(), order),
    }
    return Encoded(tensors, values)


def int4_zeros(key: str, value: Tensor) -> Encoded:
    """compressed-tensors' pack-quantized with "symmetric": false: zero points of eight rows in a word."""
    codes, zero, scale, values = _packed_with_zeros(value)
    tensors = {
        f"{key}_packed": _words(codes),
        f"{key}_scale": scale,
        f"{key}_zero_point": _words(zero.t()).t().contiguous(),
        f"{key}_shape": torch.tensor(value.shape, dtype=torch.int64),
    }
    return Encoded(tensors, values)


def _bytes(value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes from 0 to 255 [N, K], 128 being zero, float16 scales [N, K/32], values."""
    scale = (value.unflatten(1, (-1, 32)).abs().amax(2) / 127).half()
    wide = _spread(scale.float(), (1, 32), value.shape)
    codes = (value / wide).round().clamp(-128, 127)
    return codes.long() + 128, scale, codes * wide


def _words_of_bytes(codes: Tensor) -> Tensor:
    words = (codes.unflatten(-1, (-1, 4)) << torch.arange(0, 32, 8)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def gptq_bytes(key: str, value: Tensor) -> Encoded:
    """Symmetric GPTQ of 8 bits, first version: four rows of Wᵀ per int32."""
    codes, scale, values = _bytes(value)
    name, zeros = key.removesuffix("weight"), torch.full(scale.t().shape, 127)
    tensors = {
        f"{name}qweight": _words_of_bytes(codes).t().contiguous(),
        f"{name}scales": scale.t().contiguous(),
        f"{name}qzeros": _words_of_bytes(zeros),
    }
    return Encoded(tensors, values)


def int8_packed(key: str, value: Tensor) -> Encoded:
    """compressed-tensors' pack-quantized of 8 bits: four values + 128 per int32."""
    codes, scale, values = _bytes(value)
    shape = torch.tensor(value.shape, dtype=torch.int64)
    words = _words_of_bytes(codes)
    return Encoded({f"{key}_packed": words, f"{key}_scale": scale, f"{key}_shape": shape}, values)


def nvfp4(names: tuple[str, str, str], divides: bool) -> Encode:
    """E2M1, a scale in E4M3 for 16 columns, one number for all.

    Args:
        names: ends of the keys of values, scales and number, after "...weight".
        divides: the number divides the scales; else it multiplies them.
    """

    def encode(key: str, value: Tensor) -> Encoded:
        groups = value.unflatten(-1, (-1, 16))
        number = value.abs().amax() / (6 * 448)
        number = (1 / (1 / number)).float() if divides else number
        scales = (groups.abs().amax(-1) / 6 / number).clamp(max=448).to(torch.float8_e4m3fn)
        wide = (scales.float() * number)[..., None]
        codes = (groups.abs()[..., None] / wide[..., None] - _FP4).abs().nan_to_num(0).argmin(-1)
        nibbles = (codes + 8 * (groups < 0)).flatten(-2)
        stored = (nibbles[..., 0::2] + 16 * nibbles[..., 1::2]).to(torch.uint8)
        told = (1 / number if divides else number).reshape(1) if divides else number
        tensors = dict(zip((key + end for end in names), (stored, scales, told), strict=True))
        return Encoded(tensors, (_FP4[codes] * groups.sign() * wide).flatten(-2))

    return encode


def nvfp4_stack(key: str, value: Tensor) -> Encoded:
    """ModelOpt's gpt-oss: a parameter [E, K, N] as [E, K / 2, N], its scales as [E, K / 16, N]."""
    ends = ("", "_weight_scale", "_weight_scale_2")
    stored, values = nvfp4(ends, False)(key, value.transpose(1, 2).contiguous())
    turned = {k: v.transpose(1, 2).contiguous() if v.dim() == 3 else v for k, v in stored.items()}
    return Encoded(turned | {f"{key}_input_scale": torch.ones(())}, values.transpose(1, 2).contiguous())


def _fp4(value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """OCP MXFP4 of [.., K]: (bytes [.., K/2], even columns in the low bits; exponents + 127; values)."""
    groups = value.unflatten(-1, (-1, 32))
    exponent = torch.floor(torch.log2(groups.abs().amax(-1))) - 2
    scaled = groups / torch.exp2(exponent)[..., None]
    codes = (scaled.abs()[..., None] - _FP4).abs().argmin(-1)
    values = _FP4[codes] * scaled.sign() * torch.exp2(exponent)[..., None]
    nibbles = (codes + 8 * (scaled < 0)).flatten(-2)
    packed = nibbles[..., 0::2] + 16 * nibbles[..., 1::2]
    return packed.to(torch.uint8), (exponent + 127).to(torch.uint8), values.flatten(-2)


def mxfp4_packed(key: str, value: Tensor) -> Encoded:
    """compressed-tensors "mxfp4-pack-quantized"."""
    packed, exponents, values = _fp4(value)
    return Encoded({f"{key}_packed": packed, f"{key}_scale": exponents}, values)


def mxfp4_blocks(key: str, value: Tensor) -> Encoded:
    """gpt-oss: a parameter [E, K, N] as blocks [E, N, K/32, 16] and scales [E, N, K/32]."""
    packed, exponents, values = _fp4(value.transpose(1, 2).contiguous())
    tensors = {f"{key}_blocks": packed.unflatten(-1, (-1, 16)).contiguous(), f"{key}_scales": exponents}
    return Encoded(tensors, values.transpose(1, 2).contiguous())


def fp4_scale(key: str, value: Tensor) -> Encoded:
    """DeepSeek-V4: `weight` I8 [N, K/2] and `scale` F8_E8M0 [N, K/32]."""
    packed, exponents, values = _fp4(value)
    scale_key = key.removesuffix("weight") + "scale"
    return Encoded({key: packed.view(torch.int8), scale_key: exponents.view(torch.float8_e8m0fnu)}, values)
