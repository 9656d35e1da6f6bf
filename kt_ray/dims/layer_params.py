"""Parameters of one decoder layer, family by family, counted from config.json keys alone.

Module names and shapes follow the layers of transformers 5 (deepseek_v2/v3/v32/v4, glm_moe_dsa,
qwen2_moe/qwen3_moe/qwen3_next/qwen3_5_moe, mixtral, olmoe, phimoe, minimax_m2, minimax_m3_vl, glm4_moe,
gpt_oss, kimi_linear); a family not listed in `EXACT` is read by the same keys, and its counts are then
estimates.
"""

from __future__ import annotations

import math
from functools import cache

from kt_ray.dims.attention_params import LONGCAT_ATTENTIONS, attention, grouped_query
from kt_ray.dims.config_keys import MOST_LAYERS, Keys, LayerParts
from kt_ray.dims.model_dims import CacheWidth
from kt_ray.dims.state_values import mamba2

# Families whose experts the engine does not compute, whatever their activation is called.
UNCOMPUTED = {
    "inkling2_text": "experts with a gate of their own (a soft cap) are not computed",
    "muse_spark_text": "experts with a norm after each of them are not computed",
}
# Families with experts that transformers 5 does not hand to its experts interface.
UNDISPATCHED = frozenset(("dbrx", "doge", "jetmoe"))

# Families that neither transformers nor kt_ray.model.attention has "sdpa" attention for: they run "eager",
# which holds all scores.
WITHOUT_SDPA = frozenset(("deepseek_ref", "deepseek_v4", "hy_v4", "inkling2_text", "inkling_text"))
# Of these the ones that transformers has it for, with a bias of pairs that is learned: under grad torch then
# takes another kernel than in forward, and a recomputed layer would not be the same to the bit.
LEARNED_BIAS = frozenset(("inkling_text",))

# Families whose windows are chunks of the row: their masks are made whole.
CHUNKED = frozenset(("llama4_text",))

# Families whose norms torch has no single kernel for: weights of 1 + w, or mean and variance.
WRITTEN_OUT_NORMS = frozenset(
    (
        *("cohere2_moe", "minimax_m3_vl", "minimax_m3_vl_text", "phimoe", "qwen3_5_moe", "qwen3_5_moe_text"),
        *("qwen3_next", "qwen4_exp", "qwen4_exp_text", "step3p5"),
    )
)
# Families whose residual streams lie side by side in one hidden state, and whose index chooses blocks.
QWEN4_EXP = frozenset(("qwen4_exp", "qwen4_exp_text"))
# Families whose layers must be told which positions are padding, though it follows the row: a state that
# decays from the end (lightning attention). kt_ray.model.layer_checks finds it out by trying.
MASKS_PADDING = frozenset(("minimax",))

# Families with sinks: numbers per head that take part in the softmax (kt_ray/model/attention.py).
SINKS = frozenset(("flint", "gpt_oss", "granitemoe_swa", "mimo_v2_flash"))
SINK_FEATURES = 3  # of queries and keys that hold one
# Families with a norm over the queries or keys of all heads at once.
WHOLE_HEADS = frozenset(("flex_olmo", "minimax_m2", "olmoe"))
# Families whose attention multiplies each head's output by a gate, and looks up how many heads there are.
GATED_HEADS = frozenset(("step3p5",))
# Families of which some layers have another attention than softmax over keys, or none.
MIXED = frozenset(("bailing_hybrid", "granitemoehybrid", "jamba", "kimi_linear", "lfm2_moe", "minimax"))
# Families whose layers are not affine in the output of their experts (a norm follows, or an attention).
NOT_AFFINE = frozenset(
    ("afmoe", "axk1", "beam", "flex_olmo", "gemma4_text", "glm5_next_text", "inkling_text", "kolibri1")
)

