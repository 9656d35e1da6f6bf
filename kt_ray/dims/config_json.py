"""Model dimensions from a config.json alone: no checkpoint, no transformers, no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kt_ray.dims.attention_params import LONGCAT_ATTENTIONS, kv_heads
from kt_ray.dims.config_keys import TIED, Keys, LayerParts
from kt_ray.dims.handed import handed
from kt_ray.dims.layer_params import (
    ACTIVATIONS,
    EXPERT_COUNT,
    NOT_AFFINE,
    UNCOMPUTED,
    UNDISPATCHED,
    UNGATED,
    expert_intermediate,
    hidden_streams,
    is_moe_layer,
    latent_width,
    layer_parts,
    mixers,
    num_experts,
    num_layers,
    outside_params,
    zero_experts,
)
from kt_ray.dims.model_dims import ModelDims, Quantised
from kt_ray.dims.weight_formats import (
    ELEMENT_BYTES,
    expert_storage,
    linear_storage,
    missing_for_training,
    plain_expert_layers,
    plain_storage,
)
from kt_ray.errors import UserError
from kt_ray.parse import read_json

_TOP_K = (
    *("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k"),
    *("top_k_experts", "moe_top_k"),
)
_TEXT = ("text_config", "language_config", "llm_config", "thinker_config")
_OTHER_FAMILY = "use another family (DeepSeek-V2/V3, Kimi-K2, Qwen3, Mixtral, GLM-4.5, OLMoE, gpt-oss)"
_UNQUANTISED = re.compile(r"\bweights_proj$|\bcompressor\.(kv|gate)_proj$")
# Keys of LongCat-Flash's releases that transformers does not look at, and what it computes.
_LONGCAT = {
    "zero_expert_type": "identity",
    "router_bias": False,
    "norm_topk_prob": False,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}
_ACTIVATION = ("mlp_hidden_act", "hidden_activation", "hidden_act")


def dims_from_dir(path: str | Path) -> ModelDims:
    """Dimensions of the checkpoint directory `path`.

    Raises:
        UserError: the directory or its config.json is missing or unreadable, or it is no MoE language model.
    """
    folder = Path(path).expanduser()
    file = folder / "config.json"
    if not file.is_file():
        what = "the model directory does not exist"
        remedy = "set model.path to the directory of the checkpoint"
        if folder.is_dir():
            what = "the model directory holds no config.json"
            remedy = "set model.path to the directory that holds config.json, or download it again"
        raise UserError(
            what,
            where=str(folder),
            required="a Hugging Face directory with config.json and *.safetensors",
            remedy=remedy,
        )
    config = read_json(file, "the model's config.json", "download config.json again")
    return dims_from_config(_with_modelopt(config, folder / "hf_quant_config.json"), name=str(file))


def _with_modelopt(config: dict[str, Any], file: Path) -> dict[str, Any]:
    """With what a file of ModelOpt's says of weights where config.json says nothing, as older releases do."""
    stated = config.get("quantization_config") or text_part(config)[0].get("quantization_config")
    if stated or not file.is_file():
        return config
    said = read_json(file, f"the model's {file.name}", f"download {file.name} again").get("quantization")
    if not isinstance(said, Mapping) or not said.get("quant_algo"):
        return config
    own = {"quant_method": "modelopt", "ignore": said.get("exclude_modules")}
    return {**config, "quantization_config": {**said, **own}}


