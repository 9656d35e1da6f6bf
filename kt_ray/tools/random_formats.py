"""Random weights: which tensors a parameter becomes in a format, and what config.json says of it.

Shapes: a matrix is [N, K]; a stack of fused experts [E, N, K].
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kt_ray.checkpoint.safetensors_file import BITS

BLOCK, GROUP = 128, 32  # fp8: rows and columns of a scale; int4 and mxfp4: columns of a scale
_EXPERT = re.compile(r"\bexperts\.\d+\.(\w+)\.weight$")
_FUSED = re.compile(r"\bexperts\.(gate_up_proj|down_proj)$")
# Matrices that no release quantises: not products with activations, or too small to matter.
_KEPT = re.compile(r"(embed|lm_head|norm|\bgate\.weight|router|shared_expert_gate|conv1d|\.mtp\b)")


@dataclass(frozen=True)
class Entry:
    """One tensor of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    fill: str | bytes  # kind of random values, or the bytes themselves

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BITS[self.dtype] // 8


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
