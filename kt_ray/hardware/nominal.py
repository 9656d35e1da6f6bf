"""Rates of hardware that nobody measured: from a few figures per machine, each with its source.

A hardware file gives these figures in its section `rates` (name: {value, source}); what it leaves out is
assumed here from the instruction set, the cores and the GPU's name. Every assumption says that it is one.

Experts: a pass over an expert's weights costs one core `pass_*` cycles per weight (reading, decoding,
feeding the products), r rows cost it 6 · H · I · r FLOP at part `*_forward` / `*_backward` of the peak. The
root of the sum of their squares holds: decoding overlaps the products, but not quite where the two are alike
(Zen4: 0.57 cycles per weight at 1 row, 1.76 at 48, where the parts are 0.55 and 1.72). All cores together
are limited by the socket's memory: no pass is faster than the weights' bytes at `dram`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kt_ray.errors import UserError
from kt_ray.hardware.machine import Gpu, Hardware
from kt_ray.hardware.parts import ASSUMED, GpuSheet, gpu_named
from kt_ray.hardware.rates import (
    CAUSAL,
    ROWS,
    Curve,
    DeviceRate,
    ExpertRate,
    Figure,
    LinkRate,
    MemoryRate,
    Rates,
    TransportRate,
    constant,
)

ZEN4 = "measured on Zen4 (docs/performance.md)"
XEON = (
    "measured on 16 virtual cores of a Xeon, 334 and 291 GFLOP/s each at 384 rows, before the last changes "
    "(benchmarks/results/amx_engine_xeon16.json)"
)

# FLOP per cycle and core of the products, and why.
_PER_CYCLE: dict[str, tuple[float, str]] = {
    "reference_f32": (1, "assumed"),
    "avx2_f32": (32, "two 256-bit FMA per cycle"),
    "avx512_f32": (32, "one 512-bit FMA per cycle, as Zen4 and single-FMA Xeons"),
    "avx512_bf16_bf16": (64, "one vdpbf16ps per cycle"),
    "avx512_bf16_f32": (32, "as avx512"),
    "amx_bf16": (1024, "Intel's optimisation manual: TDPBF16PS, 16,384 FLOP every 16 cycles"),
    "amx_f32": (32, "as avx512"),
}
# Part of the peak that forward and backward reach with LoRA of rank 8 at ample rows.
_EFFICIENCY: dict[str, tuple[float, float, str]] = {
    "reference": (1.0, 1.0, "assumed"),
    "avx2": (0.82, 0.76, ZEN4),
    "avx512": (0.85, 0.83, ZEN4),
    "avx512_bf16": (0.89, 0.84, ZEN4),
    "amx": (0.16, 0.14, XEON),
}
# Time without LoRA as a part of the time with rank 8.
_PLAIN = (0.95, 0.90)

# Bytes per weight with scales, of the formats that plans meet.
FORMAT_BYTES = {
    "bf16": 2.0,
    "f32": 4.0,
    "fp8": 1.0 + 4 / 128**2,
    "int8": 1.0 + 4 / 2048,
    "int4": 0.5 + 2 / 32,
    "uint4": 0.5 + 4 / 128,
    "mxfp4": 0.5 + 1 / 32,
    "nvfp4": 18 / 32,
    "q8_0": 34 / 32,
    "q6_k": 210 / 256,
    "q5_k": 176 / 256,
    "q4_k": 144 / 256,
    "q5_0": 22 / 32,
    "q5_1": 24 / 32,
    "q4_0": 18 / 32,
}

_MASKED = (
    "part of the peak of the memory-efficient kernel, which takes a mask. Published of xformers' beside "
    "FlashAttention-2's 53 and 52 TFLOP/s: 43 and 27 at width 64; beside 50 and 43: 31 and 12 at width 128 "
    "(Dao-AILab/flash-attention issue 416; the card is not named)"
)
_UNKNOWN_GPU = GpuSheet(
    *(0, 100e12, 900e9, 20e9, 200e12),
    ASSUMED,
)

_HIDDEN, _INTER, _RANK = 7168, 2048, 8  # DeepSeek-V3's experts


def defaults(hardware: Hardware) -> dict[str, Figure]:
    """Every figure of the model above as assumed for `hardware`. The names a hardware file may set."""
    isa = hardware.best_isa
    cores = max(1, hardware.sockets[0].cores)
    clock, clock_why = (2.0e9, "assumed: sustained under AMX") if isa == "amx" else (2.5e9, "assumed")
    figures: dict[str, Figure] = {"clock": Figure(clock, f"{clock_why} on all cores")}
    for name, (per_cycle, why) in _PER_CYCLE.items():
        figures[f"{name}_per_cycle"] = Figure(per_cycle, why)
    for name, (forward, backward, why) in _EFFICIENCY.items():
        figures[f"{name}_forward"] = Figure(forward, why)
        figures[f"{name}_backward"] = Figure(backward, why)
    one = 12e9
    # Of what the part's data sheet or the file says.
    every = dict(hardware.rates).get("dram", Figure(min(12e9 * cores, 200e9), "")).value
    figures |= {
        "pass_forward": Figure(0.55, f"cycles per weight at one row, {ZEN4}"),
        "pass_backward": Figure(0.70, f"cycles per weight at one row, {ZEN4}"),
        # Rates over the instruction set's own products.
        "int8_products": Figure(1.5, f"W8A8 on avx512_bf16, {ZEN4}"),
        "int4_products": Figure(1.3, f"W4A8 on avx512_bf16, {ZEN4}"),
        "dram": Figure(min(12e9 * cores, 200e9), "assumed: 12 GB/s per core, at most 200 GB/s per socket"),
        "dram_one": Figure(one, "assumed"),
        "copy": Figure(0.4 * every, "assumed: 0.4 of reading"),
        "copy_one": Figure(0.4 * one, "assumed: 0.4 of reading"),
        "fresh": Figure(2e9, "assumed"),
        "torch": Figure(0.6, "assumed: part of the vector or tile peak that torch's matrix products reach"),
        "torch_operation": Figure(1.5e-6, "assumed: seconds of a small torch operation on a CPU"),
        "call": Figure(0.7e-3, "assumed: seconds of a small Ray message"),
        "arena": Figure(0.2e-3, "measured on Zen4, other work beside it (docs/decisions/012-doorbell.md)"),
        "ray_bytes": Figure(1e9, "assumed"),
        "local": Figure(50e-6, "assumed"),
        "network": Figure(1.25e9 * 0.9, "assumed: 10 Gbit/s, 90 % of it"),
        "network_latency": Figure(100e-6, "assumed"),
        "disk": Figure(2e9, "assumed"),
    }
    if hardware.gpus:
        figures |= _gpu_defaults(slowest(hardware.gpus).name)
    return figures


def slowest(gpus: Sequence[Gpu]) -> Gpu:
    """The card that all are taken for: the one of least FLOP/s, then of least PCIe."""

    def speed(gpu: Gpu) -> tuple[float, float, str]:
        sheet = gpu_named(gpu.name) or _UNKNOWN_GPU
        return sheet.flops, sheet.pcie, gpu.name

    return min(gpus, key=speed)


def _gpu_defaults(name: str) -> dict[str, Figure]:
    known = gpu_named(name)
    _, flops, memory, pcie, float8, reached = known or _UNKNOWN_GPU
    source = f"data sheet of {name}" if known else "assumed: an unknown GPU"
    more = {}
    if float8:
        more["gpu_float8"] = Figure(float8, f"{source}: dense FP8, float32 sums")
        more["gpu_float8_gemm"] = Figure(0.7, "assumed: part of the FP8 peak that large products reach")
    return more | {
        "gpu_bf16": Figure(flops, f"{source}: dense bf16"),
        "gpu_gemm": Figure(reached.gemm, reached.gemm_source),
        "gpu_flash": Figure(reached.flash, reached.flash_source),
        "gpu_flash_backward": Figure(reached.flash_backward, reached.flash_source),
        "gpu_masked": Figure(0.4, f"assumed: {_MASKED}"),
        "gpu_masked_backward": Figure(0.2, f"assumed: {_MASKED}"),
        "gpu_memory": Figure(0.8 * memory, f"{source}: memory, 80 % of it"),
        "gpu_operation": Figure(9.7e-6, "measured on an H100 in a virtual machine: a launch from Python"),
        "pcie": Figure(pcie, f"{source}: PCIe, as usually reached with page-locked memory"),
        "pcie_pageable": Figure(0.4 * pcie, "assumed: 0.4 of page-locked"),
    }


def described(data: Any, hardware: Hardware, file: str) -> tuple[tuple[str, Figure], ...]:
    """The section `rates` of a hardware file, checked.

    Raises:
        UserError: no mapping, an unknown name, a value that is no number above 0 or of another unit, or no
            source.
    """
    known, section = defaults(hardware), "in the hardware file"
    if data is None:
        return ()
    if not isinstance(data, Mapping):
        required = "name: {value: NUMBER, source: TEXT}"
        raise file_fault(file, f"rates is no mapping {section}", data, required)
    figures: list[tuple[str, Figure]] = []
    for name, entry in data.items():
        if name not in known:
            near = "" if not str(name).startswith(("gpu", "pcie")) or hardware.gpus else " (no GPU is listed)"
            raise file_fault(file, f"rates.{name} is unknown{near} {section}", name, ", ".join(known))
        if not isinstance(entry, Mapping) or set(entry) != {"value", "source"}:
            required = "{value: NUMBER, source: TEXT}"
            raise file_fault(file, f"rates.{name} is no figure {section}", entry, required)
        value, source = entry["value"], entry["source"]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            what = f"rates.{name}.value is no number above 0 {section}"
            raise file_fault(file, what, value, "a number, as 2.5e+9")
        least, most, unit = _range_of(str(name))
        if not least <= value <= most:
            raise file_fault(file, f"rates.{name}.value is of another unit {section}", value, unit)
        if not isinstance(source, str) or not source.strip():
            what = f"rates.{name}.source is empty {section}"
            raise file_fault(file, what, source, "where the value comes from")
        figures.append((str(name), Figure(float(value), source)))
    return tuple(figures)


_SECONDS = ("torch_operation", "gpu_operation", "call", "arena", "local", "network_latency")
_PARTS = ("forward", "backward", "gemm", "flash", "masked", "torch")  # last words of names


def _range_of(name: str) -> tuple[float, float, str]:
    """The least and the most that a figure can be, whatever the hardware, and what it should be."""
    if name in _SECONDS:
        return 0.0, 0.1, "seconds, at most 0.1"
    if name.startswith("pass_") or name.endswith(("_per_cycle", "_products")):
        return 0.0, math.inf, ""
    if name.rpartition("_")[2] in _PARTS:
        return 0.0, 2.0, "a part of the peak, as 0.85 for 85 %"
    return 1e6, math.inf, "what it is per second, as 25.0e+9 for 25 GB/s"


def nominal_rates(hardware: Hardware) -> Rates:
    """Rates of `hardware` from its file's figures, and assumptions for the rest."""
    figures = {**defaults(hardware), **dict(hardware.rates)}
    socket = hardware.sockets[0]
    isas = hardware.isas or ("reference",)
    experts = []
    for isa in reversed(isas):
        experts += [_expert(figures, isa, fmt, socket.cores) for fmt in FORMAT_BYTES]
        experts += [_expert(figures, isa, fmt, socket.cores, int8=True) for fmt in ("int8", "int4")]
    given = "described" if hardware.rates else "nominal"
    gpu = _gpu(figures, slowest(hardware.gpus).name) if hardware.gpus else None
    pcie, pageable = figures.get("pcie"), figures.get("pcie_pageable")
    return Rates(
        source=f"{given}: {hardware.source}",
        cpu=hardware.source,
        cores=sum(s.cores for s in hardware.on(0)),
        isas=isas,
        experts=tuple(experts),
        memory=MemoryRate(
            read_one=figures["dram_one"],
            read_all=figures["dram"],
            copy_one=figures["copy_one"],
            copy_all=figures["copy"],
            fresh=figures["fresh"],
        ),
        cpu_one=_cpu(figures, isas[-1], 1),
        cpu_all=_cpu(figures, isas[-1], socket.cores),
        gpu=gpu,
        link=LinkRate(pcie, pcie, pageable, pageable) if pcie and pageable else None,
        transport=TransportRate(
            call=figures["call"],
            arena=figures["arena"],
            arena_bytes=figures["copy_one"],
            ray_bytes=figures["ray_bytes"],
            local=figures["local"],
            network_bytes=figures["network"],
            network_latency=figures["network_latency"],
        ),
        optimizer=figures["dram"].scaled(1 / 28, "28 bytes per parameter: weight, gradient and two moments"),
        disk=figures["disk"],
    )


