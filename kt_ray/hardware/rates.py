"""How fast a machine is: what the prediction of mode=plan divides by. Pure data, each figure with its source.

A `Rates` is measured by mode=doctor, described in a hardware file, or computed from instruction set and
cores (nominal.py). Units: seconds, bytes, FLOP (a multiply-add is two), per second.

    rates = rates_for(config, hardware)  # rate_files.py
    expert = rates.expert("avx512_bf16", "bf16", hidden=2048, inter=1408)
    seconds = 6 * rows * 2048 * 1408 / expert.flops("forward", rows_per_expert, threads=2)
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

ROWS = (1, 4, 16, 64, 256)  # rows per expert at which experts are measured
# Bytes that LoRA reads and writes per element of a linear layer's input and output, forward and backward:
# by PEFT (dropout, DoRA); by kt_ray/model/lora_linear.py in float32, and in parts (bfloat16 on a GPU).
PEFT_BYTES = (20.0, 40.0)
WIDE_BYTES = (19.0, 26.0)
PARTS_BYTES = (3.0, 5.0)
CAUSAL = 2.0  # all pairs of positions of a row over those of which the later sees the earlier
NORM_BYTES = (38.0, 90.0)  # per element of an RMS norm in bfloat16 as transformers computes it, both ways
FUSED_NORM_BYTES = (4.0, 6.0)  # in one kernel (kt_ray/model/fused_norms.py), which a GPU has

# Formats of checkpoints that the engine knows by a shorter name.
ENGINE_FORMAT = {"fp8_block": "fp8"}


@dataclass(frozen=True)
class Figure:
    """One number and where it comes from: "measured", "data sheet: …", "assumed: …", "published: …"."""

    value: float
    source: str

    def scaled(self, factor: float, why: str) -> Figure:
        return Figure(self.value * factor, f"{self.source}; {why}")


@dataclass(frozen=True)
class Curve:
    """A rate that depends on a size: straight lines between logarithms, constant outside."""

    at: tuple[float, ...]  # sizes, ascending
    values: tuple[float, ...]  # the rate at each
    source: str  # as in `Figure`

    def __call__(self, size: float) -> float:
        """The rate at `size`."""
        if size <= self.at[0] or len(self.at) == 1:
            return self.values[0]
        if size >= self.at[-1]:
            return self.values[-1]
        i = bisect.bisect_right(self.at, size)
        low, high = self.at[i - 1], self.at[i]
        part = math.log(size / low) / math.log(high / low)
        return self.values[i - 1] ** (1 - part) * self.values[i] ** part

    @property
    def ample(self) -> float:
        """The rate at the largest size."""
        return self.values[-1]

    def scaled(self, factor: float, why: str) -> Curve:
        return Curve(self.at, tuple(v * factor for v in self.values), f"{self.source}; {why}")


def constant(value: float, source: str) -> Curve:
    """A rate that is the same for every size."""
    return Curve((1,), (value,), source)


@dataclass(frozen=True)
class ExpertRate:
    """Speed of one MoE layer's routed experts in one weight format on one instruction set.

    Rates count the products of the frozen matrices only (6 · H · I FLOP per row and direction with a
    gate, 4 · H · I without), while the time they are taken from includes everything the engine does:
    decoding, activation, adding to tokens, LoRA of rank `rank` with its gradients, the router's gradient.
    """

    isa: str  # instruction set
    format: str  # of the weights, as the engine calls it
    products: str  # type multiplied in, "bf16", "f32" or "int8" (W8A8)
    # hidden, inter: H and I of the experts the figures were taken from
    hidden: int
    inter: int
    rank: int  # LoRA rank included
    threads: int  # threads of the `all` curves: every core of one socket
    # forward, backward: FLOP/s of one thread over rows per expert
    forward: Curve
    backward: Curve
    # forward_all, backward_all: FLOP/s of `threads` threads together over rows per expert
    forward_all: Curve
    backward_all: Curve
    # plain_forward, plain_backward: time without LoRA as a part of the time with it, at ample rows
    plain_forward: Figure
    plain_backward: Figure

    def flops(self, direction: str, rows: float, threads: int = 1, rank: int | None = None) -> float:
        """FLOP/s of `threads` threads of one socket together, products of frozen matrices counted.

        Between one thread and all, the efficiency falls in a straight line; more threads than cores are
        as fast as all.

        Args:
            rows: mean rows per expert that has any.
            rank: LoRA rank of the run; None = as measured. LoRA's time is taken as proportional to the
                rank above the measured one, and as constant below: a narrow panel costs what a full one does.
        """
        if direction not in ("forward", "backward"):
            raise ValueError(f"direction: {direction!r}, required forward or backward")
        one = (self.forward if direction == "forward" else self.backward)(rows)
        every = (self.forward_all if direction == "forward" else self.backward_all)(rows)
        if threads >= self.threads:
            speed = every
        else:
            efficiency = every / (one * self.threads)
            share = (threads - 1) / max(1, self.threads - 1)
            # No fewer threads are faster than all of them: memory limits what is left.
            speed = min(max(one, every), threads * one * (1 + (efficiency - 1) * share))
        plain = (self.plain_forward if direction == "forward" else self.plain_backward).value
        if rank == 0:
            return speed / plain
        if rank is not None and rank > self.rank > 0:
            return speed / (plain + (1 - plain) * rank / self.rank)
        return speed


EXPERT_CURVES = ("forward", "backward", "forward_all", "backward_all")  # of an ExpertRate


@dataclass(frozen=True)
class BlockRate:
    """Speed of what a decoder layer has beside matrix products, everything in it included."""

    # adapter, adapter_backward: elements/s of a bfloat16 LoRA layer's path (rank 8; on a CPU in float32, on a
    # GPU in parts), forward and backward; its elements are the inputs and outputs of its linear layer
    adapter: Figure
    adapter_backward: Figure
    # norm, norm_backward: elements/s of an RMS norm as transformers computes it (six passes forward)
    norm: Figure
    norm_backward: Figure
    sdpa_backward: Figure  # FLOP/s of attention's backward, the forward's FLOP counted
    # unequal, unequal_backward: FLOP/s of attention where keys and values differ in width (multi-head latent
    # attention), for which torch materialises the scores; what the scores cost not counted
    unequal: Figure
    unequal_backward: Figure
    # scores, scores_backward: scores/s (query, key, head) that this costs besides
    scores: Figure
    scores_backward: Figure
    # masked, masked_backward: FLOP/s of attention with a mask on a GPU, which no flash kernel takes; hidden
    # pairs are computed. None = nobody measured it, see `DeviceRate.block`
    masked: Figure | None = None
    masked_backward: Figure | None = None


@dataclass(frozen=True)
class DeviceRate:
    """Speed of the attention side: torch on one thread, on all of a socket's, or on a GPU."""

    name: str  # "cpu, 1 thread", "cpu, 48 threads", "RTX 4090"
    threads: int  # torch threads; 0 on a GPU
    # dtype ("bfloat16", "float32") -> FLOP/s of a matrix product over its rows (tokens)
    gemm: Mapping[str, Curve]
    memory: Figure  # bytes/s read and written by elementwise operations and norms
    # FLOP/s of causal attention, forward. Every rate of attention counts all pairs of positions, also those
    # that the mask hides: a kernel that skips them reaches more than the device's peak
    sdpa: Figure
    softmax: Figure  # logits per second: float32 log-softmax over a vocabulary, forward and backward together
    operation: Figure  # seconds that an operation costs however small it is (dispatch, or a kernel launch)
    # what a layer has beside products; None = nobody measured it, see `block`
    blocks: BlockRate | None = None

    @cached_property
    def block(self) -> BlockRate:
        """`blocks`, or the bytes that each reads and writes over `memory`, and FLOP over `sdpa`."""

        def moving(size: float) -> Figure:
            return self.memory.scaled(1 / size, f"{size:g} bytes per element")

        forward, backward = WIDE_BYTES if self.threads else PARTS_BYTES
        blocks = self.blocks or BlockRate(
            adapter=moving(forward),
            adapter_backward=moving(backward),
            norm=moving(NORM_BYTES[0]),
            norm_backward=moving(NORM_BYTES[1]),
            sdpa_backward=self.sdpa.scaled(1 / 2.5, "five products instead of two"),
            unequal=self.sdpa,
            unequal_backward=self.sdpa.scaled(1 / 2, "four products instead of two"),
            scores=moving(24),
            scores_backward=moving(24),
        )
        if blocks.masked is not None and blocks.masked_backward is not None:
            return blocks
        why = "assumed: hidden pairs are computed, at "
        return replace(
            blocks,
            masked=self.sdpa.scaled(0.7 / CAUSAL, f"{why}0.7 of the rate"),
            masked_backward=blocks.sdpa_backward.scaled(0.4 / CAUSAL, f"{why}0.4 of the rate"),
        )


