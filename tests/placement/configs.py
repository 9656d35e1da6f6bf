"""Configurations for placement tests: small ones of many families, and the sizes of released models."""

from __future__ import annotations

from typing import Any

from kt_ray.config.mapping import from_dict
from kt_ray.config.schema import Config
from kt_ray.dims.config_json import dims_from_config
from kt_ray.dims.model_dims import ModelDims
from kt_ray.hardware.describe import ISAS
from kt_ray.hardware.machine import Gpu, Hardware, Socket
from kt_ray.placement.memory import GIB

_BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "vocab_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "moe_intermediate_size": 40,
    "num_experts_per_tok": 2,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
_MLA: dict[str, Any] = {
    **_BASE,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 2,
    "topk_group": 1,
}
_INDEXER = {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 8}
_LINEAR = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "num_experts": 8,
    "shared_expert_intermediate_size": 24,
}

# Family -> small config with every feature of the family that changes its size.
SMALL: dict[str, dict[str, Any]] = {
    "deepseek_v2": {**_MLA, "model_type": "deepseek_v2", "q_lora_rank": None, "topk_method": "greedy"},
    "deepseek_v3": {**_MLA, "model_type": "deepseek_v3"},
    "hunyuan_v1_moe": {
        **{k: v for k, v in _BASE.items() if k not in ("moe_intermediate_size", "num_experts_per_tok")},
        "model_type": "hunyuan_v1_moe",
        "num_experts": 8,
        "moe_topk": 2,
        "head_dim": 16,
    },
    "llama4_text": {
        **{k: v for k, v in _BASE.items() if k != "moe_intermediate_size"},
        "model_type": "llama4_text",
        "num_experts_per_tok": 1,
        "num_local_experts": 8,
        "intermediate_size_mlp": 80,
        "interleave_moe_layer_step": 2,
        "head_dim": 16,
    },
    "step3p5": {
        **{k: v for k, v in _BASE.items() if k not in ("num_key_value_heads", "num_experts_per_tok")},
        "model_type": "step3p5",
        "head_dim": 16,
        "num_attention_groups": 2,
        "attention_other_setting": {"num_attention_heads": 6},
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "sliding_window": 16,
        "moe_num_experts": 8,
        "moe_top_k": 2,
        "moe_layers_enum": "1,2,3",
        "share_expert_dim": 24,
    },
    "longcat_flash": {
        **{key: value for key, value in _MLA.items() if key not in ("num_hidden_layers", "n_shared_experts")},
        "model_type": "longcat_flash",
        "num_layers": 4,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 0,
        "head_dim": 8,
        "zero_expert_num": 4,
    },
    "deepseek_v32": {**_MLA, **_INDEXER, "model_type": "deepseek_v32"},
    "glm_moe_dsa": {
        **_MLA,
        **_INDEXER,
        "model_type": "glm_moe_dsa",
        "indexer_types": ["full", "shared", "full", "shared"],
    },
    "deepseek_v4": {
        **{key: value for key, value in _BASE.items() if key != "intermediate_size"},
        "model_type": "deepseek_v4",
        "num_key_value_heads": 1,
        "head_dim": 32,
        "q_lora_rank": 24,
        "o_lora_rank": 20,
        "o_groups": 2,
        "qk_rope_head_dim": 8,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "hc_mult": 4,
        "num_hash_layers": 1,
        "compress_ratios": [0, 4, 128, 4],
        "sliding_window": 16,
        **_INDEXER,
    },
    "hy_v4": {
        **_MLA,
        **_INDEXER,
        "model_type": "hy_v4",
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "hc_mult": 4,
    },
    "mistral_large4_text": {
        **_MLA,
        **_INDEXER,
        "model_type": "mistral_large4_text",
        "q_lora_rank": None,
        "kv_source_layers": [0, 1, 0, 1],
        "no_rope_layers": [0, 1, 0, 1],
        "indexer_types": ["full", "shared", "full", "shared"],
    },
    "gemma4_text": {
        **_BASE,
        "model_type": "gemma4_text",
        "enable_moe_block": True,
        "hidden_size_per_layer_input": 0,
        "num_experts": 8,
        "top_k_experts": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "tie_word_embeddings": True,
    },
    "glm4_moe": {
        **_BASE,
        "model_type": "glm4_moe",
        "head_dim": 24,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 2,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_group": 1,
        "topk_group": 1,
    },
    "qwen2_moe": {
        **_BASE,
        "model_type": "qwen2_moe",
        "num_experts": 8,
        "shared_expert_intermediate_size": 48,
        "decoder_sparse_step": 2,
    },
    "qwen3_moe": {
        **_BASE,
        "model_type": "qwen3_moe",
        "head_dim": 24,
        "num_experts": 8,
        "mlp_only_layers": [2],
        "decoder_sparse_step": 1,
        "attention_bias": True,
    },
    "qwen3_next": {**_BASE, **_LINEAR, "model_type": "qwen3_next", "full_attention_interval": 4},
    "qwen3_5_moe_text": {
        **_BASE,
        **_LINEAR,
        "model_type": "qwen3_5_moe_text",
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    },
    "qwen4_exp_text": {
        **_BASE,
        **_LINEAR,
        "model_type": "qwen4_exp_text",
        "eos_token_id": 2,
        "full_attention_interval": 4,
        "hc_count": 3,
        "hc_lowrank": 6,
        "ple_layer_ids": [1, 3],
        "ple_embed_dim": 48,
        "ple_conv_kernel_size": 3,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 1000,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "mixtral": {**_BASE, "model_type": "mixtral", "num_local_experts": 8, "moe_intermediate_size": None},
    "olmoe": {**_BASE, "model_type": "olmoe", "num_experts": 8, "moe_intermediate_size": None},
    "minimax_m2": {
        **_BASE,
        "model_type": "minimax_m2",
        "head_dim": 32,
        "num_local_experts": 8,
        "moe_intermediate_size": None,
        "use_qk_norm": True,
    },
    "phimoe": {
        **_BASE,
        "model_type": "phimoe",
        "num_local_experts": 8,
        "attention_bias": True,
        "lm_head_bias": True,
        "moe_intermediate_size": None,
    },
    "minimax_m3_vl_text": {
        **_BASE,
        "model_type": "minimax_m3_vl_text",
        "head_dim": 24,
        "num_local_experts": 8,
        "moe_intermediate_size": None,
        "dense_intermediate_size": 112,
        "shared_intermediate_size": 56,
        "moe_layer_freq": [0, 1, 1, 1],
        "swiglu_limit": 7.0,
        "sparse_attention_config": {
            "sparse_attention_freq": [0, 0, 1, 1],
            "sparse_num_index_heads": 2,
            "sparse_index_dim": 20,
        },
    },
    "kimi_linear": {
        **_MLA,
        "model_type": "kimi_linear",
        "q_lora_rank": None,
        "num_experts": 8,
        "n_routed_experts": None,
        "num_experts_per_token": 2,
        "num_experts_per_tok": None,
        "num_shared_experts": 2,
        "n_shared_experts": None,
        "linear_attn_config": {
            "kda_layers": [1, 3],
            "full_attn_layers": [2, 4],
            "num_heads": 3,
            "head_dim": 12,
            "short_conv_kernel_size": 4,
        },
    },
    "nemotron_h": {
        **{key: value for key, value in _BASE.items() if key not in ("hidden_act", "num_hidden_layers")},
        "model_type": "nemotron_h",
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe"],
        "mlp_hidden_act": "relu2",
        "n_routed_experts": 8,
        "head_dim": 20,
        "moe_shared_expert_intermediate_size": 72,
        "mamba_num_heads": 4,
        "mamba_head_dim": 12,
        "n_groups": 2,
        "ssm_state_size": 10,
        "conv_kernel": 4,
    },
    "gpt_oss": {
        **_BASE,
        "model_type": "gpt_oss",
        "head_dim": 16,
        "num_local_experts": 8,
        "attention_bias": True,
        "moe_intermediate_size": None,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    },
}
for _config in SMALL.values():  # these families call it something else
    for _key in ("moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "n_shared_experts"):
        if _config.get(_key, 0) is None:
            del _config[_key]

DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "vocab_size": 129280,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "num_nextn_predict_layers": 1,
}


def text_model(config: Any, **options: Any) -> tuple[Any, bool]:
    """transformers' model of a text configuration, and whether it has no head: Mistral Large 4's and
    Step-3.7's have a class with one around other towers only."""
    import transformers
    from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

    if type(config) in transformers.AutoModelForCausalLM._model_mapping:
        return transformers.AutoModelForCausalLM.from_config(config, **options), False
    if config.model_type == "step3p5":
        return Step3p7TextModel._from_config(config, **options), True
    return transformers.AutoModel.from_config(config, **options), True


def small_dims(family: str = "deepseek_v3", **changes: Any) -> ModelDims:
    """Dimensions of a small model of `family`, with some keys changed."""
    return dims_from_config({**SMALL[family], **changes}, name=family)


def make_config(
    *, rule: dict[str, Any] | None = None, mode: str = "plan", cluster: str = "ray", **groups: dict[str, Any]
) -> Config:
    """A whole configuration with defaults; `groups` overrides keys of lora, trainer, data, model, ...

    Experts are not streamed where the rule does not say so: most plans here are about something else.
    """
    defaults: dict[str, dict[str, Any]] = {
        "model": {"name": "small"},
        "data": {"max_length": 16},
        "lora": {},
        "optim": {},
        "trainer": {"micro_batch_size": 1},
        "tracking": {},
        "plan": {},
        "train_server": {},
        "accept": {},
        "run": {},
    }
    rule = rule or {}
    rule = {**rule, "experts": {"stream": "off", **rule.get("experts", {})}}
    merged = {group: {**values, **groups.get(group, {})} for group, values in defaults.items()}
    return from_dict(
        {
            "mode": mode,
            "seed": 0,
            "rule": {"name": "test", **rule},
            "cluster": {"name": cluster},
            **merged,
        }
    )


def make_hardware(
    sockets: int = 1,
    cores: int = 4,
    gpus: int = 0,
    memory: int = 64 * GIB,
    smt: bool = False,
    isa: str = "avx512",
    gpu_gib: float = 24,
) -> Hardware:
    """A host with `sockets` nodes of `cores` cores; with `smt` each core has a second thread."""
    total = sockets * cores
    nodes = []
    for n in range(sockets):
        first = tuple(range(n * cores, (n + 1) * cores))
        second = tuple(cpu + total for cpu in first) if smt else ()
        nodes.append(Socket(n, first + second, cores, memory))
    cards = tuple(Gpu(i, f"{gpu_gib:g} GB GPU", int(gpu_gib * GIB)) for i in range(gpus))
    return Hardware("test host", tuple(nodes), cards, ISAS[: ISAS.index(isa) + 1])
