"""Quantises expert weights: round to nearest, no calibration.

Shapes: E experts, N rows and K columns of one projection.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kt_ray.native.matrix import FORMATS, GGUF_BLOCKS, ExpertMatrix, scales_to_float

ScaleType = Literal["float32", "bfloat16", "float16", "ue8m0"]


def quantize(
    format: str,
    w: Tensor,
    *,
    block: tuple[int, int] | None = (128, 128),
    group: int | None = None,
    scale_type: ScaleType = "float32",
    scales: Tensor | None = None,
    global_scales: Tensor | None = None,
) -> ExpertMatrix:
    """Quantises, each value to the nearest that its scale allows.

    Q8_0, Q4_0, Q5_0 and Q5_1 are the gguf package's own. Q4_K, Q5_K and Q6_K take scales from minima and
    maxima, without the searches of llama.cpp: valid blocks, at a somewhat larger error.

    Args:
        format: one of `FORMATS`.
        w: [E, N, K], any floating type, finite.
        block: fp8 only: rows and columns that share a scale; None = each row its own.
        group: int8, int4 and uint4 only: columns that share a scale; None = all.
        scale_type: of fp8, int8, int4 and uint4; "ue8m0" for fp8 alone, rounded up to a power of two.
        scales: as `ExpertMatrix` has them, of nvfp4 as its constructor takes them; None = what each block
            needs. Not of GGUF types.
        global_scales: of nvfp4, beside `scales`.

    Raises:
        ValueError: an unknown format, or a shape that it cannot hold.
    """
    if format not in FORMATS:
        raise ValueError(f"format: {format!r}, required one of {', '.join(FORMATS)}")
    if w.dim() != 3:
        raise ValueError(f"w: shape {list(w.shape)}, required three dimensions [E, N, K]")
    w = w.detach().to(torch.float32).contiguous()
    columns = w.shape[2]
    multiple = GGUF_BLOCKS[format][0] if format in GGUF_BLOCKS else 1 if format in ("fp8", "int8") else 32
    if columns % multiple:
        raise ValueError(f"w: K = {columns}, required a multiple of {multiple} for format {format}")
    if format == "fp8":
        return _fp8(w, block, scale_type, scales)
    if format == "mxfp4":
        return _mxfp4(w, scales)
    if format == "nvfp4":
        return _nvfp4(w, scales, global_scales)
    if format in ("int8", "int4", "uint4"):
        if scale_type == "ue8m0":
            raise ValueError(f"scale_type: 'ue8m0', required float32, bfloat16 or float16 for {format}")
        group = columns if group is None else group
        if group < 1 or columns % group:
            raise ValueError(f"group: {group}, required a divisor of K = {columns}")
        if format == "uint4":
            return _uint4(w, group, scale_type, scales)
        return _integers(format, w, group, scale_type, scales)
    if format in ("q4_k", "q5_k"):
        return ExpertMatrix.gguf(format, _q45_k(w, 4 if format == "q4_k" else 5))
    if format == "q6_k":
        return ExpertMatrix.gguf(format, _q6_k(w))
    from gguf import quants

    blocks = quants.quantize(w.numpy(), quants.GGMLQuantizationType[format.upper()])
    return ExpertMatrix.gguf(format, torch.from_numpy(blocks))


def _fp8(
    w: Tensor, block: tuple[int, int] | None, scale_type: ScaleType, scales: Tensor | None
) -> ExpertMatrix:
    experts, n, k = w.shape
    rows, columns = (1, k) if block is None else block
    down, across = -(-n // rows), -(-k // columns)
    if scales is None:
        padded = w.new_zeros(experts, down * rows, across * columns)
        padded[:, :n, :k] = w
        largest = padded.view(experts, down, rows, across, columns).abs().amax((2, 4))
        scales = _stored(largest / 448, scale_type)
    each = _nonzero(scales_to_float(scales)).repeat_interleave(rows, 1)[:, :n]
    each = each.repeat_interleave(columns, 2)[:, :, :k]
    data = (w / each).clamp(-448, 448).to(torch.float8_e4m3fn)
    return ExpertMatrix.fp8(data, scales, (rows, columns))


def _mxfp4(w: Tensor, scales: Tensor | None) -> ExpertMatrix:
    experts, n, k = w.shape
    grouped = w.view(experts, n, k // 32, 32)
    # frexp gives largest = mantissa * 2^exponent, mantissa in [1/2, 1); 6 = 1.5 * 2^2 is the largest value.
    if scales is None:
        exponent = torch.frexp(grouped.abs().amax(-1)).exponent - 3
        scales = (exponent + 127).clamp(0, 254).to(torch.uint8)
    return ExpertMatrix.mxfp4(_e2m1_codes(grouped / scales_to_float(scales).unsqueeze(-1)), scales)


def _e2m1_codes(values: Tensor) -> Tensor:
    """The nearest codes [..., 2 n] in bytes [..., n], low nibble first."""
    size = values.abs()
    # Halfway between neighbours the even code is nearest.
    code = torch.zeros_like(size, dtype=torch.uint8)
    for i, bound in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        code += (size >= bound) if i % 2 else (size > bound)
    code |= torch.signbit(values).to(torch.uint8) << 3
    return code[..., 0::2] | code[..., 1::2] << 4


def _nvfp4(w: Tensor, scales: Tensor | None, global_scales: Tensor | None) -> ExpertMatrix:
    experts, n, k = w.shape
    grouped = w.view(experts, n, k // 16, 16)
    if global_scales is None:  # the largest value is then the largest code times the largest scale
        global_scales = grouped.abs().amax((1, 2, 3)) / (6 * 448)
    each = _nonzero(global_scales).view(-1, 1, 1)
    if scales is None:
        scales = (grouped.abs().amax(-1) / 6 / each).clamp(max=448).to(torch.float8_e4m3fn)
    step = _nonzero(scales.to(torch.float32) * each).unsqueeze(-1)
    return ExpertMatrix.nvfp4(_e2m1_codes(grouped / step).flatten(2), scales, global_scales)


def _integers(
    format: str, w: Tensor, group: int, scale_type: ScaleType, scales: Tensor | None
) -> ExpertMatrix:
    experts, n, k = w.shape
    grouped = w.view(experts, n, k // group, group)
    steps = 127.0 if format == "int8" else 7.5
    # Scales that are given may be another's, who used all of int8.
    limits = (-127 if scales is None else -128, 127) if format == "int8" else (-8, 7)
    if scales is None:
        scales = _stored(grouped.abs().amax(-1) / steps, scale_type)
    q = (grouped / _nonzero(scales_to_float(scales)).unsqueeze(-1)).round().clamp(*limits)
    q = q.view(experts, n, k)
    if format == "int8":
        return ExpertMatrix.int8(q.to(torch.int8), scales)
    return ExpertMatrix.int4(words(q + 8), scales)


def _uint4(w: Tensor, group: int, scale_type: ScaleType, both: Tensor | None) -> ExpertMatrix:
    experts, n, k = w.shape
    grouped = w.view(experts, n, k // group, group)
    if both is None:
        low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
        scales = _stored((high - low) / 15, scale_type)
        zeros = (-low / _nonzero(scales.to(torch.float32))).round().clamp(0, 15)
    else:
        scales, zeros = both.chunk(2, 2)
    step = _nonzero(scales.to(torch.float32))
    q = ((grouped / step.unsqueeze(-1)).round() + zeros.unsqueeze(-1)).clamp(0, 15)
    return ExpertMatrix.uint4(words(q.view(experts, n, k)), scales, zeros)


def words(codes: Tensor) -> Tensor:
    """Codes [..., 8 n] from 0 to 15 in int32 words [..., n], the first in the lowest bits."""
    packed = (codes.to(torch.int64).unflatten(-1, (-1, 8)) << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def _q45_k(w: Tensor, bits: int) -> Tensor:
    """Blocks of Q4_K or Q5_K: per 32 values a scale and a minimum of 6 bits, per 256 a factor of each."""
    experts, n, _ = w.shape
    sub = w.view(-1, 8, 32)
    top = 2**bits - 1
    low = sub.amin(-1).clamp(max=0)
    scale = (sub.amax(-1) - low) / top
    d, d_min = (v.amax(-1, keepdim=True).div(63).to(torch.float16) for v in (scale, -low))
    six_scale = (scale / _nonzero(d.float())).round().clamp(0, 63)
    six_min = (-low / _nonzero(d_min.float())).round().clamp(0, 63)
    step, least = d.float() * six_scale, d_min.float() * six_min
    q = ((sub + least.unsqueeze(-1)) / _nonzero(step).unsqueeze(-1)).round().clamp(0, top).to(torch.uint8)
    s, m = six_scale.to(torch.uint8), six_min.to(torch.uint8)
    packed_scales = torch.cat(
        (
            s[:, :4] | (s[:, 4:] >> 4) << 6,
            m[:, :4] | (m[:, 4:] >> 4) << 6,
            (s[:, 4:] & 15) | (m[:, 4:] & 15) << 4,
        ),
        -1,
    )
    nibbles = (q[:, 0::2] & 15) | (q[:, 1::2] & 15) << 4
    parts = [d.view(torch.uint8), d_min.view(torch.uint8), packed_scales]
    if bits == 5:
        eighths = torch.arange(8, dtype=torch.uint8).view(8, 1)
        parts.append(((q >> 4) << eighths).sum(1).to(torch.uint8))
    parts.append(nibbles.flatten(1))
    return torch.cat(parts, -1).view(experts, n, -1)


def _q6_k(w: Tensor) -> Tensor:
    """Blocks of Q6_K: per 16 values a scale of 8 bits, per 256 its factor."""
    experts, n, _ = w.shape
    sub = w.view(-1, 16, 16)
    scale = sub.abs().amax(-1) / 31
    d = scale.amax(-1, keepdim=True).div(127).to(torch.float16)
    eight = (scale / _nonzero(d.float())).round().clamp(0, 127)
    step = _nonzero(d.float() * eight).unsqueeze(-1)
    q = ((sub / step).round().clamp(-32, 31) + 32).to(torch.uint8).view(-1, 2, 4, 32)
    low = (q[:, :, :2] & 15) | (q[:, :, 2:] & 15) << 4
    quarters = torch.arange(0, 8, 2, dtype=torch.uint8).view(4, 1)
    high = ((q >> 4) << quarters).sum(2).to(torch.uint8)
    parts = (low.flatten(1), high.flatten(1), eight.to(torch.int8).view(torch.uint8), d.view(torch.uint8))
    return torch.cat(parts, -1).view(experts, n, -1)


def _stored(scales: Tensor, scale_type: ScaleType) -> Tensor:
    """Scales in their type; ue8m0 at least as large."""
    if scale_type != "ue8m0":
        return scales.to(getattr(torch, scale_type))
    mantissa, exponent = torch.frexp(scales)
    exponent = exponent - (mantissa == 0.5).to(torch.int32)
    return (exponent + 127).clamp(0, 254).to(torch.uint8)


def _nonzero(scales: Tensor) -> Tensor:
    """Divisors: 1 where all values are zero."""
    return torch.where(scales == 0, 1.0, scales)