@dataclass(frozen=True)
class LayerRate:
    """What one kind of decoder layer of one model took, its experts left out (layer_rates.py)."""

    signature: str  # of all layers that cost the same
    name: str  # for readers, "deepseek_v3 layer 3"
    threads: int  # of torch; 0 on a GPU
    # "forward" (no grad), "recompute" (under grad), "backward"; of a model's ends "begin", "loss" ->
    # positions/s of one row over its positions
    kinds: Mapping[str, Curve]


@dataclass(frozen=True)
class MemoryRate:
    """Of one socket, bytes/s: read by one thread and by all; copied (bytes of the source) by one and all;
    fresh memory written to for the first time (the system hands out zeroed pages)."""

    read_one: Figure
    read_all: Figure
    copy_one: Figure
    copy_all: Figure
    fresh: Figure


@dataclass(frozen=True)
class LinkRate:
    """Between host and one GPU, bytes/s each way; page-locked and pageable host memory."""

    to_device: Figure
    to_host: Figure
    to_device_pageable: Figure
    to_host_pageable: Figure


@dataclass(frozen=True)
class TransportRate:
    """Between actors."""

    call: Figure  # seconds of a small Ray message from one actor to another until it can be taken
    # seconds of a message through the doorbell, its tensors in shared memory, the copy not counted
    arena: Figure
    arena_bytes: Figure  # bytes/s copied into shared memory
    ray_bytes: Figure  # bytes/s of tensors inside Ray calls between two processes of a node
    local: Figure  # seconds of a message between the actors of one process (cluster=local)
    # network_bytes, network_latency: between nodes, bytes/s each way and seconds one way
    network_bytes: Figure
    network_latency: Figure


