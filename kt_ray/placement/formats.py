"""The format of the routed experts' weights, read from a config.json, and its bytes per parameter.

Sources: the `quantization_config` conventions of transformers (fp8, mxfp4, gptq, awq, bitsandbytes)
and of compressed-tensors (`config_groups`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# What expert actors read from checkpoints, and so train.
TRAINABLE_FORMATS = ("bf16", "f32")
# What the engine computes beside these, forward and backward, on every instruction set. (It computes GGUF
# types as well; no config.json names them.)
COMPUTED_FORMATS = ("fp8_block", "fp8", "mxfp4", "int8", "int4")
# Methods whose integers are packed in another way than the engine reads, though of the same name here.
_OTHER_PACKING = ("gptq", "awq", "auto-round", "bitsandbytes")

# Bytes per expert parameter, scales included: blocks of 128 x 128 carry one float32 scale; MXFP4 and
# INT4 groups of 32 one byte and two bytes.
BYTES_PER_PARAM: dict[str, float] = {
    "f32": 4.0,
    "bf16": 2.0,
    "f16": 2.0,
    "fp8_block": 1.0 + 4 / (128 * 128),
    "fp8": 1.0,
    "int8": 1.0 + 2 / 128,
    "mxfp4": 0.5 + 1 / 32,
    "int4": 0.5 + 2 / 32,
    "nf4": 0.5 + 4 / 64,
}

_PLAIN = {"bfloat16": "bf16", "float32": "f32", "float16": "f16"}
BACKEND_FORMAT = {"AMXINT8": "int8", "AMXINT4": "int4"}  # experts quantised while they stream in


def plain_format(dtype: str) -> str:
    """Format name of unquantised experts in `dtype` ("bfloat16" -> "bf16")."""
    return _PLAIN[dtype]


def expert_bytes_per_param(expert_format: str, backend: str = "auto") -> float:
    """Bytes one expert parameter takes in memory under `backend`, scales included.

    An unknown format counts as bf16, the largest of those that checkpoints quantise from.
    """
    return BYTES_PER_PARAM.get(BACKEND_FORMAT.get(backend, expert_format), 2.0)


def expert_format(config: Mapping[str, Any], dtype: str) -> str:
    """Format of the routed experts: "bf16", "fp8_block", "mxfp4", "int4", ... or the method's name."""
    quantization = config.get("quantization_config")
    if str(config.get("expert_dtype", "")).lower() in ("fp4", "mxfp4"):
        return "mxfp4"
    if not isinstance(quantization, Mapping) or not quantization:
        return plain_format(dtype)
    method = str(quantization.get("quant_method", "unknown")).lower()
    if method in ("fp8", "finegrained_fp8", "fbgemm_fp8"):
        return "fp8_block" if quantization.get("weight_block_size") else "fp8"
    if method in ("compressed-tensors", "compressed_tensors"):
        return _compressed_tensors(quantization)
    if method == "bitsandbytes":
        return "nf4" if quantization.get("load_in_4bit") else "int8"
    if method in ("gptq", "awq", "auto-round"):
        return "int4" if int(quantization.get("bits", 4)) <= 4 else "int8"
    return method


def missing_for_training(config: Mapping[str, Any], fmt: str) -> str | None:
    """What keeps experts of a format from being trained; None = nothing does.

    Args:
        config: the released configuration.
        fmt: what `expert_format` says of it.
    """
    if fmt in TRAINABLE_FORMATS:
        return None
    quantization = config.get("quantization_config")
    method = str(quantization.get("quant_method", "")) if isinstance(quantization, Mapping) else ""
    packed_alike = method.lower() not in _OTHER_PACKING and not _asymmetric(quantization)
    if fmt in COMPUTED_FORMATS and packed_alike:
        return "the engine computes them, expert actors do not read them from checkpoints"
    return "the engine does not compute them" + (f" as {method} packs them" if method else "")


def _asymmetric(quantization: object) -> bool:
    """Whether integers have zero points of their own (compressed-tensors)."""
    groups = quantization.get("config_groups") if isinstance(quantization, Mapping) else None
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and weights.get("symmetric") is False:
            return True
    return False


def _compressed_tensors(quantization: Mapping[str, Any]) -> str:
    groups = quantization.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            continue
        bits = int(weights.get("num_bits", 8))
        if weights.get("type") == "float":
            return "mxfp4" if bits == 4 else "fp8_block" if weights.get("block_structure") else "fp8"
        return "int4" if bits <= 4 else "int8"
    return "compressed-tensors"