def dims_from_config(config: Mapping[str, Any], name: str = "") -> ModelDims:
    """Dimensions from the contents of a config.json.

    Raises:
        UserError: no routed experts, or a dimension is missing or not a positive integer.
    """
    where = name or "config.json"
    if not isinstance(config, Mapping):
        raise UserError(
            "the model's config.json is not a JSON object", where=where, observed=type(config).__name__,
            required="an object of keys and values", remedy="download config.json again",
        )  # fmt: skip
    text, part = text_part(config)
    keys = Keys(text, where)
    if not any(text.get(key) for key in EXPERT_COUNT):
        raise UserError(
            "the model has no routed experts",
            where=where,
            observed=f"model_type {config.get('model_type', 'missing')}, none of {', '.join(EXPERT_COUNT)}",
            required="a Mixture-of-Experts model",
            remedy="choose a MoE checkpoint; a dense model needs no expert offloading (PEFT trains it)",
        )
    layers = num_layers(keys)
    hidden, vocab = keys.size("hidden_size"), keys.size("vocab_size")
    pad = text.get("pad_token_id")
    if isinstance(pad, int) and not -vocab <= pad < vocab:
        raise UserError(
            "pad_token_id in the model's config.json is no token of the model", where=where, observed=pad,
            required=f"an id below vocab_size {vocab}, or null", remedy="set it to null in config.json",
        )  # fmt: skip
    experts, top_k = num_experts(keys), keys.size(*_TOP_K)
    zero = zero_experts(keys)
    if top_k > experts + zero:
        raise UserError(
            "num_experts_per_tok is larger than the number of experts", where=where, observed=top_k,
            required=f"at most {experts + zero}", remedy="correct config.json",
        )  # fmt: skip
    moe = tuple(layer for layer in range(layers) if is_moe_layer(keys, layer))
    if not moe:
        raise UserError(
            "no layer of the model holds routed experts", where=where, required="at least one MoE layer",
            remedy="check first_k_dense_replace, moe_layer_freq, decoder_sparse_step and mlp_only_layers",
        )  # fmt: skip
    parts = [layer_parts(keys, layer, layer in moe) for layer in range(layers)]
    intermediate = expert_intermediate(keys)
    streams = hidden_streams(keys)
    dtype, assumed = _dtype(config, text, where)
    quantization = text.get("quantization_config") or config.get("quantization_config")
    weights = {**text, "quantization_config": quantization}
    storage, plain = expert_storage(weights, dtype, moe), plain_expert_layers(weights, dtype, moe)
    if plain == moe or storage == plain_storage(dtype):  # quantization_config excludes all of them
        storage, plain = plain_storage(dtype), ()
    quantised = _quantised(weights, dtype, parts)
    notes = [f"dtype is not in config.json; {dtype} assumed"] if assumed else []
    if part:
        notes.append(f"multimodal model: only its text part ({part}) is planned and trained")
    if not keys.exact:
        notes.append(f"family {keys.family!r} is read by its keys: sizes outside the experts are estimates")
    mapped = tuple(p.mapped for p in parts)
    if any(mapped):
        size = sum(mapped) * ELEMENT_BYTES[dtype] / 1e9
        notes.append(
            f"n-gram tables of {size:.1f} GB stay in the model's files, where every host with attention "
            "workers looks them up: let them lie on a fast local disk, or fit into memory beside this plan"
        )
    if plain:
        notes.append(f"the experts of {len(plain)} of {len(moe)} MoE layers are not quantised")
    named = [*(["tie_embedding"] if keys.family == "lfm2_moe" else []), "tie_word_embeddings"]
    ties = (source[key] for source in (text, config) for key in named if key in source)
    latent, longest = latent_width(keys), _longest_row(keys)
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
        # not of indexers: model/lora.py says why
        lora_in_out=tuple(tuple(m for m in p.modules if ".indexer." not in m[0]) for p in parts),
        tie_embeddings=bool(next(ties, keys.family in TIED)),
        dtype=dtype,
        expert_storage=storage,
        refusal=_refusal(keys, part, missing_for_training(weights, storage, moe), latent),
        notes=tuple(notes),
        name=name,
        expert_hidden=latent,
        expert_bias_params=2 * intermediate + hidden if keys.family == "gpt_oss" else 0,
        outside_params=outside_params(keys),
        mapped_params=mapped if any(mapped) else (),
        num_heads=max(keys.of_layer(layer).size("num_attention_heads") for layer in range(layers)),
        kv_heads=kv_heads(keys),
        attention_width=max(p.width for p in parts),
        attention_normed=max(p.normed for p in parts),
        pair_widths=tuple((p.pair, p.window) for p in parts),
        indexes=tuple(p.index for p in parts),
        cache_widths=tuple(p.cache for p in parts),
        compressions=tuple(p.compression for p in parts) if any(p.compression.tokens for p in parts) else (),
        biases=tuple(p.bias for p in parts) if any(p.bias for p in parts) else (),
        states=tuple(p.state for p in parts) if any(p.state for p in parts) else (),
        handed=handed(keys, layers),
        context=longest or _context(keys),
        longest_row=longest,
        hidden_streams=streams,
        mixers=mixers(keys),
        affine=streams == 1 and keys.family not in NOT_AFFINE,
        gated=keys.family not in UNGATED,
        plain_expert_layers=plain,
        zero_experts=zero,
        float32_params=hidden * (experts + zero) if keys.family == "longcat_flash" else 0,
        attentions=LONGCAT_ATTENTIONS if keys.family == "longcat_flash" else 1,
        quantised=quantised if any(q.params for q in quantised) else (),
    )


def _rope(keys: Keys) -> tuple[Keys, tuple[Any, Any]]:
    """Scaling of positions, and what names its kind."""
    rope = keys.inner("rope_parameters" if keys.config.get("rope_parameters") else "rope_scaling")
    return rope, (rope.config.get("rope_type"), rope.config.get("type"))


