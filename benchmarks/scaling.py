#!/usr/bin/env python
"""What the plan predicts on machines that are not here: tables and plots of the documentation.

    python benchmarks/scaling.py --json out.json                 # both
    python benchmarks/scaling.py --only machines                 # published settings, formats
    python benchmarks/scaling.py --only nodes --plots docs/assets

Tables of docs/prediction.md and docs/scaling.md. Every figure is `mode=plan` on a hardware file: the plan's
own order simulated with the file's rates. Steps have 8,192 tokens (16 rows of 512, micro-batches of one row),
or 65,536 per host (32 rows of 2,048). Nothing is measured here.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import machine, write_json

from kt_ray.config.compose import compose
from kt_ray.config.schema import Config
from kt_ray.hardware.describe import hardware_for
from kt_ray.hardware.rate_files import rates_for
from kt_ray.hardware.rates import Figure, Rates
from kt_ray.modes.plan import model_dims
from kt_ray.placement.plan import make_plan
from kt_ray.placement.plan_types import Plan
from kt_ray.timing.lane_rates import lane_rates
from kt_ray.timing.prediction import Prediction, predict

STEP = ["mode=plan", "trainer.batch_size=16", "trainer.micro_batch_size=1", "data.max_length=512"]
PER_HOST = ["mode=plan", "trainer.micro_batch_size=auto", "data.max_length=2048"]
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
ROWS = 16  # of a step that does not grow with the hosts
DRIVER, SHARED, COPIES = "driver", "shared", "copies"  # see `layouts`
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
    config, plan, rates = planned(tuple(overrides))
    if gbit is not None:
        network = Figure(gbit * 1e9 / 8 * OF_LINE, f"{gbit:g} Gbit/s, {OF_LINE:.0%} of it")
        rates = dataclasses.replace(
            rates, transport=dataclasses.replace(rates.transport, network_bytes=network)
        )
    return predict(plan, config, rates), plan.fits


@functools.lru_cache(maxsize=8)
def planned(overrides: tuple[str, ...]) -> tuple[Config, Plan, Rates]:
    """A plan, which no link's speed changes."""
    config = compose([*STEP, *overrides])
    hardware = hardware_for(config)
    dims, rates = model_dims(config.model), rates_for(config, hardware)
    lanes = lane_rates(config, hardware, dims, rates)
    return config, make_plan(dims, config, hardware, lane_rates=lanes), rates


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
            given = [
                *overrides,
                f"plan.hardware={hardware}",
                "rule.groups=2",
                "rule.experts.stream=off",
                *rule,
            ]
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


def layouts(count: int) -> dict[str, list[str]]:
    """Ways to use so many hosts of two GPUs: attention on the first one only; on all, with the experts
    divided between all hosts; on all, with all experts on each."""
    shared = ["rule.attention_hosts=all", f"rule.replicas={2 * count}"]
    found = {DRIVER: ["rule.attention_hosts=driver", "rule.replicas=2", "rule.experts.copies=1"]}
    if count > 1:
        found |= {
            SHARED: [*shared, "rule.experts.copies=1"],
            COPIES: [*shared, f"rule.experts.copies={count}"],
        }
    return {
        name: [*keys, f"rule.nodes={count}", "rule.stages=1", "rule.groups=2", "rule.experts.stream=auto"]
        for name, keys in found.items()
    }


def nodes() -> list[Record]:
    """Models over numbers of hosts and link speeds: steps that grow with the hosts, and steps that do not."""
    records = []
    for label, model in MODELS.items():
        for count in NODES:
            own = [f"model={model}", f"plan.hardware={XEON}"]
            steps = {
                "65,536 per host": [*PER_HOST, f"trainer.batch_size={32 * count}"],
                "8,192": [f"trainer.batch_size={ROWS}"],
            }
            for step, rows in steps.items():
                for layout, keys in layouts(count).items():
                    if step == "8,192" and layout != DRIVER and 2 * count > ROWS:
                        continue  # a replica would have no row
                    if step != "8,192" and layout == DRIVER and count > 1:
                        continue
                    for gbit in GBIT:
                        given = [*own, *rows, *keys]
                        found, fits = predicted(given, gbit)
                        about = {"model": label, "gbit": gbit, "nodes": count, "step": step}
                        records.append(record_of("nodes", given, found, fits, layout=layout, **about))
            print(f"{label}: {count} hosts", file=sys.stderr, flush=True)
    for step in ("65,536 per host", "8,192"):
        _table([record for record in records if record["step"] == step], step)
    return records