def peak(figures: Mapping[str, Figure], isa: str, products: str) -> Figure:
    """FLOP/s of one core multiplying in `products` on `isa`."""
    per_cycle = figures[f"{isa}_{products}_per_cycle"]
    clock = figures["clock"]
    return Figure(per_cycle.value * clock.value, f"{per_cycle.source}; clock {clock.source}")


def _expert(figures: Mapping[str, Figure], isa: str, fmt: str, cores: int, int8: bool = False) -> ExpertRate:
    products = "bf16" if isa in ("avx512_bf16", "amx") and fmt != "f32" else "f32"
    top = peak(figures, isa, products)
    base = "avx512" if isa in ("avx512_bf16", "amx") and products == "f32" else isa
    boost = figures[f"{fmt}_products"].value if int8 else 1.0
    clock, dram = figures["clock"].value, figures["dram"]
    curves: dict[str, Curve] = {}
    for direction in ("forward", "backward"):
        part = figures[f"{base}_{direction}"]
        row = 2 / (top.value * boost * part.value)  # seconds per weight and row on one core
        least = figures[f"pass_{direction}"].value / clock
        one = [math.hypot(least, rows * row) for rows in ROWS]
        every = [max(t / cores, FORMAT_BYTES[fmt] / dram.value) for t in one]
        why = f"peak {top.source}; part of it {part.source}; memory {dram.source}"
        at = tuple(float(rows) for rows in ROWS)
        curves[direction] = Curve(at, tuple(2 * r / t for r, t in zip(ROWS, one, strict=True)), why)
        curves[f"{direction}_all"] = Curve(
            at, tuple(2 * r / t for r, t in zip(ROWS, every, strict=True)), why
        )
    return ExpertRate(
        isa=isa,
        format=fmt,
        products="int8" if int8 else products,
        hidden=_HIDDEN,
        inter=_INTER,
        rank=_RANK,
        threads=cores,
        **curves,
        plain_forward=Figure(_PLAIN[0], "as the part of the peak"),
        plain_backward=Figure(_PLAIN[1], "as the part of the peak"),
    )


