"""Quantise weights for a checkpoint: the inverse of stored.py.

An `Encoding` gives the keys, types and shapes of a matrix W [N, K] (or a stack [E, N, K]) before any value
exists, so that a shard can be laid out first and filled one expert at a time:

    fp8          X.weight F8_E4M3, X.weight_scale_inv F32 [N/128, K/128]  (DeepSeek, Qwen, MiniMax)
    fp8-row      X.weight F8_E4M3, X.weight_scale BF16 [N, 1]             (compressed-tensors float-quantized)
    fp8-fused    X F8_E4M3 [E, N, K], X_scale_inv F32                     (transformers' fused experts)
    int8         X.weight I8, X.weight_scale BF16 [N, K/group]            (compressed-tensors int-quantized)
    int4         X.weight_packed I32 [N, K/8], X.weight_scale BF16, X.weight_shape   (pack-quantized)
    mxfp4        X.weight_packed U8 [N, K/2], X.weight_scale U8           (mxfp4-pack-quantized)
    mxfp4-blocks X_blocks U8 [E, N, K/32, 16], X_scales U8 [E, N, K/32]   (gpt-oss)
    fp4          X.weight I8 [N, K/2], X.scale F8_E8M0 [N, K/32]          (DeepSeek-V4)

`Encoding.like` copies the keys, types and block of a checkpoint's matrix, and keeps scales powers of two
where they are. Rounding is to nearest, without calibration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kt_ray.checkpoint.safetensors_file import BITS, TORCH_DTYPES, read_dtype, read_shape
from kt_ray.checkpoint.stored import StoredMatrix
from kt_ray.native import ExpertMatrix
from kt_ray.native.matrix import scales_to_float
from kt_ray.native.quantize import ScaleType, quantize

CONVENTIONS = ("fp8", "fp8-row", "fp8-fused", "int8", "int4", "mxfp4", "mxfp4-blocks", "fp4")
_FORMATS = {"fp8-row": "fp8", "fp8-fused": "fp8", "mxfp4-blocks": "mxfp4", "fp4": "mxfp4"}
_BAND = 2048
_SCALE_TYPES: dict[str, ScaleType] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True)
class Entry:
    """A tensor of a file that is still to be written: key, type as safetensors names it, shape."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BITS[self.dtype] // 8