def _table(records: Sequence[Record], step: str) -> None:
    """Tokens/s over hosts. Of steps that do not grow the fastest layout, by its first letter."""
    print(f"\n{step} tokens per step")
    print("| model | Gbit/s | experts | " + " | ".join(f"{n}" for n in NODES) + " |")
    print("|---" * (len(NODES) + 3) + "|")
    for label in MODELS:
        for gbit in GBIT:
            rows: dict[str, tuple[str, ...]] = {COPIES: (DRIVER, COPIES), SHARED: (DRIVER, SHARED)}
            if step == "8,192":
                rows = {"the fastest": (DRIVER, SHARED, COPIES)}
            for name, wanted in rows.items():
                cells = []
                for count in NODES:
                    own = [
                        r
                        for r in records
                        if (r["model"], r["gbit"], r["nodes"]) == (label, gbit, count)
                        and r["layout"] in wanted
                    ]
                    best = max(own, key=lambda r: r["tokens_per_s"])
                    mark = f" {best['layout'][0]}" if len(wanted) > 2 and count > 1 else ""
                    cells.append(f"{best['tokens_per_s']:,.0f}{mark}{'' if best['fits'] else '*'}")
                print(f"| {label} | {gbit} | {name} | " + " | ".join(cells) + " |")


def plot(records: Sequence[Record], directory: Path) -> None:
    """scaling.svg: tokens/s over hosts, 65,536 tokens per host. scaling_used.svg: what DeepSeek-V3 then uses
    of each side."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "kt_ray"  # the same file every time
    from matplotlib import pyplot

    def line(label: str, gbit: int, layout: str) -> list[Record]:
        return [
            r
            for r in records
            if (r["model"], r["gbit"], r["step"]) == (label, gbit, "65,536 per host")
            and r["layout"] == (DRIVER if r["nodes"] == 1 else layout)
        ]

    directory.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots(1, len(MODELS), figsize=(11, 3.4))
    for axis, label in zip(axes, MODELS, strict=True):
        for number, gbit in enumerate(GBIT):
            for layout, style in ((COPIES, "o-"), (SHARED, "o--")):
                own = line(label, gbit, layout)
                name = f"{gbit} Gbit/s" if layout == COPIES else None
                x, y = [r["nodes"] for r in own], [r["tokens_per_s"] for r in own]
                axis.plot(x, y, style, color=f"C{number}", label=name, markersize=4)
        _finish(axis, label, "tokens/s")
        axis.set_yscale("log")
    axes[0].plot([], [], "k-", label="all experts on each host")
    axes[0].plot([], [], "k--", label="divided between hosts")
    axes[0].legend(fontsize=8)
    _save(figure, directory / "scaling.svg")
    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3.4), sharey=True)
    titles = {COPIES: "all experts on each host", SHARED: "experts divided between hosts"}
    for axis, (layout, title) in zip(axes, titles.items(), strict=True):
        own = line("DeepSeek-V3", 100, layout)
        for name, what in (
            ("experts_busy", "experts"),
            ("attention_busy", "attention"),
            ("network_used", "network"),
        ):
            axis.plot([r["nodes"] for r in own], [r[name] for r in own], "o-", label=what)
        _finish(axis, f"100 Gbit/s, {title}", "part of the step in use")
        axis.set_ylim(bottom=0)
    axes[0].legend()
    _save(figure, directory / "scaling_used.svg")


def _finish(axis: Any, title: str, y: str) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(NODES, [str(n) for n in NODES])
    axis.set_title(title, fontsize=10)
    axis.set_xlabel("hosts")
    axis.set_ylabel(y)
    axis.grid(alpha=0.3)


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main())
