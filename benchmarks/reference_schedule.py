#!/usr/bin/env python
"""The reference system's step on paper: KTransformers' schedule in terms, beside its published step times.

    python benchmarks/reference_schedule.py model=deepseek_v3 plan.hardware=2x4090_2x8488c \\
        data.max_length=512 trainer.batch_size=16 trainer.micro_batch_size=1 --json out.json

Takes the overrides of `mode=plan`; nothing is measured. KTransformers' technical notes and kt-kernel 0.7.2
describe the schedule. Micro-batches pass all layers one after another, so each of them reads the weights of
every expert it touches, forward and backward. GPUs take turns (model parallelism). A GPU waits for each
layer's experts; only the shared expert runs beside them. Copies are pageable, layers are recomputed on the
GPU. Experts are INT8, with W and its transpose in memory. Nothing overlaps, so the terms add up. What they do
not explain of a published step stays "overhead, not explained".

Legend: T tokens per step, H hidden, I intermediate, K experts per token, L MoE layers, B micro-batches.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kt_ray.config.compose import compose
from kt_ray.config.schema import Config
from kt_ray.dims.model_dims import ModelDims
from kt_ray.hardware.describe import hardware_for
from kt_ray.hardware.machine import Hardware
from kt_ray.hardware.nominal import FORMAT_BYTES, defaults, peak
from kt_ray.hardware.rate_files import rates_for
from kt_ray.hardware.rates import ENGINE_FORMAT, Rates
from kt_ray.modes.plan import model_dims
from kt_ray.placement.lora_sizes import expert_lora_params

NOTES = "KTransformers' developer technical notes, speed tests"
UNEXPLAINED = "overhead, not explained"

# Published MoE rates, all cores of two Xeon 8488C, DeepSeek-V3, counted as 6 and 10 times H * I per slot.
_TFLOPS = {"forward": 17.55e12, "backward": 18.41e12}
_COUNTED = {"forward": 6, "backward": 10}
_CORES = 96

# kt-kernel 0.7.2 on two Zen4 cores (469 GFLOP/s peak), DeepSeek-V2-Lite's layer, 512 tokens, 6 * H * I per
# slot each way: part of the peak. The step's 512-token micro-batches have fewer rows per expert.
_OF_PEAK = {
    "bf16": (234 / 469, 182 / 469),
    "int8": (146 / 469, 124 / 469),
    "fp8": (97 / 469, 87 / 469),
    "mxfp4": (65 / 235, 41 / 235),
}
_ZEN4 = "kt-kernel 0.7.2 measured on Zen4, its part of the bf16 peak"


class ReferenceTerm(NamedTuple):
    """One kind of work of a step.

    seconds: on paper. source: of count and rate. counted: part of the sum; False = it may or may not have
    been part of the published run, and stands beside the sum.
    """

    name: str
    seconds: float
    source: str
    counted: bool = True


@dataclass(frozen=True)
class Published:
    """A published step.

    Attributes:
        setting: model, tokens and machine in words. tokens: per step; 0 = not published.
        micro: tokens per micro-batch. tokens_per_s: as published, the best where several are.
        experts: routed experts per layer; hidden: H; moe_layers: L; cores, gpu, gpus: of the machine, all
            sockets' cores, part of the GPU's name and how many: what a plan must have for the step to be its
            counterpart. format: of the experts.
        source: where it was published.
    """

    setting: str
    tokens: int
    micro: int
    tokens_per_s: float
    experts: int
    hidden: int
    moe_layers: int
    cores: int
    gpu: str
    gpus: int
    format: str
    source: str

    @property
    def seconds(self) -> float:
        """Of a step; 0 where the tokens of a step are not published."""
        return self.tokens / self.tokens_per_s if self.tokens else 0.0


PUBLISHED = (
    Published(
        "DeepSeek-V3, 16 x 512 tokens, 2 x RTX 4090 48 GB, 2 x Xeon 8488C",
        *(8192, 512, 40.35, 256, 7168, 58, 96, "4090", 2, "int8"),
        f"{NOTES}: 203 s per step; INT8 with W and its transpose inferred from 1.2-1.3 TB of host memory",
    ),
    Published(
        "DeepSeek-V2-Lite, 16 x 512 tokens, the same machine",
        *(8192, 512, 227.6, 64, 2048, 26, 96, "4090", 2, "int8"),
        f"{NOTES}: 36 s per step (530 token/s in another, undescribed setting)",
    ),
    Published(
        "DeepSeek-V3.1 in FP8, 8 x RTX 5090, 2 x EPYC 9355",
        *(0, 512, 136.0, 256, 7168, 58, 64, "5090", 8, "fp8"),
        "published figures: 62 before, 136 token/s after its optimisation; tokens per step not given",
    ),
)


def published_for(dims: ModelDims, hardware: Hardware) -> Published | None:
    """The published step of this model on such a machine; None = there is none."""
    cores, gpus = sum(socket.cores for socket in hardware.on(0)), hardware.gpus
    for step in PUBLISHED:
        shape = (step.experts, step.hidden, step.moe_layers)
        same_model = shape == (dims.num_experts, dims.hidden_size, len(dims.moe_layers))
        same_gpus = len(gpus) == step.gpus and all(step.gpu in gpu.name for gpu in gpus)
        if same_model and same_gpus and cores == step.cores:
            return step
    return None


def reference_terms(dims: ModelDims, config: Config, hardware: Hardware, rates: Rates) -> list[ReferenceTerm]:
    """The terms of a step of this model under the reference's schedule, the published rest last.

    Tokens per step and micro-batch are the published ones where this model and machine have a published
    step, else the configuration's. The last term is UNEXPLAINED where there is a published step time.

    Args:
        rates: of memory, GPU, link and optimizer; the experts' rates are the reference's own.
    """
    step = published_for(dims, hardware)
    tokens = config.trainer.batch_size * config.data.max_length
    micro = config.micro_batch_rows(1) * config.data.max_length
    if step is not None:
        tokens, micro = step.tokens or tokens, step.micro
    micro = min(micro, tokens)
    counts = math.ceil(tokens / micro)
    isa = hardware.isas[-1] if hardware.isas else "reference"
    fmt = step.format if step else "int8" if isa == "amx" else ENGINE_FORMAT.get(dims.expert_format, "bf16")
    work = _Work(dims, hardware, rates, tokens, micro, counts, fmt if fmt in _OF_PEAK else "bf16", isa)
    terms = [work.experts("forward"), work.experts("backward"), work.copies(), work.host_copies()]
    terms += work.attention()
    if config.lora.experts:
        adapters = expert_lora_params(dims, config.lora) * dims.num_experts * len(dims.moe_layers)
        seconds = adapters / (rates.optimizer.value * len(hardware.on(0)))
        terms.append(ReferenceTerm("optimizer", seconds, f"AdamW on experts' LoRA: {rates.optimizer.source}"))
    if step is not None and step.tokens:
        rest = step.seconds - sum(term.seconds for term in terms)
        terms.append(ReferenceTerm(UNEXPLAINED, rest, f"{step.seconds:.0f} s published less the terms above"))
    return [*terms, work.again(), work.transposing()]


def reference_seconds(terms: list[ReferenceTerm]) -> float:
    """Seconds of a step: the counted terms."""
    return sum(term.seconds for term in terms if term.counted)


def reference_table(
    dims: ModelDims, config: Config, hardware: Hardware, rates: Rates
) -> tuple[str, list[tuple[str, str, str]], list[str]]:
    """Title, rows (term, seconds, source) and notes."""
    step, terms = published_for(dims, hardware), reference_terms(dims, config, hardware, rates)
    tokens = (step.tokens if step else 0) or config.trainer.batch_size * config.data.max_length
    total = reference_seconds(terms)
    rows = [(t.name, f"{t.seconds:.1f}", t.source) for t in terms if t.counted]
    rows.append(("step", f"{total:.1f}", f"{tokens:,} tokens: {tokens / total:.1f} tokens/s"))
    notes = [
        f"not in the sum, since nothing published says that it was done: {t.name}, {t.seconds:.1f} s "
        f"({t.source})"
        for t in terms
        if not t.counted
    ]
    if step is None:
        notes.insert(
            0, "no step time is published for this model on such a machine: the sum is a lower bound"
        )
    elif not step.tokens:
        notes.insert(0, f"published: {step.tokens_per_s:g} token/s ({step.setting}; {step.source})")
    else:
        notes.insert(0, f"published: {step.setting}; {step.source}")
    return "The reference system's schedule (KTransformers), on paper", rows, notes


@dataclass(frozen=True)
class _Work:
    dims: ModelDims
    hardware: Hardware
    rates: Rates
    tokens: int
    micro: int
    counts: int  # micro-batches
    fmt: str
    isa: str

    @property
    def _layers(self) -> int:
        return len(self.dims.moe_layers)

    @property
    def _memory(self) -> float:
        """Bytes/s of all sockets: experts are sharded over them."""
        return self.rates.memory.read_all.value * len(self.hardware.on(0))

    @property
    def _touched(self) -> float:
        """Bytes of experts that one micro-batch touches, all layers; even routing."""
        dims = self.dims
        missed = (1 - dims.experts_per_token / dims.num_experts) ** self.micro
        return dims.routed_params * (1 - missed) * FORMAT_BYTES[self.fmt]

    def _products(self, direction: str) -> tuple[float, str]:
        """Seconds of the reference's own kernels, and the source of their rate."""
        dims = self.dims
        slots = self.tokens * dims.experts_per_token * self._layers * dims.expert_width
        slots *= dims.expert_intermediate
        cores = sum(socket.cores for socket in self.hardware.on(0))
        if self.isa == "amx":
            rate = _TFLOPS[direction] * cores / _CORES
            of = "" if cores == _CORES else f", {cores} of {_CORES} cores"
            source = f"published {_TFLOPS[direction] / 1e12:.2f} TFLOPS ({NOTES}){of}"
            return slots * _COUNTED[direction] / rate, source
        part = _OF_PEAK[self.fmt][0 if direction == "forward" else 1]
        figures = {**defaults(self.hardware), **dict(self.hardware.rates)}
        isa = "avx512_bf16" if self.isa == "avx512_bf16" else self.isa
        top = peak(figures, isa, "bf16" if isa == "avx512_bf16" else "f32")
        return 6 * slots / (top.value * cores * part), f"{_ZEN4}, {100 * part:.0f} %; peak {top.source}"

    def experts(self, direction: str) -> ReferenceTerm:
        """The larger of its kernels' own time and reading the weights once per micro-batch."""
        products, source = self._products(direction)
        reading = self.counts * self._touched / self._memory
        name = f"experts, {direction}"
        what = "W" if direction == "forward" else "its transpose"
        traffic = f"{self.counts} passes over {self._touched / 1e9:,.0f} GB of {self.fmt} ({what})"
        if reading > products:
            source = f"{traffic} at memory's rate ({self.rates.memory.read_all.source})"
            return ReferenceTerm(name, reading, f"{source}; its products alone {products:.1f} s")
        return ReferenceTerm(name, products, f"{source}; {traffic} alone {reading:.1f} s")

    def _crossing(self) -> float:
        """Bytes between GPU and host: x, y, dy and dx in bf16, every MoE layer."""
        return 4 * self.tokens * self.dims.expert_width * 2 * self._layers

    def copies(self) -> ReferenceTerm:
        link = self.rates.link
        name = "copies between GPU and host"
        if link is None:
            return ReferenceTerm(name, 0.0, "no GPU")
        half = self._crossing() / 2
        seconds = half / link.to_host_pageable.value + half / link.to_device_pageable.value
        return ReferenceTerm(name, seconds, f"x, y, dy, dx in bf16; pageable: {link.to_host_pageable.source}")

    def host_copies(self) -> ReferenceTerm:
        """Into and out of the engine's buffers, by one thread of rank 0."""
        copy = self.rates.memory.copy_one
        return ReferenceTerm(
            "copies on the host", self._crossing() / copy.value, f"the same bytes once more: {copy.source}"
        )

    def attention(self) -> list[ReferenceTerm]:
        """GPU work, one GPU after the other; the shared expert's first pass runs beside the experts."""
        gpu = self.rates.gpu or self.rates.cpu_all
        rate = gpu.gemm["bfloat16"](self.micro)
        dims = self.dims
        params = sum(dims.attention_params) + sum(dims.dense_params)
        beside = sum(dims.dense_params[layer] for layer in dims.moe_layers)
        linear = 2 * self.tokens * params / rate
        hidden = 2 * self.tokens * beside / rate
        rows = self.tokens / self.micro
        scores = sum(dims.attention_flops(layer, 1, self.micro) for layer in range(dims.num_layers))
        pairs, back = (rows * scores / rate.value for rate in (gpu.sdpa, gpu.block.sdpa_backward))
        head = 2 * 2 * self.tokens * dims.embedding_params / rate
        source = f"2 FLOP per parameter and token: {gpu.gemm['bfloat16'].source}"
        return [
            ReferenceTerm("attention, forward", linear - hidden + pairs, source),
            ReferenceTerm("attention, recomputed", linear + pairs, source),
            ReferenceTerm("attention, backward", linear + back, source),
            ReferenceTerm("head and loss", head, source),
        ]

    def again(self) -> ReferenceTerm:
        """Experts' forward a second time, where gradient checkpointing reruns the whole layer."""
        seconds = self.experts("forward").seconds
        return ReferenceTerm(
            "experts' forward once more", seconds, "gradient checkpointing of whole layers", counted=False
        )

    def transposing(self) -> ReferenceTerm:
        """Reading W and writing its transpose before every backward, as kt-kernel 0.7.2 does."""
        seconds = self.counts * 2 * self.dims.routed_params * FORMAT_BYTES[self.fmt] / self._memory
        why = "kt-kernel 0.7.2 repacks instead of keeping the transpose: read and written once per backward"
        return ReferenceTerm("repacking the transpose", seconds, why, counted=False)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", help="model, hardware, batch: as for mode=plan")
    parser.add_argument("--json", metavar="FILE", help="write the terms here")
    args = parser.parse_args(argv)
    config = compose(["mode=plan", *args.overrides])
    hardware = hardware_for(config)
    setting = (model_dims(config.model), config, hardware, rates_for(config, hardware))
    show(*reference_table(*setting))
    if args.json:
        from common import machine, write_json

        write_json(args.json, [term._asdict() for term in reference_terms(*setting)], machine())
    return 0


def show(title: str, rows: Sequence[tuple[str, str, str]], notes: Sequence[str]) -> None:
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160, highlight=False)
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, title_justify="left")
    table.add_column("term")
    table.add_column("seconds", justify="right")
    table.add_column("source")
    for name, seconds, source in rows[:-1]:
        table.add_row(escape(name), seconds, escape(source))
    table.add_section()
    table.add_row(*rows[-1], style="bold")
    console.print(table)
    for note in notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
