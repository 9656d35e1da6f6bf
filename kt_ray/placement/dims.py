"""Model dimensions from a config.json alone: no checkpoint, no transformers, no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kt_ray.errors import UserError
from kt_ray.placement.families import EXACT, Keys, expert_intermediate, is_moe_layer, layer_parts, num_experts
from kt_ray.placement.formats import TRAINABLE_FORMATS, expert_format, missing_for_training
from kt_ray.placement.types import ModelDims

_EXPERT_COUNT = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k")
_TEXT = ("text_config", "language_config", "llm_config")


def dims_from_dir(path: str | Path) -> ModelDims:
    """Dimensions of the checkpoint directory `path`.

    Raises:
        UserError: the directory or its config.json is missing or unreadable, or it is no MoE language model.
    """
    folder = Path(path).expanduser()
    file = folder / "config.json"
    if not folder.is_dir():
        raise UserError(
            "the model directory does not exist",
            where=str(folder),
            required="a Hugging Face directory with config.json and *.safetensors",
            remedy="set model.path to the directory of the checkpoint",
        )
    if not file.is_file():
        raise UserError(
            "the model directory holds no config.json",
            where=str(folder),
            required="a Hugging Face directory with config.json and *.safetensors",
            remedy="set model.path to the directory that holds config.json, or download it again",
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            "the model's config.json cannot be read",
            where=str(file),
            observed=error,
            required="a JSON object",
            remedy="download config.json again",
        ) from None
    return dims_from_config(config, name=str(file))


def dims_from_config(config: Mapping[str, Any], name: str = "") -> ModelDims:
    """Dimensions from the contents of a config.json.

    Args:
        config: the released configuration, as a mapping.
        name: label for messages (a path or a model name).

    Raises:
        UserError: no routed experts, or a dimension is missing or not a positive integer.
    """
    where = name or "config.json"
    if not isinstance(config, Mapping):
        raise UserError(
            "the model's config.json is not a JSON object", where=where, observed=type(config).__name__,
            required="an object of keys and values", remedy="download config.json again",
        )  # fmt: skip
    text, part = _text_part(config)
    keys = Keys(text, where)
    if not any(text.get(key) for key in _EXPERT_COUNT):
        raise UserError(
            "the model has no routed experts",
            where=where,
            observed=f"model_type {config.get('model_type', 'missing')}, none of {', '.join(_EXPERT_COUNT)}",
            required="a Mixture-of-Experts model",
            remedy="choose a MoE checkpoint; a dense model needs no expert offloading (PEFT trains it)",
        )
    layers = keys.size("num_hidden_layers")
    hidden, vocab = keys.size("hidden_size"), keys.size("vocab_size")
    experts, top_k = num_experts(keys), keys.size(*_TOP_K)
    if top_k > experts:
        raise UserError(
            "num_experts_per_tok is larger than the number of experts", where=where, observed=top_k,
            required=f"at most {experts}", remedy="correct config.json",
        )  # fmt: skip
    moe = tuple(layer for layer in range(layers) if is_moe_layer(keys, layer))
    if not moe:
        raise UserError(
            "no layer of the model holds routed experts", where=where, required="at least one MoE layer",
            remedy="check first_k_dense_replace, moe_layer_freq, decoder_sparse_step and mlp_only_layers",
        )  # fmt: skip
    parts = [layer_parts(keys, layer, layer in moe) for layer in range(layers)]
    intermediate = expert_intermediate(keys)
    streams = keys.size("hc_mult", default=4) if keys.family == "deepseek_v4" else 1
    dtype, assumed = _dtype(config, text, where)
    weights = {
        **text,
        "quantization_config": text.get("quantization_config") or config.get("quantization_config"),
    }
    fmt = expert_format(weights, dtype)
    latent = keys.size("routed_expert_hidden_size", default=0, least=0)
    notes = [f"dtype is not in config.json; {dtype} assumed"] if assumed else []
    if part:
        notes.append(f"only the text part ({part}) of this multimodal model is planned")
    if keys.family not in EXACT:
        notes.append(f"family {keys.family!r} is read by its keys: sizes outside the experts are estimates")
    if fmt not in TRAINABLE_FORMATS:
        notes.append(f"attention, norms, routers and shared experts are planned in {dtype}")
    tie = text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    return ModelDims(
        model_type=str(text.get("model_type") or config.get("model_type") or "unknown"),
        hidden_size=hidden,
        num_layers=layers,
        vocab_size=vocab,
        num_experts=experts,
        experts_per_token=top_k,
        expert_intermediate=intermediate,
        moe_layers=moe,
        attention_params=tuple(p.attention for p in parts),
        dense_params=tuple(p.dense for p in parts),
        lora_in_out=tuple(tuple(p.modules) for p in parts),
        tie_embeddings=bool(tie),
        dtype=dtype,
        expert_format=fmt,
        refusal=_refusal(config, keys, fmt, missing_for_training(weights, fmt), part, latent),
        notes=tuple(notes),
        name=name,
        expert_hidden=latent,
        expert_bias_params=2 * intermediate + hidden if keys.family == "gpt_oss" else 0,
        outside_params=hidden + (streams * (streams * hidden + 1) + 1 if streams > 1 else 0),
        num_heads=keys.size("num_attention_heads"),
        attention_width=max(p.width for p in parts),
        hidden_streams=streams,
    )


def _text_part(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The language model's own keys, and the key they sit under ("" = the top level)."""
    for key in _TEXT:
        inner = config.get(key)
        if isinstance(inner, Mapping) and "hidden_size" in inner:
            return inner, key
    return config, ""


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any], where: str) -> tuple[str, bool]:
    """Type of the non-expert weights, and whether it had to be assumed."""
    for source in (text, config):
        for key in ("dtype", "torch_dtype"):
            value = str(source.get(key) or "auto").removeprefix("torch.")
            if value == "auto":
                continue
            if value not in ("bfloat16", "float32", "float16"):
                raise UserError(
                    f"{key} in the model's config.json is not supported", where=where, observed=value,
                    required="bfloat16, float32 or float16", remedy="use a checkpoint saved in bfloat16",
                )  # fmt: skip
            return value, False
    return "bfloat16", True


def _refusal(
    config: Mapping[str, Any], keys: Keys, fmt: str, missing: str | None, part: str, latent: int
) -> str | None:
    """Why the model can be planned but not trained, with what to do; None = it can be trained."""
    activation = str(keys.config.get("hidden_act") or "silu")
    reasons = []
    if (
        keys.family in ("gpt_oss", "deepseek_v4")
        or activation not in ("silu", "swish")
        or keys.config.get("swiglu_limit")
    ):
        reasons.append(
            f"the experts of family {keys.family!r} (clamped, biased or {activation!r} activation) cannot be "
            "trained yet: expert actors load plain SiLU experts only; use a family with such "
            "(DeepSeek-V2/V3, Kimi-K2, Qwen3, Mixtral, GLM-4.5, OLMoE)"
        )
    if latent:
        reasons.append(
            "experts that work on a projected width are not implemented yet; use a family without them"
        )
    if part:
        reasons.append(
            f"multimodal checkpoints ({config.get('model_type', 'unknown')}) cannot be trained yet; "
            "use a text-only checkpoint of the family"
        )
    if missing:
        reasons.append(
            f"routed experts stored as {fmt} cannot be trained yet: {missing}; use a BF16 checkpoint of the "
            "model (released, or dequantised with its authors' script)"
        )
    return "; also: ".join(reasons) or None
