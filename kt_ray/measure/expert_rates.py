"""Speed of the expert engine: every weight format, rows per expert from one to many, one thread and all.

Weights are random, of a size that no cache holds where few rows make memory matter; routing is even.
Legend: E experts, H hidden, I intermediate, T tokens, K experts per token, r LoRA rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kt_ray.hardware.rates import ROWS, Curve, ExpertRate, Figure
from kt_ray.measure.timing import REPEATS, SECONDS, median_seconds
from kt_ray.native import Engine, ExpertLora, ExpertMatrix, ExpertWeights, allocate, quantize

_GROUPS = {"int4": 32, "uint4": 128}  # columns that share a scale, as in most releases
SLOTS = 4  # experts per token of the measurement; divides every number of experts used here


@dataclass(frozen=True)
class ExpertShape:
    """hidden: H. inter: I. weight_bytes: of bf16 weights that a call with few rows passes over."""

    hidden: int = 2048
    inter: int = 1408
    weight_bytes: int = 400 << 20

    def experts(self, rows: float) -> int:
        """E for `rows` per expert: many where memory matters, few where products do; multiples of SLOTS."""
        each = 6 * self.hidden * self.inter
        many = max(SLOTS, min(256, self.weight_bytes // each) // SLOTS * SLOTS)
        return many if rows < 32 else max(SLOTS, min(many, (many // 4) // SLOTS * SLOTS))


def measure_experts(
    engine: Engine,
    fmt: str,
    shape: ExpertShape,
    rows: Sequence[int] = ROWS,
    rank: int = 8,
    seconds: float = SECONDS,
) -> ExpertRate:
    """FLOP/s of `fmt` on one thread and on all threads of `engine`, over rows per expert.

    Args:
        engine: of the instruction set, with every thread that the machine is to use.
        fmt: "bf16", "f32" or a format of kt_ray.native.quantization that the shape can hold.
        rank: of the LoRA on every expert, its gradients included.
        seconds: per figure.

    Raises:
        ValueError: the format cannot hold rows of this shape.
    """
    weights = random_weights(fmt, shape, shape.experts(1))
    same = {"pinned": engine.pinned, "int8_products": engine.int8_products}
    with Engine(engine.isa, 1, engine.cpus, **same) as single:
        one = [_pair(single, weights, shape, n, rank, seconds) for n in rows]
        plain = _pair(single, weights, shape, rows[-1], 0, seconds)
    every = one
    if engine.threads > 1:
        every = [_pair(engine, weights, shape, n, rank, seconds) for n in rows]
    at = tuple(float(n) for n in rows)

    def curve(pairs: Sequence[tuple[float, float]], which: int) -> Curve:
        return Curve(at, tuple(pair[which] for pair in pairs), "measured")

    return ExpertRate(
        isa=engine.isa,
        format=fmt,
        products="int8" if engine.int8_products else "f32" if fmt == "f32" else engine.compute,
        hidden=shape.hidden,
        inter=shape.inter,
        rank=rank,
        threads=engine.threads,
        forward=curve(one, 0),
        backward=curve(one, 1),
        forward_all=curve(every, 0),
        backward_all=curve(every, 1),
        # Noise must not make LoRA a gain.
        plain_forward=Figure(min(1.0, one[-1][0] / plain[0]), "measured"),
        plain_backward=Figure(min(1.0, one[-1][1] / plain[1]), "measured"),
    )


def _pair(
    engine: Engine, weights: ExpertWeights, shape: ExpertShape, rows: int, rank: int, seconds: float
) -> tuple[float, float]:
    """FLOP/s of the frozen products, forward and backward, with `rows` rows for each expert."""
    experts = shape.experts(rows)
    part = _first(weights, experts)
    tokens = rows * experts // SLOTS
    flops = 6 * tokens * SLOTS * shape.hidden * shape.inter
    rng = torch.Generator().manual_seed(0)
    f32 = isinstance(weights.up, Tensor) and weights.up.dtype == torch.float32
    x = torch.randn(tokens, shape.hidden, generator=rng).to(torch.float32 if f32 else torch.bfloat16)
    dy = torch.randn(tokens, shape.hidden, generator=rng)
    slots = torch.arange(tokens * SLOTS).view(tokens, SLOTS)
    ids, router = slots % experts, torch.full((tokens, SLOTS), 1 / SLOTS)
    lora = grads = None
    if rank:
        lora, grads = random_lora(shape, experts, rank), random_lora(shape, experts, rank)
    # Held by name, so that a call frees what the one before it kept, as training does.
    kept: list[object] = [None]

    def forward() -> None:
        kept[0] = None
        kept[0] = engine.forward(part, x, ids, router, lora=lora)[1]

    ahead = median_seconds(forward, seconds, REPEATS)
    _, saved = engine.forward(part, x, ids, router, lora=lora)
    back = median_seconds(
        lambda: engine.backward(part, saved, dy, lora=lora, lora_grads=grads), seconds, REPEATS
    )
    return flops / ahead, flops / back


def random_weights(fmt: str, shape: ExpertShape, experts: int) -> ExpertWeights:
    """E experts, each in memory of its own, with the values of one."""
    sizes = ((shape.inter, shape.hidden), (shape.inter, shape.hidden), (shape.hidden, shape.inter))
    gate, up, down = (_matrix(fmt, experts, n, k, seed) for seed, (n, k) in enumerate(sizes))
    return ExpertWeights(gate, up, down)


def _matrix(fmt: str, experts: int, n: int, k: int, seed: int) -> Tensor | ExpertMatrix:
    rng = torch.Generator().manual_seed(seed)
    one = torch.empty(1, n, k).uniform_(-(k**-0.5), k**-0.5, generator=rng)
    if fmt in ("bf16", "f32"):
        return _repeated(one.to(torch.bfloat16 if fmt == "bf16" else torch.float32), experts)
    stored = quantize(fmt, one, group=math.gcd(k, _GROUPS[fmt]) if fmt in _GROUPS else None)
    scales = None if stored.scales is None else _repeated(stored.scales, experts)
    return ExpertMatrix(stored.format, _repeated(stored.data, experts), (experts, n, k), scales, stored.block)


def _repeated(one: Tensor, experts: int) -> Tensor:
    whole = allocate((experts, *one.shape[1:]), one.dtype)
    whole.copy_(one.expand(experts, *one.shape[1:]))
    return whole


def _first(weights: ExpertWeights, experts: int) -> ExpertWeights:
    """The first experts of `weights`, as views."""
    if experts == weights.E:
        return weights

    def cut(matrix: Tensor | ExpertMatrix | None) -> Tensor | ExpertMatrix:
        if isinstance(matrix, ExpertMatrix):
            scales = None if matrix.scales is None else matrix.scales[:experts]
            return ExpertMatrix(
                matrix.format, matrix.data[:experts], (experts, *matrix.shape[1:]), scales, matrix.block
            )
        assert matrix is not None
        return matrix[:experts]

    return ExpertWeights(cut(weights.gate), cut(weights.up), cut(weights.down))


def random_lora(shape: ExpertShape, experts: int, rank: int) -> ExpertLora:
    """A and B of gate, up and down for E experts, float32."""
    h, i = shape.hidden, shape.inter
    sizes = ((rank, h), (i, rank), (rank, h), (i, rank), (rank, i), (h, rank))
    rng = torch.Generator().manual_seed(1)
    parts = [torch.randn(experts, n, k, generator=rng) * k**-0.5 for n, k in sizes]
    gate_a, gate_b, up_a, up_b, down_a, down_b = parts
    return ExpertLora(gate_a, gate_b, up_a, up_b, down_a, down_b, scale=1.0)
