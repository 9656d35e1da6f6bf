"""Attention of one decoder layer with its norms: parameters, and the projections that LoRA targets.

Module names and shapes follow the layers of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping

from kt_ray.dims.config_keys import Keys, LayerParts
from kt_ray.dims.handed import has_index, keys_of, rotates
from kt_ray.dims.model_dims import CacheWidth, Compression
from kt_ray.dims.state_values import gated_delta, kimi_delta, lightning, mamba, mamba2, short_convolution
from kt_ray.errors import UserError

KV_HEADS = ("num_key_value_heads", "num_attention_groups")
LONGCAT_ATTENTIONS = 2  # of a layer of LongCat-Flash


def attention(keys: Keys, layer: int, parts: LayerParts) -> None:
    """Adds the attention of decoder layer `layer` to `parts`."""
    if keys.family == "deepseek_v4":
        _deepseek_v4(keys, layer, parts)
    elif is_linear(keys, layer) and (kimi := _kimi(keys)) is not None:
        _kimi_delta(keys, kimi, parts)
    elif is_linear(keys, layer) and keys.config.get("linear_num_key_heads"):
        _gated_delta(keys, parts)
    elif keys.family == "longcat_flash":
        for number in range(LONGCAT_ATTENTIONS):
            _mla(keys, layer, parts, f"self_attn.{number}")
    elif keys.config.get("kv_lora_rank"):
        _mla(keys, layer, parts)
    elif is_linear(keys, layer) and keys.family in _STATES:
        _STATES[keys.family](keys, parts)
    else:
        grouped_query(keys, layer, parts)


def kv_heads(keys: Keys) -> int:
    """Heads of keys and values; of latent attention as they are expanded."""
    heads = keys.size("num_attention_heads")
    return heads if keys.config.get("kv_lora_rank") else keys.size(*KV_HEADS, default=heads)


def grouped_query(keys: Keys, layer: int, parts: LayerParts, at: str = "self_attn") -> None:
    """Grouped-query attention with the family's biases, norms, gates and sinks; `at` is its module."""
    family, hidden, heads = keys.family, keys.size("hidden_size"), keys.size("num_attention_heads")
    kv_heads = keys.size(*KV_HEADS, default=heads)
    head = keys.size("head_dim", default=max(1, hidden // heads))
    whole = family == "gemma4_text" and "full_attention" in (keys.listed("layer_types") or ())[layer:][:1]
    shares = whole and keys.flag("attention_k_eq_v")  # keys are values
    if whole:  # saved by transformers for each of these layers
        head = keys.size("global_head_dim", default=head if keys.config.get("per_layer_config") else 512)
    if shares:
        kv_heads = keys.size("num_global_key_value_heads", default=kv_heads)
    q_out, kv_out = heads * head, kv_heads * head
    bias = keys.flag("qkv_bias", True) if family == "qwen2_moe" else keys.flag("attention_bias")
    gated = family in ("qwen3_next", "qwen3_5_moe", "qwen4_exp") and keys.flag("attn_output_gate", True)
    parts.project(f"{at}.q_proj", hidden, q_out * (2 if gated else 1), bias)
    parts.project(f"{at}.k_proj", hidden, kv_out, bias)
    if not shares:
        parts.project(f"{at}.v_proj", hidden, kv_out, bias)
    if family == "step3p5":
        parts.project(f"{at}.g_proj", hidden, heads)
    o_bias = bias and family not in ("qwen2_moe", "glm4_moe")
    parts.project(f"{at}.o_proj", q_out, hidden, o_bias)
    normed = (
        *("gemma4_text", "hunyuan_v1_moe", "minimax_m3_vl_text", "qwen3_5_moe", "qwen3_moe", "qwen3_next"),
        *("qwen4_exp", "step3p5"),
    )
    if family in normed or (family == "glm4_moe" and keys.flag("use_qk_norm")):
        parts.attention += 2 * head
        parts.normed = q_out + kv_out
    elif family == "olmoe" or (family == "minimax_m2" and keys.flag("use_qk_norm", True)):
        parts.attention += q_out + kv_out
        parts.normed = q_out + kv_out
    elif family == "gpt_oss":
        parts.attention += heads  # attention sinks
    elif family == "afmoe":
        parts.project(f"{at}.gate_proj", hidden, q_out)
    parts.width = heads * head * 3
    parts.pair, parts.window = 2 * q_out, _window(keys, layer)
    if parts.window:
        parts.cache = CacheWidth(near=2 * kv_out, window=parts.window - 1)
    else:
        parts.cache = CacheWidth(token=2 * kv_out)
    if family == "minimax_m3_vl_text":
        _block_indexer(keys, layer, parts)
    elif family == "inkling_text":
        _learned_bias(keys, heads, 2 * (kv_out + hidden), parts)
    elif family == "qwen4_exp":
        _index_of_means(keys, layer, parts)


def _index_of_means(keys: Keys, layer: int, parts: LayerParts) -> None:
    """Qwen4-Exp's choice of key blocks, by the means of their keys."""
    heads, width = keys.size("indexer_n_heads"), keys.size("indexer_head_dim")
    parts.index = (heads, False)
    parts.project("self_attn.indexer.index_qk_proj", keys.size("hidden_size"), (heads + 1) * width)
    parts.attention += 2 * width  # norms
    places = 3 if all(is_linear(keys, before) for before in range(layer)) else 0  # which the first keeps
    parts.cache = parts.cache._replace(token=parts.cache.token + width + places)


def _learned_bias(keys: Keys, heads: int, convolved: int, parts: LayerParts) -> None:
    """Inkling's bias of a query and a key by their distance, and its four short convolutions."""
    relative, extent = keys.size("d_rel", default=16), keys.size("rel_extent", default=1024)
    parts.project("self_attn.r_proj", keys.size("hidden_size"), heads * relative)
    parts.bias = heads * extent
    kernel = keys.size("sconv_kernel_size", "conv_kernel_size", default=4)
    parts.attention += relative * extent + convolved * kernel
    parts.cache = parts.cache._replace(state=convolved * kernel)


def _window(keys: Keys, layer: int) -> int:
    """Keys that a query of this layer meets at most; 0 = all before it."""
    if keys.family == "llama4_text":
        return _chunk(keys, layer)
    window, types = keys.config.get("sliding_window"), keys.listed("layer_types")
    if not isinstance(window, int) or not keys.flag("use_sliding_window", True):
        return 0
    if types is not None:
        slides = layer < len(types) and types[layer] == "sliding_attention"
    elif keys.family == "gpt_oss":
        slides = layer % 2 == 0
    else:
        slides = keys.family in ("mixtral", "phimoe")
    return window if slides else 0


def _chunk(keys: Keys, layer: int) -> int:
    """Llama 4: rotating layers look at one chunk of the row."""
    types, rotating = keys.listed("layer_types"), keys.listed("no_rope_layers")
    if types is not None:
        chunked = types[layer : layer + 1] == ["chunked_attention"]
    elif rotating is not None:
        chunked = bool(rotating[layer : layer + 1] and rotating[layer])
    else:
        chunked = (layer + 1) % keys.size("no_rope_layer_interval", default=4) != 0
    if chunked and keys.config.get("attention_chunk_size", 8192) is None:  # transformers makes no mask then
        raise UserError(
            "the model attends in chunks, and its config.json does not say how long they are",
            where=keys.where,
            observed="attention_chunk_size null",
            required="a number of tokens",
            remedy='write "attention_chunk_size": 8192 there, as Llama 4 has it, or that of its training',
        )
    return keys.size("attention_chunk_size", default=8192) if chunked else 0


def _block_indexer(keys: Keys, layer: int, parts: LayerParts) -> None:
    """MiniMax-M3's choice of key blocks, in its sparse layers."""
    inner, types = keys.inner("sparse_attention_config"), keys.listed("layer_types")
    frequency = inner.listed("sparse_attention_freq") or []
    if types is not None:
        sparse = layer < len(types) and types[layer] == "minimax_m3_sparse"
    else:
        sparse = layer < len(frequency) and bool(frequency[layer])
    if not sparse:
        return
    hidden = keys.size("hidden_size")
    heads = inner.size("sparse_num_index_heads", default=keys.size("index_n_heads", default=4))
    head = inner.size("sparse_index_dim", default=keys.size("index_head_dim", default=128))
    parts.index = (heads, True)
    parts.project("self_attn.indexer.q_proj", hidden, heads * head)
    parts.project("self_attn.indexer.k_proj", hidden, head)
    parts.attention += 2 * head  # norms
    parts.cache = parts.cache._replace(token=parts.cache.token + head)


def _mla(keys: Keys, layer: int, parts: LayerParts, at: str = "self_attn") -> None:
    """Multi-head latent attention (DeepSeek-V2), with DeepSeek-V3.2's indexer where the config has one.

    Layers may take an earlier one's keys, or its index's choice (handed.py). `at` is the module.
    """
    family, hidden, heads = keys.family, keys.size("hidden_size"), keys.size("num_attention_heads")
    nope, rope = keys.size("qk_nope_head_dim"), keys.size("qk_rope_head_dim", least=0)
    v_head, kv_rank = keys.size("v_head_dim"), keys.size("kv_lora_rank")
    if not rotates(keys, layer):
        nope, rope = nope + rope, 0
    q_out = heads * (nope + rope)
    mistral = family == "mistral_large4_text"
    q_rank = 0 if mistral else keys.size("q_lora_rank", default=0, least=0)
    bias = keys.flag("attention_bias")
    if q_rank:
        parts.project(f"{at}.q_a_proj", hidden, q_rank, bias)
        parts.attention += q_rank  # norm
        parts.project(f"{at}.q_b_proj", q_rank, q_out)
    else:
        parts.project(f"{at}.q_proj", hidden, q_out)
    token = 0
    if keys_of(keys, layer) == layer:
        parts.project(f"{at}.kv_a_proj_with_mqa", hidden, kv_rank + rope, bias)
        parts.attention += kv_rank  # norm
        token = kv_rank + rope
    parts.project(f"{at}.kv_b_proj", kv_rank, heads * (nope + v_head))
    parts.project(f"{at}.o_proj", heads * v_head, hidden, bias)
    if family == "bailing_hybrid":
        parts.project(f"{at}.g_proj", hidden, heads)
    if keys.flag("mla_use_output_gate"):
        parts.attention += hidden * heads * v_head
    if mistral:
        parts.attention += 2 * heads  # scale of the softmax
    if family == "hy_v4":
        parts.project(f"{at}.gate_proj", hidden, heads * v_head)
        parts.attention += heads  # sinks
        streams = keys.size("hc_mult", default=4)  # hyper-connections of attention and MoE
        parts.attention += 2 * (2 * streams * (streams * hidden + 1) + 2)
    if keys.config.get("index_n_heads") and has_index(keys, layer):
        index_heads, index_head = keys.size("index_n_heads"), keys.size("index_head_dim")
        parts.index = (index_heads, False)
        parts.project(f"{at}.indexer.wq_b", q_rank or hidden, index_heads * index_head)
        parts.project(f"{at}.indexer.wk", hidden, index_head)
        parts.attention += 2 * index_head  # norm with bias
        if mistral:
            parts.attention += 2 * hidden + 2 * index_heads  # norm with bias, scale of the softmax
        parts.project(f"{at}.indexer.weights_proj", hidden, index_heads)
        parts.pair = index_heads * index_head
        token += index_head
    parts.cache = CacheWidth(token=parts.cache.token + token)
    parts.width = heads * (2 * (nope + rope) + v_head)
    parts.pair += heads * (nope + rope + v_head)


def _deepseek_v4(keys: Keys, layer: int, parts: LayerParts) -> None:
    """DeepSeek-V4: one key/value head, grouped output, compressor, indexer, hyper-connections."""
    hidden, heads, head = keys.size("hidden_size"), keys.size("num_attention_heads"), keys.size("head_dim")
    q_rank, o_rank, groups = keys.size("q_lora_rank"), keys.size("o_lora_rank"), keys.size("o_groups")
    parts.project("self_attn.q_a_proj", hidden, q_rank)
    parts.project("self_attn.q_b_proj", q_rank, heads * head)
    parts.project("self_attn.kv_proj", hidden, head)
    parts.project("self_attn.o_b_proj", groups * o_rank, hidden)
    parts.attention += heads + q_rank + head + heads * head * o_rank  # sinks, two norms, o_a_proj in groups
    ratio, fine = _compression(keys, layer)
    window = keys.size("sliding_window", default=128)
    # Keys are values, but only compressing layers' caches hold them once.
    parts.cache = CacheWidth(near=head if ratio else 2 * head, window=window - 1)
    if ratio:
        name = "self_attn.compressor"
        overlap = 2 if fine else 1  # the fine compressor keeps two overlapping windows
        parts.compression = Compression(ratio, overlap * head)
        parts.attention += overlap * head * ratio + head  # position bias, norm
        parts.project(f"{name}.kv_proj", hidden, overlap * head)
        parts.project(f"{name}.gate_proj", hidden, overlap * head)
        # Besides compressed tokens those that are not compressed yet, and the fine one's window before.
        kept = 2 * (overlap * head * (ratio - 1) + (overlap - 1) * head * ratio)
        parts.cache = parts.cache._replace(token=head / ratio, row=kept)
        if fine:
            index_heads, index_head = keys.size("index_n_heads"), keys.size("index_head_dim")
            parts.compression = Compression(ratio, overlap * head, index_heads, index_head)
            parts.attention += 2 * index_head * ratio + index_head
            kept += 2 * (2 * index_head * (ratio - 1) + index_head * ratio)
            parts.cache = parts.cache._replace(token=(head + index_head) / ratio, row=kept)
            parts.project(f"{name}.indexer.kv_proj", hidden, 2 * index_head)
            parts.project(f"{name}.indexer.gate_proj", hidden, 2 * index_head)
            parts.project(f"{name}.indexer.q_b_proj", q_rank, index_heads * index_head)
            parts.project(f"{name}.indexer.scorer.weights_proj", hidden, index_heads)
    streams = keys.size("hc_mult", default=4)
    mixes = streams * (streams + 2)
    parts.attention += 2 * (mixes * streams * hidden + mixes + 3)  # hyper-connections of attention and MoE
    parts.width = heads * head + 2 * head
    parts.pair, parts.window = 2 * heads * head, window


def _compression(keys: Keys, layer: int) -> tuple[int, bool]:
    """DeepSeek-V4: tokens per compressed one (0 = uncompressed), and whether it is the fine compressor.

    Releases list ratios; transformers saves layer_types and a rate for each of them.
    """
    ratios, types = keys.listed("compress_ratios"), keys.listed("layer_types")
    if ratios is not None or types is None:
        given = ratios[layer] if ratios and layer < len(ratios) else 0
        ratio = Keys({"compress_ratios": given}, keys.where).size("compress_ratios", default=0, least=0)
        return ratio, ratio == 4
    kind = str(types[layer]) if layer < len(types) else ""
    fine = kind == "compressed_sparse_attention"
    if not fine and kind != "heavily_compressed_attention":
        return 0, False
    return keys.inner("compress_rates").size(kind, default=4 if fine else 128), fine


def is_linear(keys: Keys, layer: int) -> bool:
    """Whether this layer's attention is a linear one (gated delta, Kimi delta, lightning, mamba), or a short
    convolution."""
    linear = keys.config.get("linear_attn_config")
    if isinstance(linear, Mapping) and isinstance(
        linear.get("kda_layers"), list
    ):  # kimi_linear counts layers from 1
        return layer + 1 in linear["kda_layers"]
    types = keys.listed("layer_types")
    if types is not None:
        return layer < len(types) and types[layer] in ("linear_attention", "mamba", "conv")
    if keys.config.get("linear_num_key_heads"):
        return (layer + 1) % keys.size("full_attention_interval", default=4) != 0
    if keys.family == "bailing_hybrid":
        return (layer + 1) % keys.size("layer_group_size", default=6) != 0
    if keys.family == "jamba":
        period = keys.size("attn_layer_period", default=8)
        return layer % period != keys.size("attn_layer_offset", default=4, least=0)
    return keys.family == "granitemoehybrid" or (keys.family == "minimax" and layer % 2 == 1)


def _granite_mamba(keys: Keys, parts: LayerParts) -> None:
    """Granite's Mamba-2."""
    hidden, inner = keys.size("hidden_size"), keys.size("mamba_expand", default=2) * keys.size("hidden_size")
    heads, kernel = keys.size("mamba_n_heads", default=128), keys.size("mamba_d_conv", default=4)
    groups, state = keys.size("mamba_n_groups", default=1), keys.size("mamba_d_state", default=256)
    convolved = inner + 2 * groups * state
    parts.project("mamba.in_proj", hidden, inner + convolved + heads)
    parts.project("mamba.out_proj", inner, hidden)
    parts.attention += convolved * (kernel + 1) + 3 * heads + inner  # dt_bias, A_log, D; norm
    parts.width = inner + convolved
    parts.cache = CacheWidth(row=convolved * kernel, state=inner * state)
    parts.state = mamba2(heads, inner // heads, groups, state, keys.size("mamba_chunk_size", default=256))


def _jamba_mamba(keys: Keys, parts: LayerParts) -> None:
    hidden, inner = keys.size("hidden_size"), keys.size("mamba_expand", default=2) * keys.size("hidden_size")
    rank = keys.config.get("mamba_dt_rank", "auto")
    rank = -(-hidden // 16) if rank == "auto" else keys.size("mamba_dt_rank")
    state, kernel = keys.size("mamba_d_state", default=16), keys.size("mamba_d_conv", default=4)
    parts.project("mamba.in_proj", hidden, 2 * inner)
    parts.project("mamba.x_proj", inner, rank + 2 * state)
    parts.project("mamba.out_proj", inner, hidden)
    parts.attention += inner * (rank + 1) + inner * (kernel + 1)  # dt_proj, which no adapter reaches
    parts.attention += inner * (state + 1) + rank + 2 * state  # A_log, D; norms
    parts.width = 2 * inner
    parts.cache = CacheWidth(row=inner * kernel, state=inner * state)
    parts.state = mamba(inner, state, rank)


def _lightning(keys: Keys, parts: LayerParts) -> None:
    """MiniMax-Text-01's and M1's, whose output gate no adapter reaches."""
    hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    head = keys.size("head_dim", default=max(1, hidden // heads))
    width = heads * head
    parts.project("self_attn.qkv_proj", hidden, 3 * width)
    parts.project("self_attn.out_proj", width, hidden)
    parts.attention += hidden * width + width  # output_gate, norm
    parts.width = 3 * width
    parts.cache = CacheWidth(state=width * head)
    parts.state = lightning(heads, head, keys.size("block_size", default=256))


def _short_convolution(keys: Keys, parts: LayerParts) -> None:
    """LFM2's."""
    hidden, kernel = keys.size("hidden_size"), keys.size("conv_L_cache", default=3)
    parts.project("conv.in_proj", hidden, 3 * hidden)
    parts.project("conv.out_proj", hidden, hidden)
    parts.attention += hidden * kernel
    parts.width = 3 * hidden
    parts.cache = CacheWidth(row=hidden * kernel)
    parts.state = short_convolution(hidden)


_STATES = {
    "granitemoehybrid": _granite_mamba,
    "jamba": _jamba_mamba,
    "lfm2_moe": _short_convolution,
    "minimax": _lightning,
}


def _kimi(keys: Keys) -> Keys | None:
    """Keys of Kimi Linear's delta attention, as released or as transformers saves them; of Ling's."""
    if isinstance(keys.config.get("linear_attn_config"), Mapping):
        return keys.inner("linear_attn_config")
    full_rank = keys.family == "bailing_hybrid"
    named = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    if keys.config.get(named[0]) is None:
        if not full_rank:
            return None
        named = ("num_attention_heads", "head_dim", "short_conv_kernel_size")
    names = ("num_heads", "head_dim", "short_conv_kernel_size")
    given = {new: keys.config.get(old) for old, new in zip(named, names, strict=True)}
    if full_rank and given["head_dim"] is None:
        given["head_dim"] = 128
    return Keys({**given, "use_full_rank_gate": full_rank}, keys.where)


def _kimi_delta(keys: Keys, inner: Keys, parts: LayerParts) -> None:
    """Kimi Linear's delta attention, and Ling's; `inner` are its own keys."""
    hidden, heads, head = keys.size("hidden_size"), inner.size("num_heads"), inner.size("head_dim")
    width, kernel = heads * head, inner.size("short_conv_kernel_size", default=4)
    for name in ("q_proj", "k_proj", "v_proj"):
        parts.project(f"self_attn.{name}", hidden, width)
    parts.project("self_attn.o_proj", width, hidden)
    parts.project("self_attn.b_proj", hidden, heads)
    if inner.flag("use_full_rank_gate"):
        parts.project("self_attn.g_proj", hidden, width)
    else:
        parts.project("self_attn.g_a_proj", hidden, head)
        parts.project("self_attn.g_b_proj", head, width)
    forget = hidden * width if keys.family == "bailing_hybrid" else hidden * head + head * width
    parts.attention += 3 * width * kernel + forget  # convolution, forget gate
    parts.attention += width + heads + head  # dt_bias, A_log, norm
    parts.width = 3 * width
    parts.cache = CacheWidth(row=3 * width * kernel, state=width * head)
    parts.state = kimi_delta(heads, head)


def _gated_delta(keys: Keys, parts: LayerParts) -> None:
    """Qwen3-Next's and Qwen3.5's gated delta attention."""
    hidden = keys.size("hidden_size")
    key_heads, key_head = keys.size("linear_num_key_heads"), keys.size("linear_key_head_dim")
    key = key_heads * key_head
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
    parts.cache = CacheWidth(row=conv, state=value * key_head)
    parts.state = gated_delta(key_heads, key_head, value_heads, value_head)
    parts.attention += conv + 2 * value_heads + value_head  # dt_bias and A_log, norm
    parts.width = 2 * key + value
