#!/usr/bin/env python
"""What the plan predicts on machines that are not here: tables and plots of the documentation.

    python benchmarks/scaling.py --json out.json                 # both
    python benchmarks/scaling.py --only machines                 # published settings, formats
    python benchmarks/scaling.py --only nodes --plots docs/assets

Tables of docs/prediction.md and docs/scaling.md. Every figure is `mode=plan` on a hardware file, 8,192
tokens per step (16 rows of 512, micro-batches of one row): the plan's own order simulated with the file's
rates. Nothing is measured here.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import machine, write_json

from kt_ray.config.compose import compose
from kt_ray.hardware.describe import hardware_for
from kt_ray.hardware.rate_files import rates_for
from kt_ray.hardware.rates import Figure
from kt_ray.modes.plan import model_dims
from kt_ray.placement.plan import make_plan
from kt_ray.timing.prediction import Prediction, predict

STEP = ["mode=plan", "trainer.batch_size=16", "trainer.micro_batch_size=1", "data.max_length=512"]
FORMATS = {
    "FP8": [],
    "BF16": ["model.config.quantization_config=null"],
    "INT8": ["rule.experts.backend=AMXINT8"],
    "MXFP4": ["+model.config.expert_dtype=mxfp4"],
}
XEON, EPYC = "2x4090_2x8488c", "8x5090_2x9355"
LAYOUTS = {
    "2 stages": ["rule.stages=2"],
    "2 replicas": ["rule.stages=1", "rule.replicas=2"],
    "4 stages x 2": ["rule.stages=4", "rule.replicas=2"],
    "8 stages": ["rule.stages=8"],
}
# label, hardware, published tokens/s (None = none), overrides
MACHINES: list[tuple[str, str, float | None, list[str]]] = [
    *(
        (f"DeepSeek-V3 {f}", XEON, 40 if f == "INT8" else None, ["model=deepseek_v3", *o])
        for f, o in FORMATS.items()
    ),
    ("Qwen3-235B BF16", XEON, None, ["model=qwen3_235b_a22b"]),
    ("Kimi-K2 FP8", XEON, None, ["model=kimi_k2"]),
    ("DeepSeek-V3 FP8", EPYC, 136, ["model=deepseek_v3"]),
    ("Qwen3-235B BF16", EPYC, None, ["model=qwen3_235b_a22b"]),
]
MODELS = {"DeepSeek-V3": "deepseek_v3", "Qwen3-235B": "qwen3_235b_a22b", "Kimi-K2": "kimi_k2"}
NODES = (1, 2, 4, 8, 16, 32, 64)
GBIT = (10, 25, 100)
GROUPS = (2, 4, 8)
OF_LINE = 0.9  # of a link's nominal rate that payload reaches
Record = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("machines", "nodes"))
    parser.add_argument("--plots", type=Path, help="directory for the plots")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    records: list[Record] = []
    if args.only != "nodes":
        records += machines()
    if args.only != "machines":
        scaled = nodes()
        records += scaled
        if args.plots:
            plot(scaled, args.plots)
    if args.json:
        write_json(args.json, records, machine())
    return 0


def predicted(overrides: Sequence[str], gbit: float | None = None) -> tuple[Prediction, bool]:
    """A prediction, and whether the plan fits."""
    config = compose([*STEP, *overrides])
    hardware = hardware_for(config)
    plan = make_plan(model_dims(config.model), config, hardware)
    rates = rates_for(config, hardware)
    if gbit is not None:
        network = Figure(gbit * 1e9 / 8 * OF_LINE, f"{gbit:g} Gbit/s, {OF_LINE:.0%} of it")
        rates = dataclasses.replace(
            rates, transport=dataclasses.replace(rates.transport, network_bytes=network)
        )
    return predict(plan, config, rates), plan.fits


def record_of(kind: str, overrides: Sequence[str], found: Prediction, fits: bool, **about: Any) -> Record:
    return {
        "kind": kind,
        **about,
        "overrides": list(overrides),
        "fits": fits,
        "tokens_per_s": found.tokens_per_s,
        "seconds": found.simulated.seconds,
        "attention_busy": found.side_busy("attention"),
        "experts_busy": found.side_busy("experts"),
        "critical": found.simulated.critical,
        "critical_used": found.simulated.used[found.simulated.critical],
        "network_used": max(
            v for k, v in {"": 0.0, **found.simulated.used}.items() if not k or "network" in k
        ),
        "terms": {t.name: t.seconds for t in found.terms},
    }


def machines() -> list[Record]:
    """The published settings, and other formats and models on the same machines."""
    print("| model | machine | layout | tokens/s | s per step | experts busy | attention busy | published |")
    print("|---|---|---|---|---|---|---|---|")
    records = []
    for label, hardware, published, overrides in MACHINES:
        for layout, rule in LAYOUTS.items():
            if (hardware == EPYC) != (layout in ("4 stages x 2", "8 stages")):
                continue
            given = [*overrides, f"plan.hardware={hardware}", "rule.groups=2", *rule]
            found, fits = predicted(given)
            record = record_of("machine", given, found, fits, model=label, layout=layout, published=published)
            records.append(record)
            print(
                f"| {label} | {hardware} | {layout}{'' if fits else ' (does not fit)'} | "
                f"{record['tokens_per_s']:.0f} | {record['seconds']:.1f} | {record['experts_busy']:.0%} | "
                f"{record['attention_busy']:.0%} | {published or ''} |",
                flush=True,
            )
    return records


def nodes() -> list[Record]:
    """Models over numbers of hosts and link speeds, each with the number of groups that is fastest."""
    print("\n| model | Gbit/s | " + " | ".join(f"{n}" for n in NODES) + " |")
    print("|---" * (len(NODES) + 2) + "|")
    records = []
    for label, model in MODELS.items():
        for gbit in GBIT:
            row = []
            for count in NODES:
                best: Record | None = None
                for groups in GROUPS:
                    given = [
                        f"model={model}", f"plan.hardware={XEON}", "rule.stages=1", "rule.replicas=2",
                        f"rule.nodes={count}", f"rule.groups={groups}", "rule.attention_hosts=driver",
                    ]  # fmt: skip
                    found, fits = predicted(given, gbit)
                    record = record_of(
                        "nodes", given, found, fits, model=label, gbit=gbit, nodes=count, groups=groups
                    )
                    if best is None or record["tokens_per_s"] > best["tokens_per_s"]:
                        best = record
                assert best is not None
                records.append(best)
                row.append(f"{best['tokens_per_s']:.0f}" + ("" if best["fits"] else "*"))
            print(f"| {label} | {gbit} | " + " | ".join(row) + " |", flush=True)
    return records


def plot(records: Sequence[Record], directory: Path) -> None:
    """scaling.svg: tokens/s over hosts. scaling_used.svg: what is used of each side, DeepSeek-V3."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "kt_ray"  # the same file every time
    from matplotlib import pyplot

    directory.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots(1, len(MODELS), figsize=(11, 3.4))
    for axis, label in zip(axes, MODELS, strict=True):
        for gbit in GBIT:
            own = [r for r in records if r["model"] == label and r["gbit"] == gbit]
            axis.plot(
                [r["nodes"] for r in own], [r["tokens_per_s"] for r in own], "o-", label=f"{gbit} Gbit/s"
            )
        _finish(axis, label, "tokens/s")
    axes[0].legend()
    _save(figure, directory / "scaling.svg")
    figure, axes = pyplot.subplots(1, len(GBIT), figsize=(11, 3.4), sharey=True)
    for axis, gbit in zip(axes, GBIT, strict=True):
        own = [r for r in records if r["model"] == "DeepSeek-V3" and r["gbit"] == gbit]
        for name, what in (
            ("experts_busy", "experts"),
            ("attention_busy", "attention"),
            ("network_used", "network"),
        ):
            axis.plot([r["nodes"] for r in own], [r[name] for r in own], "o-", label=what)
        _finish(axis, f"DeepSeek-V3, {gbit} Gbit/s", "part of the step in use")
    axes[0].legend()
    _save(figure, directory / "scaling_used.svg")


def _finish(axis: Any, title: str, y: str) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(NODES, [str(n) for n in NODES])
    axis.set_ylim(bottom=0)
    axis.set_title(title, fontsize=10)
    axis.set_xlabel("hosts")
    axis.set_ylabel(y)
    axis.grid(alpha=0.3)


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main())
