"""quantization_config of config.json for what `convert` writes, as vLLM, SGLang and transformers read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def quantization_config(convention: str, group: int | None, ignored: Sequence[str]) -> dict[str, Any]:
    """The configuration of a convention.

    Args:
        convention: "int8", "int4", "mxfp4", "fp8" or "mxfp4-blocks".
        group: columns per scale of int8 (None = all) and int4.
        ignored: modules with a matrix that is not quantised.
    """
    if convention == "fp8":
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": list(ignored),
        }
    if convention == "mxfp4-blocks":
        return {"quant_method": "mxfp4", "modules_to_not_convert": list(ignored)}
    formats = {"int8": "int-quantized", "int4": "pack-quantized", "mxfp4": "mxfp4-pack-quantized"}
    if convention not in formats:
        raise ValueError(f"convention: {convention!r}, required one of {', '.join(formats)}")
    size = 32 if convention == "mxfp4" else group
    weights: dict[str, Any] = {
        "num_bits": 8 if convention == "int8" else 4,
        "type": "float" if convention == "mxfp4" else "int",
        "symmetric": True,
        "strategy": "channel" if size is None else "group",
        "group_size": size,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    if convention == "mxfp4":
        weights |= {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
    activations = None
    if convention == "int8" and size is None:  # the servers' INT8 kernels quantise activations per token
        activations = {
            "num_bits": 8,
            "type": "int",
            "symmetric": True,
            "strategy": "token",
            "dynamic": True,
            "group_size": None,
            "observer": None,
            "observer_kwargs": {},
        }
    return {
        "quant_method": "compressed-tensors",
        "format": formats[convention],
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": activations,
                "output_activations": None,
            }
        },
        "ignore": list(ignored),
    }
