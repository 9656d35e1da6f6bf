"""Bytes that decoder layers hold beside their weights: what autograd keeps, what a module needs for a moment,
masks. Per token, but where a function says otherwise.
"""

from __future__ import annotations

import math
from functools import cache
from importlib.util import find_spec

from kt_ray.config.schema import Config
from kt_ray.dims.layer_params import (
    CHUNKED,
    HELD_BYTES,
    MASKS_PADDING,
    MORE_NORMS,
    QWEN4_EXP,
    SINK_FEATURES,
    SINKS,
    flash_width,
    holds_scores,
)
from kt_ray.dims.model_dims import Compression, ModelDims, StateValues
from kt_ray.dims.weight_formats import ELEMENT_BYTES
from kt_ray.placement.generation_memory import generates, longest_row
from kt_ray.placement.lora_sizes import adapted, in_parts
from kt_ray.placement.range_memory import attends_everywhere, heads_width
from kt_ray.placement.wave_tokens import Load


def layer_activation_bytes(
    dims: ModelDims, config: Config, layer: int, dtype: str, *, gpu: bool = False
) -> int:
    """Bytes per token that autograd keeps while one layer is recomputed under grad."""
    element = ELEMENT_BYTES[dtype]
    linear = element * sum(n_in + n_out for _, n_in, n_out in dims.lora_in_out[layer])
    # A x in float32. PEFT (of a dropped input, or with DoRA) keeps its input in float32 besides; of a dropped
    # one the mask, a byte per element; with DoRA W x, B A x and its scaled sum.
    each = 5 if drops(config) else 4 if config.lora.dora else 0
    dora = 12 if config.lora.dora else 0
    sizes = adapted(dims, config.lora, layer)
    if in_parts(config.lora, dtype, gpu=gpu):  # its input as it is, and A x in three numbers
        lora = sum(6 * rank for _, _, rank in sizes)
    else:
        lora = sum(each * i + dora * o + 8 * rank for i, o, rank in sizes)
    if dims.model_type in QWEN4_EXP:
        normed = _mixed_bytes(dims, layer, element)
    else:
        norms = 2 * dims.hidden_streams + MORE_NORMS.get(dims.model_type, 0)
        normed = norms * dims.hidden_size * (element + 4)
        if dims.hidden_streams > 1:
            normed += _collapsed_bytes(dims, element)
    scores = 0
    row = longest_row(dims, config) if generates(config) else config.data.widest_row
    if holds_scores(dims.model_type, config.model.attn_implementation):
        if _compression(dims, layer):
            scores = math.ceil(_compressed_bytes(dims, config, layer, row, element))
        scores += _scores(dims, layer, row) * (element + 4)
        if bias := _bias(dims, layer):  # of every distance; which distance a key has, and whether it counts
            scores += bias * element + 9 * row
    elif not generates(config):
        window = dims.pair_widths[layer][1] if dims.pair_widths else 0
        # torch adds a mask in the type of the queries, and autograd keeps it. Blocks have their keys and
        # values twice: in their own and in the next.
        if masked(dims, config, gpu=gpu) or _window_masked(dims, window, row, gpu=gpu):
            scores = element * row * (dims.num_heads if _index(dims, layer)[1] else 1)
        elif 0 < window <= row:
            scores = element * dims.cache_widths[layer].near
        if not gpu and _scores_held(dims, config, layer, row):
            scores += 4 * dims.num_heads * row
    state = dims.states[layer] if dims.states else None
    if state and by_torch(state, gpu=gpu):
        return linear + lora + normed + math.ceil(state.bytes(row, element))
    attended = dims.attentions * (element * _attention_values(dims, layer, gpu=gpu) + scores)
    return linear + lora + normed + attended


def _collapsed_bytes(dims: ModelDims, element: int) -> int:
    """Of several residual streams, for attention and for the MLP: what they become together, its norm, what
    goes back to them, and the weights of the streams at first and after each of DeepSeek-V4's 20 rounds."""
    streams = dims.hidden_streams
    return 2 * (dims.hidden_size * (2 * element + 4) + 21 * 2 * 4 * (streams**2 + streams))


def _mixed_bytes(dims: ModelDims, layer: int, element: int) -> int:
    """Qwen4-Exp's streams, for attention and for the MLP: in float32 and normed, with a weight for each
    element; what they become together, and what goes back to them. With n-grams three times the streams in
    float32, and gates, norms and the convolution between them."""
    streams, hidden = dims.hidden_streams, dims.hidden_size
    mixed = 2 * (streams * hidden * (4 + 2 * element) + 2 * element * hidden)
    if not dims.mapped_params or not dims.mapped_params[layer]:
        return mixed
    return mixed + streams * hidden * (12 + 3 * element)


def _compression(dims: ModelDims, layer: int) -> Compression | None:
    return dims.compressions[layer] if dims.compressions else None


