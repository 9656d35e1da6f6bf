"""Tiny shapes of real families: 8 experts, one dense layer first where the family has such, sizes apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "intermediate_size": 56,
        "moe_intermediate_size": 24,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.7,
        "q_lora_rank": 20,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12,
        "v_head_dim": 12,
    },
    "deepseek_v2": {
        "intermediate_size": 56,
        "moe_intermediate_size": 24,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12,
        "v_head_dim": 12,
    },
    "qwen3_moe": {
        "intermediate_size": 56,
        "moe_intermediate_size": 24,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "qwen2_moe": {
        "intermediate_size": 56,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "num_key_value_heads": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
    },
    "mixtral": {
        "intermediate_size": 24,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "olmoe": {
        "intermediate_size": 24,
        "num_key_value_heads": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "glm4_moe": {
        "intermediate_size": 56,
        "moe_intermediate_size": 24,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
    },
    "longcat_flash": {
        "num_hidden_layers": 6,  # two of each layer
        "ffn_hidden_size": 56,
        "expert_ffn_hidden_size": 24,
        "n_routed_experts": 8,
        "zero_expert_num": 4,
        "moe_topk": 3,
        "routed_scaling_factor": 1.7,
        "q_lora_rank": 20,
        "kv_lora_rank": 16,
        "head_dim": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12,
        "v_head_dim": 12,
    },
    "granitemoe": {
        "intermediate_size": 24,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "residual_multiplier": 0.22,
        "embedding_multiplier": 12.0,
        "logits_scaling": 6.0,
        "attention_multiplier": 0.2,
    },
}

# Where released checkpoints keep an expert's gate, up and down; those of the others are named as the first.
_NAMES: dict[str, tuple[str, tuple[str, str, str]]] = {
    "": ("mlp", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
    "minimax_m2": ("block_sparse_moe", ("w1", "w3", "w2")),
    "phimoe": ("block_sparse_moe", ("w1", "w3", "w2")),
    "granitemoe": ("block_sparse_moe", ("gate_proj", "up_proj", "down_proj")),
    "deepseek_v4": ("ffn", ("w1", "w3", "w2")),
}


def expert_names(config: Mapping[str, Any]) -> dict[int, dict[str, str]]:
    """Layer -> projection -> the expert module's released name in a text model, {} for the expert."""
    block, leaves = _NAMES.get(config["model_type"], _NAMES[""])
    return {
        layer: {
            kind: f"model.layers.{layer}.{block}.experts.{{}}.{leaf}"
            for kind, leaf in zip(("gate", "up", "down"), leaves, strict=True)
        }
        for layer in range(config.get("num_hidden_layers") or config["num_layers"])
    }
