"""What the attention side of one decoder layer costs, counted from its dimensions and divided by rates.

A micro-batch of b rows x s positions passes attention, norms, router and shared expert (or the dense MLP),
all torch operations. Each is counted in kinds of work (`Counts`) that have measured rates: products of
matrices, attention over pairs of positions, elements through LoRA, norms and other elementwise passes, and
kernels, which cost their dispatch however small they are. On a CPU the kinds add up; on a GPU dispatch runs
beside the device's work, so the larger counts.

Sources of the counts: transformers 5's decoder layers and the LoRA layers (PEFT's; for bfloat16 on a GPU
kt_ray/model/lora_linear.py) as they are; operations were counted with torch.profiler on layers of the demo,
and kernels of a GPU on layers at released widths (docs/prediction.md). Backward is what autograd does for
trained LoRA and frozen weights: one product for the input's gradient, none for the weight's.

Legend: M = b * s positions, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from kt_ray.config.schema import Config, LoraConfig
from kt_ray.dims.layer_params import HELD_BYTES, WRITTEN_OUT_NORMS, holds_scores, window_block
from kt_ray.dims.model_dims import ModelDims
from kt_ray.hardware.rates import (
    FUSED_NORM_BYTES,
    NORM_BYTES,
    PARTS_BYTES,
    PEFT_BYTES,
    WIDE_BYTES,
    DeviceRate,
)
from kt_ray.placement.activation_bytes import masked
from kt_ray.placement.lora_sizes import in_parts, module_ranks
from kt_ray.placement.plan_types import Plan

# Operations that are dispatched, forward and backward, views not counted (torch.profiler, on a CPU).
LINEAR_OPS = (7.0, 11.0)  # a linear layer with LoRA by PEFT, or by kt_ray/model/lora_linear.py in float32
PARTS_OPS = (6.0, 13.0)  # in parts, with gradients added up
KNOWN_OPS = 4.0  # of them forward where the output is known
BARE_LINEAR_OPS = (1.0, 1.0)  # a linear layer alone
LAYER_OPS = (120.0, 127.0)  # norms, rotary embedding, masks, residuals, attention itself
ROUTER_OPS = (39.0, 52.0)
# Kernels of a GPU, where a norm is one (benchmarks/elementwise_bytes.py).
GPU_LAYER_OPS = (36.0, 44.0)
GPU_ROUTER_OPS = (12.0, 10.0)
# Time of a small operation that views and Python take per kernel; autograd calls kernels without Python.
AROUND_OP = 4.4
AROUND_BACK = 3.4
# The same of a GPU, whose layers have fewer kernels and as much Python.
GPU_AROUND = 16.0
GRAD_OPS = 1.22  # forward under grad over forward without

HEAD_OPS = 75.0  # norm, logits, loss and gradient of a chunk

NORM_PASSES = 6.0  # passes over its elements that a norm takes, the unit of elementwise work here


@dataclass(frozen=True)
class Passes:
    """Passes over elements, forward and backward.

    hidden: per element of the hidden state: residuals. width: of queries, keys and values: slices, rotation,
    joining them. gated: of an MLP's inner width. router: per token and expert: scores, choice, counts.
    """

    hidden: tuple[float, float]
    width: tuple[float, float]
    gated: tuple[float, float]
    router: tuple[float, float]


CPU_PASSES = Passes(hidden=(4.0, 4.0), width=(6.0, 8.0), gated=(6.0, 13.0), router=(120.0, 60.0))
# On a GPU memory decides. Bytes that transformers' layers read and write (benchmarks/elementwise_bytes.py),
# over those of one pass of a norm.
_PASS = NORM_BYTES[0] / NORM_PASSES
GPU_PASSES = Passes(
    hidden=(22 / _PASS, 24 / _PASS),
    width=(7 / _PASS, 17 / _PASS),
    gated=(10 / _PASS, 32 / _PASS),
    router=(60 / _PASS, 60 / _PASS),
)

# Projections of a layer's own input.
_FIRST = ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa", "kv_proj", "qkv_proj", "in_proj")


class Counts(NamedTuple):
    """Amounts per micro-batch.

    products: FLOP in the layer's type. thin: FLOP in float32 (router). pairs: FLOP of attention forward, by a
    flash kernel; masked: by one that takes a mask; held: by products around scores that are held. scores:
    that are. adapted: elements through LoRA as a `BlockRate` of the device has it.
    normed: elements through norms. passes: elements times passes over them. operations: kernels.
    """

    products: float = 0.0
    thin: float = 0.0
    pairs: float = 0.0
    masked: float = 0.0
    held: float = 0.0
    scores: float = 0.0
    adapted: float = 0.0
    normed: float = 0.0
    passes: float = 0.0
    operations: float = 0.0

    def plus(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, factor: float) -> Counts:
        return Counts(*(factor * own for own in self))


@dataclass(frozen=True)
class LayerWork:
    """What one layer's attention side is counted as: linear functions of M and of the pairs of positions."""

    dims: ModelDims  # the model
    layer: int  # index
    lora: LoraConfig  # adapters
    dtype: str  # of the weights
    attention: str = "sdpa"  # "sdpa" or "eager"
    gpu: bool = False  # whether it runs on one
    masked: bool = False  # whether it gets a mask that no window explains, on a GPU

    @property
    def passes(self) -> Passes:
        return GPU_PASSES if self.gpu else CPU_PASSES

    @property
    def in_parts(self) -> bool:
        """Whether LoRA takes kt_ray/model/lora_linear.py's path in parts."""
        return in_parts(self.lora, self.dtype, gpu=self.gpu)

    @property
    def fused_norms(self) -> bool:
        """Whether norms are one kernel each (kt_ray/model/fused_norms.py)."""
        return self.gpu and self.dtype == "bfloat16" and self.dims.model_type not in WRITTEN_OUT_NORMS

    @property
    def moe(self) -> bool:
        return self.layer in self.dims.moe_layers

    @cached_property
    def modules(self) -> tuple[tuple[str, int, int, int, bool], ...]:
        """(name, in, out, rank of its LoRA or 0, whether it is of attention)."""
        modules, ranks = self.dims.lora_in_out[self.layer], module_ranks(self.dims, self.lora, self.layer)
        mixing = ((*module, 0, True) for module in self.dims.mixers)
        own = (
            (name, n_in, n_out, rank, "attn" in name or (name.startswith("mixer.") and name[6:7] in "qkvo"))
            for (name, n_in, n_out), rank in zip(modules, ranks, strict=True)
        )
        return (*own, *mixing)

    @cached_property
    def heads(self) -> tuple[float, float]:
        """Elements per token of queries, and of values, over all query heads; 0 without softmax attention."""
        out = [n_in for name, n_in, _, _, _ in self.modules if name.endswith((".o_proj", ".o_b_proj"))]
        if not out or "linear_attn" in self.modules[0][0] or self.dims.num_heads == 0:
            return 0.0, 0.0
        value = min(float(out[0]), self.dims.attention_width / 2)
        return (self.dims.attention_width - value) / 2, value

    @property
    def eager(self) -> bool:
        """Whether attention holds all scores."""
        return holds_scores(self.dims.model_type, self.attention)

    def forward(self, rows: int, width: int) -> tuple[Counts, Counts]:
        """What is counted until the experts get their tokens, and after it (the shared expert)."""
        return self._forward(rows, width, ())

    def recompute(self, rows: int, width: int, retained: bool) -> tuple[Counts, Counts]:
        """`forward` under grad, without the products whose outputs are known (kt_ray/model/known_outputs.py).

        That is as in layers that add what shared experts and a dense MLP give to the residual. Where a norm
        comes after them, which no configuration says, a product more is computed.

        Args:
            retained: whether the output of attention is.
        """
        return self._forward(rows, width, self._known(retained))

    def _known(self, retained: bool) -> tuple[str, ...]:
        """Names of the modules whose outputs a recomputed layer need not compute."""
        if self.lora.dora:
            return ()
        wide = [
            (n_in, name, of) for name, n_in, n_out, _, of in self.modules if n_out == self.dims.hidden_size
        ]
        last = max((each for each in wide if each[2] and self._is_early(each[1], each[2])), default=None)
        others = [f"mlps.{number}." for number in range(self.dims.attentions - 1)]  # an attention follows
        unused = [
            name for _, name, of in wide if not of and self.dims.affine and not name.startswith((*others,))
        ]
        return (*unused, *([last[1]] if retained and last else []))

    def _is_early(self, name: str, of_attention: bool) -> bool:
        """Whether a module comes before the experts get their tokens: of several attentions the first."""
        if self.dims.attentions > 1:
            return name.startswith("self_attn.0.")
        return of_attention or not self.moe or "latent" in name

    def _forward(self, rows: int, width: int, known: tuple[str, ...]) -> tuple[Counts, Counts]:
        m, early = rows * width, 1 / self.dims.attentions
        between = self._between(m, 0).plus(self.pairs(rows, width))
        first, rest = between.times(early), between.times(1 - early)
        for name, n_in, n_out, rank, of_attention in self.modules:
            work = self.linear(n_in, n_out, rank, m, 0, known=name in known)
            if self._is_early(name, of_attention):
                first = first.plus(work)
            else:
                rest = rest.plus(work)
        if self.moe:
            first = first.plus(self._router(m, 0))
            rest = rest.plus(self._activation(m, 0))
        else:
            first = first.plus(self._activation(m, 0))
        return first, rest

    def backward(self, rows: int, width: int) -> Counts:
        """Counts of autograd through the layer, after it was run under grad."""
        m = rows * width
        total = self._between(m, 1).plus(self.pairs(rows, width)).plus(self._activation(m, 1))
        for name, n_in, n_out, rank, of in self.modules:
            work = self.linear(n_in, n_out, rank, m, 1)
            if self.layer == 0 and name.rpartition(".")[2] in _FIRST and self._is_early(name, of):
                # Nothing before the first layer trains: its input needs no gradient.
                work = work._replace(products=0.0, adapted=work.adapted / 2, operations=work.operations / 2)
            total = total.plus(work)
        return total.plus(self._router(m, 1)) if self.moe else total

    # -- parts -------------------------------------------------------------------------------

    def linear(
        self, n_in: int, n_out: int, rank: int, m: int, back: int = 0, *, known: bool = False
    ) -> Counts:
        """Of a module; back: 1 = of its backward."""
        product = 0.0 if known else 2.0 * m * n_in * n_out
        if not rank:
            return Counts(products=product, operations=BARE_LINEAR_OPS[back])
        elements = float(m * (n_in + n_out))
        if (
            known and self.in_parts
        ):  # A x alone, which reads two bytes of an input where both sides' are three
            return Counts(products=4.0 * m * rank * n_in, adapted=2 / 3 * m * n_in, operations=KNOWN_OPS)
        if self.in_parts:  # two numbers for each of A and B: twice the products, three times to add B A x
            product += 2.0 * m * rank * (5 * n_in + 4 * n_out if back else 2 * n_in + 3 * n_out)
            return Counts(products=product, adapted=elements, operations=PARTS_OPS[back])
        elements *= max(1.0, rank / 8)
        formed = 0.0
        if self.lora.dora:  # the norms of W + scale * B A, in float32, once per call; two sums per output
            formed = 0.0 if back else n_in * (5.0 * n_out + n_in)
            elements += 3.0 * m * n_out
            product += 0.0 if back else 2.0 * rank * n_in * (n_in + n_out)
        of_rate = PARTS_BYTES if self.gpu else WIDE_BYTES  # the path that was measured
        own = PEFT_BYTES if self.lora.dora or self.lora.dropout else WIDE_BYTES
        elements *= own[back] / of_rate[back]
        return Counts(products=product, passes=formed, adapted=elements, operations=LINEAR_OPS[back])

    def _between(self, m: int, back: int) -> Counts:
        """Norms, residuals, rotary embedding."""
        dims = self.dims
        hidden = dims.hidden_size * dims.hidden_streams
        compressed = sum(n_out for name, _, n_out, _, _ in self.modules if "_a_proj" in name)
        passes = hidden * self.passes.hidden[back] + dims.attention_width * self.passes.width[back]
        passes *= dims.attentions
        normed = 2.0 * hidden * dims.attentions + compressed
        if self.gpu:  # a CPU's passes have them
            normed += dims.attention_normed
        if self.fused_norms:
            normed *= FUSED_NORM_BYTES[back] / NORM_BYTES[back]
        operations = GPU_LAYER_OPS if self.fused_norms else LAYER_OPS
        return Counts(normed=m * normed, passes=m * passes, operations=operations[back] * dims.attentions)

    def pairs(self, rows: int, width: int) -> Counts:
        """By the kernel that torch has for these rows (kt_ray/model/attention.py)."""
        pairs = self.dims.attention_flops(self.layer, rows, width)
        scores = rows * float(width) ** 2 * self.dims.num_heads * self.dims.attentions
        query, value = self.heads
        unequal = abs(query - value) > 0.01 * query  # the narrower get zeros, or a CPU holds scores
        if self.eager or (unequal and not self.gpu and 4 * scores <= HELD_BYTES * self.dims.attentions):
            return Counts(held=pairs, scores=scores)
        window = self.dims.pair_widths[self.layer][1]
        if self.gpu and self.masked:
            return Counts(masked=pairs)
        if 0 < window <= width and (self.gpu or width**2 > HELD_BYTES):
            size = window_block(window)
            computed = size * (2 * size * -(-width // size) - size) / width**2
            return Counts(masked=pairs * computed) if self.gpu else Counts(pairs=pairs * computed)
        return Counts(pairs=pairs * 2 * max(query, value) / (query + value) if unequal else pairs)

    def _activation(self, m: int, back: int) -> Counts:
        inner = sum(n_in for name, n_in, _, _, of in self.modules if not of and "down" in name)
        return Counts(passes=m * inner * self.passes.gated[back])

    def _router(self, m: int, back: int) -> Counts:
        """In float32, as most families have it; its weights are widened in every call."""
        dims = self.dims
        matrix = dims.hidden_size * dims.choices
        passes = 2.0 * (matrix + m * dims.hidden_size) + m * dims.choices * self.passes.router[back]
        operations = GPU_ROUTER_OPS if self.gpu else ROUTER_OPS
        return Counts(thin=2.0 * m * matrix, passes=passes, operations=operations[back])


def layer_works(plan: Plan, config: Config) -> tuple[LayerWork, ...]:
    """The counted work of every layer of the plan's model."""
    kind, gpu = config.model.attn_implementation, plan.workers[0].device != "cpu"
    told = masked(plan.dims, config, gpu=gpu)
    return tuple(
        LayerWork(plan.dims, layer, config.lora, plan.dtype, kind, gpu, told)
        for layer in range(plan.dims.num_layers)
    )


def seconds(
    work: Counts,
    rate: DeviceRate,
    host: DeviceRate,
    dtype: str,
    m: int,
    *,
    back: bool = False,
    grad: bool = False,
) -> float:
    """Seconds of `work` for a micro-batch of `m` positions.

    Args:
        rate: of the device. host: of the CPU that dispatches to it (the same, without a GPU).
        back: autograd's work. grad: forward under grad.
    """
    block = rate.block
    assert block.masked is not None and block.masked_backward is not None
    adapter = block.adapter_backward if back else block.adapter
    norm = block.norm_backward if back else block.norm
    products = rate.gemm.get(dtype) or rate.gemm["bfloat16" if dtype == "float16" else "float32"]
    device = (
        work.products / products(m)
        + work.thin / rate.gemm.get("float32", products)(m)
        + work.pairs / (block.sdpa_backward if back else rate.sdpa).value
        + work.masked / (block.masked_backward if back else block.masked).value
        + work.held / (block.unequal_backward if back else block.unequal).value
        + work.scores / (block.scores_backward if back else block.scores).value
        + work.adapted / adapter.value
        + work.normed / norm.value
        + work.passes / (NORM_PASSES * block.norm.value)
    )
    return _with_dispatch(device, work.operations * (GRAD_OPS if grad else 1.0), rate, host, back=back)


def dispatch_seconds(operations: float, rate: DeviceRate, host: DeviceRate, *, back: bool = False) -> float:
    """Seconds that `operations` kernels cost however small they are; back: called by autograd."""
    around = GPU_AROUND if rate.threads == 0 else AROUND_BACK if back else AROUND_OP
    return operations * (rate.operation.value + around * host.operation.value)


def _with_dispatch(
    device: float, operations: float, rate: DeviceRate, host: DeviceRate, *, back: bool = False
) -> float:
    dispatch = dispatch_seconds(operations, rate, host, back=back)
    return max(device, dispatch) if rate.threads == 0 else device + dispatch


def head_seconds(
    dims: ModelDims, rate: DeviceRate, host: DeviceRate, dtype: str, trained: int, chunk: int
) -> float:
    """Final norm, logits, loss and the gradient at the last layer's output, for `trained` positions."""
    if not trained:
        return 0.0
    hidden, vocab = dims.hidden_size, dims.vocab_size
    products = rate.gemm.get(dtype) or rate.gemm["bfloat16" if dtype == "float16" else "float32"]
    device = 4.0 * trained * hidden * vocab / products(min(trained, chunk))
    device += trained * vocab / rate.softmax.value
    device += trained * hidden * (1 / rate.block.norm.value + 1 / rate.block.norm_backward.value)
    return _with_dispatch(device, HEAD_OPS * -(-trained // chunk), rate, host)