@dataclass(frozen=True)
class Rates:
    """Everything the prediction divides by, for one kind of host."""

    source: str  # of the whole: "measured on …", "conf/hardware/…", "nominal"
    cpu: str  # the CPU's name
    cores: int  # physical cores usable, all sockets of one host
    isas: tuple[str, ...]  # best last
    experts: tuple[ExpertRate, ...]  # measured or described; `expert` finds the right one
    memory: MemoryRate
    # cpu_one, cpu_all: torch on one thread, and on all cores of one socket
    cpu_one: DeviceRate
    cpu_all: DeviceRate
    transport: TransportRate
    optimizer: Figure  # parameters/s of AdamW, all of a socket
    disk: Figure  # bytes/s of files not in memory
    gpu: DeviceRate | None = None  # one GPU; None = there is none
    link: LinkRate | None = None  # PCIe of one GPU; None without a GPU
    date: str = ""
    commit: str = ""
    layers: tuple[LayerRate, ...] = ()  # whole layers of models, measured
    notes: tuple[str, ...] = ()  # what a reader must know (a refused file, scaled figures)

    def expert(
        self, isa: str, fmt: str, hidden: int = 0, inter: int = 0, products: str = "any"
    ) -> ExpertRate:
        """The rate of experts of this instruction set and format, of the nearest shape.

        Args:
            isa: "auto" = the best.
            fmt: as ModelDims.expert_format or the engine call it ("fp8_block" is "fp8").
            hidden, inter: H and I; 0 = any.
            products: "int8" = W8A8, "any" = whatever the engine multiplies this format in by itself.

        Returns:
            The exact one, or that of bf16 on the same instruction set, or of the nearest instruction set
            below, with a source that says so.

        Raises:
            KeyError: there are no rates of experts at all, or none of W8A8.
        """
        isa = self.isas[-1] if isa == "auto" and self.isas else isa
        fmt = ENGINE_FORMAT.get(fmt, fmt)
        candidates = [e for e in self.experts if (e.products == "int8") == (products == "int8")]
        if not candidates:
            raise KeyError(f"no rates of experts{' in int8 products' if products == 'int8' else ''}")
        exact = [e for e in candidates if (e.isa, e.format) == (isa, fmt)]
        if exact:
            return _nearest(exact, hidden, inter)
        same_isa = [e for e in candidates if e.isa == isa]
        bf16 = [e for e in same_isa if e.format == "bf16"]
        same_format = [e for e in candidates if e.format == fmt]
        near = _nearest(bf16 or same_isa or same_format or candidates, hidden, inter)
        why = f"of {near.isa} {near.format}: {isa} {fmt} is not among these rates"
        curves = {name: getattr(near, name).scaled(1, why) for name in EXPERT_CURVES}
        return replace(near, isa=isa, format=fmt, **curves)

    def cpu_rate(self, threads: int) -> DeviceRate:
        """torch on `threads` threads of one socket: between one thread and all by a power law."""
        one, every = self.cpu_one, self.cpu_all
        if threads <= one.threads or every.threads <= one.threads:
            return one
        if threads >= every.threads:
            return every
        part = math.log(threads / one.threads) / math.log(every.threads / one.threads)

        def between(a: Figure, b: Figure) -> Figure:
            return Figure(a.value ** (1 - part) * b.value**part, f"between {one.name} and {every.name}")

        def curve(a: Curve, b: Curve) -> Curve:
            at = tuple(sorted({*a.at, *b.at}))
            values = tuple(a(x) ** (1 - part) * b(x) ** part for x in at)
            return Curve(at, values, f"between {one.name} and {every.name}")

        blocks = [f.name for f in fields(BlockRate)]
        return DeviceRate(
            name=f"cpu, {threads} threads",
            threads=threads,
            gemm={name: curve(one.gemm[name], every.gemm.get(name, one.gemm[name])) for name in one.gemm},
            memory=between(one.memory, every.memory),
            sdpa=between(one.sdpa, every.sdpa),
            softmax=between(one.softmax, every.softmax),
            operation=between(one.operation, every.operation),
            blocks=BlockRate(*(between(getattr(one.block, n), getattr(every.block, n)) for n in blocks)),
        )


def _nearest(rates: Sequence[ExpertRate], hidden: int, inter: int) -> ExpertRate:
    """The one whose H and I are nearest in ratio; the first where none is asked for."""
    if not hidden or not inter:
        return rates[0]

    def distance(rate: ExpertRate) -> float:
        return abs(math.log(rate.hidden / hidden)) + abs(math.log(rate.inter / inter))

    return min(rates, key=distance)
