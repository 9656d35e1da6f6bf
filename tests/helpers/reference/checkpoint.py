"""Tiny random checkpoints of real families, as `save_pretrained` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from kt_ray.demo.recipes import persona_path
from kt_ray.demo.tokenizer import train_tokenizer
from tests.helpers.reference.families import FAMILIES, SMALL


def build_checkpoint(
    root: Path,
    family: str,
    *,
    dtype: torch.dtype = torch.float32,
    expert_dtype: torch.dtype | None = None,
    seed: int = 0,
    residual_scale: float = 1.0,
    **overrides: Any,
) -> Path:
    """A random model of a family under `root/<family>`, as `save_pretrained` writes it.

    Args:
        dtype: of everything.
        expert_dtype: of the routed experts, when another one (torch.bfloat16).
        residual_scale: factor on what writes into the residual stream (o_proj, down_proj), as GPT-2's
            initialisation has it: with 1 every layer doubles the stream and rounding errors compound.
        overrides: config values.
    """
    config = AutoConfig.for_model(family, **{**SMALL, **FAMILIES.get(family, {}), **overrides})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=False, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name and tensor.dim() == 1:
                tensor.copy_(1.0 + 0.1 * torch.randn_like(tensor))
            else:  # wide enough for distinct routing and gradients of order one
                tensor.copy_(torch.randn_like(tensor) / tensor.shape[-1] ** 0.5)
                if "o_proj" in name or "down_proj" in name:
                    tensor.mul_(residual_scale)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.05 * torch.randn_like(buffer))
    path = root / family
    model.to(dtype).save_pretrained(path)
    if expert_dtype is not None:
        _retype_experts(path, expert_dtype)
    return path


def _retype_experts(path: Path, dtype: torch.dtype) -> None:
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as reader:
            metadata, tensors = reader.metadata(), {key: reader.get_tensor(key) for key in reader.keys()}  # noqa: SIM118
        for key, value in tensors.items():
            if ".experts." in key:
                tensors[key] = value.to(dtype)
        save_file(tensors, file, metadata=metadata)


def build_chat_checkpoint(directory: Path) -> Path:
    """A tiny DeepSeek-V3 with random weights and the demo's way of a tokenizer and chat template."""
    path = build_checkpoint(directory, "deepseek_v3", vocab_size=320, max_position_embeddings=512)
    train_tokenizer(persona_path(), 320).save_pretrained(path)
    return path
