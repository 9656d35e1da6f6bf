"""Parameters of one decoder layer, family by family, counted from config.json keys alone.

Module names and shapes follow the layers of transformers 5 (deepseek_v2/v3/v32/v4, glm_moe_dsa,
qwen2_moe/qwen3_moe/qwen3_next/qwen3_5_moe, mixtral, olmoe, minimax_m2, glm4_moe, gpt_oss); a family
not listed in `EXACT` is read by the same keys, and its counts are then estimates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kt_ray.errors import UserError

# Other names that checkpoints give the same architecture.
ALIASES = {
    "kimi_k2": "deepseek_v3",
    "deepseek_ref": "deepseek_v4",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
}

# Families whose counts equal transformers' own, parameter for parameter (tests/placement/test_dims.py).
EXACT = frozenset(
    (
        *("deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "glm_moe_dsa", "glm4_moe", "gpt_oss"),
        *("minimax_m2", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe"),
    )
)


class Keys:
    """config.json with errors that name the file and the key."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config = config
        self.where = where
        model_type = str(config.get("model_type", ""))
        self.family = ALIASES.get(model_type, model_type)

    def size(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """The first of `names` that is present and not null, as an integer of at least `least`."""
        for name in names:
            value = self.config.get(name)
            if isinstance(value, list | tuple) and value:  # one value per modality (ernie): text comes first
                value = value[0]
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UserError(
                    f"{name} in the model's config.json is not usable",
                    where=self.where,
                    observed=repr(value),
                    required=f"an integer of at least {least}",
                    remedy="download config.json again, or correct the key",
                )
            return value
        if default is not None:
            return default
        raise UserError(
            f"the model's config.json lacks {' or '.join(names)}",
            where=self.where,
            required="the dimensions of a decoder-only MoE language model",
            remedy="point model.path at a Hugging Face MoE checkpoint with its released config.json",
        )

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.config.get(name)
        return default if value is None else bool(value)

    def listed(self, name: str) -> list[Any] | None:
        value = self.config.get(name)
        return list(value) if isinstance(value, list | tuple) and value else None


@dataclass
class LayerParts:
    """Counts of one decoder layer; `modules` are what LoRA's "auto" targets: (name, in, out)."""

    attention: int = 0
    dense: int = 0
    modules: list[tuple[str, int, int]] = field(default_factory=list)
    width: int = 0  # elements per token of expanded queries, keys and values

    def project(self, name: str, n_in: int, n_out: int, bias: bool = False) -> None:
        """An attention projection that LoRA targets."""
        self.attention += n_in * n_out + (n_out if bias else 0)
        self.modules.append((name, n_in, n_out))


def layer_parts(keys: Keys, layer: int, moe: bool) -> LayerParts:
    """Everything of decoder layer `layer` except its routed experts."""
    parts = LayerParts()
    if keys.family == "deepseek_v4":
        _deepseek_v4(keys, layer, parts)
    elif _is_linear(keys, layer):
        _linear_attention(keys, parts)
    elif keys.config.get("kv_lora_rank"):
        _mla(keys, parts)
    else:
        _gqa(keys, parts)
    hidden = keys.size("hidden_size")
    parts.dense += 2 * hidden  # input and post-attention norms
    if moe:
        _moe_mlp(keys, parts)
    else:
        _gated_mlp(parts, "mlp", hidden, keys.size("dense_intermediate_size", "intermediate_size"))
    return parts


def is_moe_layer(keys: Keys, layer: int) -> bool:
    """Whether decoder layer `layer` holds routed experts."""
    types = keys.listed("mlp_layer_types")
    if types is not None:
        return layer < len(types) and types[layer] == "sparse"
    frequency = keys.listed("moe_layer_freq")
    if frequency is not None:
        return layer < len(frequency) and bool(frequency[layer])
    if "moe_layer_start_index" in keys.config:  # ernie4_5_moe
        end = keys.config.get("moe_layer_end_index")
        last = keys.size("num_hidden_layers") - 1 if end in (None, -1) else int(end)
        start = keys.size("moe_layer_start_index", least=0)
        return start <= layer <= last and (layer + 1) % keys.size("moe_layer_interval", default=1) == 0
    if layer < keys.size("first_k_dense_replace", "num_dense_layers", default=0, least=0):
        return False
    if layer in (keys.listed("mlp_only_layers") or ()):
        return False
    if (layer + 1) % keys.size("decoder_sparse_step", default=1) != 0:
        return False
    return layer % keys.size("moe_layer_freq", default=1) == 0


# --- attention ----------------------------------------------------------------------------------


def _gqa(keys: Keys, parts: LayerParts) -> None:
    """Grouped-query attention with the family's biases, norms, gates and sinks."""
    family, hidden, heads = keys.family, keys.size("hidden_size"), keys.size("num_attention_heads")
    kv_heads = keys.size("num_key_value_heads", default=heads)
    head = keys.size("head_dim", default=max(1, hidden // heads))
    q_out, kv_out = heads * head, kv_heads * head
    bias = keys.flag("qkv_bias", True) if family == "qwen2_moe" else keys.flag("attention_bias")
    gated = family in ("qwen3_next", "qwen3_5_moe") and keys.flag("attn_output_gate", True)
    parts.project("self_attn.q_proj", hidden, q_out * (2 if gated else 1), bias)
    parts.project("self_attn.k_proj", hidden, kv_out, bias)
    parts.project("self_attn.v_proj", hidden, kv_out, bias)
    o_bias = bias and family not in ("qwen2_moe", "glm4_moe")
    parts.project("self_attn.o_proj", q_out, hidden, o_bias)
    if family in ("qwen3_moe", "qwen3_next", "qwen3_5_moe", "minimax_m3") or (
        family == "glm4_moe" and keys.flag("use_qk_norm")
    ):
        parts.attention += 2 * head
    elif family == "olmoe" or (family == "minimax_m2" and keys.flag("use_qk_norm", True)):
        parts.attention += q_out + kv_out
    elif family == "gpt_oss":
        parts.attention += heads  # attention sinks
    parts.width = heads * head * 3


def _mla(keys: Keys, parts: LayerParts) -> None:
    """Multi-head latent attention (DeepSeek-V2), with DeepSeek-V3.2's indexer where the config has one."""
    hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    nope, rope = keys.size("qk_nope_head_dim"), keys.size("qk_rope_head_dim", least=0)
    v_head, kv_rank = keys.size("v_head_dim"), keys.size("kv_lora_rank")
    q_out = heads * (nope + rope)
    q_rank = keys.size("q_lora_rank", default=0, least=0)
    bias = keys.flag("attention_bias")
    if q_rank:
        parts.project("self_attn.q_a_proj", hidden, q_rank, bias)
        parts.attention += q_rank  # norm
        parts.project("self_attn.q_b_proj", q_rank, q_out)
    else:
        parts.project("self_attn.q_proj", hidden, q_out)
    parts.project("self_attn.kv_a_proj_with_mqa", hidden, kv_rank + rope, bias)
    parts.attention += kv_rank  # norm
    parts.project("self_attn.kv_b_proj", kv_rank, heads * (nope + v_head))
    parts.project("self_attn.o_proj", heads * v_head, hidden, bias)
    if keys.flag("mla_use_output_gate"):
        parts.attention += hidden * heads * v_head
    if keys.config.get("index_n_heads"):
        index_heads, index_head = keys.size("index_n_heads"), keys.size("index_head_dim")
        parts.project("self_attn.indexer.wq_b", q_rank or hidden, index_heads * index_head)
        parts.project("self_attn.indexer.wk", hidden, index_head)
        parts.attention += 2 * index_head  # norm with bias
        parts.project("self_attn.indexer.weights_proj", hidden, index_heads)
    parts.width = heads * (2 * (nope + rope) + v_head)


def _deepseek_v4(keys: Keys, layer: int, parts: LayerParts) -> None:
    """DeepSeek-V4: one key/value head, grouped output, compressor, indexer, hyper-connections."""
    hidden, heads, head = keys.size("hidden_size"), keys.size("num_attention_heads"), keys.size("head_dim")
    q_rank, o_rank, groups = keys.size("q_lora_rank"), keys.size("o_lora_rank"), keys.size("o_groups")
    parts.project("self_attn.q_a_proj", hidden, q_rank)
    parts.project("self_attn.q_b_proj", q_rank, heads * head)
    parts.project("self_attn.kv_proj", hidden, head)
    parts.project("self_attn.o_b_proj", groups * o_rank, hidden)
    parts.attention += heads + q_rank + head + heads * head * o_rank  # sinks, two norms, o_a_proj in groups
    ratios = keys.listed("compress_ratios") or []
    ratio = int(ratios[layer]) if layer < len(ratios) else 0
    if ratio:
        name = "self_attn.compressor"
        overlap = 2 if ratio == 4 else 1  # the fine compressor keeps two overlapping windows
        parts.attention += overlap * head * ratio + head  # position bias, norm
        parts.project(f"{name}.kv_proj", hidden, overlap * head)
        parts.project(f"{name}.gate_proj", hidden, overlap * head)
        if ratio == 4:
            index_heads, index_head = keys.size("index_n_heads"), keys.size("index_head_dim")
            parts.attention += 2 * index_head * ratio + index_head
            parts.project(f"{name}.indexer.kv_proj", hidden, 2 * index_head)
            parts.project(f"{name}.indexer.gate_proj", hidden, 2 * index_head)
            parts.project(f"{name}.indexer.q_b_proj", q_rank, index_heads * index_head)
            parts.project(f"{name}.indexer.scorer.weights_proj", hidden, index_heads)
    streams = keys.size("hc_mult", default=4)
    mixes = streams * (streams + 2)
    parts.attention += 2 * (
        mixes * streams * hidden + mixes + 3
    )  # hyper-connections of attention and of the MoE
    parts.width = heads * head + 2 * head


def _is_linear(keys: Keys, layer: int) -> bool:
    """Whether this layer's attention is a linear (gated delta) one."""
    linear = keys.config.get("linear_attn_config")
    if isinstance(linear, Mapping):  # kimi_linear counts layers from 1
        return layer + 1 in (linear.get("kda_layers") or ())
    types = keys.listed("layer_types")
    if types is not None:
        return layer < len(types) and types[layer] == "linear_attention"
    if keys.config.get("linear_num_key_heads"):
        return (layer + 1) % keys.size("full_attention_interval", default=4) != 0
    return False


def _linear_attention(keys: Keys, parts: LayerParts) -> None:
    hidden = keys.size("hidden_size")
    kimi = keys.config.get("linear_attn_config")
    if isinstance(kimi, Mapping):
        inner = Keys(kimi, keys.where + ", linear_attn_config")
        heads, head = inner.size("num_heads"), inner.size("head_dim")
        width, kernel = heads * head, inner.size("short_conv_kernel_size", default=4)
        for name in ("q_proj", "k_proj", "v_proj"):
            parts.project(f"self_attn.{name}", hidden, width)
        parts.project("self_attn.o_proj", width, hidden)
        parts.attention += 3 * width * kernel + hidden * heads + hidden * head + head * width
        parts.attention += (
            hidden * width if inner.flag("use_full_rank_gate") else hidden * head + head * width
        )
        parts.attention += width + heads + head
        parts.width = 3 * width
        return
    key = keys.size("linear_num_key_heads") * keys.size("linear_key_head_dim")
    value_heads, value_head = keys.size("linear_num_value_heads"), keys.size("linear_value_head_dim")
    value = value_heads * value_head
    if keys.family == "qwen3_next":
        parts.project("linear_attn.in_proj_qkvz", hidden, 2 * key + 2 * value)
        parts.project("linear_attn.in_proj_ba", hidden, 2 * value_heads)
    else:
        parts.project("linear_attn.in_proj_qkv", hidden, 2 * key + value)
        parts.project("linear_attn.in_proj_z", hidden, value)
        parts.project("linear_attn.in_proj_b", hidden, value_heads)
        parts.project("linear_attn.in_proj_a", hidden, value_heads)
    parts.project("linear_attn.out_proj", value, hidden)
    conv = (2 * key + value) * keys.size("linear_conv_kernel_dim", default=4)
    parts.attention += conv + 2 * value_heads + value_head  # dt_bias and A_log, norm
    parts.width = 2 * key + value


# --- MLP ----------------------------------------------------------------------------------------


def _gated_mlp(parts: LayerParts, name: str, hidden: int, intermediate: int) -> None:
    parts.dense += 3 * hidden * intermediate
    parts.modules += [
        (f"{name}.gate_proj", hidden, intermediate),
        (f"{name}.up_proj", hidden, intermediate),
        (f"{name}.down_proj", intermediate, hidden),
    ]


def _moe_mlp(keys: Keys, parts: LayerParts) -> None:
    """Router and shared experts of a MoE layer."""
    hidden, experts = keys.size("hidden_size"), num_experts(keys)
    parts.dense += hidden * experts + (experts if keys.family == "gpt_oss" else 0)
    latent = keys.size("routed_expert_hidden_size", default=0, least=0)
    parts.dense += 2 * hidden * latent
    shared = keys.size("shared_expert_intermediate_size", "shared_intermediate_size", default=0, least=0)
    if not shared:
        count = keys.size(
            "n_shared_experts", "num_shared_experts", "moe_num_shared_experts", default=0, least=0
        )
        shared = count * expert_intermediate(keys)
    if not shared:
        return
    gated = keys.family in ("qwen2_moe", "qwen3_next", "qwen3_5_moe")
    _gated_mlp(parts, "mlp.shared_expert" if gated else "mlp.shared_experts", hidden, shared)
    parts.dense += hidden if gated else 0  # shared_expert_gate


def num_experts(keys: Keys) -> int:
    """Routed experts per MoE layer."""
    return keys.size("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")


def expert_intermediate(keys: Keys) -> int:
    """Intermediate size of one routed expert."""
    return keys.size("moe_intermediate_size", "expert_intermediate_size", "intermediate_size")