# Norms as wide as the hidden state that a layer has beyond two; a gate after a norm (A.X-K2) counts as one,
# Inkling's four short convolutions and the norms of its heads as three.
MORE_NORMS = {
    "afmoe": 2,
    "axk1": 1,
    "axk2": 2,
    "beam": 2,
    "gemma4_text": 5,
    "inkling_text": 3,
    "kolibri1": 2,
    "longcat_flash": 2,
}

# Dense layers before the first one with experts, where config.json does not say; 0 in other families.
FIRST_DENSE = {
    **dict.fromkeys(("afmoe", "axk1", "axk2", "dots3_note_text", "ernie4_5_moe", "ernie4_5_vl_moe_text"), 1),
    **dict.fromkeys(("exaone_moe", "glm4_moe", "glm4_moe_lite", "glm4v_moe_text", "hy_v3", "hy_v4"), 1),
    **dict.fromkeys(
        ("kimi_linear", "laguna", "mimo_v2_flash", "mistral_large4_text", "unlimited_ocr_text"), 1
    ),
    **dict.fromkeys(("bailing_hybrid", "lfm2_moe"), 2),
    **dict.fromkeys(("beam", "deepseek_v3", "deepseek_v32", "glm5_next_text", "glm_moe_dsa", "step3p5"), 3),
}

HELD_BYTES = 1 << 26  # of scores, or of a window's mask, that attention may hold for one call on a CPU

EXPERT_COUNT = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
# Activations that the engine computes, by config.json's names; "swigluoai" is MiniMax-M3's clamped one.
ACTIVATIONS = ("silu", "swish", "gelu_pytorch_tanh", "gelu_new", "swigluoai")
UNGATED = ("nemotron_h",)  # experts without a gate: relu2 of up alone


def holds_scores(model_type: str, attn_implementation: str) -> bool:
    """Whether attention runs "eager": all its scores are in memory."""
    return attn_implementation == "eager" or model_type in WITHOUT_SDPA


