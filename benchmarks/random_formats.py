"""Random weights on disk: which tensors a matrix becomes in a format, and where their bytes come from.

Values are about N(0, 0.02), as in a freshly initialised model. Their bytes are drawn once, into a pool per
kind; a tensor takes its bytes from there, from an offset of its own, so that writing costs no drawing. A
pool's length is odd, so the rows of a long matrix do not repeat.

Shapes: a matrix is [N, K]; a stack of fused experts [E, N, K].
"""

from __future__ import annotations

import math
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

STD = 0.02
FORMATS = ("bf16", "fp8", "int4", "int8", "mxfp4")
BYTES = {"I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F8_E4M3": 1, "I8": 1, "U8": 1}
POOL = (1 << 24) - 3  # elements
BLOCK, GROUP = 128, 32  # fp8: rows and columns of a scale; int4 and mxfp4: columns of a scale
# What one step of a code is worth, so that the values have STD.
FP8_STEP, INT8_STEP, INT4_STEP, MXFP4_EXPONENT = STD / 64, STD / 32, STD / 3, 120  # 2^-7

_CODES = {"int4": 8, "mxfp4": 2}  # packed into one element

_EXPERT = re.compile(r"\bexperts\.\d+\.(\w+)\.weight$")
_FUSED = re.compile(r"\bexperts\.(gate_up_proj|down_proj)$")
# Matrices that no release quantises: not products with activations, or too small to matter.
_KEPT = re.compile(r"(embed|lm_head|norm|\bgate\.weight|router|shared_expert_gate|conv1d|\.mtp\b)")


@dataclass(frozen=True)
class Entry:
    """One tensor of the file: `fill` names a pool, or is the bytes themselves."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    fill: str | bytes

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BYTES[self.dtype]


def is_expert(name: str) -> bool:
    """Whether a released name is a routed expert's matrix, or a stack of them."""
    return bool(_EXPERT.search(name) or _FUSED.search(name))


def entries(name: str, shape: tuple[int, ...], format: str) -> Iterator[Entry]:
    """The tensors that one parameter becomes.

    FP8 takes every linear as the releases do, the other formats the routed experts.

    Raises:
        ValueError: the format cannot hold this shape, or the family stores its experts another way.
    """
    if name.endswith("e_score_correction_bias"):
        yield Entry(name, "F32", shape, "zeros")
    elif "norm" in name or (len(shape) == 1 and name.endswith(".weight")):
        yield Entry(name, "BF16", shape, "ones")
    elif len(shape) == 1 or name.endswith("_bias"):
        yield Entry(name, "BF16", shape, "zeros")
    elif _FUSED.search(name):
        yield from _fused(name, shape, format)
    elif _quantised(name, shape, format):
        yield from _matrix(name, (shape[0], shape[1]), format)
    else:
        yield Entry(name, "BF16", shape, "normal")


def _quantised(name: str, shape: tuple[int, ...], format: str) -> bool:
    if format == "fp8":
        return len(shape) == 2 and name.endswith(".weight") and not _KEPT.search(name)
    return format != "bf16" and bool(_EXPERT.search(name))