def _context(keys: Keys) -> int:
    """`ModelDims.context`. YaRN added as model cards say leaves max_position_embeddings as it was. Ling 3 and
    Inkling state model_max_length."""
    stated = keys.config.get("max_position_embeddings") or keys.config.get("model_max_length")
    context = stated if isinstance(stated, int) and stated > 0 else 0
    rope, kinds = _rope(keys)
    factor, original = (rope.config.get(name) for name in ("factor", "original_max_position_embeddings"))
    if context and "yarn" in kinds and isinstance(factor, int | float) and isinstance(original, int):
        return max(context, int(factor * original)) if math.isfinite(factor) else context
    return context


def _longest_row(keys: Keys) -> int:
    """`ModelDims.longest_row`: transformers takes PhiMoE's short factors (LongRoPE) for every row; otherwise
    LongRoPE and dynamic scaling change all rows' frequencies beyond a length. Hunyuan's alpha is constant."""
    rope, kinds = _rope(keys)
    if "dynamic" in kinds and not rope.config.get("alpha"):
        return keys.size("max_position_embeddings")
    if "longrope" not in kinds:
        return 0
    name = "original_max_position_embeddings"
    return rope.size(name, default=0) or keys.size(name, "max_position_embeddings")


def _quantised(weights: Mapping[str, Any], dtype: str, parts: list[LayerParts]) -> tuple[Quantised, ...]:
    """Per layer the linear modules outside the routed experts that are stored quantised.

    Routers, embedding and head never are; compressors and the indexers' scores are released unquantised.
    """
    layers = []
    for layer, part in enumerate(parts):
        params, size, largest = 0, 0.0, 0
        for module, columns, rows in part.modules:
            storage = linear_storage(weights, dtype, layer, module)
            if storage == plain_storage(dtype) or _UNQUANTISED.search(module):
                continue
            params, largest = params + rows * columns, max(largest, rows * columns)
            size += storage.matrix_bytes(rows, columns)
        layers.append(Quantised(params, size, largest))
    return tuple(layers)


def text_part(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The language model's own keys, and the key they sit under ("" = the top level)."""
    for key in _TEXT:
        inner = config.get(key)
        if not isinstance(inner, Mapping):
            continue
        text, deeper = text_part(inner)
        if "hidden_size" in text:
            outer = config.get("model_type")
            outer = "step3p5" if outer == "step3p7" else outer  # whose parts transformers names itself
            named = text if text.get("model_type") else {**text, "model_type": outer}
            return named, f"{key}.{deeper}" if deeper else key
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


def _refusal(keys: Keys, part: str, missing: str | None, latent: int) -> str | None:
    """Why the model can be planned but not trained, with what to do; None = it can be trained."""
    family, ungated = keys.family, keys.family in UNGATED
    default = "relu2" if ungated else "silu"
    activation = next((str(keys.config[key]) for key in _ACTIVATION if keys.config.get(key)), default)
    known = ("relu2",) if ungated else ACTIVATIONS
    reasons = []
    if family in UNDISPATCHED:
        reasons.append(
            f"transformers does not dispatch the routed experts of {family}; use a family that it dispatches"
        )
    if family in UNCOMPUTED:
        reasons.append(f"{UNCOMPUTED[family]}; {_OTHER_FAMILY}")
    elif activation not in known:
        kind = f"experts with the activation {activation!r}{' without a gate' if ungated else ''}"
        reasons.append(f"{kind} are not computed (known: {', '.join(known)}); {_OTHER_FAMILY}")
    if family == "llama4_text" and keys.size(*_TOP_K) != 1:
        reasons.append(f"experts of {family} are trained with num_experts_per_tok 1 only; {_OTHER_FAMILY}")
    if family == "step3p5" and not part:
        reasons.append("transformers has no class for Step-3.5 without a vision tower; use Step-3.7")
    if family == "longcat_flash":
        for key, computed in _LONGCAT.items():
            stated = keys.config.get(key, computed)
            same = stated == computed or not (stated or computed)  # null is false
            if not same and (key != "zero_expert_type" or zero_experts(keys)):
                what = f"{family} with {key} {stated!r} is not computed (known: {computed!r})"
                reasons.append(f"{what}; {_OTHER_FAMILY}")
    if latent:
        width = f"experts on a projected width ({latent} of {keys.size('hidden_size')})"
        reasons.append(f"{width} are not trained; {_OTHER_FAMILY}")
    if missing:
        reasons.append(missing)
    return "; also: ".join(reasons) or None
