"""Section `fast`: rates for the plan, one layer of experts beside its peers, loading; by benchmarks/."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from kt_ray.accept.items import FAIL, PASS, WARN, Claim, Found, Item, OutOfTimeError, Task
from kt_ray.config.schema import AcceptConfig, Config
from kt_ray.hardware.machine import Hardware
from kt_ray.hardware.nominal import nominal_rates
from kt_ray.hardware.rate_files import rates_path, read_rates
from kt_ray.hardware.rates import DeviceRate, ExpertRate, Figure, LinkRate, Rates

FORMATS = "bf16,fp8,int8,int4,mxfp4"
TOKENS = "512,4096,16,1"  # those that claims are about first
TARGETS = ("512", "4096")
TARGET_FORMATS = ("bf16", "fp8", "int8")
OURS, PEER, PEER_RATIO = "kt_ray", "kt", 2.0
PEAK_SHARES = {"forward": 0.2, "backward": 0.15}
PEAK_ROWS = 256  # per expert: with fewer, memory takes the larger part of the time
MEMORY = "GB of memory"  # in a record's error: it was not tried, for want of memory
RATES_SECONDS = 240.0  # mode=doctor stores at its end


class Shape(NamedTuple):
    """A shape of benchmarks/layer_inputs.py: its experts, and bytes of one in BF16."""

    name: str
    experts: int
    bytes: int


SHAPES = (
    Shape("deepseek_v3", 256, 3 * 7168 * 2048 * 2),
    Shape("deepseek_v2_lite", 64, 3 * 2048 * 1408 * 2),
    Shape("qwen3_30b", 128, 3 * 2048 * 768 * 2),
    Shape("mixtral", 8, 3 * 4096 * 14336 * 2),
)
TINY = Shape("tiny", 8, 3 * 256 * 128 * 2)


def items(config: Config, hardware: Hardware, free: int, quick: bool) -> Iterator[Item]:
    """free: bytes of host memory that nobody uses."""
    if not quick:
        run = partial(_rates, config=config, hardware=hardware)
        yield Item("fast", "rates", "Rates, stored for mode=plan", run, least=RATES_SECONDS)
    for shape in (TINY,) if quick else SHAPES:
        yield _layer(shape, config.accept, hardware, free, quick)
    if not quick:
        yield Item("fast", "load", "Loading experts", _load)


def _script(name: str) -> list[str]:
    return [sys.executable, f"benchmarks/{name}.py"]


def _records(file: Path) -> list[dict[str, Any]]:
    """Records of a benchmark; [] where it wrote none."""
    with suppress(OSError, ValueError, KeyError):
        found: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["records"]
        return found
    return []


# -- rates -----------------------------------------------------------------------------------


def _rates(task: Task, *, config: Config, hardware: Hardware) -> Found:
    """mode=doctor measures and stores; its checks are those of the section `here`."""
    cluster, path, begun = [f"cluster={config.cluster.name}"], rates_path(hardware), time.time()
    code = task.run([sys.executable, "launch.py", "mode=doctor", "model=deepseek_v2_lite", *cluster])
    if code is None:
        raise OutOfTimeError("the time was over before the rates were measured")
    if not path.is_file() or path.stat().st_mtime < begun:  # of an earlier day
        found = f"exit status {code}, nothing was stored"
        return Found([Claim(FAIL, "Rates are measured", found, "rates", "docs/rates.md")])
    measured, nominal = read_rates(path), nominal_rates(hardware)
    rows = [("figure", "nominal", "measured", "measured / nominal")]
    shown = [expert for expert in measured.experts if expert.forward.source.startswith("measured")]
    beside = figures(nominal, shown)
    for name, figure in figures(measured, shown).items():
        expected = beside.get(name)
        ratio = "" if expected is None else f"{figure / expected:.2f}"
        rows.append((name, "" if expected is None else f"{expected:.4g}", f"{figure:.4g}", ratio))
    return Found(tables={"Rates (per second)": rows}, notes=measured.notes, records=str(path.name))


def figures(rates: Rates, shown: Sequence[ExpertRate]) -> dict[str, float]:
    """Figures by name, per second: bytes, FLOP, parameters; of curves the largest size.

    Args:
        shown: experts whose ISA, format and shape are looked up in `rates`.
    """
    found: dict[str, float] = {}
    for name, figure in vars(rates.memory).items():
        if isinstance(figure, Figure):
            found[f"memory {name}, bytes"] = figure.value
    devices: Sequence[tuple[str, DeviceRate | None]] = (
        ("one thread", rates.cpu_one),
        ("a socket", rates.cpu_all),
        ("GPU", rates.gpu),
    )
    for where, device in devices:
        for kind, curve in device.gemm.items() if device is not None else ():
            found[f"torch on {where}, {kind} products, FLOP"] = curve.ample
    link: LinkRate | None = rates.link
    for name, figure in vars(link).items() if link is not None else ():
        found[f"PCIe {name}, bytes"] = figure.value
    for e in shown:
        products = "int8" if e.products == "int8" else "any"
        expert = rates.expert(e.isa, e.format, e.hidden, e.inter, products)
        what = f"experts {e.isa} {e.format} {e.hidden} x {e.inter} {e.products}"
        found[f"{what}, forward, FLOP a core"] = expert.forward.ample
        found[f"{what}, backward, FLOP a core"] = expert.backward.ample
    found["AdamW, parameters"] = rates.optimizer.value
    found["disk, bytes"] = rates.disk.value
    return found


# -- one layer of experts --------------------------------------------------------------------


def _layer(shape: Shape, accept: AcceptConfig, hardware: Hardware, free: int, quick: bool) -> Item:
    name = f"layer_{shape.name}"
    peers = [] if quick else accept.against
    # Peers copy and adapt; those that need more than there is say so in their record.
    most = int(0.5 * free / ((4.0 if PEER in peers else 2.2) * shape.bytes))
    experts = min(shape.experts, 1 << max(0, most.bit_length() - 1))
    missing = "" if experts >= 8 or experts == shape.experts else "too little free memory for 8 experts"

    def run(task: Task) -> Found:
        out = task.file.with_suffix(".bench.json")
        cores = hardware.sockets[0].cores
        command = [
            *_script("moe_layer"),
            "--shape",
            shape.name,
            "--experts",
            str(experts),
            "--json",
            str(out),
        ]
        command += ["--threads", str(cores), "--against", ",".join(peers) or "none", "--rank", "8"]
        if quick:
            command += ["--tokens", "64", "--formats", "bf16,fp8", "--rounds", "1", "--peak-seconds", "0.2"]
        else:
            command += ["--tokens", TOKENS, "--formats", FORMATS, "--isas", "all", "--rounds", "3"]
        if accept.kt is not None and PEER in peers:
            folder = str(task.file.with_name("kt_venv"))
            given = Path(accept.kt).is_dir()
            command += ["--kt-venv", accept.kt] if given else ["--kt-venv", folder, "--kt-wheel", accept.kt]
        command += ["--resume"]  # formats and tokens that an earlier round has measured stay
        # Threads and weights of one socket: between two, the memory's way would be measured.
        cpus = hardware.sockets[0].cpus if len(hardware.sockets) > 1 else ()
        with tempfile.TemporaryDirectory(prefix=f"{name}_", dir=out.parent) as scratch:
            code = task.run(command, {"TMPDIR": scratch}, cpus)
        records = _records(out)
        claims = list(_claims(records, peers))
        if code not in (0, None) or (code == 0 and not records):
            claims.append(
                Claim(FAIL, f"{shape.name}: measured", f"exit status {code}", "0", "docs/performance.md")
            )
        note = [] if experts == shape.experts else [f"{experts} of {shape.experts} experts: memory"]
        return Found(
            claims, {f"{shape.name}, {cores} threads": _rows(records)}, note, records, cut=code is None
        )

    options = ",".join([*peers, accept.kt or ""])
    return Item("fast", name, f"One layer of experts, {shape.name}", run, missing, options=options)


def _rows(records: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("implementation", "ISA", "format", "tokens", "direction", "ms", "of peak", "times ours")
    ]
    for r in records:
        what = (r["impl"], str(r.get("isa") or ""), r["format"], str(r["tokens"]))
        if r["direction"] is None:
            rows.append((*what, r["error"], "", "", ""))
            continue
        peak = "" if r["of_peak"] is None else f"{r['of_peak']:.0%}"
        ratio = f"{r['ratio_to_ours']:.2f}" if "ratio_to_ours" in r else ""
        rows.append((*what, r["direction"], f"{r['median_ms']:.2f}", peak, ratio))
    return rows


def _claims(records: Sequence[Mapping[str, Any]], peers: Sequence[str]) -> Iterator[Claim]:
    """That everything was measured; and what is promised where there are AMX tiles."""
    page = "docs/performance.md"
    for r in records:
        if r["direction"] is None and MEMORY not in r["error"]:
            status = FAIL if r["impl"] == OURS else WARN
            text = (
                f"{r['impl']} {r.get('isa') or ''} computes {r['shape']} {r['format']}, {r['tokens']} tokens"
            )
            yield Claim(status, text, r["error"], "a figure", page)
        if r["direction"] is None or str(r["tokens"]) not in TARGETS or r["format"] not in TARGET_FORMATS:
            continue
        what = f"{r['shape']} {r['format']}, {r['tokens']} tokens"
        if r["impl"] == OURS and r["isa"] == "amx" and r["rows_per_expert"] >= PEAK_ROWS:
            share = PEAK_SHARES[r["direction"]]
            status = PASS if (r["of_peak"] or 0) >= share else WARN
            found = (
                "no peak was measured" if r["of_peak"] is None else f"{r['of_peak']:.0%} of the measured peak"
            )
            yield Claim(status, f"AMX {r['direction']} of {what}", found, f"{share:.0%}", page)
        has_amx = any(o["impl"] == OURS and o.get("isa") == "amx" for o in records)
        if r["impl"] == PEER and r["direction"] == "forward" and has_amx and PEER in peers:
            ratio = r.get("ratio_to_ours_both", 0.0)
            status = PASS if ratio >= PEER_RATIO else WARN
            text = f"Faster than kt-kernel, {what}, forward and backward"
            yield Claim(status, text, f"{ratio:.2f} times", f"{PEER_RATIO:g} times", page)


# -- loading ---------------------------------------------------------------------------------


def _load(task: Task) -> Found:
    """Four layers of DeepSeek-V2-Lite in FP8, written to the acceptance's disk."""
    weights, out = task.file.with_name("load_weights"), task.file.with_suffix(".bench.json")
    made = [sys.executable, "-m", "kt_ray.tools", "random", str(weights), "--model", "deepseek_v2_lite"]
    shutil.rmtree(weights, ignore_errors=True)  # of a round that was killed
    try:
        code = task.run([*made, "--format", "fp8", "--layers", "4"])
        if code == 0:
            code = task.run([*_script("load"), str(weights), "--rounds", "1", "--json", str(out)])
    finally:
        shutil.rmtree(weights, ignore_errors=True)
    records = _records(out)
    claims = (
        [] if code in (0, None) else [Claim(FAIL, "Loading", f"exit status {code}", "0", "docs/rates.md")]
    )
    rows = [("pages", "GB/s", "cat, GB/s", "above what stays, MB")]
    for r in records:
        rows.append(
            (
                str(r.get("condition", "")),
                f"{r['gb_per_s']:.2f}",
                f"{r['cat_gb_per_s']:.2f}",
                f"{r['peak_over_resident'] / 1e6:.0f}",
            )
        )
    return Found(claims, {"Loading experts": rows} if records else {}, (), records, cut=code is None)