def _matrix(name: str, shape: tuple[int, int], format: str) -> Iterator[Entry]:
    rows, columns = shape
    if format == "fp8":
        yield Entry(name, "F8_E4M3", shape, "fp8")
        yield Entry(f"{name}_scale_inv", "F32", (-(-rows // BLOCK), -(-columns // BLOCK)), "fp8_scales")
        return
    if format == "int8":
        yield Entry(name, "I8", shape, "int8")
        yield Entry(f"{name}_scale", "BF16", (rows, 1), "int8_scales")
        return
    if columns % GROUP:
        raise ValueError(f"{name}: {columns} columns, {format} requires a multiple of {GROUP}")
    if format == "int4":
        yield Entry(f"{name}_packed", "I32", (rows, columns // 8), "int4")
        yield Entry(f"{name}_scale", "BF16", (rows, columns // GROUP), "int4_scales")
        yield Entry(f"{name}_shape", "I32", (2,), struct.pack("<2i", rows, columns))
    else:
        yield Entry(f"{name}_packed", "U8", (rows, columns // 2), "mxfp4")
        yield Entry(f"{name}_scale", "U8", (rows, columns // GROUP), "mxfp4_scales")


def _fused(name: str, shape: tuple[int, ...], format: str) -> Iterator[Entry]:
    """gpt-oss keeps [E, K, N] in BF16 and [E, N, K / 32, 16] blocks in MXFP4; FP8 is transformers' own."""
    experts, first, last = shape
    if format == "bf16":
        yield Entry(name, "BF16", shape, "normal")
    elif format == "fp8":
        scales = (experts, -(-first // BLOCK), -(-last // BLOCK))
        yield Entry(name, "F8_E4M3", shape, "fp8")
        yield Entry(f"{name}_scale_inv", "F32", scales, "fp8_scales")
    elif format == "mxfp4" and first % GROUP == 0:
        yield Entry(f"{name}_blocks", "U8", (experts, last, first // GROUP, GROUP // 2), "mxfp4")
        yield Entry(f"{name}_scales", "U8", (experts, last, first // GROUP), "mxfp4_scales")
    else:
        raise ValueError(f"{name}: experts fused into {list(shape)} are not released in {format}")


def quantization_config(format: str, names: list[str], fused: bool) -> dict[str, Any] | None:
    """What config.json says about the format.

    Args:
        names: released names of the two-dimensional parameters that stay BF16, embedding left out.
        fused: experts are fused (gpt-oss).
    """
    modules = [name.removesuffix(".weight") for name in names]
    if format == "bf16":
        return None
    if format == "fp8":
        return {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": modules,
        }
    if fused:
        return {"quant_method": "mxfp4", "modules_to_not_convert": modules}
    # Kimi-K2.5's, and by name what its patterns do not cover.
    ignore = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"]
    ignore += [r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
    patterns = [re.compile(pattern.removeprefix("re:")) for pattern in ignore]
    ignore += [m for m in modules if not any(p.match(m) for p in patterns)]
    scheme: dict[str, Any] = {
        "int4": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP},
        "int8": {"num_bits": 8, "type": "int", "strategy": "channel", "group_size": None},
        "mxfp4": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": GROUP},
    }[format]
    weights = {"actorder": None, "block_structure": None, "dynamic": False, "symmetric": True, **scheme}
    group = {
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    kinds = {"int4": "pack-quantized", "int8": "int-quantized", "mxfp4": "mxfp4-pack-quantized"}
    return {
        "config_groups": {"group_0": group},
        "format": kinds[format],
        "ignore": ignore,
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


class Pools:
    """Bytes of every kind, drawn on first use.

    Args:
        seed: decides them, and each tensor's place in them.
        elements: of a pool; odd.
    """

    def __init__(self, seed: int, elements: int = POOL) -> None:
        self.seed, self.elements = seed, elements | 1
        self._pools: dict[str, memoryview] = {}

    def chunks(self, entry: Entry) -> Iterator[memoryview]:
        """The tensor's bytes, piece by piece."""
        if isinstance(entry.fill, bytes):
            yield memoryview(entry.fill)
            return
        pool, element = self._pool(entry.fill), BYTES[entry.dtype]
        place = zlib.crc32(f"{self.seed}:{entry.name}".encode()) % (len(pool) // element) * element
        left = entry.nbytes
        while left:
            piece = pool[place : place + left]
            yield piece
            left -= len(piece)
            place = 0

    def _pool(self, kind: str) -> memoryview:
        if kind not in self._pools:
            generator = torch.Generator().manual_seed(self.seed)
            count = self.elements // _CODES.get(kind, 1) | 1
            drawn = _DRAW[kind](count, generator).contiguous().view(torch.uint8).numpy()
            self._pools[kind] = memoryview(np.ascontiguousarray(drawn)).cast("B")
        return self._pools[kind]


def _normal(count: int, generator: torch.Generator, step: float, limit: float) -> torch.Tensor:
    """N(0, STD) in steps of `step`, float32, clamped to ± limit steps."""
    return torch.randn(count, generator=generator).mul_(STD / step).clamp_(-limit, limit)


def _around(value: float, dtype: torch.dtype) -> Callable[[int, torch.Generator], torch.Tensor]:
    """Scales within a fifth of `value`."""
    return lambda count, generator: (torch.rand(count, generator=generator) * 0.4 + 0.8).mul_(value).to(dtype)


def _int4(count: int, generator: torch.Generator) -> torch.Tensor:
    """Two codes a byte, four bytes an int32."""
    codes = _normal(8 * count, generator, INT4_STEP, 7.0).round_().add_(8).to(torch.uint8)
    return codes[0::2] | codes[1::2] << 4


def _mxfp4(count: int, generator: torch.Generator) -> torch.Tensor:
    """Two E2M1 codes a byte; of the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 the nearest one."""
    values = _normal(2 * count, generator, 2.0 ** (MXFP4_EXPONENT - 127), 6.0)
    bounds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    codes = (
        torch.bucketize(values.abs(), bounds, right=True).to(torch.uint8) | (values < 0).to(torch.uint8) << 3
    )
    return codes[0::2] | codes[1::2] << 4


_DRAW: dict[str, Callable[[int, torch.Generator], torch.Tensor]] = {
    "normal": lambda count, generator: _normal(count, generator, 1.0, math.inf).bfloat16(),
    "fp8": lambda count, generator: _normal(count, generator, FP8_STEP, 448.0).to(torch.float8_e4m3fn),
    "int8": lambda count, generator: _normal(count, generator, INT8_STEP, 127.0).round_().to(torch.int8),
    "int4": _int4,
    "mxfp4": _mxfp4,
    "fp8_scales": _around(FP8_STEP, torch.float32),
    "int8_scales": _around(INT8_STEP, torch.bfloat16),
    "int4_scales": _around(INT4_STEP, torch.bfloat16),
    "mxfp4_scales": lambda count, generator: torch.full((count,), MXFP4_EXPONENT, dtype=torch.uint8),
    "ones": lambda count, generator: torch.ones(count, dtype=torch.bfloat16),
    "zeros": lambda count, generator: torch.zeros(count * 2, dtype=torch.bfloat16),
}