def window_block(window: int) -> int:
    """Queries of a block, and of the one before it keys: attention with a window goes by such blocks."""
    return -(-window // 16) * 16


def flash_width(features: int) -> int:
    """The width at which flash takes so many features, in training as without grad: a multiple of 8, and none
    between 192 and 256 (kt_ray/model/attention.py)."""
    aligned = -(-features // 8) * 8
    return 256 if 192 < aligned < 256 else aligned


def layer_parts(keys: Keys, layer: int, moe: bool) -> LayerParts:
    """Everything of decoder layer `layer` except its routed experts."""
    parts = LayerParts()
    if keys.family == "nemotron_h":
        _nemotron_block(keys, layer, parts)
        return parts
    attention(keys.of_layer(layer), layer, parts)
    hidden = keys.size("hidden_size")
    if keys.family == "qwen4_exp":
        _streams(keys, layer, parts)
    else:  # input and post-attention norms; PhiMoE's have a bias, Gemma 4 and LongCat-Flash have two more
        parts.dense += (4 if keys.family in ("gemma4_text", "longcat_flash", "phimoe") else 2) * hidden
    mlp = "feed_forward" if keys.family == "llama4_text" else "mlp"
    if keys.family == "longcat_flash":
        for number in range(LONGCAT_ATTENTIONS):  # a dense MLP behind each
            _gated_mlp(parts, f"mlps.{number}", hidden, keys.size("ffn_hidden_size", "intermediate_size"))
    if moe:
        _moe_mlp(keys, parts, mlp)
    else:
        fused = keys.family == "minimax_m3_vl_text"
        names = ("dense_intermediate_size", "intermediate_size_mlp", "intermediate_size", "ffn_hidden_size")
        _gated_mlp(parts, mlp, hidden, keys.size(*names), fused)
    return parts


def _streams(keys: Keys, layer: int, parts: LayerParts) -> None:
    """Qwen4-Exp: hyper-connections of attention and MoE, and in some layers n-gram embeddings (PLE)."""
    hidden, streams = keys.size("hidden_size"), hidden_streams(keys)
    wide = streams * hidden
    parts.attention += 2 * wide + sum(n_in * n_out for _, n_in, n_out in mixers(keys))  # norms
    numbered = sorted({*(keys.listed("ple_layer_ids") or ())})  # counted from 1
    if layer + 1 not in numbered:
        return
    embedded = keys.size("ple_embed_dim", default=hidden)
    longest = keys.size("ngram_size", default=3, least=2, most=64)
    heads = keys.size("heads_per_ngram", default=8, most=1024)
    parts.linear("ple.key_proj", embedded, wide)
    parts.linear("ple.value_proj", embedded, hidden)
    kernel = keys.size("ple_conv_kernel_size", default=4)
    parts.dense += wide * (3 + kernel)  # norms, convolution
    waiting = wide * (kernel - 1) * longest + longest - 1  # of the convolution, and tokens
    parts.cache = parts.cache._replace(row=parts.cache.row + waiting)
    base = keys.size("ngram_vocab_size_base", default=20_000_000, most=1 << 40)
    tables = (longest - 1) * heads  # with sizes of their own: primes in a row, through all of the layers
    first = numbered.index(layer + 1) * tables
    rows = sum(_primes(base, first + tables)[first:])
    multiple = keys.size("make_ngram_vocab_size_divisible_by", default=128)
    parts.mapped = -(-rows // multiple) * multiple * (embedded // tables)


def mixers(keys: Keys) -> tuple[tuple[str, int, int], ...]:
    """Linear modules (name, in, out) of Qwen4-Exp's hyper-connections, of attention and MoE, in a layer."""
    if keys.family != "qwen4_exp":
        return ()
    streams, rank = hidden_streams(keys), keys.size("hc_lowrank", default=320)
    wide = streams * keys.size("hidden_size")
    return tuple(
        (f"{part}_hyper_connection.{name}", n_in, n_out)
        for part in ("attn", "mlp")
        for name, n_in, n_out in (
            ("input_mix_weight_down", wide, rank),
            ("input_mix_weight_up", rank, wide),
            ("block_inject_weight", wide, streams),
        )
    )


@cache
def _primes(least: int, count: int) -> list[int]:
    """The first primes that are not smaller."""
    found: list[int] = []
    while len(found) < count:
        if least > 1 and all(least % divisor for divisor in range(2, math.isqrt(least) + 1)):
            found.append(least)
        least += 1
    return found


def hidden_streams(keys: Keys) -> int:
    """Residual streams between layers."""
    if keys.family == "qwen4_exp":
        return keys.size("hc_count", default=4)
    streamed = keys.family in ("deepseek_v4", "glm5_next_text", "hy_v4")
    return keys.size("hc_mult", default=4) if streamed else 1


def is_moe_layer(keys: Keys, layer: int) -> bool:
    """Whether decoder layer `layer` holds routed experts."""
    types = keys.listed("mlp_layer_types")
    if types is not None:
        return layer < len(types) and types[layer] != "dense"  # sparse, moe, hash_moe
    frequency = keys.listed("moe_layer_freq")
    if frequency is not None:
        return layer < len(frequency) and bool(frequency[layer])
    blocks = _blocks(keys)
    if blocks:
        return layer < len(blocks) and blocks[layer] in ("E", "moe")
    chosen = keys.listed("moe_layers")
    if chosen is not None:  # llama4
        return layer in chosen
    numbers = keys.config.get("moe_layers_enum")
    if numbers is not None:  # step3p5
        items = numbers.split(",") if isinstance(numbers, str) else keys.listed("moe_layers_enum") or []
        return str(layer) in (str(item).strip() for item in items)
    if keys.config.get("interleave_moe_layer_step"):
        return (layer + 1) % keys.size("interleave_moe_layer_step") == 0
    if keys.family == "jamba" or keys.config.get("expert_layer_period"):
        offset = keys.size("expert_layer_offset", default=1, least=0)
        return layer % keys.size("expert_layer_period", default=2) == offset
    if "moe_layer_start_index" in keys.config:  # ernie4_5_moe
        end = keys.size("moe_layer_end_index", default=-1, least=-1)
        last = num_layers(keys) - 1 if end == -1 else end
        start = keys.size("moe_layer_start_index", least=0)
        return start <= layer <= last and (layer + 1) % keys.size("moe_layer_interval", default=1) == 0
    dense = FIRST_DENSE.get(keys.family, 0)
    if layer < keys.size("first_k_dense_replace", "num_dense_layers", default=dense, least=0):
        return False
    only = keys.listed("mlp_only_layers") or []
    if keys.family == "flint" and keys.config.get("mlp_only_layers") is None:
        only = [0, 1]
    if layer in only:
        return False
    if (layer + 1) % keys.size("decoder_sparse_step", default=1) != 0:
        return False
    return layer % keys.size("moe_layer_freq", default=1) == 0


def num_layers(keys: Keys) -> int:
    """Decoder layers; Nemotron-H's blocks count as one each. LongCat-Flash's num_hidden_layers counts
    attentions in transformers, layers elsewhere: num_layers is what counts, if it is there."""
    blocks = _blocks(keys)
    if blocks:
        keys = Keys({"num_hidden_layers": len(blocks)}, f"{keys.where} (hybrid_override_pattern)")
    if keys.family == "longcat_flash":
        if keys.config.get("num_layers") is None:
            return max(1, keys.size("num_hidden_layers", most=2 * MOST_LAYERS) // LONGCAT_ATTENTIONS)
        return keys.size("num_layers", most=MOST_LAYERS)
    return keys.size("num_hidden_layers", "num_layers", most=MOST_LAYERS)


def _blocks(keys: Keys) -> list[str] | None:
    """Nemotron-H: what each layer is, as transformers' names or as letters (M, E, *, -)."""
    pattern = keys.config.get("hybrid_override_pattern")
    return list(pattern) if isinstance(pattern, str) else keys.listed("layers_block_type")


def _nemotron_block(keys: Keys, layer: int, parts: LayerParts) -> None:
    """Nemotron-H: a layer is a mixer, attention, an ungated MLP or experts, and a norm."""
    hidden, kind = keys.size("hidden_size"), (_blocks(keys) or [])[layer]
    parts.dense += hidden
    if kind in ("E", "moe"):
        latent, experts = latent_width(keys), num_experts(keys)
        shared = keys.size("moe_shared_expert_intermediate_size", default=0, least=0)
        parts.dense += hidden * experts
        _ungated_mlp(parts, "mixer.shared_experts", hidden, shared)
        if latent:
            parts.linear("mixer.fc1_latent_proj", hidden, latent)
            parts.linear("mixer.fc2_latent_proj", latent, hidden)
    elif kind in ("-", "mlp"):
        _ungated_mlp(parts, "mixer", hidden, keys.size("intermediate_size"))
    elif kind in ("*", "attention", "full_attention"):
        grouped_query(keys, layer, parts, "mixer")
    else:
        heads, head = keys.size("mamba_num_heads"), keys.size("mamba_head_dim")
        inner, groups, state = (
            heads * head,
            keys.size("n_groups", "mamba_n_groups"),
            keys.size("ssm_state_size"),
        )
        convolved = inner + 2 * groups * state
        kernel = keys.size("conv_kernel", "mamba_d_conv", default=4)
        parts.project("mixer.in_proj", hidden, inner + convolved + heads)
        parts.attention += inner * hidden  # out_proj, which no adapter reaches: kt_ray/model/lora.py
        bias = convolved if keys.flag("use_conv_bias", True) else 0
        parts.attention += convolved * kernel + bias + 3 * heads + inner  # dt_bias, A_log, D; norm
        parts.width = inner + convolved
        parts.cache = CacheWidth(row=convolved * kernel, state=inner * state)
        chunk = keys.size("chunk_size", "mamba_chunk_size", default=128)
        parts.state = mamba2(heads, head, groups, state, chunk)


def _ungated_mlp(parts: LayerParts, name: str, hidden: int, intermediate: int) -> None:
    parts.linear(f"{name}.up_proj", hidden, intermediate)
    parts.linear(f"{name}.down_proj", intermediate, hidden)


def _gated_mlp(parts: LayerParts, name: str, hidden: int, intermediate: int, fused: bool = False) -> None:
    if fused:
        parts.linear(f"{name}.gate_up_proj", hidden, 2 * intermediate)
    else:
        parts.linear(f"{name}.gate_proj", hidden, intermediate)
        parts.linear(f"{name}.up_proj", hidden, intermediate)
    parts.linear(f"{name}.down_proj", intermediate, hidden)


def _moe_mlp(keys: Keys, parts: LayerParts, mlp: str) -> None:
    """Router and shared experts of a MoE layer, whose module is `mlp`."""
    hidden, experts = keys.size("hidden_size"), num_experts(keys)
    if keys.family == "hunyuan_v1_moe":
        _gated_mlp(parts, "mlp.shared_mlp", hidden, keys.size("intermediate_size"))
    if keys.family == "gemma4_text":
        _gated_mlp(parts, "mlp", hidden, keys.size("intermediate_size"))
        parts.dense += 3 * hidden + hidden + experts  # norms; the router's scales
    parts.dense += hidden * (experts + zero_experts(keys)) + (experts if keys.family == "gpt_oss" else 0)
    parts.dense += 2 * hidden * latent_width(keys)
    shared = keys.size(
        *("shared_expert_intermediate_size", "shared_intermediate_size", "shared_experts_intermediate_size"),
        *("moe_shared_expert_intermediate_size", "share_expert_dim", "share_expert_dims"),
        default=0,
        least=0,
    )
    if not shared:
        counts = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
        shared = keys.size(*counts, default=0, least=0) * expert_intermediate(keys)
    if keys.family == "llama4_text":
        shared = expert_intermediate(keys)
    if not shared:
        return
    gated = keys.family in ("qwen2_moe", "qwen3_next", "qwen3_5_moe", "qwen4_exp")
    fused = keys.family == "minimax_m3_vl_text"
    one = gated or keys.family == "llama4_text"
    _gated_mlp(parts, f"{mlp}.shared_expert" if one else f"{mlp}.shared_experts", hidden, shared, fused)
    parts.dense += hidden if gated else 0  # shared_expert_gate


def num_experts(keys: Keys) -> int:
    """Routed experts per MoE layer."""
    return keys.size(*EXPERT_COUNT)


def zero_experts(keys: Keys) -> int:
    """Experts without weights that routers choose among, too."""
    if keys.family != "longcat_flash":
        return 0
    return keys.size("zero_expert_num", default=0 if "zero_expert_num" in keys.config else 256, least=0)


def expert_intermediate(keys: Keys) -> int:
    """Intermediate size of one routed expert."""
    return keys.size(
        *("moe_intermediate_size", "expert_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
    )


def latent_width(keys: Keys) -> int:
    """Width that the hidden state is projected to before the routed experts; 0 = it is not."""
    return keys.size("routed_expert_hidden_size", "moe_latent_size", "moe_hidden_size", default=0, least=0)


def outside_params(keys: Keys) -> int:
    """Parameters outside layers, embedding and head's matrix: the last norm, the head's bias, streams."""
    hidden, streams = keys.size("hidden_size"), hidden_streams(keys)
    if keys.family == "qwen4_exp":  # one that only takes them together, with its norm
        return streams * hidden * (1 + 2 * keys.size("hc_lowrank", default=320))
    count = hidden
    if keys.family == "phimoe":  # LayerNorm with a bias
        count += hidden + (keys.size("vocab_size") if keys.flag("lm_head_bias") else 0)
    return count + (streams * (streams * hidden + 1) + 1 if streams > 1 else 0)
