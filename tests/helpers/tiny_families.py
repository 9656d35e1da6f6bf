"""Shapes of families that the common reference does not list, as small as they go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.helpers.hf_reference import build_checkpoint

_LINEAR: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 24,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_LOCAL: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_5_moe_text": _LINEAR,
    "qwen3_next": _LINEAR,
    "gpt_oss": {
        **_LOCAL,
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "minimax_m2": {**_LOCAL, "head_dim": 12, "rotary_dim": 6},
    "phimoe": _LOCAL,
    "deepseek_v4": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "q_lora_rank": 16,
        "head_dim": 16,
        "o_lora_rank": 16,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "index_topk": 4,
        "o_groups": 2,
    },
}
# Where the experts' size is not moe_intermediate_size.
_INTERMEDIATE = ("gpt_oss", "minimax_m2", "phimoe", "mixtral")


def tiny_family(root: Path, family: str, *, expert_size: int = 24, **changes: Any) -> Path:
    """A random float32 checkpoint of a family, as `save_pretrained` writes it."""
    size = "intermediate_size" if family in _INTERMEDIATE else "moe_intermediate_size"
    return build_checkpoint(root, family, **{**SHAPES.get(family, {}), size: expert_size, **changes})
