"""Hand-made checkpoints of names, shapes and types alone: no forward, so no transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from kt_ray.checkpoint.encode_weights import CONVENTIONS as WRITTEN
from kt_ray.checkpoint.encode_weights import Encoding, Entry
from kt_ray.checkpoint.safetensors_file import build_header, tensor_bytes

E, H, I, LAYERS = 3, 64, 96, 2
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": H,
    "num_hidden_layers": LAYERS,
    "num_experts": E,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": I,
    "vocab_size": 11,
    "num_attention_heads": 2,
    "torch_dtype": "bfloat16",
}


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.05


def per_expert(
    dtype: torch.dtype = torch.bfloat16,
    *,
    moe: str = "mlp",
    leaves: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    layers: int = LAYERS,
    biases: bool = False,
) -> dict[str, Tensor]:
    """Experts of every layer, an attention projection, a router, a norm and an embedding."""
    tensors: dict[str, Tensor] = {"model.embed_tokens.weight": values(11, H, seed=99).to(dtype)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        tensors[f"{prefix}.self_attn.q_proj.weight"] = values(H, H, seed=layer).to(dtype)
        tensors[f"{prefix}.{moe}.gate.weight"] = values(E, H, seed=layer + 50).to(dtype)
        tensors[f"{prefix}.input_layernorm.weight"] = torch.ones(H, dtype=dtype)
        for expert in range(E):
            for number, (leaf, shape) in enumerate(zip(leaves, ((I, H), (I, H), (H, I)), strict=True)):
                seed = 100 + layer * 1000 + expert * 10 + number
                key = f"{prefix}.{moe}.experts.{expert}.{leaf}"
                tensors[f"{key}.weight"] = values(*shape, seed=seed).to(dtype)
                if biases:
                    tensors[f"{key}.bias"] = values(shape[0], seed=seed + 500).to(dtype)
    return tensors


def fused(
    dtype: torch.dtype = torch.bfloat16,
    *,
    transposed: bool = False,
    interleaved: bool = False,
    biases: bool = False,
) -> dict[str, Tensor]:
    """The same values, gate and up of all experts in one tensor."""
    single = per_expert(dtype, biases=biases)
    tensors = {key: value for key, value in single.items() if ".experts." not in key}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}.mlp.experts"

        def stack(leaf: str, end: str, prefix: str = prefix) -> Tensor:
            return torch.stack([single[f"{prefix}.{e}.{leaf}.{end}"] for e in range(E)])

        def both(end: str) -> Tensor:
            gate, up = stack("gate_proj", end), stack("up_proj", end)
            return torch.stack((gate, up), 2).flatten(1, 2) if interleaved else torch.cat((gate, up), 1)

        swap = (lambda t: t.transpose(1, 2).contiguous()) if transposed else (lambda t: t)
        tensors[f"{prefix}.gate_up_proj"] = swap(both("weight"))
        tensors[f"{prefix}.down_proj"] = swap(stack("down_proj", "weight"))
        if biases:
            tensors[f"{prefix}.gate_up_proj_bias"] = both("bias")
            tensors[f"{prefix}.down_proj_bias"] = stack("down_proj", "bias")
    return tensors


def granite() -> dict[str, Tensor]:
    """The values of `fused` under Granite's names."""
    names = {
        ".mlp.experts.gate_up_proj": ".block_sparse_moe.input_linear.weight",
        ".mlp.experts.down_proj": ".block_sparse_moe.output_linear.weight",
    }
    return {
        next((key.replace(old, new) for old, new in names.items() if old in key), key): value
        for key, value in fused().items()
    }


CONVENTIONS = (*WRITTEN, "fp8-row", "fp8-fused", "fp4")


