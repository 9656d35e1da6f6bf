"""The second half of mode=doctor: how fast this machine is, measured and stored for mode=plan."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from kt_ray.config.schema import Config
from kt_ray.demo import resolve_model_dir
from kt_ray.dims.config_json import dims_from_dir
from kt_ray.dims.model_dims import ModelDims
from kt_ray.errors import UserError
from kt_ray.hardware.describe import cache_bytes, cpu_name, memory_free
from kt_ray.hardware.machine import Hardware
from kt_ray.hardware.nominal import nominal_rates, slowest
from kt_ray.hardware.rate_files import mismatch, of_card, rates_path, read_rates, storing, write_rates
from kt_ray.hardware.rates import (
    ENGINE_FORMAT,
    EXPERT_CURVES,
    ROWS,
    ExpertRate,
    Figure,
    LayerRate,
    Rates,
)
from kt_ray.placement.plan import make_plan
from kt_ray.runs.environment import environment
from kt_ray.timing.layer_rates import merged
from kt_ray.timing.layer_work import layer_works

Say = Callable[[str], None]
MAIN_FORMATS = ("bf16", "fp8", "int8", "int4", "mxfp4", "f32")
OWN_FORMATS = (*MAIN_FORMATS, "nvfp4", "uint4")  # measured in the model's own shape, if it has them
GGUF_FORMATS = ("q8_0", "q6_k", "q4_k", "q4_0")
FEW_ROWS = (1, 16, 256)
WIDTHS = (16, 64, 256, 1024)  # positions of a row at which a model's layers are measured
MEMORY_BYTES, OPTIMIZER_PARAMETERS = 256 << 20, 1 << 22  # at least
OPTIMIZER_BYTES = 16  # of a parameter: value, gradient, two moments
BUDGET = 150.0  # seconds after which the remaining formats are not measured
DISTURBED = 0.1  # CPUs that others may use before the figures are called disturbed


def measure_rates(config: Config, hardware: Hardware, dims: ModelDims | None, say: Say) -> Rates:
    """Everything that mode=plan divides by, measured on this host.

    On a host of several sockets the first one is measured, by a process bound to it. Figures that
    cannot be taken here (no GPU, cluster=local, no disk to write to) are nominal and say so.

    Args:
        dims: of the configured model; its experts' shape is measured beside the usual one. None = unknown.
        say: told what is being measured.
    """
    allowed = os.sched_getaffinity(0)
    socket = hardware.sockets[0]
    if len(hardware.sockets) > 1 and socket.cpus:
        os.sched_setaffinity(0, socket.cpus)
    try:
        rates = _measure(config, hardware, dims, say)
    finally:
        os.sched_setaffinity(0, allowed)
    about = environment()
    return dataclasses.replace(
        rates,
        source=f"measured on {cpu_name()}",
        date=str(about["time"]),
        commit=str(about["git_commit"] or about["packages"].get("kt_ray") or ""),
    )


def _place(config: Config, hardware: Hardware) -> Path:
    return rates_path(hardware) if config.plan.rates == "auto" else Path(config.plan.rates)


def require_place(config: Config, hardware: Hardware) -> None:
    """Refuse, before minutes of measuring, a place that the rates cannot be written to.

    Raises:
        UserError: the file's directory cannot be made or written.
    """
    path = _place(config, hardware)
    probe = path.with_name(f".{path.name}.{os.getpid()}.probe")
    with storing(path):
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()


def store(config: Config, hardware: Hardware, rates: Rates) -> Path:
    """Write `rates` to plan.rates, or to this host's file in the user's cache, and say where.

    Shapes of experts that an earlier measurement of this host has besides are kept.

    Raises:
        UserError: the file cannot be written.
    """
    path = _place(config, hardware)
    if os.path.isfile(path):
        try:
            old = read_rates(path)
        except UserError:  # of another version, or damaged: replaced
            old = None
        if old is not None and mismatch(old, hardware) is None:
            new = {_key(e) for e in rates.experts}
            kept = [e for e in old.experts if _key(e) not in new and _is_measured(e)]
            same = old.gpu is not None and of_card(rates, old.gpu.name)
            layers = merged(rates.layers, [layer for layer in old.layers if layer.threads or same])
            rates = dataclasses.replace(rates, experts=(*rates.experts, *kept), layers=layers)
    write_rates(rates, path)
    return path


def _key(rate: ExpertRate) -> tuple[str, str, str, int, int]:
    return rate.isa, rate.format, rate.products, rate.hidden, rate.inter


def _is_measured(rate: ExpertRate) -> bool:
    return rate.forward.source.startswith("measured")


def _measure(config: Config, hardware: Hardware, dims: ModelDims | None, say: Say) -> Rates:
    from kt_ray import measure

    nominal = nominal_rates(hardware)
    cores = hardware.sockets[0].cores
    notes: list[str] = []
    others = _Others()
    say("memory")
    # Weights are in no cache: nor may be what is read here, on CPUs with hundreds of MB of it.
    large = min(4 * cache_bytes(hardware.sockets[0].cpus), memory_free() // 16)
    memory = measure.measure_memory(cores, max(MEMORY_BYTES, large))
    say("torch on the CPU: one thread, then all of a socket's")
    hidden = dims.hidden_size if dims and 1024 <= dims.hidden_size <= 8192 else 2048
    one = measure.measure_cpu(1, hidden)
    every = measure.measure_cpu(cores, hidden) if cores > 1 else one
    optimizer = measure.measure_optimizer(cores, max(OPTIMIZER_PARAMETERS, large // OPTIMIZER_BYTES))
    say("disk")
    root = Path(config.run.root)
    folder = next(folder for folder in (root, *root.parents) if os.path.exists(folder))
    disk = measure.measure_disk(folder if config.model.path is None else Path(config.model.path))
    if disk is None:
        notes.append("no disk was measured: neither the model's files nor a directory to write to")
    experts = _experts(config, hardware, dims, say, notes)
    layers = _layers(config, hardware, say, notes) if dims else ()
    gpu, link = nominal.gpu, nominal.link
    if hardware.gpus and config.rule.device != "cpu":
        import torch

        say("GPU and its link")
        if torch.cuda.is_available():
            try:
                gpu, link = measure.measure_gpu(torch.device("cuda", slowest(hardware.gpus).index))
            except Exception as error:  # as of Ray below: of a full card, say
                notes.append(_not_measured("the GPU was", error))
        else:
            notes.append("the GPU was not measured: torch finds no CUDA device")
    say("messages")
    arena_bytes = measure.measure_arena()
    messages = {"local": measure.measure_local_message(), "arena_bytes": arena_bytes}
    used = others.cpus()  # before Ray starts, whose processes would count as others
    if used > DISTURBED:
        notes.append(f"other programs used {used:.1f} CPUs while this was measured: rates are too low")
    if config.cluster.name == "ray":
        say("Ray (started for it where none runs)")
        messages |= _ray(config.cluster.address, arena_bytes.value, notes)
    return dataclasses.replace(
        nominal,
        cpu=cpu_name(),
        experts=(*experts, *_nominal_beside(nominal, experts)),
        memory=memory,
        cpu_one=one,
        cpu_all=every,
        gpu=gpu,
        link=link,
        transport=dataclasses.replace(nominal.transport, **messages),
        optimizer=optimizer,
        disk=disk or nominal.disk,
        layers=layers,
        notes=tuple(notes),
    )


def _nominal_beside(nominal: Rates, measured: Sequence[ExpertRate]) -> list[ExpertRate]:
    """Nominal rates of what was not measured, scaled by measured over nominal bf16."""
    known = {(e.isa, e.format, e.products == "int8") for e in measured}
    beside = []
    for rate in nominal.experts:
        if (rate.isa, rate.format, rate.products == "int8") in known:
            continue
        base = [e for e in measured if (e.isa, e.format) == (rate.isa, "bf16")]
        if base:
            other, curves = nominal.expert(rate.isa, "bf16"), {}
            for name in EXPERT_CURVES:
                factor = getattr(base[-1], name).ample / getattr(other, name).ample
                curves[name] = getattr(rate, name).scaled(factor, "scaled as bf16 was measured")
            rate = dataclasses.replace(rate, **curves)
        beside.append(rate)
    return beside


def _experts(
    config: Config, hardware: Hardware, dims: ModelDims | None, say: Say, notes: list[str]
) -> list[ExpertRate]:
    """The model's own shape and the main formats on the instruction set in use, the GGUF ones in short,
    bf16 on the others; what BUDGET leaves no time for is named in `notes`."""
    from kt_ray.measure import ExpertShape, measure_experts
    from kt_ray.native import Engine, available_isas, select_isa
    from kt_ray.native.engine import INTEGER_FORMATS

    socket = hardware.sockets[0]
    # Those of a quota may be any.
    cpus = socket.cpus[: socket.cores if socket.pinned else None] or None
    pinned = socket.pinned
    usual, chosen = ExpertShape(), select_isa(config.rule.experts.isa)[0]
    end, skipped = time.monotonic() + BUDGET, []
    rates: list[ExpertRate] = []

    def measure(engine: Engine, fmt: str, shape: ExpertShape, rows: Sequence[int] = ROWS) -> None:
        what = f"{engine.isa} {fmt}{', int8 products' if engine.int8_products else ''}"
        if time.monotonic() > end and rates:
            skipped.append(what)
            return
        say(f"experts: {what}, {shape.hidden} x {shape.inter}")
        rates.append(measure_experts(engine, fmt, shape, rows, seconds=0.1 if rows == ROWS else 0.05))

    with Engine(chosen, socket.cores, cpus, pinned=pinned) as engine:
        own = (dims.expert_width, dims.expert_intermediate) if dims is not None and dims.gated else None
        if dims is not None and own is not None and own != (usual.hidden, usual.inter):
            fmt = ENGINE_FORMAT.get(dims.expert_format, dims.expert_format)
            measure(engine, fmt if fmt in OWN_FORMATS else "bf16", ExpertShape(*own))
        for fmt in MAIN_FORMATS:
            measure(engine, fmt, usual)
        for fmt in GGUF_FORMATS:
            # K-quants need rows of whole blocks of 256.
            measure(engine, fmt, ExpertShape(2048, 1280) if fmt.endswith("k") else usual, FEW_ROWS)
    with Engine(chosen, socket.cores, cpus, pinned=pinned, int8_products=True) as engine:
        for fmt in INTEGER_FORMATS:
            measure(engine, fmt, usual)
    for isa in available_isas():
        if isa not in (chosen, "reference"):
            with Engine(isa, socket.cores, cpus, pinned=pinned) as engine:
                measure(engine, "bf16", usual, FEW_ROWS[1:])
    if skipped:
        notes.append(f"not measured for want of time: experts of {'; '.join(skipped)}")
    return rates


def _layers(config: Config, hardware: Hardware, say: Say, notes: list[str]) -> tuple[LayerRate, ...]:
    """Rates of the configured model's layers, if its weights are here: with a worker's threads, with one, and
    with all."""
    from kt_ray.actors.specs import stage_specs
    from kt_ray.measure import measure_layers

    try:
        model_dir = os.path.abspath(resolve_model_dir(config.model))
        plan = make_plan(dims_from_dir(model_dir), config, hardware)
        works = layer_works(plan, config)
        threads = sorted({1, plan.workers[0].threads, hardware.sockets[0].cores})
        longest = max(WIDTHS[0], config.data.max_length)
        widths = [*(w for w in WIDTHS if w < longest), min(longest, 4 * WIDTHS[-1])]
        spec = stage_specs(plan, config, model_dir)[0]
        if spec.device != "cpu":
            spec = dataclasses.replace(spec, device=f"cuda:{slowest(hardware.gpus).index}")
        return measure_layers(spec, works, threads, widths, lambda what: say(f"the model's {what}"))
    except Exception as error:  # the other figures are of use without these
        notes.append(_not_measured("the model's own layers were", error))
        return ()


def _ray(address: str, arena_bytes: float, notes: list[str]) -> dict[str, Figure]:
    from kt_ray.actors.ray.ray_probe import measure_ray

    try:
        return measure_ray(address, arena_bytes=arena_bytes)
    except Exception as error:  # the other figures are of use without this one
        notes.append(_not_measured("Ray was", error))
        return {}


def _not_measured(what: str, error: Exception) -> str:
    told = (
        f"{error.what} ({error.where})"
        if isinstance(error, UserError)
        else f"{type(error).__name__}: {error}"
    )
    return f"{what} not measured: {told}"


class _Others:
    """CPU time that other processes used since this object was made."""

    def __init__(self) -> None:
        self._start = self._now()

    @staticmethod
    def _now() -> tuple[float, float]:
        """Time; CPU seconds of all processes but this one and its children."""
        every, own = psutil.cpu_times(), os.times()
        return time.monotonic(), every.user + every.nice + every.system - sum(own[:4])

    def cpus(self) -> float:
        """CPUs used by others, mean since the start."""
        now, start = self._now(), self._start
        return max(0.0, (now[1] - start[1]) / max(1e-9, now[0] - start[0]))


def show(rates: Rates, threads: int) -> list[str]:
    """The figures as lines of text."""
    at = (1, 16, 256)
    lines = [
        f"memory    read {_gb(rates.memory.read_one)} on one thread, {_gb(rates.memory.read_all)} on "
        f"{threads}; copy {_gb(rates.memory.copy_one)}, {_gb(rates.memory.copy_all)}; "
        f"fresh {_gb(rates.memory.fresh)}"
    ]
    for device in (rates.cpu_one, rates.cpu_all, *([rates.gpu] if rates.gpu else [])):
        gemm = ", ".join(f"{name} {_gf(curve.ample)}" for name, curve in device.gemm.items())
        lines.append(
            f"torch     {device.name}: {gemm}, attention {_gf(device.sdpa.value)}; elementwise "
            f"{_gb(device.memory)}, log-softmax {device.softmax.value / 1e6:,.0f} M logits/s, "
            f"small operation {device.operation.value * 1e6:.1f} us"
        )
    for layer in rates.layers:
        took = ", ".join(
            f"{kind} {at / curve(at) * 1e3:,.3g} ms"
            for kind, curve in layer.kinds.items()
            for at in curve.at[-1:]
        )
        on = f"{layer.threads} threads" if layer.threads else "the GPU"
        length = max((curve.at[-1] for curve in layer.kinds.values()), default=0)
        lines.append(f"layers    {layer.name} on {on}, {length:.0f} positions: {took}")
    for rate in rates.experts:
        if not _is_measured(rate):
            continue
        numbers = [
            " ".join(f"{rate.flops(direction, rows, threads) / 1e9:,.3g}" for rows in at)
            for direction in ("forward", "backward")
        ]
        name = f"{rate.format}{' W8A8' if rate.products == 'int8' else ''}"
        lines.append(
            f"experts   {rate.isa} {name}, {rate.hidden} x {rate.inter}: GFLOP/s at "
            f"{', '.join(map(str, at))} rows per expert forward {numbers[0]}, backward {numbers[1]}"
        )
    link, transport = rates.link, rates.transport
    if link is not None:
        lines.append(
            f"PCIe      to the GPU {_gb(link.to_device)}, back {_gb(link.to_host)}; {link.to_device.source}"
        )
    lines.append(
        f"messages  Ray {transport.call.value * 1e3:.2f} ms ({transport.call.source}), one process "
        f"{transport.local.value * 1e6:.0f} us, shared memory {_gb(transport.arena_bytes)}, "
        f"inside Ray calls {_gb(transport.ray_bytes)}"
    )
    lines.append(
        f"others    AdamW {rates.optimizer.value / 1e6:,.0f} M parameters/s; disk {_gb(rates.disk)} "
        f"({rates.disk.source})"
    )
    return [*lines, *(f"note: {note}" for note in rates.notes)]


def _gb(figure: Figure) -> str:
    return f"{figure.value / 1e9:,.1f} GB/s"


def _gf(value: float) -> str:
    return f"{value / 1e9:,.0f} GFLOP/s"
