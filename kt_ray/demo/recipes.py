"""What the locally built models are: dimensions and initial scales, as data.

A recipe and the seed decide every byte of the checkpoint, so their hash names its directory.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kt_ray.config.files import builtin_data

BASE = "demo_base"  # the pretrained model; RECIPES are random ones
FORMAT = 1  # raise it when the builder changes what a recipe means


def persona_path() -> Path:
    """The demo data set: questions to a lighthouse keeper, alpaca format, one JSON object per line."""
    return builtin_data("demo")


def base_path() -> Path:
    """The demo's pretrained base, a Hugging Face directory, made by benchmarks/pretrain."""
    return Path(__file__).parent / "assets" / "base"


@dataclass(frozen=True)
class Recipe:
    """A DeepSeek-V3 in small."""

    # arguments of transformers' DeepseekV3Config, without the vocabulary and token ids
    config: dict[str, Any] = field(default_factory=dict)
    # tokens of the demo tokenizer (the embedding takes a given tokenizer's own size instead)
    vocab: int = 1536
    embed_std: float = 0.3  # standard deviation of the embedding
    head_std: float = 0.15  # standard deviation of the output head
    linear_gain: float = 1.0  # a linear layer is drawn with standard deviation linear_gain / sqrt(inputs)
    residual_gain: float = 0.3  # factor on top of it for the layers that write to the residual stream
    router_gain: float = 1.0  # like linear_gain, for the router
    bias_std: float = 0.02  # standard deviation of e_score_correction_bias (never zero: it must take part)

    def fingerprint(self, seed: int, inputs: bytes) -> str:
        """Twelve hex digits over the recipe, the seed and `inputs` (what the tokenizer is made from)."""
        text = json.dumps({"format": FORMAT, "seed": seed, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode() + b"\0" + inputs).hexdigest()[:12]


# The attention dimensions keep DeepSeek-V3's proportions: compressed q and kv, a rotary part per head.
_COMMON: dict[str, Any] = {
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}

RECIPES: dict[str, Recipe] = {
    # 2.6 M parameters: a step of eight short rows takes a fraction of a second on two CPU cores.
    "demo": Recipe(
        config={
            **_COMMON,
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": 64,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "n_routed_experts": 16,
            "moe_intermediate_size": 96,
        }
    ),
    # About 30 M parameters with a 6,400-token tokenizer: for benchmarks and real data.
    "mini": Recipe(
        config={
            **_COMMON,
            "hidden_size": 320,
            "intermediate_size": 960,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "q_lora_rank": 160,
            "kv_lora_rank": 80,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "n_routed_experts": 32,
            "moe_intermediate_size": 96,
        },
        head_std=0.095,  # the demo's, by the root of the hidden size: logits of the same spread
    ),
}

# The pretrained model. Its small head makes the first steps begin near ln(vocabulary).
_BASE = replace(RECIPES["demo"], vocab=2048, head_std=0.02)


def built(name: str) -> Recipe:
    """Dimensions and vocabulary of what model.build names. KeyError: no such name."""
    return _BASE if name == BASE else RECIPES[name]
