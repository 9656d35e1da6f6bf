"""Expert weights as checkpoints store them: quantised, with their scales, never repacked.

Shapes: E local experts, N rows (outputs) and K columns (inputs) of one projection.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kt_ray.native._native import MatrixArg

GGUF_BLOCKS = {
    "q8_0": (32, 34),
    "q4_0": (32, 18),
    "q5_0": (32, 22),
    "q5_1": (32, 24),
    "q4_k": (256, 144),
    "q5_k": (256, 176),
    "q6_k": (256, 210),
}
"""Elements and bytes of a block of each GGUF type, which holds its scales itself."""

SCALED_FORMATS = ("fp8", "mxfp4", "nvfp4", "int8", "int4", "uint4")
FORMATS = (*SCALED_FORMATS, *GGUF_BLOCKS)

_E8M0: torch.dtype | None = getattr(torch, "float8_e8m0fnu", None)  # torch 2.7 has it
_SCALE_TYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.uint8: "ue8m0"}
if _E8M0 is not None:
    _SCALE_TYPES[_E8M0] = "ue8m0"

_REAL = ("f32", "bf16", "f16")
# Format: element type; the smallest number of values in a row, and of elements that hold them; scales' types.
_DATA = {
    "fp8": (torch.float8_e4m3fn, 1, 1, (*_REAL, "ue8m0")),
    "mxfp4": (torch.uint8, 32, 16, ("ue8m0",)),
    "nvfp4": (torch.uint8, 32, 18, ("f32",)),
    "int8": (torch.int8, 1, 1, _REAL),
    "int4": (torch.int32, 32, 4, _REAL),
    "uint4": (torch.int32, 32, 4, _REAL),
}
_MOST = 2**20  # rows or columns
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _pieces(n: int, size: int) -> int:
    return -(-n // size)


@dataclass(frozen=True, eq=False)
class ExpertMatrix:
    """One projection of all local experts in a quantised format, as stored; W[e] is [N, K].

    The constructors `fp8`, `mxfp4`, `nvfp4`, `int8`, `int4`, `uint4` and `gguf` take what checkpoints hold.
    `nvfp4` and `uint4` put tensors together. Else nothing is copied: views of larger tensors do, such as
    every second row of a fused projection, as long as the elements of a row lie together.

    Raises:
        ValueError: a tensor that does not fit; names the argument, what was seen, what is required.
    """

    format: str  # one of `FORMATS`
    # [E, N, ...], the bytes of a row in the dimensions after the second: fp8 float8_e4m3fn and int8 int8 [K];
    # mxfp4 uint8 [K / 2], low nibble first; nvfp4 uint8 [K / 32, 18], of each block two scales in E4M3, then
    # nibbles; int4 and uint4 int32 [K / 8], nibbles of value + 8 and of value + zero point, low first; GGUF
    # types uint8, their blocks
    data: Tensor
    shape: tuple[int, int, int]  # (E, N, K)
    # [E, ceil(N / rows), ceil(K / columns)] with `block` rows and columns: float32, bfloat16, float16, or
    # ue8m0 (uint8 or float8_e8m0fnu, 2^(byte - 127)), the only type of mxfp4 and none of the others but fp8;
    # of nvfp4 float32, its global scale; of uint4 the zero points follow in each row, as many numbers of the
    # same type; None for GGUF types
    scales: Tensor | None = None
    # rows and columns that one scale covers; rows are 1 but for fp8 and nvfp4 (all), columns K or a multiple
    # of 32; None: (1, K) or (1, group) as the scales' shape says, (1, 32) for mxfp4, (N, K) for nvfp4
    block: tuple[int, int] | None = None

    @classmethod
    def fp8(cls, data: Tensor, scales: Tensor, block: tuple[int, int] | None = (128, 128)) -> ExpertMatrix:
        """E4M3 with scales per block, or with block=None per row.

        Args:
            data: [E, N, K] float8_e4m3fn.
            scales: [E, ceil(N / rows), ceil(K / columns)] of the block; per row [E, N] or [E, N, 1].
            block: rows and columns that one scale covers, or None.
        """
        shape = _three("data", data)
        scales = scales.unsqueeze(-1) if block is None and scales.dim() == 2 else scales
        return cls("fp8", data, shape, scales, (1, shape[2]) if block is None else block)

    @classmethod
    def mxfp4(cls, blocks: Tensor, scales: Tensor) -> ExpertMatrix:
        """E2M1 in groups of 32 along a row.

        Args:
            blocks: [E, N, K / 32, 16] uint8.
            scales: [E, N, K / 32] uint8 or float8_e8m0fnu.
        """
        if blocks.dim() != 4 or blocks.shape[3] != 16:
            raise ValueError(f"blocks: shape {list(blocks.shape)}, required [E, N, K / 32, 16]")
        return cls("mxfp4", blocks, (blocks.shape[0], blocks.shape[1], blocks.shape[2] * 32), scales)

    @classmethod
    def nvfp4(cls, packed: Tensor, scales: Tensor, global_scales: Tensor) -> ExpertMatrix:
        """E2M1 in groups of 16 along a row, a scale in E4M3 each, and a global scale of the matrix.

        Args:
            packed: [E, N, K / 2] uint8, K a multiple of 32, low nibble first.
            scales: [E, N, K / 16] float8_e4m3fn.
            global_scales: [E] float32, of which each is multiplied with all scales of its matrix.
        """
        experts, rows, half = _three("packed", packed)
        if half % 16 or tuple(scales.shape) != (experts, rows, half // 8):
            required = f"[{experts}, {rows}, K / 16] and K a multiple of 32"
            raise ValueError(f"scales: shape {list(scales.shape)}, K = {2 * half}, required {required}")
        of_blocks = scales.view(torch.uint8).unflatten(2, (-1, 2))
        blocks = torch.cat((of_blocks, packed.unflatten(2, (-1, 16))), 3)
        return cls("nvfp4", blocks, (experts, rows, 2 * half), global_scales.reshape(experts, 1, 1))

    @classmethod
    def int8(cls, data: Tensor, scales: Tensor) -> ExpertMatrix:
        """Symmetric 8-bit integers, scales per row or per group along a row.

        Args:
            data: [E, N, K] int8.
            scales: [E, N], [E, N, 1] or [E, N, K / group], group a multiple of 32.
        """
        return cls("int8", data, _three("data", data), scales.unsqueeze(-1) if scales.dim() == 2 else scales)

    @classmethod
    def int4(cls, packed: Tensor, scales: Tensor) -> ExpertMatrix:
        """Symmetric 4-bit integers, packed as compressed-tensors' pack-quantized format does.

        Args:
            packed: [E, N, K / 8] int32.
            scales: [E, N], [E, N, 1] or [E, N, K / group], group a multiple of 32.
        """
        experts, rows, words = _three("packed", packed)
        scales = scales.unsqueeze(-1) if scales.dim() == 2 else scales
        return cls("int4", packed, (experts, rows, words * 8), scales)

    @classmethod
    def uint4(cls, packed: Tensor, scales: Tensor, zeros: Tensor) -> ExpertMatrix:
        """4-bit integers from 0 to 15, less a zero point, times a scale.

        Args:
            packed: [E, N, K / 8] int32.
            scales: [E, N, K / group], group a multiple of 32.
            zeros: the same shape, whole numbers of any type.
        """
        experts, rows, words = _three("packed", packed)
        both = torch.cat((scales, zeros.to(scales.dtype)), 2)
        return cls("uint4", packed, (experts, rows, words * 8), both)

    @classmethod
    def gguf(cls, kind: str, data: Tensor) -> ExpertMatrix:
        """Blocks of a GGUF type.

        Args:
            kind: the type's name, such as "q4_k"; case does not matter.
            data: [E, N, bytes of a row] uint8.
        """
        kind = kind.lower()
        if kind not in GGUF_BLOCKS:
            raise ValueError(f"kind: {kind!r}, required one of {', '.join(GGUF_BLOCKS)}")
        experts, rows, size = _three("data", data)
        elements, block = GGUF_BLOCKS[kind]
        if size % block:
            raise ValueError(f"data: rows of {size} bytes, required a multiple of {block}, a block of {kind}")
        return cls(kind, data, (experts, rows, size // block * elements))

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"format: {self.format!r}, required one of {', '.join(FORMATS)}")
        if len(self.shape) != 3 or min(self.shape) < 1:
            raise ValueError(f"shape: {self.shape}, required three positive sizes (E, N, K)")
        if max(self.shape[1:]) > _MOST:
            raise ValueError(f"shape: {self.shape}, required at most 2^20 rows and columns")
        self._check_data()
        if self.format in GGUF_BLOCKS:
            if self.scales is not None or self.block is not None:
                raise ValueError(f"scales, block: given, required None: {self.format} blocks hold their own")
            return
        if not isinstance(self.scales, Tensor):
            got = type(self.scales).__name__
            raise ValueError(f"scales: must be a tensor for format {self.format}, got {got}")
        if self.block is None:
            object.__setattr__(self, "block", self._implied_block(self.scales))
        # What covers more covers all; the engine divides by it in 32 bits.
        object.__setattr__(self, "block", tuple(min(size, _MOST) for size in self.scale_block))
        self._check_scales(self.scales)

    def _check_data(self) -> None:
        experts, rows, columns = self.shape
        if self.format in GGUF_BLOCKS:
            elements, size = GGUF_BLOCKS[self.format]
            dtype, multiple = torch.uint8, elements
            row = columns // elements * size
        else:
            dtype, multiple, size, _ = _DATA[self.format]
            row = columns // multiple * size
        if columns % multiple:
            raise ValueError(f"shape: K = {columns}, required a multiple of {multiple} for {self.format}")
        _check_tensor("data", self.data)
        if self.data.dtype != dtype:
            raise ValueError(f"data: {self.data.dtype}, required {dtype} for format {self.format}")
        elements_of_row = self.data.shape[2:].numel() if self.data.dim() >= 3 else 0
        if self.data.dim() < 3 or tuple(self.data.shape[:2]) != (experts, rows) or elements_of_row != row:
            raise ValueError(
                f"data: shape {list(self.data.shape)}, required [{experts}, {rows}, {row} in all] "
                f"for format {self.format} and shape {self.shape}"
            )
        _check_rows("data", self.data)

    def _implied_block(self, scales: Tensor) -> tuple[int, int]:
        columns = self.shape[2]
        if self.format == "mxfp4":
            return 1, 32
        if self.format == "nvfp4":
            return self.shape[1:]
        groups = scales.shape[-1] if scales.dim() == 3 else 1
        groups = groups // 2 if self.format == "uint4" else groups
        if groups == 0 or columns % groups:
            raise ValueError(f"scales: {groups} in a row, required a divisor of K = {columns}")
        return 1, columns // groups

    def _check_scales(self, scales: Tensor) -> None:
        rows, columns = self.scale_block
        experts, n, k = self.shape
        _check_tensor("scales", scales)
        allowed = _DATA[self.format][3]
        if _SCALE_TYPES.get(scales.dtype) not in allowed:
            raise ValueError(f"scales: {scales.dtype}, required {_types(allowed)} for format {self.format}")
        if rows < 1 or columns < 1 or (columns < k and columns % 32):
            raise ValueError(
                f"block: {(rows, columns)}, required a row or more, by K = {k} columns or a multiple of 32"
            )
        if 2**12 <= rows < n:  # the decoders find a row's block by a multiplication
            raise ValueError(f"block: {rows} rows, required fewer than 4096, or all {n}")
        if self.format == "nvfp4":
            if rows < n or columns < k:
                raise ValueError(f"block: {(rows, columns)}, required all of {(n, k)} for format nvfp4")
        elif rows > 1 and self.format != "fp8":
            raise ValueError(f"block: {rows} rows, required 1 for format {self.format}")
        if self.format == "mxfp4" and columns != 32:
            raise ValueError(f"block: {columns} columns, required 32 for format mxfp4")
        if self.format in ("int8", "int4", "uint4") and columns < k and k % columns:
            raise ValueError(f"block: {columns} columns, required a divisor of K = {k} for {self.format}")
        required = (experts, _pieces(n, rows), _pieces(k, columns) * (2 if self.format == "uint4" else 1))
        if tuple(scales.shape) != required:
            raise ValueError(
                f"scales: shape {list(scales.shape)}, required {list(required)} for shape {self.shape} and "
                f"blocks of {rows} x {columns}"
            )
        _check_rows("scales", scales)

    @property
    def scale_block(self) -> tuple[int, int]:
        """Rows and columns that one scale covers; (1, K) for GGUF types."""
        return (1, self.shape[2]) if self.block is None else self.block

    @property
    def bytes(self) -> int:
        """Memory of the data and the scales, without what a view leaves out."""
        scales = 0 if self.scales is None else self.scales.numel() * self.scales.element_size()
        return self.data.numel() * self.data.element_size() + scales

    def rows(self, start: int, stop: int, step: int = 1) -> ExpertMatrix:
        """Rows [start, stop) in steps, as a view: a part of a fused projection.

        Raises:
            ValueError: rows beyond the matrix, or that cut a block of scales.
        """
        experts, n, k = self.shape
        if not (0 <= start < stop <= n and step >= 1):
            raise ValueError(f"rows: {start}:{stop}:{step}, required a part of 0:{n}")
        data = self.data[:, start:stop:step]
        shape = (experts, data.shape[1], k)
        if self.scales is None:
            return ExpertMatrix(self.format, data, shape)
        rows, columns = self.scale_block
        if rows == 1:
            scales, kept = self.scales[:, start:stop:step], 1
        elif rows >= n:  # as each of any rows, too
            scales, kept = self.scales, data.shape[1]
        else:
            if rows % step or start % rows >= step:
                raise ValueError(f"rows: {start}:{stop}:{step}, required whole blocks of {rows} rows")
            kept = rows // step
            first = start // rows
            scales = self.scales[:, first : first + _pieces(data.shape[1], kept)]
        return ExpertMatrix(self.format, data, shape, scales, (kept, columns))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values [E, N, K]: the formats' definition in float32, then rounded to `dtype`."""
        if self.scales is None:
            from gguf import quants

            rows = self.data.reshape(self.shape[0] * self.shape[1], -1).contiguous().numpy()
            values = quants.dequantize(rows, quants.GGMLQuantizationType[self.format.upper()])
            return torch.from_numpy(values).reshape(self.shape).to(dtype)
        return dequantize(self.format, self.data, self.scales, self.shape, self.scale_block).to(dtype)

    def binding_arg(self, name: str) -> MatrixArg:
        """What the binding needs of it; `name` is for its messages."""
        size = self.data.element_size()
        addresses = (self.data.data_ptr(), self.data.stride(0) * size, self.data.stride(1) * size, 0)
        kind, at, per_expert, per_row = "none", 0, 0, 0
        if self.scales is not None:
            kind, at = _SCALE_TYPES[self.scales.dtype], self.scales.data_ptr()
            per_expert = self.scales.stride(0) * self.scales.element_size()
            per_row = self.scales.stride(1) * self.scales.element_size()
        return (name, self.format, *self.shape, *addresses, kind, at, per_expert, per_row, *self.scale_block)


