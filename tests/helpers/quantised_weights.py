"""Store some weights of a tiny checkpoint quantised, in the formats that releases use.

    write_quantised(path, ["model.layers.0.mlp.gate_proj.weight", ...], "fp8_block")

The model a reference loads is the dequantised one: `dequantise(path, to)` writes it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kt_ray.checkpoint import CheckpointIndex
from tests.helpers.released.formats import awq, gptq, nvfp4

FORMATS = ("fp8_block", "fp8_row", "int8", "int4", "gptq", "awq", "mxfp4", "nvfp4")
BLOCK = 32
_RELEASED = {"gptq": gptq, "awq": awq, "nvfp4": nvfp4(("", "_scale", "_scale_2"), False)}


def quantise(name: str, weight: Tensor, kind: str) -> dict[str, Tensor]:
    """The tensors that stand for one weight [N, K], K a multiple of 32."""
    base = name.removesuffix(".weight")
    n, k = weight.shape
    if kind == "fp8_block":
        rows, columns = -(-n // BLOCK), -(-k // BLOCK)
        padded = torch.zeros(rows * BLOCK, columns * BLOCK)
        padded[:n, :k] = weight
        blocks = padded.view(rows, BLOCK, columns, BLOCK)
        scales = blocks.abs().amax((1, 3)).clamp_min(1e-6) / 448
        values = (blocks / scales[:, None, :, None]).view_as(padded)[:n, :k]
        return {name: values.to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}
    if kind == "fp8_row":
        scales = weight.abs().amax(1, keepdim=True).clamp_min(1e-6) / 448
        return {name: (weight / scales).to(torch.float8_e4m3fn), f"{name}_scale": scales.bfloat16()}
    if kind == "int8":
        scales = weight.abs().amax(1, keepdim=True).clamp_min(1e-6) / 127
        return {name: (weight / scales).round().to(torch.int8), f"{name}_scale": scales}
    groups = weight.reshape(n, k // 32, 32)
    if kind in _RELEASED:
        return _RELEASED[kind](name, weight).tensors
    if kind == "int4":
        scales = (groups.abs().amax(2) / 7).clamp_min(1e-6)
        nibbles = (groups / scales[..., None]).round().clamp(-8, 7).to(torch.int32).view(n, k) + 8
        words = torch.zeros(n, k // 8, dtype=torch.int64)
        for i in range(8):
            words |= nibbles[:, i::8].long() << (4 * i)
        words = torch.where(words >= 2**31, words - 2**32, words)
        return {
            f"{base}.weight_packed": words.to(torch.int32),
            f"{base}.weight_scale": scales,
            f"{base}.weight_shape": torch.tensor([n, k]),
        }
    exponent = torch.floor(torch.log2(groups.abs().amax(2).clamp_min(1e-6))) - 2
    codes = (groups / 2.0 ** exponent[..., None]).round().clamp(-6, 6).view(n, k)
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    index = (codes.abs()[..., None] - table).abs().argmin(-1).to(torch.uint8)
    index = index | ((codes < 0).to(torch.uint8) << 3)
    return {
        f"{base}.weight_packed": index[:, 0::2] | (index[:, 1::2] << 4),
        f"{base}.weight_scale": (exponent + 127).to(torch.uint8),
    }


def write_quantised(path: Path, names: list[str], kind: str) -> None:
    """Replace these weights of a single-file checkpoint."""
    tensors = load_file(path / "model.safetensors")
    for name in names:
        tensors |= quantise(name, tensors.pop(name).float(), kind)
    save_file({k: v.contiguous() for k, v in tensors.items()}, path / "model.safetensors", {"format": "pt"})
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    if kind == "fp8_block":
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    elif kind in ("gptq", "awq"):
        config["quantization_config"] = {"quant_method": kind, "bits": 4, "group_size": 32}
    else:
        config["quantization_config"] = {"quant_method": "compressed-tensors"}
    (path / "config.json").write_text(json.dumps(config))


def dequantise(path: Path, to: Path, dtype: torch.dtype) -> Path:
    """The same checkpoint with every weight in `dtype`, as a directory of its own."""
    index = CheckpointIndex.open(path)
    shutil.copytree(path, to)
    tensors = {name: index.value(name, dtype).contiguous() for name in sorted(index.names)}
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    config = json.loads((to / "config.json").read_text())
    config.pop("quantization_config", None)
    (to / "config.json").write_text(json.dumps(config))
    return to
