"""The dimensions of a model, as plans and predictions need them. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kt_ray.dims.weight_formats import BACKEND_STORAGE, Storage, plain_storage


class Quantised(NamedTuple):
    """The part of a layer outside its routed experts that the checkpoint stores quantised.

    params: parameters. bytes: what they take as stored. largest: parameters of the largest matrix.
    """

    params: int = 0
    bytes: float = 0
    largest: int = 0


class CacheWidth(NamedTuple):
    """What one layer's key-value cache keeps of one row, in transformers' caches (`kt_ray/model/caches.py`).

    Latent keys and values for multi-head latent attention, states instead of keys for linear attention.

    token: elements per token. near: elements per token of the last ones, `window` of them. row: elements
    besides. state: float32 values besides.
    """

    token: float = 0.0
    near: int = 0
    window: int = 0
    row: int = 0
    state: int = 0

    def bytes(self, rows: int, tokens: int, element: int) -> float:
        """Of `rows` rows with `tokens` tokens all together (padding included); element: bytes of a value."""
        near = self.near * min(tokens, rows * self.window)
        return element * (self.token * tokens + near + self.row * rows) + 4 * self.state * rows


class StateValues(NamedTuple):
    """Values per token that a layer with a state from token to token keeps for backward (state_values.py).

    plain: of the layer's type. wide: float32. chunked: float32, of rows that are filled up to multiples of
    `chunk` tokens. pairs: of the layer's type, for each token of a chunk of the row. rounded: of the layer's
    type, which a float32 layer has among the others. row: float32 values of a row besides. package: whose
    kernels transformers takes in the place of torch's own functions where it is installed; "" = of none.
    """

    plain: float = 0.0
    wide: float = 0.0
    chunked: float = 0.0
    chunk: int = 1
    pairs: float = 0.0
    rounded: float = 0.0
    row: float = 0.0
    package: str = ""

    def bytes(self, row: int, element: int) -> float:
        """Per token of rows of `row`; element: bytes of a value."""
        filled = -(-row // self.chunk) * self.chunk / row
        values = self.plain + self.pairs * min(row, self.chunk) + (self.rounded if element < 4 else 0)
        return element * values + 4 * (self.wide + self.chunked * filled + self.row / row)


class Compression(NamedTuple):
    """DeepSeek-V4's compressed tokens beside the row's own.

    tokens: per compressed one, 0 = there are none. width: of what a token gives to them. index_heads,
    index_head: of the index that chooses among them, and its width; 0 = all are seen.
    """

    tokens: int = 0
    width: int = 0
    index_heads: int = 0
    index_head: int = 0

    def keys(self, row: int) -> int:
        """Compressed tokens of a row."""
        return row // self.tokens if self.tokens else 0


class Handed(NamedTuple):
    """What a layer hands to later ones beside the hidden state (kt_ray/model/handed_results.py).

    layer: that leaves it. last: that takes it last. elements: of keys and values, per token. chosen: keys at
    most that an index chooses for a token, each an int32.
    """

    layer: int
    last: int
    elements: int = 0
    chosen: int = 0

    def bytes(self, tokens: int, row: int, element: int) -> int:
        """Of so many tokens in rows of `row`; element: bytes of a value."""
        return tokens * (self.elements * element + 4 * min(self.chosen, row))

    def crosses(self, cut: int) -> bool:
        """Whether it would have to pass from the stage before layer `cut` to the next."""
        return self.layer < cut <= self.last


@dataclass(frozen=True)
class ModelDims:
    """Dimensions of a MoE language model, read from its config.json.

    Sizes are numbers of elements; `*_params` are numbers of parameters per layer of that kind.
    """

    model_type: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    num_experts: int  # routed experts per MoE layer
    experts_per_token: int
    expert_intermediate: int  # I of one routed expert
    moe_layers: tuple[int, ...]  # indices of layers with routed experts
    attention_params: tuple[int, ...]  # per layer: attention with its norms
    dense_params: tuple[int, ...]  # per layer: router + shared expert, or the dense MLP; plus layer norms
    lora_in_out: tuple[
        tuple[tuple[str, int, int], ...], ...
    ]  # per layer: (module, in, out) of LoRA targets ("auto")
    tie_embeddings: bool
    dtype: str  # "bfloat16" | "float32" | "float16": non-expert weights
    expert_storage: Storage  # of the routed experts, but for those of plain_expert_layers
    refusal: str | None = None  # why this model cannot be trained; None = it can
    notes: tuple[str, ...] = ()
    name: str = ""  # label for messages: the model group's name or the directory
    expert_hidden: int = 0  # width the routed experts work on; 0 = hidden_size
    expert_bias_params: int = 0  # biases of one routed expert
    outside_params: int = 0  # final norm and whatever else sits outside layers, embedding and head
    # per layer: a table of n-grams that is looked up in the checkpoint's files (MappedTable), which no other
    # count has; () = no layer has one
    mapped_params: tuple[int, ...] = ()
    num_heads: int = 0  # query heads
    kv_heads: int = 0  # heads of keys and values, where every layer has as many
    attention_width: int = 0  # elements per token of expanded queries, keys and values of one layer
    attention_normed: int = (
        0  # elements per token of one layer's queries and keys that pass norms of their own
    )
    pair_widths: tuple[
        tuple[int, int], ...
    ] = ()  # per layer: elements that a query multiplies per key, window
    # per layer: heads of the index that chooses a query's keys, 0 without one, and whether query heads choose
    # apart; () = no layer has one
    indexes: tuple[tuple[int, bool], ...] = ()
    cache_widths: tuple[CacheWidth, ...] = ()  # per layer: what generation keeps of a row
    compressions: tuple[Compression, ...] = ()  # per layer; () = no layer compresses
    biases: tuple[int, ...] = ()  # per layer: values per token of a learned bias; () = no layer has one
    # per layer: what it keeps of a state that goes from token to token; None = it has none
    states: tuple[StateValues | None, ...] = ()
    handed: tuple[Handed, ...] = ()  # what layers hand to later ones beside the hidden state
    # tokens that the model was made for (max_position_embeddings, or more by YaRN); 0 = it does not say
    context: int = 0
    # tokens of the longest row for which transformers computes what the model was trained to; 0 = any
    longest_row: int = 0
    hidden_streams: int = 1  # residual streams between layers (hyper-connections), each hidden_size wide
    # (module, in, out) of every layer that mix the streams, which "auto" leaves alone
    mixers: tuple[tuple[str, int, int], ...] = ()
    affine: bool = True  # whether a layer's output is affine in that of its experts
    gated: bool = True  # whether the routed experts have a gate projection
    plain_expert_layers: tuple[int, ...] = ()  # MoE layers whose experts are stored in `dtype`
    zero_experts: int = 0  # that routers choose among, too: without weights, their output is their input
    float32_params: int = 0  # of a MoE layer's dense_params: in float32 whatever the others' type
    attentions: int = 1  # of a layer, one after the other; num_heads and attention_width are one's
    quantised: tuple[Quantised, ...] = ()  # per layer, outside the routed experts; () = nothing is
    experts_file_bytes: int = 0  # bytes of all routed experts in a file of their own (GGUF); 0 = unknown

    @property
    def cuts(self) -> tuple[int, ...]:
        """Layers at which a stage after the first may begin: nothing is handed over such a cut but h."""
        return tuple(n for n in range(1, self.num_layers) if not any(h.crosses(n) for h in self.handed))

    def takes(self, layer: int) -> bool:
        """Whether a layer may take what an earlier one leaves."""
        return any(h.layer < layer <= h.last for h in self.handed)

    @property
    def expert_format(self) -> str:
        """ "bf16", "f32", "fp8_block", "fp8", "mxfp4", "int8", "int4", ... of the routed experts."""
        return self.expert_storage.format

    @property
    def tokens_per_row(self) -> float:
        """Tokens for each row that an expert gets, were routing even."""
        return self.choices / self.experts_per_token

    @property
    def choices(self) -> int:
        """What a router chooses among."""
        return self.num_experts + self.zero_experts

    @property
    def expert_width(self) -> int:
        """Width of a routed expert's input and output."""
        return self.expert_hidden or self.hidden_size

    @property
    def expert_params(self) -> int:
        """Parameters of one routed expert (gate if there is one, up, down and their biases)."""
        matrices = 3 if self.gated else 2
        return matrices * self.expert_width * self.expert_intermediate + self.expert_bias_params

    def expert_bytes(self, storage: Storage | None = None) -> float:
        """Bytes of one expert index in all MoE layers: data and scales as stored, biases in float32.

        Args:
            storage: one that the experts are quantised to while they are read; None = the checkpoint's.
        """
        layers, plain = len(self.moe_layers), len(self.plain_expert_layers)
        if storage is not None:
            return layers * self._bytes_in_layer(storage, streamed=True)
        kept = plain * self._bytes_in_layer(plain_storage(self.dtype)) if plain else 0
        return (layers - plain) * self._bytes_in_layer(self.expert_storage) + kept

    def _bytes_in_layer(self, kind: Storage, streamed: bool = False) -> float:
        width, inter = self.expert_width, self.expert_intermediate
        up, down = (kind.dividing(width), kind.dividing(inter)) if streamed else (kind, kind)
        ups = (2 if self.gated else 1) * up.matrix_bytes(inter, width)
        return ups + down.matrix_bytes(width, inter) + 4 * self.expert_bias_params

    @property
    def bytes_in_file(self) -> float:
        """Of all routed experts in a GGUF file: of one that is not there in Q8_0, 34 bytes for 32 values."""
        return self.experts_file_bytes or self.routed_params * 34 / 32

    def held_bytes(self, backend: str) -> float:
        """Bytes of one expert in memory, mean over MoE layers. backend: of the rule."""
        if self._held_as_in_file(backend):
            return self.bytes_in_file / (self.num_experts * len(self.moe_layers))
        return self.expert_bytes(BACKEND_STORAGE.get(backend)) / len(self.moe_layers)

    def most_held_bytes(self, backend: str) -> float:
        """The same of the layer whose experts take most; of a GGUF file the mean."""
        mean = self.held_bytes(backend)
        if not self.plain_expert_layers or backend in BACKEND_STORAGE or self._held_as_in_file(backend):
            return mean
        return max(mean, self._bytes_in_layer(plain_storage(self.dtype)))

    def _held_as_in_file(self, backend: str) -> bool:
        file = backend == "llamafile" or self.experts_file_bytes > 0
        return file and backend not in BACKEND_STORAGE  # those quantise what they read

    def attention_flops(self, layer: int, rows: int, width: int) -> float:
        """FLOP of the forward products of scores and values, for `rows` rows of `width` positions.

        All pairs of positions count, also those that a causal mask or a window hides, and so they do in every
        rate of attention (`DeviceRate.sdpa`): a kernel that skips the hidden half has twice the rate.
        """
        return 2.0 * rows * width**2 * self.pair_widths[layer][0]

    @property
    def routed_params(self) -> int:
        """Parameters of all routed experts of all layers."""
        return self.expert_params * self.num_experts * len(self.moe_layers)

    @property
    def embedding_params(self) -> int:
        """Parameters of the token embedding (the head has as many, unless they are tied)."""
        return self.vocab_size * self.hidden_size

    @property
    def total_params(self) -> int:
        """All parameters, multi-token-prediction layers not counted."""
        ends = self.embedding_params * (1 if self.tie_embeddings else 2) + self.outside_params
        layers = sum(self.attention_params) + sum(self.dense_params) + self.routed_params
        return ends + layers + sum(self.mapped_params)