def _cpu(figures: Mapping[str, Figure], isa: str, threads: int) -> DeviceRate:
    part = figures["torch"]
    wide = "avx512" if isa.startswith(("avx512", "amx")) else isa
    f32 = peak(figures, wide, "f32").scaled(part.value * threads, part.source)
    bf16 = peak(figures, isa, "bf16") if isa in ("avx512_bf16", "amx") else peak(figures, wide, "f32")
    bf16 = bf16.scaled(part.value * threads * (1 if isa != "amx" else 0.5), part.source)
    memory = figures["copy"] if threads > 1 else figures["copy_one"]
    return DeviceRate(
        name=f"cpu, {threads} thread{'s' if threads > 1 else ''}",
        threads=threads,
        gemm={"bfloat16": constant(bf16.value, bf16.source), "float32": constant(f32.value, f32.source)},
        memory=memory.scaled(2, "read and written"),
        sdpa=f32.scaled(0.5, "assumed: half of float32 matrix products"),
        softmax=Figure(0.1e9 * threads, "assumed: logits per second and thread"),
        operation=figures["torch_operation"],
    )


def _gpu(figures: Mapping[str, Figure], name: str) -> DeviceRate:
    top, part = figures["gpu_bf16"], figures["gpu_gemm"]
    gemm = top.scaled(part.value, part.source)
    float8 = {}
    if "gpu_float8" in figures:
        part = figures["gpu_float8_gemm"]
        reached = figures["gpu_float8"].scaled(part.value, part.source)
        float8["float8"] = constant(reached.value, reached.source)

    def attention(name: str, factor: float, why: str) -> Figure:
        return top.scaled(figures[name].value * factor, f"{figures[name].source}; {why}")

    seen = "all pairs counted, half of them seen"
    five = "five products for the forward's two"
    rate = DeviceRate(
        name=name,
        threads=0,
        gemm={
            "bfloat16": constant(gemm.value, gemm.source),
            "float32": constant(gemm.value / 4, f"{gemm.source}; assumed: float32 at a quarter"),
            **float8,
        },
        memory=figures["gpu_memory"],
        sdpa=attention("gpu_flash", CAUSAL, seen),
        softmax=Figure(figures["gpu_memory"].value / 24, "six passes of float32 per logit over GPU memory"),
        operation=figures["gpu_operation"],
    )
    blocks = replace(
        rate.block,
        sdpa_backward=attention("gpu_flash_backward", CAUSAL / 2.5, f"{seen}; {five}"),
        unequal=gemm,
        unequal_backward=gemm.scaled(1 / 2, "four products for the forward's two"),
        masked=attention("gpu_masked", 1.0, "all pairs computed"),
        masked_backward=attention("gpu_masked_backward", 1 / 2.5, f"all pairs computed; {five}"),
    )
    return replace(rate, blocks=blocks)


def file_fault(file: object, what: str, observed: object, required: object) -> UserError:
    """What is wrong with a hardware file."""
    remedy = "see conf/hardware/ for examples, or set plan.hardware=wizard"
    return UserError(what, where=str(file), observed=observed, required=required, remedy=remedy)