def dequantize(
    format: str, data: Tensor, scales: Tensor, shape: tuple[int, int, int], block: tuple[int, int]
) -> Tensor:
    """Values [E, N, K] in float32 of tensors on any device; arguments as the fields of `ExpertMatrix`."""
    experts, n, k = shape
    rows, columns = block

    def spread(factors: Tensor) -> Tensor:
        return factors.repeat_interleave(rows, 1)[:, :n].repeat_interleave(columns, 2)[:, :, :k]

    factors = scales_to_float(scales)
    if format in ("fp8", "int8"):
        values = data.to(torch.float32)
    elif format == "mxfp4":
        values = _e2m1(data)
    elif format == "nvfp4":
        blocks = data.reshape(experts, n, k // 32, 18)
        of_groups = blocks[..., :2].contiguous().view(torch.float8_e4m3fn).to(torch.float32)
        of_groups = of_groups.reshape(experts, n, k // 16) * factors
        return of_groups.repeat_interleave(16, 2) * _e2m1(blocks[..., 2:]).reshape(experts, n, k)
    else:
        shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=data.device)
        values = (data.unsqueeze(-1) >> shifts & 15).to(torch.float32).reshape(experts, n, k)
        if format == "uint4":
            factors, zeros = factors.chunk(2, 2)
            return (values - spread(zeros)) * spread(factors)
        values = values - 8
    return values.reshape(experts, n, k) * spread(factors)


def _e2m1(data: Tensor) -> Tensor:
    """Values [..., 2] of bytes [...], low nibble first."""
    return _e2m1_values(data.device)[torch.stack((data & 15, data >> 4), -1).long()]


@functools.cache
def _e2m1_values(device: torch.device) -> Tensor:
    """Float32 [16]. Once: while it is copied to a GPU the host waits for all that the GPU was told before."""
    return torch.tensor([*_E2M1, *(-v for v in _E2M1)], dtype=torch.float32, device=device)


def scales_to_float(scales: Tensor) -> Tensor:
    """Scales of any of the formats' types as float32; ue8m0 is 2^(byte - 127), 255 a NaN."""
    if _SCALE_TYPES[scales.dtype] != "ue8m0":
        return scales.to(torch.float32)
    exponent = scales.view(torch.uint8).to(torch.int32)
    bits = torch.where(exponent == 0, 0x00400000, exponent << 23).to(torch.int32)
    return torch.where(exponent == 255, torch.nan, bits.view(torch.float32))


def _three(name: str, tensor: Tensor) -> tuple[int, int, int]:
    if tensor.dim() != 3:
        raise ValueError(f"{name}: shape {list(tensor.shape)}, required three dimensions [E, N, ...]")
    return tensor.shape[0], tensor.shape[1], tensor.shape[2]


def _check_tensor(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name}: must be a tensor, got {type(tensor).__name__}")
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise ValueError(f"{name}: {tensor.layout} on {tensor.device}, required torch.strided on cpu")


def _check_rows(name: str, tensor: Tensor) -> None:
    """The dimensions after the second must be contiguous."""
    expected = 1
    for dim in range(tensor.dim() - 1, 1, -1):
        if tensor.shape[dim] > 1 and tensor.stride(dim) != expected:
            raise ValueError(
                f"{name}: strides {list(tensor.stride())}, required contiguous dimensions from the third on"
            )
        expected *= tensor.shape[dim]


def _types(names: tuple[str, ...]) -> str:
    return " or ".join(str(dtype) for dtype, name in _SCALE_TYPES.items() if name in names)
