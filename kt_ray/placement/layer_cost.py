"""What the attention side of one decoder layer costs, counted from its dimensions and divided by rates.

A micro-batch of b rows x s positions passes attention, norms, router and shared expert (or the dense MLP),
all torch operations. Each is counted in five kinds of work: products of matrices (FLOP), products of LoRA
and routers in float32, attention over pairs of positions, bytes that elementwise operations read and
write, and operations, which cost their dispatch however small they are. On a CPU the kinds add up; on a GPU
dispatch runs beside the device's work, so the larger counts.

Sources of the counts: transformers 5's decoder layers and PEFT's LoRA layer as they are (inputs of LoRA
are widened to float32, its output is added in float32 and rounded back). Operations were counted with
torch.profiler on layers of the demo (docs/prediction.md). Backward is what autograd does for trained LoRA
and frozen weights: one product for the input's gradient, none for the weight's.

Legend: M = b * s positions, e bytes of an element, r LoRA rank, H hidden size.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from kt_ray.config.schema import LoraConfig
from kt_ray.placement.families import WITHOUT_SDPA
from kt_ray.placement.formats import ELEMENT_BYTES
from kt_ray.placement.rates import DeviceRate
from kt_ray.placement.types import ModelDims

# Operations with what Python adds around them, in units of one small torch operation (rates: `operation`).
LINEAR_OPS = (25.0, 30.0)  # a linear layer with LoRA: forward, backward
BARE_LINEAR_OPS = (4.0, 5.0)  # a linear layer alone
LAYER_OPS = (480.0, 420.0)  # norms, rotary embedding, masks, residuals, the layer's own Python
ROUTER_OPS = (180.0, 100.0)
GRAD_OPS = 1.2  # forward under grad over forward without

NORM_BYTES = (38, 60)  # per element: widened, squared, averaged, scaled, rounded
ROTARY_BYTES = (12, 20)  # per element of queries, keys and values: slices, rotation, concatenation
SCORE_BYTES = (24, 24)  # per pair and head where scores are materialised, at 2 bytes per element


class Work(NamedTuple):
    """Amounts per micro-batch. products: FLOP in the layer's type; thin: FLOP in float32; pairs: FLOP of
    attention over pairs; moved: bytes of elementwise operations; operations: small operations."""

    products: float = 0.0
    thin: float = 0.0
    pairs: float = 0.0
    moved: float = 0.0
    operations: float = 0.0

    def plus(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, factor: float) -> Work:
        return Work(*(a * factor for a in self))


@dataclass(frozen=True)
class LayerWork:
    """Work of one layer's attention side, as linear functions of M and of the pairs of positions.

    Attributes:
        dims: the model. layer: index. lora: adapters. dtype: of the weights. attention: "sdpa" or "eager".
    """

    dims: ModelDims
    layer: int
    lora: LoraConfig
    dtype: str
    attention: str = "sdpa"

    @property
    def moe(self) -> bool:
        return self.layer in self.dims.moe_layers

    @cached_property
    def modules(self) -> tuple[tuple[str, int, int, bool, bool], ...]:
        """(name, in, out, whether it has LoRA, whether it is of attention)."""
        found = []
        for name, n_in, n_out in self.dims.lora_in_out[self.layer]:
            of_attention = "attn" in name or (name.startswith("mixer.") and name[6:7] in "qkvo")
            found.append((name, n_in, n_out, self._adapted(name), of_attention))
        return tuple(found)

    def _adapted(self, module: str) -> bool:
        targets, name = self.lora.target_modules, f"model.layers.{self.layer}.{module}"
        if isinstance(targets, str):
            return targets == "auto" or (targets != "none" and re.fullmatch(targets, name) is not None)
        return any(name == t or name.endswith("." + t) for t in targets)

    @cached_property
    def heads(self) -> tuple[float, float]:
        """Elements per token of queries, and of values, over all query heads; 0 without softmax attention."""
        out = [n_in for name, n_in, _, _, _ in self.modules if name.endswith((".o_proj", ".o_b_proj"))]
        if not out or "linear_attn" in self.modules[0][0] or self.dims.num_heads == 0:
            return 0.0, 0.0
        value = min(float(out[0]), self.dims.attention_width / 2)
        return (self.dims.attention_width - value) / 2, value

    @property
    def materialised(self) -> bool:
        """Whether torch computes attention through a matrix of scores: eager, or sdpa where the widths of
        keys and values differ (its fused kernel on the CPU wants one width)."""
        query, value = self.heads
        return (
            self.attention == "eager"
            or self.dims.model_type in WITHOUT_SDPA
            or abs(query - value) > 0.01 * query
        )

    def forward(self, rows: int, width: int) -> tuple[Work, Work]:
        """Work until the experts get their tokens, and after it (the shared expert)."""
        m = rows * width
        first, rest = Work(), Work()
        for name, n_in, n_out, adapted, of_attention in self.modules:
            work = self._linear(n_in, n_out, adapted, m)
            if of_attention or not self.moe or "latent" in name:
                first = first.plus(work)
            else:
                rest = rest.plus(work)
        first = first.plus(self._between(m, 0)).plus(self._pairs(rows, width, 0))
        if self.moe:
            first = first.plus(self._router(m, 0))
            rest = rest.plus(self._activation(m, 0))
        else:
            first = first.plus(self._activation(m, 0))
        return first, rest

    def backward(self, rows: int, width: int) -> Work:
        """Work of autograd through the layer, after it was run under grad."""
        m = rows * width
        total = self._between(m, 1).plus(self._pairs(rows, width, 1)).plus(self._activation(m, 1))
        for _, n_in, n_out, adapted, _ in self.modules:
            total = total.plus(self._linear_back(n_in, n_out, adapted, m))
        return total.plus(self._router(m, 1)) if self.moe else total

    # -- parts -------------------------------------------------------------------------------

    @property
    def _element(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    def _linear(self, n_in: int, n_out: int, adapted: bool, m: int) -> Work:
        e, r = self._element, self.lora.rank
        product = 2.0 * m * n_in * n_out
        if not adapted:
            return Work(products=product, operations=BARE_LINEAR_OPS[0])
        widened = 0 if e == 4 else e + 4
        rounded = 0 if e == 4 else 4 + e
        moved = m * n_in * (widened + 4) + m * n_out * (4 + 8 + (e + 8) + rounded)
        return Work(product, 2.0 * m * r * (n_in + n_out), 0.0, moved, LINEAR_OPS[0])

    def _linear_back(self, n_in: int, n_out: int, adapted: bool, m: int) -> Work:
        e, r = self._element, self.lora.rank
        product = 2.0 * m * n_in * n_out
        if not adapted:
            return Work(products=product, operations=BARE_LINEAR_OPS[1])
        widened = 0 if e == 4 else e + 4
        rounded = 0 if e == 4 else 4 + e
        moved = m * n_out * (widened + 8 + 8) + m * n_in * (4 + 4 + rounded + 3 * e)
        return Work(product, 4.0 * m * r * (n_in + n_out), 0.0, moved, LINEAR_OPS[1])

    def _between(self, m: int, back: int) -> Work:
        """Norms, residuals, rotary embedding."""
        dims, e = self.dims, self._element
        hidden = dims.hidden_size * dims.hidden_streams
        moved = hidden * (2 * NORM_BYTES[back] + 6 * e) + dims.attention_width * ROTARY_BYTES[back] * e / 2
        return Work(moved=m * moved, operations=LAYER_OPS[back])

    def _pairs(self, rows: int, width: int, back: int) -> Work:
        query, value = self.heads
        pairs = rows * float(width) ** 2
        flop = 2 * pairs * (query + value)
        if not self.materialised:
            return Work(pairs=flop * (2.5 if back else 1.0))  # the fused kernel computes scores again
        moved = pairs * self.dims.num_heads * SCORE_BYTES[back] * self._element / 2
        return Work(pairs=flop * (2.0 if back else 1.0), moved=moved)

    def _activation(self, m: int, back: int) -> Work:
        inner = sum(n_out for name, _, n_out, _, of in self.modules if not of and "down" not in name)
        return Work(moved=m * inner * self._element * (5 if back else 2.5))

    def _router(self, m: int, back: int) -> Work:
        """In float32, as most families have it; its weights are widened in every call."""
        dims, e = self.dims, self._element
        matrix = dims.hidden_size * dims.num_experts
        widened = 0 if e == 4 else (e + 4) * (matrix + m * dims.hidden_size)
        scores = m * dims.num_experts * (40 if back else 60)
        return Work(thin=2.0 * m * matrix, moved=widened + scores, operations=ROUTER_OPS[back])


def seconds(work: Work, rate: DeviceRate, dtype: str, m: int, *, grad: bool = False) -> float:
    """Seconds of `work` for a micro-batch of `m` positions on a device."""
    products = rate.gemm.get(dtype) or rate.gemm["bfloat16" if dtype == "float16" else "float32"]
    thin = rate.gemm.get("float32", products)
    device = (
        work.products / products(m)
        + work.thin / thin(m)
        + work.pairs / rate.sdpa.value
        + work.moved / rate.memory.value
    )
    dispatch = work.operations * rate.operation.value * (GRAD_OPS if grad else 1.0)
    return max(device, dispatch) if rate.threads == 0 else device + dispatch


def head_seconds(dims: ModelDims, rate: DeviceRate, dtype: str, trained: int, chunk: int) -> float:
    """Final norm, logits, loss and the gradient at the last layer's output, for `trained` positions.

    Args:
        chunk: rows of logits at a time.
    """
    if not trained:
        return 0.0
    hidden, vocab = dims.hidden_size, dims.vocab_size
    products = rate.gemm.get(dtype) or rate.gemm["bfloat16" if dtype == "float16" else "float32"]
    e = ELEMENT_BYTES[dtype]
    device = 4.0 * trained * hidden * vocab / products(min(trained, chunk))
    device += trained * vocab / rate.softmax.value
    device += trained * (vocab * 2 * (e + 4) + hidden * sum(NORM_BYTES)) / rate.memory.value
    dispatch = -(-trained // chunk) * 120 * rate.operation.value
    return max(device, dispatch) if rate.threads == 0 else device + dispatch
