"""config.json of tiny models, in the keys that each family is released with.

Legend: H hidden size, I intermediate size of an expert, D of a dense MLP; no two sizes of a model agree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Config = dict[str, Any]


class Sizes(NamedTuple):
    """Widths that stored formats restrict, and the number of layers."""

    hidden: int = 56
    inner: int = 36
    dense: int = 72
    layers: int = 3


def _common(s: Sizes) -> Config:
    return {
        "vocab_size": 96,
        "hidden_size": s.hidden,
        "num_hidden_layers": s.layers,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }


def _mla(s: Sizes) -> Config:
    return {
        "attention_bias": False,
        "num_key_value_heads": 4,
        "q_lora_rank": 20,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12,
        "v_head_dim": 10,
    }


def _deepseek_v3(s: Sizes) -> Config:
    return {
        **_mla(s),
        "intermediate_size": s.dense,
        "moe_intermediate_size": s.inner,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "routed_scaling_factor": 1.7,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 1,
        "rope_theta": 10000.0,
    }


def _kimi_k2(s: Sizes) -> Config:
    return {**_deepseek_v3(s), "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0}


def _indexed(s: Sizes) -> Config:
    return {**_deepseek_v3(s), "index_n_heads": 4, "index_head_dim": 16, "index_topk": 6}


def _deepseek_v2(s: Sizes) -> Config:
    return {
        **_mla(s),
        "q_lora_rank": None,
        "intermediate_size": s.dense,
        "moe_intermediate_size": s.inner,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": False,
        "rope_theta": 10000.0,
    }


def _qwen2_moe(s: Sizes) -> Config:
    return {
        "intermediate_size": s.dense,
        "moe_intermediate_size": s.inner,
        "shared_expert_intermediate_size": 40,
        "num_key_value_heads": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
    }


def _qwen3_moe(s: Sizes) -> Config:
    return {
        "attention_bias": False,
        "intermediate_size": s.dense,
        "moe_intermediate_size": s.inner,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0],
    }


def _linear_attention(s: Sizes) -> Config:
    return {
        "attention_bias": False,
        "moe_intermediate_size": s.inner,
        "shared_expert_intermediate_size": 40,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
        "full_attention_interval": 2,
    }


def _qwen3_next(s: Sizes) -> Config:
    extra = {"intermediate_size": s.dense, "norm_topk_prob": True, "decoder_sparse_step": 1}
    return {**_linear_attention(s), **extra, "mlp_only_layers": [], "partial_rotary_factor": 0.25}


def _qwen3_5_moe(s: Sizes) -> Config:
    types = [("full" if (i + 1) % 2 == 0 else "linear") + "_attention" for i in range(s.layers)]
    rope = {
        "mrope_interleaved": True,
        "mrope_section": [1, 1, 0],
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
    }
    return {
        **_linear_attention(s),
        "attn_output_gate": True,
        "layer_types": types,
        "mlp_only_layers": [],
        "rope_parameters": rope,
    }


def _mixtral(s: Sizes) -> Config:
    return {
        "intermediate_size": s.inner,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1e6,
        "sliding_window": None,
    }


def _glm4_moe(s: Sizes) -> Config:
    return {
        "attention_bias": True,
        "intermediate_size": s.dense,
        "moe_intermediate_size": s.inner,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "num_nextn_predict_layers": 1,
    }


def _olmoe(s: Sizes) -> Config:
    return {
        "intermediate_size": s.inner,
        "num_key_value_heads": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
        "clip_qkv": None,
    }


def _minimax_m2(s: Sizes) -> Config:
    return {
        "intermediate_size": s.inner,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "rotary_dim": 6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "use_routing_bias": True,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "rope_theta": 5000000,
    }


def _gpt_oss(s: Sizes) -> Config:
    return {
        "attention_bias": True,
        "intermediate_size": s.inner,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "experts_per_token": 2,
        "layer_types": [("full" if i % 2 else "sliding") + "_attention" for i in range(s.layers)],
        "sliding_window": 4,
        "swiglu_limit": 1.5,  # reached: the released 7.0 never is at these sizes
        "rope_theta": 150000,
        "initial_context_length": 32,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 2.0,
            "original_max_position_embeddings": 32,
            "rope_type": "yarn",
            "truncate": False,
        },
    }


def _phimoe(s: Sizes) -> Config:
    return {
        "attention_bias": True,
        "lm_head_bias": True,
        "intermediate_size": s.inner,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_jitter_noise": 0.01,
        "input_jitter_noise": 0.01,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
    }


def _deepseek_v4(s: Sizes) -> Config:
    return {
        "attention_bias": False,
        "moe_intermediate_size": s.inner,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 1,
        "norm_topk_prob": True,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 1.5,
        "q_lora_rank": 20,
        "o_lora_rank": 10,
        "o_groups": 2,
        "head_dim": 16,
        "qk_rope_head_dim": 8,
        "index_n_heads": 4,
        "index_head_dim": 16,
        "index_topk": 4,
        "hc_mult": 4,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20,
        "num_hash_layers": 1,
        "compress_ratios": [0, 4, 128][: s.layers],
        "compress_rope_theta": 160000.0,
        "rope_theta": 10000.0,
        "sliding_window": 6,
        "swiglu_limit": 1.0,  # reached: the released 10.0 never is at these sizes
        "num_nextn_predict_layers": 1,
    }


def _granitemoe(s: Sizes) -> Config:
    return {
        "intermediate_size": s.inner,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "residual_multiplier": 0.22,
        "embedding_multiplier": 12.0,
        "logits_scaling": 6.0,
        "attention_multiplier": 0.2,
    }


def _longcat_flash(s: Sizes) -> Config:
    return {
        **_mla(s),
        "head_dim": 8,
        "num_layers": s.layers,
        "ffn_hidden_size": s.dense,
        "expert_ffn_hidden_size": s.inner,
        "n_routed_experts": 8,
        "zero_expert_num": 4,
        "zero_expert_type": "identity",
        "moe_topk": 3,
        "routed_scaling_factor": 1.7,
        "router_bias": False,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    }


# Name in tests -> (model_type of transformers, keys of its own).
FAMILIES: dict[str, tuple[str, Callable[[Sizes], Config]]] = {
    "deepseek_v2": ("deepseek_v2", _deepseek_v2),
    "deepseek_v3": ("deepseek_v3", _deepseek_v3),
    "kimi_k2": ("deepseek_v3", _kimi_k2),
    "deepseek_v32": ("deepseek_v32", _indexed),
    "glm_moe_dsa": ("glm_moe_dsa", _indexed),
    "qwen2_moe": ("qwen2_moe", _qwen2_moe),
    "qwen3_moe": ("qwen3_moe", _qwen3_moe),
    "qwen3_next": ("qwen3_next", _qwen3_next),
    "qwen3_5_moe": ("qwen3_5_moe_text", _qwen3_5_moe),
    "mixtral": ("mixtral", _mixtral),
    "glm4_moe": ("glm4_moe", _glm4_moe),
    "olmoe": ("olmoe", _olmoe),
    "minimax_m2": ("minimax_m2", _minimax_m2),
    "gpt_oss": ("gpt_oss", _gpt_oss),
    "phimoe": ("phimoe", _phimoe),
    "deepseek_v4": ("deepseek_v4", _deepseek_v4),
    "granitemoe": ("granitemoe", _granitemoe),
    "longcat_flash": ("longcat_flash", _longcat_flash),
}


def text_config(family: str, sizes: Sizes, **overrides: Any) -> Config:
    """The language model's configuration as released, "model_type" being transformers'."""
    model_type, own = FAMILIES[family]
    config = {"model_type": model_type, **_common(sizes), **own(sizes), **overrides}
    if "num_layers" in config:
        del config["num_hidden_layers"]
    return config


def released_config(family: str, text: Config, dtype: str, quantization: Config | None) -> Config:
    """config.json around it: the released name, and the outer part of multimodal models."""
    extra = {} if quantization is None else {"quantization_config": quantization}
    if family == "kimi_k2":
        return {
            **text,
            "model_type": "kimi_k2",
            "architectures": ["DeepseekV3ForCausalLM"],
            "dtype": dtype,
        } | extra
    if family == "qwen3_5_moe":
        vision = {
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "out_hidden_size": 56,
        }
        return {
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "model_type": "qwen3_5_moe",
            "text_config": {**text, "dtype": dtype},
            "tie_word_embeddings": False,
            "vision_config": vision,
            "image_token_id": 90,
            "video_token_id": 91,
            "vision_start_token_id": 92,
            "vision_end_token_id": 93,
        } | extra
    return {**text, "torch_dtype": dtype} | extra
