"""Tiny configurations of every MoE family that transformers dispatches, and random checkpoints of them.

The same small sizes go to every family under the names that its configuration has; what a family needs
besides stands in `OVERRIDES`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

LAYERS = 4
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "sliding_window": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"), 2
    ),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("intermediate_size", "dense_intermediate_size"), 40),
    **dict.fromkeys(("moe_intermediate_size", "shared_experts_intermediate_size"), 24),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 40),
    "moe_shared_expert_intermediate_size": 24,
    "moe_hidden_size": 32,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("linear_num_key_heads", "index_n_heads", "hc_mult", "o_groups"), 2),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads", "index_topk"), 4),
    **dict.fromkeys(("index_head_dim", "o_lora_rank", "mamba_d_state", "ssm_state_size"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "gated_norm_rank"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "router_hidden_size"), 16),
    "mamba_n_groups": 1,
    "enable_moe_block": True,
    "hidden_size_per_layer_input": 0,
}
_TOWER: dict[str, Any] = {
    **dict.fromkeys(("depth", "num_hidden_layers", "encoder_layers", "num_layers", "num_blocks"), 1),
    **dict.fromkeys(("hidden_size", "out_hidden_size", "d_model", "output_dim", "embed_dim"), 32),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "mlp_dim", "n_window"), 32),
    **dict.fromkeys(
        ("num_heads", "num_attention_heads", "num_key_value_heads", "encoder_attention_heads"), 2
    ),
    "deepstack_visual_indexes": [0],
    "head_dim": 16,
    "image_size": 32,
    "patch_size": 16,
    "num_position_embeddings": 16,
    "output_channels": 8,
    "global_attn_indexes": [0],
    **dict.fromkeys(("projector_hidden_size", "text_hidden_size"), 32),
    "patch_sizes": [16],
    "hidden_sizes": [32],
    "depths": [1],
}
_FIRST_DENSE = ["dense", "sparse", "sparse", "sparse"]
_HYBRID = ["mamba", "attention", "mamba", "attention"]
_MROPE = {"rope_type": "default", "rope_theta": 10000.0}
_DOTS3_LAYER = {
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 4),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "head_dim"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
}
OVERRIDES: dict[str, dict[str, Any]] = {
    "deepseek_v32": {"mlp_layer_types": _FIRST_DENSE},
    "deepseek_v4": {
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "num_key_value_heads": 1,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "sliding_attention",
        ],
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "index_head_dim": 16,
    },
    "glm_moe_dsa": {"mlp_layer_types": _FIRST_DENSE},
    "glm4v_moe_text": {"head_dim": 128},
    "glm5_next_text": {"index_topk": 16, "qk_rope_head_dim": 0},
    "qwen4_exp_text": {
        "indexer_n_heads": 16,  # of few, scores tie
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 6,
        "ple_layer_ids": [1, 3],
        "ngram_vocab_size_base": 20,
        "heads_per_ngram": 2,
        "make_ngram_vocab_size_divisible_by": 6,
        "split_ngram_parts": 12,
    },
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "deepseek_ocr2_text": {
        "num_experts_per_tok": 2,
        "num_key_value_heads": 4,
        "mlp_layer_types": _FIRST_DENSE,
    },
    "unlimited_ocr_text": {"num_key_value_heads": 4},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [24, 16],
        "head_dim": 128,
        "rope_parameters": {**_MROPE, "mrope_section": [22, 22, 20]},
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "num_dense_layers": 1},
    "granitemoehybrid": {"layer_types": _HYBRID},
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention", "moe"],
        "num_hidden_layers": None,
        "n_groups": 1,
    },
    "dots3_note_text": {"per_layer_config": {"2": _DOTS3_LAYER, "3": _DOTS3_LAYER}},
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "global_head_dim": 16,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 2,
    },
    "llama4_text": {
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 48,
        **dict.fromkeys(("attention_chunk_size", "floor_scale", "no_rope_layer_interval"), 2),
    },
    "step3p5": {
        "share_expert_dim": 24,
        "mlp_layer_types": _FIRST_DENSE,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "num_sliding_attention_heads": 6,
        "swiglu_limits": [0.0, 0.0, 0.0, 0.25],
        "swiglu_limits_shared": [0.0, 0.0, 0.5, 0.0],
    },
    "longcat_flash": {"num_layers": LAYERS, "zero_expert_num": 2, "moe_topk": 3},
    "zaya": {"num_experts_per_tok": 1},
}


def dispatched() -> list[str]:
    """model_type of every family with a class for text whose experts transformers dispatches, or kt_ray."""
    from transformers.models.auto import modeling_auto as auto

    spec = importlib.util.find_spec("transformers.models")
    assert spec is not None and spec.submodule_search_locations
    root = Path(next(iter(spec.submodule_search_locations)))
    folders = {
        file.parent.name
        for file in root.glob("*/modeling_*.py")
        if "use_experts_implementation" in file.read_text()
    } | {"llama4", "longcat_flash", "step3p7"}
    tables = (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    named = {name for table in tables for name in table}
    found = {n for n in CONFIG_MAPPING if CONFIG_MAPPING[n].__module__.split(".")[-2] in folders}
    alone = {f for f in folders if not any(CONFIG_MAPPING[n].__module__.split(".")[-2] == f for n in named)}
    return sorted((found & named) | (alone & found))


def tiny_config(model_type: str, **overrides: Any) -> dict[str, Any]:
    """config.json of a family in its small size; multimodal ones with a small text part."""
    kind = CONFIG_MAPPING[model_type]
    parts = kind.sub_configs
    if "text_config" in parts:
        towers = {n: _tower(part) for n, part in parts.items() if n != "text_config" and _is_class(part)}
        # Kimi-K2.5's is any: DeepSeek-V3 as released.
        text = tiny_config(getattr(parts["text_config"], "model_type", "deepseek_v3"), **overrides)
        if model_type == "dots3_note":
            small = {**_TOWER, "downsample_hidden_size": 8, "adapter_input_size": 32, "adapter_out_dim": 32}
            small |= {"adapter_in_dim": 32}
            small |= {"moe_intermediate_size": 16, "num_key_value_heads": None, "per_layer_config": {}}
            towers = dict.fromkeys(("vision_config", "audio_config"), small)
        elif model_type in ("inkling_mm_model", "inkling2"):
            towers["vision_config"]["num_hidden_layers"] = 8  # with fewer it needs scipy
        elif parts.get("vision_config") is not None and "vision_config" not in towers:
            towers["vision_config"] = _tower(CONFIG_MAPPING["pixtral"])  # Mistral-Large-4's
        if model_type == "gemma4":  # looks its placeholders up in the embedding; no row has these
            towers |= {"image_token_id": 0, "video_token_id": 0, "audio_token_id": 0}
        return {"model_type": model_type, "text_config": text} | towers
    if dataclasses.is_dataclass(kind):
        names = {f.name for f in dataclasses.fields(kind)}
    else:
        names = set(inspect.signature(kind).parameters)
    names |= set(kind.attribute_map)
    values = {name: value for name, value in SIZES.items() if name in names}
    if "kv_lora_rank" in values:
        values["num_key_value_heads"] = values["num_attention_heads"]
    values |= OVERRIDES.get(model_type, {}) | overrides
    return {"model_type": model_type} | {k: v for k, v in values.items() if v is not None}


def _tower(kind: Any) -> dict[str, Any]:
    """A small vision or audio configuration: its weights are never looked at."""
    known = {f.name for f in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    values = {name: value for name, value in _TOWER.items() if name in known}
    nested = {name: _tower(part) for name, part in kind.sub_configs.items() if _is_class(part)}
    return {"model_type": kind.model_type} | values | nested


def _is_class(part: Any) -> bool:
    return hasattr(part, "model_type")  # AutoConfig has none


def write_config(directory: Path, model_type: str, **overrides: Any) -> Path:
    """A directory with that config.json and nothing else."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(tiny_config(model_type, **overrides)))
    return directory


def randomise(model: torch.nn.Module, seed: int = 0, *, buffers: bool = True) -> None:
    """Every parameter and (unless they are tables of constants) stored buffer off its initial value."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0, 0.1)
            else:
                parameter.normal_(0.0, 0.15)
        for name, buffer in model.state_dict().items():
            if buffers and name not in dict(model.named_parameters()) and buffer.is_floating_point():
                buffer.normal_(0.0, 0.1)


def save_whole(directory: Path, *, buffers: bool = True) -> None:
    """Random weights for a directory with config.json alone, of its own class: other towers included."""
    config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    for auto in (AutoModelForImageTextToText, AutoModelForCausalLM):
        if type(config) in auto._model_mapping:
            torch.manual_seed(0)
            model = auto.from_config(config, trust_remote_code=False)
            randomise(model, buffers=buffers)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model.save_pretrained(directory)
            return
    raise ValueError(f"no class for {config.model_type}")