def encoding_of(convention: str, key: str, shape: tuple[int, ...], **options: Any) -> Encoding:
    """`Encoding.new`, and conventions that are read but never chosen for writing: compressed-tensors
    float-quantized, transformers' fused FP8 experts, DeepSeek-V4's FP4."""
    *lead, rows, columns = shape
    values, base = Entry(key, "F8_E4M3", shape), key.removesuffix(".weight")
    if convention == "fp8-row":
        return Encoding(
            "fp8", shape, (1, columns), values, Entry(f"{base}.weight_scale", "BF16", (*lead, rows, 1))
        )
    if convention == "fp8-fused":
        scales = Entry(f"{key}_scale_inv", "F32", (*lead, -(-rows // 128), -(-columns // 128)))
        return Encoding("fp8", shape, (128, 128), values, scales)
    if convention == "fp4":
        scales = Entry(f"{base}.scale", "F8_E8M0", (*lead, rows, columns // 32))
        return Encoding("mxfp4", shape, (1, 32), Entry(key, "I8", (*lead, rows, columns // 2)), scales)
    return Encoding.new(convention, key, shape, **options)


def encoded(tensors: dict[str, Tensor], convention: str, **options: Any) -> dict[str, tuple[str, Tensor]]:
    """Expert weights in a convention: key -> (type as safetensors names it, values); the rest as it is."""
    result: dict[str, tuple[str, Tensor]] = {}
    for key, value in tensors.items():
        if ".experts." not in key or "bias" in key:
            result[key] = ({torch.bfloat16: "BF16", torch.float32: "F32"}[value.dtype], value)
            continue
        encoding = encoding_of(convention, key, tuple(value.shape), **options)
        data, scales, _ = encoding.encode(value)
        result[encoding.data.key] = (encoding.data.dtype, data)
        result[encoding.scales.key] = (encoding.scales.dtype, scales)
        for extra in encoding.extra:
            result[extra.key] = (extra.dtype, encoding.extras()[extra.key])
    return result


def save(path: Path, tensors: dict[str, Any], config: dict[str, Any] | None = None) -> Path:
    """One file and config.json. Values may be tensors or (type, values) as `encoded` gives."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG | (config or {})))
    (path / "tokenizer.json").write_text("{}")
    if not any(isinstance(value, tuple) for value in tensors.values()):
        save_file(tensors, path / "model.safetensors")
        return path
    names = {torch.bfloat16: "BF16", torch.float32: "F32"}
    typed = {k: v if isinstance(v, tuple) else (names[v.dtype], v) for k, v in tensors.items()}
    head, _, _ = build_header((key, dtype, value.shape) for key, (dtype, value) in typed.items())
    with (path / "model.safetensors").open("wb") as file:
        file.write(head)
        for _, value in typed.values():
            held = value.contiguous()
            file.write(tensor_bytes(held))
    return path


def save_adapter(path: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    """An adapter directory. Names without "base_model.model."."""
    path.mkdir(parents=True)
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "base_model_name_or_path": "nowhere", **config}
    (path / "adapter_config.json").write_text(json.dumps(settings))
    save_file({f"base_model.model.{k}": v for k, v in tensors.items()}, path / "adapter_model.safetensors")
    return path


def lora(modules: dict[str, tuple[int, int]], rank: int = 4) -> dict[str, Tensor]:
    """A and B, both random, for module -> (out, in)."""
    tensors = {}
    for seed, (module, (rows, columns)) in enumerate(modules.items()):
        tensors[f"{module}.lora_A.weight"] = values(rank, columns, seed=2 * seed + 7)
        tensors[f"{module}.lora_B.weight"] = values(rows, rank, seed=2 * seed + 8)
    return tensors


def expert_modules(
    moe: str = "mlp", leaves: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, tuple[int, int]]:
    """Every expert's projections and the attention's."""
    modules: dict[str, tuple[int, int]] = {}
    for layer in range(LAYERS):
        modules[f"model.layers.{layer}.self_attn.q_proj"] = (H, H)
        for expert in range(E):
            for leaf, shape in zip(leaves, ((I, H), (I, H), (H, I)), strict=True):
                modules[f"model.layers.{layer}.{moe}.experts.{expert}.{leaf}"] = shape
    return modules