def _bias(dims: ModelDims, layer: int) -> int:
    return dims.biases[layer] if dims.biases else 0


def _scores(dims: ModelDims, layer: int, row: int) -> int:
    """Scores of a token; DeepSeek-V4's of compressed tokens and the sink, too."""
    compression = _compression(dims, layer)
    return dims.num_heads * (row + (compression.keys(row) + 1 if compression else 0))


def _compressed_bytes(dims: ModelDims, config: Config, layer: int, row: int, element: int) -> float:
    """DeepSeek-V4's attention beside its scores: what compresses tokens. Of several rows torch copies keys,
    values and compressed tokens for each head, to multiply them. Of the index nothing waits for backward:
    what it chooses has no gradient."""
    compression = dims.compressions[layer]
    several = _rows(config) > 1
    copies = dims.pair_widths[layer][0] * several * (row + compression.keys(row)) / row
    return compression.width * (4 + 2 * element) + element * copies


def _attention_values(dims: ModelDims, layer: int, *, gpu: bool) -> int:
    """Queries, keys and values of a layer; of a block without attention (Nemotron-H) none. With sinks on a
    CPU every head has its own, as wide as the kernel wants them with the sink's features, and so are the
    outputs."""
    if dims.states and not dims.states[layer] and not dims.pair_widths[layer][0]:
        return 0
    if dims.model_type not in SINKS or gpu:
        return dims.attention_width
    return 4 * dims.num_heads * flash_width(dims.attention_width // (3 * dims.num_heads) + SINK_FEATURES)


def _scores_held(dims: ModelDims, config: Config, layer: int, row: int) -> bool:
    """Whether a CPU holds the scores of short rows, in float32: of values narrower than keys, or wider
    (kt_ray/model/attention.py)."""
    if dims.states:  # beside which some layers attend
        if not _attends(dims, layer):
            return False
    elif not attends_everywhere(dims) or dims.attention_width == 3 * heads_width(dims, layer):
        return False
    if dims.pair_widths and dims.pair_widths[layer][0] == 2 * heads_width(dims, layer):
        return False
    return 4 * _rows(config) * dims.num_heads * row**2 <= HELD_BYTES


def _attends(dims: ModelDims, layer: int) -> bool:
    """Whether a layer has attention over keys, not a state; Nemotron-H has blocks of neither."""
    return not dims.states or (not dims.states[layer] and dims.pair_widths[layer][0] > 0)


def _rows(config: Config) -> int:
    """Rows of a micro-batch."""
    return config.micro_batch_rows(config.rule.replica_count) * config.rows_per_unit


def by_torch(state: StateValues, *, gpu: bool) -> bool:
    """Whether torch's own functions compute a state, which keep what it says, and no package's kernels."""
    return not gpu or not state.package or not installed(state.package)


@cache
def installed(package: str) -> bool:
    return find_spec(package) is not None


def may_retain(dims: ModelDims, *, gpu: bool) -> bool:
    """Whether a plan retains layers of its own accord: `layer_activation_bytes` counts all that they keep.

    Not of scores, several streams of the hidden state, nor of an index of each head. On a GPU, what
    kernels of a package keep of a state that goes from token to token is not known; and sinks, an index and
    norms after the experts have been measured on a CPU alone.
    """
    if dims.hidden_streams > 1 or holds_scores(dims.model_type, "sdpa"):
        return False
    if any(apart for _, apart in dims.indexes):
        return False
    indexed = any(heads for heads, _ in dims.indexes)
    if gpu and (indexed or dims.model_type in SINKS or not dims.affine):
        return False
    if dims.states:
        return all(by_torch(state, gpu=gpu) for state in dims.states if state)
    return attends_everywhere(dims)


def adapter_scratch_bytes(
    dims: ModelDims, config: Config, layer: int, dtype: str, *, gpu: bool = False
) -> int:
    """Bytes per token of a micro-batch that the largest LoRA module of a layer needs for a moment.

    In two parts (kt_ray/model/lora_linear.py) it needs the gradients of both sides, and what has the rank. In
    float32 it needs x widened and B A x, which torch adds to y by two more copies; in backward x and dy
    widened, dx and the same at it. PEFT (with dropout or DoRA) holds B A x, its scaled copy and the sum with
    the module's output at once, each in float32; backward needs as much, or the gradients of both sides. With
    dropout the input in float32 is there meanwhile, or before that three int32 per element of which the mask
    is computed.
    """
    sizes = adapted(dims, config.lora, layer)
    if in_parts(config.lora, dtype, gpu=gpu):
        return max((2 * (n_in + n_out) + 26 * rank for n_in, n_out, rank in sizes), default=0)
    if drops(config):
        return max((max(12 * n_out + 4 * n_in, 11 * n_in) for n_in, n_out, _ in sizes), default=0)
    if config.lora.dora:
        return max((max(12 * n_out, 4 * (n_in + n_out)) for n_in, n_out, _ in sizes), default=0)
    if dtype == "float32":
        return max((4 * max(n_in, n_out) + 8 * rank for n_in, n_out, rank in sizes), default=0)
    widened = (max(12 * n_out + 4 * n_in, 18 * n_in + 4 * n_out) + 8 * rank for n_in, n_out, rank in sizes)
    return max(widened, default=0)


def index_scratch_bytes(dims: ModelDims, row: int, layer: int, dtype: str) -> int:
    """Bytes per token of a micro-batch that an index of a layer needs for a moment, beside rows of `row`.

    transformers holds the scores of every key and index head in float32, twice at once (as it scales, cuts or
    masks them); where heads choose apart, then the choice and the mask of every query head. Qwen4-Exp's has
    scores of some queries at a time, and masks (kt_ray/model/qwen4.py). Of an index over
    compressed tokens three times, and in float32 those tokens for each query.
    """
    heads, apart = _index(dims, layer)
    if heads and dims.model_type in QWEN4_EXP:
        return 12 * row
    if compression := _compression(dims, layer):
        return compression.keys(row) * (12 * compression.index_heads + 4 * compression.index_head)
    return row * max(8 * heads, (2 + ELEMENT_BYTES[dtype]) * dims.num_heads * apart)


def scores_scratch_bytes(dims: ModelDims, config: Config, row: int, layer: int, dtype: str) -> int:
    """Bytes per token of a micro-batch that eager attention needs for a moment beside the scores it keeps:
    around softmax, forward as backward, 12 bytes of each are there at once. A learned bias has its scores
    then, and in backward the gradient of its values."""
    if not holds_scores(dims.model_type, config.model.attn_implementation) or not _attends(dims, layer):
        return 0
    element, bias = ELEMENT_BYTES[dtype], _bias(dims, layer)
    scores = _scores(dims, layer, row)
    return scores * (8 - element) + element * (scores + bias if bias else 0)


def _index(dims: ModelDims, layer: int) -> tuple[int, bool]:
    return dims.indexes[layer] if dims.indexes else (0, False)


def dora_bytes(dims: ModelDims, config: Config, layer: int) -> int:
    """Bytes that DoRA needs for weights while a layer is computed.

    PEFT forms W, B A of the identity and their sum in float32 for the norms. Of a dropped input W itself is
    kept until backward.
    """
    if not config.lora.dora:
        return 0
    sizes = adapted(dims, config.lora, layer)
    kept = sum(4 * n_in * n_out for n_in, n_out, _ in sizes) if drops(config) else 0
    return kept + max((4 * n_in * (4 * n_out + n_in) for n_in, n_out, _ in sizes), default=0)


def drops(config: Config) -> bool:
    """Whether LoRA modules drop elements of their input."""
    return config.lora.dropout > 0 and not generates(config)


def mask_bytes(dims: ModelDims, config: Config, load: Load, dtype: str, *, gpu: bool = False) -> int:
    """Bytes of the attention masks of a replica's wave: [rows, 1, row, row] for each kind of attention.

    They are made when a pass begins, kept until its end and shared by the layers of one kind (all keys, or a
    window of them). Causal attention over whole rows needs none; see `masked`, `_window_masked`. Eager
    attention's masks are added to scores and have their type.
    """
    row, eager = load.row, holds_scores(dims.model_type, config.model.attn_implementation)
    windows = {window for _, window in dims.pair_widths} or {0}
    told = eager or masked(dims, config, gpu=gpu)
    asked = generates(config)  # whose masks look at caches
    made = (told or (asked and 0 < w <= row) or _window_masked(dims, w, row, gpu=gpu) for w in windows)
    kinds = sum(made)
    return kinds * load.replica * row * (ELEMENT_BYTES[dtype] if eager else 1)


def _window_masked(dims: ModelDims, window: int, row: int, *, gpu: bool) -> bool:
    """Whether a window alone makes a mask of whole rows: attention goes by blocks on a GPU, and where the
    mask would be large (kt_ray/model/windows.py), but for chunks."""
    by_blocks = dims.model_type not in CHUNKED and (gpu or row**2 > HELD_BYTES)
    return 0 < window <= row and not by_blocks


def masked(dims: ModelDims, config: Config, *, gpu: bool) -> bool:
    """Whether layers that look at all keys get a mask: other documents in the row, an index that chooses
    keys; of padding, which follows the row, only generation, CPUs and `MASKS_PADDING` have one (`Stage`)."""
    told = not gpu or generates(config) or dims.model_type in MASKS_PADDING
    indexed = any(heads for heads, _ in dims.indexes)
    return config.data.packing or indexed or (told and config.pads(config.rule.replica_count))
