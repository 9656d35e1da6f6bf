"""Bytes of attention workers whose layers go by ranges (rule.activations=ranges).

Attention goes by ranges of heads, all else by ranges of tokens (kt_ray/model/range_loop.py). Of every token
of a micro-batch the GPU holds

    entered   what attention's first projections give, and its gradient: all heads' queries, keys and values;
              of latent attention the compressed ones, whose gradients add up in float32, with what their
              norms give
    heads     of one range: q, k, v, the outputs and their gradients, as flash attention has them, with
              float32 sums of the gradients of q

and of RANGE_TOKENS tokens all that a layer makes of them. Hidden states, their gradients and heads' outputs
are in host memory. tests/placement/test_range_memory.py counts every allocation of such a layer against this.
"""

from __future__ import annotations

import math

from kt_ray.config.schema import Config, LoraConfig
from kt_ray.dims.layer_params import (
    GATED_HEADS,
    MIXED,
    SINK_FEATURES,
    SINKS,
    WHOLE_HEADS,
    flash_width,
    holds_scores,
)
from kt_ray.dims.model_dims import ModelDims
from kt_ray.placement.lora_sizes import module_ranks

RANGE_TOKENS = 4096  # of a range: products with so many rows are near their peak
TOKEN_BYTES = 512  # on the device for each token of a wave: its id, position, rotary embedding


def without_ranges(dims: ModelDims, config: Config) -> str:
    """Why a model's layers cannot go by ranges, as far as its configuration says; "" = they can. Which can is
    found by trying (kt_ray/model/head_ranges.py)."""
    if dims.hidden_streams > 1:
        return "its hidden state has several streams"
    if dims.attentions > 1:
        return "a layer has several attentions"
    if any(heads for heads, _ in dims.indexes):
        return "an index chooses the keys of a query"
    if dims.handed:
        return "layers take what earlier ones computed"
    if holds_scores(dims.model_type, config.model.attn_implementation):
        return "attention holds its scores"
    if not attends_everywhere(dims):
        return "some of its layers have another attention than softmax over keys"
    if dims.model_type in WHOLE_HEADS:
        return "a norm looks at all heads at once"
    if dims.model_type in GATED_HEADS:
        return "its attention gates heads by their number"
    if not dims.affine:
        return "its output is not affine in that of its experts"
    if config.lora.dora and any(_inner_lora(dims, config.lora, n) for n in range(dims.num_layers)):
        return "DoRA of latent attention's inner projections needs all heads at once"
    return "" if dims.kv_heads > 1 else "all heads share one key"


def attends_everywhere(dims: ModelDims) -> bool:
    """Whether every layer has softmax attention over keys, as far as its configuration says."""
    names = [[name for name, _, _ in modules if name.endswith(".o_proj")] for modules in dims.lora_in_out]
    return all(names) and dims.num_heads > 0 and dims.model_type not in MIXED


def _inner_lora(dims: ModelDims, lora: LoraConfig, layer: int) -> bool:
    """Whether LoRA adapts what lies between attention's first projections and the last one."""
    ranks = module_ranks(dims, lora, layer)
    return any(
        rank and "attn." in name and not name.endswith(".o_proj") and n_in != dims.hidden_size
        for (name, n_in, _), rank in zip(dims.lora_in_out[layer], ranks, strict=True)
    )


def range_counts(dims: ModelDims) -> tuple[int, ...]:
    """Numbers of ranges that heads can be divided into, whole groups that share a key, the fewest first."""
    return tuple(count for count in range(2, dims.kv_heads + 1) if dims.kv_heads % count == 0)


def heads_width(dims: ModelDims, layer: int) -> int:
    """Outputs of all heads of a layer per token: inputs of attention's last projection."""
    return next(n_in for name, n_in, _ in dims.lora_in_out[layer] if name.endswith(".o_proj"))


def range_workspace(
    dims: ModelDims,
    config: Config,
    layer: int,
    tokens: int,
    count: int,
    element: int,
    *,
    each: float,
    widened: bool,
) -> float:
    """Bytes on the device while a layer of a micro-batch is differentiated, or its tokens are embedded.

    Args:
        tokens: of the micro-batch. count: ranges of heads. element: bytes of the layer's type.
        each: bytes per token that a whole layer needs under grad. widened: whether LoRA widens to float32.
    """
    attention = [m for m in dims.lora_in_out[layer] if "attn." in m[0] and not m[0].endswith(".o_proj")]
    entered = sum(n_out for _, n_in, n_out in attention if n_in == dims.hidden_size)
    inner = [(n_in, n_out) for _, n_in, n_out in attention if n_in != dims.hidden_size]
    held = entered * element
    slopes = entered * (4 if inner else element)
    # Inputs of what is between, and their gradients.
    between: float = sum(n_in for n_in, _ in inner) * 2 * element
    moment = _heads_bytes(dims, layer, count, element)
    if widened:  # with its mask; what an adapter needs for a moment is gone when heads are differentiated
        between += sum(5 * n_in for n_in, _ in inner)
        moment = max(moment, *(12 * n_out / count + 11 * n_in for n_in, n_out in inner), 0.0)
    heads = slopes + between + moment
    some = min(tokens, RANGE_TOKENS) * each
    embedded = tokens * element * dims.hidden_size * (2 if config.trainer.neftune_noise_alpha else 1)
    return max(tokens * (held + heads), tokens * (held + slopes) + some, embedded)


def _heads_bytes(dims: ModelDims, layer: int, count: int, element: int) -> float:
    """Per token, of a range of heads."""
    value: float = heads_width(dims, layer) / dims.num_heads
    query = (dims.attention_width / dims.num_heads - value) / 2
    sinks = dims.model_type in SINKS
    width = flash_width(math.ceil(max(query, value)) + (SINK_FEATURES if sinks else 0))
    each: float = 5 * width + value + 32
    if sinks or query != value:  # copies that are as wide as the kernel wants them
        each += width + value
    if dims.kv_heads < dims.num_heads:  # gradients of shared keys and values, of every head
        each += 2 * width
    return element * (dims.num_heads * each + dims.kv_heads * 4 * width) / count


def range_host(
    dims: ModelDims, layers: range, replica: int, group: int, micro: int, element: int, *, outputs: bool
) -> tuple[int, int]:
    """Bytes of host memory of what waits, of a worker, and of what passes.

    Args:
        layers: its own that backward passes. replica, group, micro: tokens of the replica's wave, and of a
            group and a micro-batch of it. outputs: whether heads' outputs are kept from forward.
    """
    hidden = dims.hidden_size * element
    widths = [heads_width(dims, layer) for layer in layers]
    # Before every layer, after the last, and a gradient from the next stage; one that goes to stages beside.
    states, passing = (len(widths) + 2) * replica * hidden, replica * hidden
    widest = max(heads_width(dims, layer) for layer in range(dims.num_layers))  # without backward, too
    heads = element * (micro * widest + (replica * sum(widths) if outputs else 0))
    # Answers of the experts are added up here, in float32; the loss has a gradient of its own for a moment.
    return states + heads, passing + group * (4 * dims.expert_width + hidden)
