"""Quantise weights for a checkpoint: the inverse of stored.py.

An `Encoding` gives the keys, types and shapes of a matrix W [N, K] (or a stack [E, N, K]) before any value
exists, so that a shard can be laid out first and filled one expert at a time:

    fp8          X.weight F8_E4M3, X.weight_scale_inv F32 [N/128, K/128]  (DeepSeek, Qwen, MiniMax)
    int8         X.weight I8, X.weight_scale BF16 [N, K/group]            (compressed-tensors int-quantized)
    int4         X.weight_packed I32 [N, K/8], X.weight_scale BF16, X.weight_shape   (pack-quantized)
    mxfp4        X.weight_packed U8 [N, K/2], X.weight_scale U8           (mxfp4-pack-quantized)
    mxfp4-blocks X_blocks U8 [E, N, K/32, 16], X_scales U8 [E, N, K/32]   (gpt-oss)

`Encoding.like` copies the keys, types and block of a checkpoint's matrix, and keeps scales powers of two
where they are. Rounding is to nearest, without calibration.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kt_ray.checkpoint.packings import Nvfp4, Packing
from kt_ray.checkpoint.safetensors_file import BITS, TORCH_DTYPES, read_dtype, read_shape
from kt_ray.checkpoint.stored import StoredMatrix
from kt_ray.native import ExpertMatrix
from kt_ray.native.matrix import scales_to_float
from kt_ray.native.quantization import ScaleType, quantize

CONVENTIONS = ("fp8", "int8", "int4", "mxfp4", "mxfp4-blocks")
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
    """How one matrix, or a stack of them, is written: as `data` and `scales`."""

    format: str  # one of `kt_ray.native.matrix.SCALED_FORMATS`
    shape: tuple[int, ...]  # of the values: (N, K) or (E, N, K)
    block: tuple[int, int]  # rows and columns that one scale covers
    data: Entry
    scales: Entry
    extra: tuple[Entry, ...] = ()  # a weight_shape tensor, or nothing
    powers: bool = False  # scales are powers of two although their type could hold others
    packing: Packing | None = None  # of a checkpoint's matrix; `new` gives none
    keeps_scales: bool = False  # likewise

    @classmethod
    def like(cls, matrix: StoredMatrix, *, powers: bool = False) -> Encoding:
        """As `matrix` is stored. What it has beside values and scales stays as it is, and is no entry."""
        data = Entry(matrix.data.name, matrix.data.dtype, matrix.data.shape)
        scales = Entry(matrix.scales.name, matrix.scales.dtype, matrix.scales.shape)
        kept: dict[str, Any] = {"packing": matrix.packing, "keeps_scales": matrix.keeps_scales}
        return cls(matrix.format, matrix.shape, matrix.block, data, scales, powers=powers, **kept)

    @classmethod
    def new(cls, convention: str, name: str, shape: tuple[int, ...], *, group: int | None = None) -> Encoding:
        """A convention of `CONVENTIONS` for the parameter `name` ("...gate_proj.weight").

        Args:
            shape: (N, K), or (E, N, K) for mxfp4-blocks.
            group: columns per scale of int8 and int4; None = all.

        Raises:
            ValueError: a shape that the format cannot hold.
        """
        if convention not in CONVENTIONS:
            raise ValueError(f"convention: {convention!r}, required one of {', '.join(CONVENTIONS)}")
        kind = "mxfp4" if convention == "mxfp4-blocks" else convention
        lead, (rows, columns) = shape[:-2], shape[-2:]
        if kind in ("int4", "mxfp4") and columns % 32:
            raise ValueError(f"{name}: {columns} columns, required a multiple of 32 for {kind}")
        group = 32 if kind == "mxfp4" else columns if group is None else group
        if kind in ("int8", "int4") and (columns % group or (group % 32 and group != columns)):
            raise ValueError(
                f"{name}: groups of {group}, required a multiple of 32 that divides {columns} columns"
            )
        base = name.removesuffix(".weight")
        packed, scale, scale_shape = (
            f"{base}.weight_packed",
            f"{base}.weight_scale",
            (*lead, rows, columns // group),
        )
        if kind == "fp8":
            scales = Entry(f"{scale}_inv", "F32", (*lead, -(-rows // 128), -(-columns // 128)))
            return cls(kind, shape, (128, 128), Entry(name, "F8_E4M3", shape), scales)
        if kind == "int8":
            return cls(kind, shape, (1, group), Entry(name, "I8", shape), Entry(scale, "BF16", scale_shape))
        if kind == "int4":
            data = Entry(packed, "I32", (*lead, rows, columns // 8))
            extra = (Entry(f"{base}.weight_shape", "I64", (len(shape),)),)
            return cls(kind, shape, (1, group), data, Entry(scale, "BF16", scale_shape), extra)
        data, scales = Entry(packed, "U8", (*lead, rows, columns // 2)), Entry(scale, "U8", scale_shape)
        if convention == "mxfp4-blocks":
            data, scales = (
                Entry(f"{name}_blocks", "U8", (*scale_shape, 16)),
                Entry(f"{name}_scales", "U8", scale_shape),
            )
        return cls(kind, shape, (1, group), data, scales)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Everything that is written for this matrix."""
        return (self.data, *(() if self.keeps_scales else (self.scales,)), *self.extra)

    def one(self, index: int) -> Encoding:
        """The same for one matrix of a stack, under the stack's keys."""
        if self.packing is None or len(self.shape) == 2:
            return self
        return replace(self, packing=self.packing.one(index))

    def encode(self, value: Tensor, before: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Quantise the whole parameter, or one matrix [N, K] of a stack.

        Args:
            value: `shape`, or its last two dimensions; any floating type, finite.
            before: scales that the values were stored with. A block keeps its scale unless a new one serves
                it better: what did not change keeps its value, and a small change is not lost among new
                roundings of everything else.

        Returns:
            Data and scales as the file holds them, each [*entry shape] (without E for one of a stack;
            types that torch lacks as their bytes), and the values that they stand for, float32.

        Raises:
            ValueError: another shape.
        """
        if tuple(value.shape) not in (self.shape, self.shape[-2:]):
            raise ValueError(f"{self.data.key}: shape {list(value.shape)}, required {list(self.shape)}")
        if self.keeps_scales:
            assert before is not None, "no convention of `new` has this format"
            return self._with_scales_kept(value, before)
        stack = value.reshape(-1, *self.shape[-2:])
        # Bands of rows bound the memory of rounding a large matrix; no scale may span two of them.
        whole = self.block[0] > _BAND or _BAND % self.block[0]
        rows = stack.shape[1] if whole else _BAND
        parts = stack.split(rows, 1)
        kept: Iterable[Tensor | None] = [None] * len(parts)
        if before is not None:
            before = before if self.packing is None else self.packing.scales(before).contiguous()
            down = -(-self.shape[-2] // self.block[0])
            kept = before.reshape(len(stack), down, -1).split(-(-rows // self.block[0]), 1)
        bands = [self._quantize(part, scales) for part, scales in zip(parts, kept, strict=True)]
        data, scales, meant = (torch.cat(each, 1) for each in zip(*bands, strict=True))
        if self.packing is not None:
            data = self.packing.stored(data[0]).contiguous()
            scales = self.packing.stored_scales(scales[0]).contiguous()
        drop = len(self.shape) - value.dim()
        shape = read_shape(self.data.dtype, self.data.shape)[drop:]
        data = data.reshape(shape).view(read_dtype(self.data.dtype))
        return data, scales.reshape(self.scales.shape[drop:]), meant.reshape(value.shape)

    def _with_scales_kept(self, value: Tensor, before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One matrix whose scales stay: values alone are new."""
        assert self.packing is not None
        scales, global_scales = self.packing.scales(before).unsqueeze(0), None
        if isinstance(self.packing, Nvfp4):
            scales, global_scales = self.packing.read_scales().unsqueeze(0), scales.flatten()
        more: dict[str, Any] = {"group": self.block[1], "global_scales": global_scales}
        if self.format == "fp8":
            scales, more = scales.reshape(1, 1, 1), {"block": self.block}
        matrix = quantize(self.format, value.unsqueeze(0), scales=scales, **more)
        return self.packing.stored(matrix.data[0]).contiguous(), before, matrix.dequantize()[0]

    def _quantize(self, stack: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Data, scales in the file's type, and the values they stand for, of [n, rows, K]."""
        data, scales, meant = self._quantized(stack, None)
        if before is None:
            return data, scales, meant
        old_data, _, old_meant = self._quantized(stack, before)
        better = self._by_block((old_meant - stack).square()) <= self._by_block((meant - stack).square())
        return (
            torch.where(self._spread(better, data.shape), old_data, data),
            torch.where(better, before, scales),
            torch.where(self._spread(better, meant.shape), old_meant, meant),
        )

    def _quantized(self, stack: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        matrix = quantize(
            self.format,
            stack,
            block=self.block,
            group=self.block[1] if self.format in ("int8", "int4") else None,
            scale_type=self._scale_type(),
            scales=scales,
        )
        scales = _scales(matrix, self.scales.dtype)
        meant = ExpertMatrix(self.format, matrix.data, matrix.shape, scales, matrix.block)
        return matrix.data, scales, meant.dequantize()

    def _by_block(self, values: Tensor) -> Tensor:
        """Sums of [n, rows, K] over what each scale covers."""
        rows, columns = self.block
        down, across = -(-values.shape[1] // rows), -(-values.shape[2] // columns)
        missing = (0, across * columns - values.shape[2], 0, down * rows - values.shape[1])
        padded = torch.nn.functional.pad(values, missing)
        return padded.view(-1, down, rows, across, columns).sum((2, 4))

    def _spread(self, blocks: Tensor, shape: torch.Size) -> Tensor:
        """What is known of each block for all that it covers of [n, rows, values or words ...]."""
        words = math.prod(shape[2:])
        wide = blocks.repeat_interleave(self.block[0], 1)[:, : shape[1]]
        wide = wide.repeat_interleave(self.block[1] * words // self.shape[-1], 2)[:, :, :words]
        return wide.reshape(shape)

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
