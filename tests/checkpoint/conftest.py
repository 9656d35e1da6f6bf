"""Tiny random checkpoints: hand-made ones (names and shapes only) and ones that transformers saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

H, I, E, LAYERS = 8, 6, 4, 3


def expert_tensors(dtype: torch.dtype = torch.float32, *, mixtral: bool = False) -> dict[str, torch.Tensor]:
    """Layers 1 and 2 have E experts each; layer 0 is dense."""
    generator = torch.Generator().manual_seed(0)
    moe, names = (
        ("block_sparse_moe", ("w1", "w3", "w2"))
        if mixtral
        else ("mlp", ("gate_proj", "up_proj", "down_proj"))
    )
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(1, LAYERS):
        for expert in range(E):
            for name, shape in zip(names, ((I, H), (I, H), (H, I)), strict=True):
                value = torch.randn(shape, generator=generator).to(dtype)
                tensors[f"model.layers.{layer}.{moe}.experts.{expert}.{name}.weight"] = value
    return tensors


def config_dict(**changes: Any) -> dict[str, Any]:
    config = {"model_type": "qwen3_moe", "hidden_size": H, "num_hidden_layers": LAYERS, "num_experts": E}
    return {key: value for key, value in {**config, **changes}.items() if value is not None}


def write_checkpoint(
    path: Path, tensors: dict[str, torch.Tensor], *, shards: int = 1, config: dict[str, Any] | None = None
) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config or config_dict()))
    if shards == 1:
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, path / "model.safetensors")
        return path
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for i in range(shards):
        shard = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        mine = names[i::shards]
        save_file({name: tensors[name].clone() for name in mine}, path / shard)
        weight_map |= dict.fromkeys(mine, shard)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


@pytest.fixture
def make_experts() -> Callable[..., dict[str, torch.Tensor]]:
    return expert_tensors


@pytest.fixture
def make_config() -> Callable[..., dict[str, Any]]:
    return config_dict


@pytest.fixture
def write() -> Callable[..., Path]:
    return write_checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Two shards of float32 experts and an embedding."""
    tensors = expert_tensors() | {"model.embed_tokens.weight": torch.ones(5, H)}
    return write_checkpoint(tmp_path / "model", tensors, shards=2)


_COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_MLA: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
_DEEPSEEK: dict[str, Any] = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**_DEEPSEEK, **_MLA, "n_group": 2, "topk_group": 1},
    "deepseek_v2": {**_DEEPSEEK, **_MLA, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    "qwen3_moe": {
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [0],
        "head_dim": 8,
    },
    "qwen2_moe": {
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [0],
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {**_DEEPSEEK, "n_group": 1, "topk_group": 1, "head_dim": 8},
}


def tiny_model(family: str, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A randomly initialised `...ForCausalLM` whose norms and biases are random too."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**_COMMON, **FAMILIES[family], **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.normal_(1, 0.1)
            else:
                parameter.normal_(0, 0.15)
        for name, buffer in model.named_buffers():
            if "bias" in name:
                buffer.normal_(0, 0.1)
    return model


@pytest.fixture
def make_model() -> Callable[..., Any]:
    return tiny_model