@dataclass(frozen=True)
class Encoding:
    """How one matrix, or a stack of them, is written.

    Attributes:
        format: "fp8", "mxfp4", "int8" or "int4".
        shape: of the values: (N, K) or (E, N, K).
        block: rows and columns that one scale covers.
        data, scales: what is written.
        extra: a weight_shape tensor, or nothing.
        powers: scales are powers of two although their type could hold others.
    """

    format: str
    shape: tuple[int, ...]
    block: tuple[int, int]
    data: Entry
    scales: Entry
    extra: tuple[Entry, ...] = ()
    powers: bool = False

    @classmethod
    def like(cls, matrix: StoredMatrix, *, powers: bool = False) -> Encoding:
        """As `matrix` is stored. Its weight_shape, where it has one, stays as it is and is not an entry.

        Args:
            matrix: found by `CheckpointIndex.matrices`.
            powers: the checkpoint's scales are powers of two (`scale_fmt: ue8m0`) in a wider type.
        """
        data = Entry(matrix.data.name, matrix.data.dtype, matrix.data.shape)
        scales = Entry(matrix.scales.name, matrix.scales.dtype, matrix.scales.shape)
        return cls(matrix.format, matrix.shape, matrix.block, data, scales, powers=powers)

    @classmethod
    def new(cls, convention: str, name: str, shape: tuple[int, ...], *, group: int | None = None) -> Encoding:
        """A convention of `CONVENTIONS` for the parameter `name` ("...gate_proj.weight").

        Args:
            convention: see the module.
            name: the parameter's name.
            shape: (N, K), or (E, N, K) for the fused conventions.
            group: columns per scale of int8 and int4; None = all.

        Raises:
            ValueError: a shape that the format cannot hold.
        """
        kind = _FORMATS.get(convention, convention)
        lead, (rows, columns) = shape[:-2], shape[-2:]
        if kind in ("int4", "mxfp4") and columns % 32:
            raise ValueError(f"{name}: {columns} columns, required a multiple of 32 for {kind}")
        if kind in ("int8", "int4"):
            group = columns if group is None else group
            if columns % group or (group % 32 and group != columns):
                raise ValueError(f"{name}: groups of {group}, required a divisor of {columns} columns")
        base = name.removesuffix(".weight")
        if convention in ("fp8", "fp8-fused"):
            block = (128, 128)
            end = (-(-rows // 128), -(-columns // 128))
            key = f"{base}.weight_scale_inv" if convention == "fp8" else f"{name}_scale_inv"
            return cls(kind, shape, block, Entry(name, "F8_E4M3", shape), Entry(key, "F32", (*lead, *end)))
        if convention == "fp8-row":
            scales = Entry(f"{base}.weight_scale", "BF16", (*lead, rows, 1))
            return cls(kind, shape, (1, columns), Entry(name, "F8_E4M3", shape), scales)
        if convention == "int8":
            assert group is not None
            scales = Entry(f"{base}.weight_scale", "BF16", (*lead, rows, columns // group))
            return cls(kind, shape, (1, group), Entry(name, "I8", shape), scales)
        if convention == "int4":
            assert group is not None
            data = Entry(f"{base}.weight_packed", "I32", (*lead, rows, columns // 8))
            scales = Entry(f"{base}.weight_scale", "BF16", (*lead, rows, columns // group))
            extra = (Entry(f"{base}.weight_shape", "I64", (len(shape),)),)
            return cls(kind, shape, (1, group), data, scales, extra)
        groups = columns // 32
        if convention == "mxfp4":
            data = Entry(f"{base}.weight_packed", "U8", (*lead, rows, columns // 2))
            scales = Entry(f"{base}.weight_scale", "U8", (*lead, rows, groups))
        elif convention == "mxfp4-blocks":
            data = Entry(f"{name}_blocks", "U8", (*lead, rows, groups, 16))
            scales = Entry(f"{name}_scales", "U8", (*lead, rows, groups))
        elif convention == "fp4":
            data = Entry(name, "I8", (*lead, rows, columns // 2))
            scales = Entry(f"{base}.scale", "F8_E8M0", (*lead, rows, groups))
        else:
            raise ValueError(f"convention: {convention!r}, required one of {', '.join(CONVENTIONS)}")
        return cls(kind, shape, (1, 32), data, scales)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Everything that is written for this matrix."""
        return (self.data, self.scales, *self.extra)

    def encode(self, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Quantise the whole parameter, or one matrix [N, K] of a stack.

        Args:
            value: `shape`, or its last two dimensions; any floating type, finite.

        Returns:
            Data and scales as the file holds them, each [*entry shape] (without E for one of a stack;
            types that torch lacks as their bytes), and the values that they stand for, float32.

        Raises:
            ValueError: another shape.
        """
        if tuple(value.shape) not in (self.shape, self.shape[-2:]):
            raise ValueError(f"{self.data.key}: shape {list(value.shape)}, required {list(self.shape)}")
        stack = value.reshape(-1, *self.shape[-2:])
        # Bands of rows bound the memory of rounding a large matrix; no scale may span two of them.
        whole = self.block[0] > _BAND or _BAND % self.block[0]
        bands = [self._quantize(part) for part in stack.split(stack.shape[1] if whole else _BAND, 1)]
        data, scales, meant = (torch.cat(parts, 1) for parts in zip(*bands, strict=True))
        drop = len(self.shape) - value.dim()
        shape = read_shape(self.data.dtype, self.data.shape)[drop:]
        data = data.reshape(shape).view(read_dtype(self.data.dtype))
        return data, scales.reshape(self.scales.shape[drop:]), meant.reshape(value.shape)

    def _quantize(self, stack: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Data, scales in the file's type, and the values they stand for, of [n, rows, K]."""
        matrix = quantize(
            self.format,
            stack,
            block=self.block,
            group=self.block[1] if self.format in ("int8", "int4") else None,
            scale_type=self._scale_type(),
        )
        scales = _scales(matrix, self.scales.dtype)
        meant = ExpertMatrix(self.format, matrix.data, matrix.shape, scales, matrix.block)
        return matrix.data, scales, meant.dequantize()

    def extras(self) -> dict[str, Tensor]:
        """Values of `extra`, which do not depend on the weights."""
        return {e.key: torch.tensor(self.shape, dtype=TORCH_DTYPES[e.dtype]) for e in self.extra}

    def _scale_type(self) -> ScaleType:
        if self.format == "mxfp4":
            return "float32"  # not used: its scales have one type
        return "ue8m0" if self.powers else _SCALE_TYPES.get(self.scales.dtype, "ue8m0")


def _scales(matrix: ExpertMatrix, dtype: str) -> Tensor:
    """Scales in the file's type; exponents become powers of two where that type holds numbers."""
    scales = matrix.scales
    assert scales is not None
    if scales.dtype != torch.uint8 or dtype in ("U8", "F8_E8M0"):
        return scales
    return scales_to_float(scales).to(TORCH_DTYPES[dtype])
