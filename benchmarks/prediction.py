#!/usr/bin/env python
"""Predicted against measured tokens per second, with rates measured in the same session.

    python benchmarks/prediction.py --scratch DIR --json out.json
    python benchmarks/prediction.py --scratch DIR --cases demo.local_1x1,v2lite_2_bf16.local_1x1

Every case is a model, a layout and a batch (CASES). Rates are measured once per model's expert shape
(mode=doctor's measurement, stored in --scratch), then each case runs in a process of its own and is
predicted from the plan, the rates and the micro-batches that it took. Random checkpoints are written to
--scratch on first use. A record per case: seconds and tokens/s measured (median over steps and rounds) and
predicted, the error, and how the prediction divides the step.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import REPO, JobFailed, add_common_arguments, quiet_machine, write_json
from train_child import RULES, Job
from train_layers import long_rows
from train_step import built_model_dir, run_job

AIM = 0.15
CHARACTERS = 6  # of text per token, at least


@dataclasses.dataclass(frozen=True)
class Model:
    """What is trained: a built-in model, or a random checkpoint (model, layers, format, further options).

    rows: "demo", "nekoqa" (KT_RAY_TEST_DATA) or tokens per row of long ones.
    warmup: steps before the measured ones; torch prepares its products anew for each new length of row.
    """

    options: tuple[str, ...]
    rows: str | int
    batch: int
    checkpoint: tuple[str, ...] = ()
    warmup: int = 2


SMALL_VOCABULARY = ("--set", "vocab_size=4096")
MODELS = {
    "demo": Model(("model=demo",), "demo", 8, warmup=24),
    "mini": Model(("model=mini", "data.max_length=256", "data.pad_to_multiple_of=8"), "nekoqa", 8, warmup=24),
    "v2lite_2_bf16": Model((), 256, 4, ("deepseek_v2_lite", "2", "bf16", *SMALL_VOCABULARY)),
    "v2lite_4_fp8": Model((), 256, 4, ("deepseek_v2_lite", "4", "fp8", *SMALL_VOCABULARY)),
    "v2lite_8_fp8": Model((), 512, 4, ("deepseek_v2_lite", "8", "fp8")),
    "mixtral_1_bf16": Model((), 256, 4, ("mixtral_8x7b", "1", "bf16", *SMALL_VOCABULARY)),
    "mixtral_2_fp8": Model((), 256, 4, ("mixtral_8x7b", "2", "fp8", *SMALL_VOCABULARY)),
    "qwen3_2_bf16": Model((), 256, 4, ("qwen3_30b_a3b", "2", "bf16", *SMALL_VOCABULARY)),
}
ONE_CORE_EACH = ("rule.worker_threads=1", "rule.experts.threads=1")
LAYOUTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "local": ("kt_ray_local", ()),
    "ray": ("kt_ray_ray", ()),
    "local_1x1": ("kt_ray_local", ONE_CORE_EACH),
    "ray_1x1": ("kt_ray_ray", ONE_CORE_EACH),
    "local_1x1_groups1": ("kt_ray_local", (*ONE_CORE_EACH, "rule.groups=1")),
    "local_1x1_recompute": ("kt_ray_local", (*ONE_CORE_EACH, "rule.experts.activations=recompute")),
    "local_1x1_micro2": ("kt_ray_local", (*ONE_CORE_EACH, "trainer.micro_batch_size=2")),
    "local_1x1_serial": ("kt_ray_local", (*ONE_CORE_EACH, "rule.overlap=false")),
    "ray_2experts": ("kt_ray_ray", ("rule.experts.sockets=2", *ONE_CORE_EACH)),
    "local_2experts": ("kt_ray_local", ("rule.experts.sockets=2", *ONE_CORE_EACH)),
}
QUICK = ("local_1x1", "ray_1x1")
CASES = [
    *(
        f"{model}.{layout}"
        for model in ("demo", "mini", "v2lite_2_bf16", "qwen3_2_bf16")
        for layout in LAYOUTS
    ),
    *(
        f"{model}.{layout}"
        for model in ("v2lite_4_fp8", "mixtral_1_bf16", "mixtral_2_fp8", "v2lite_8_fp8")
        for layout in ("local", "ray", "local_1x1", "local_1x1_recompute")
    ),
]


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    about = quiet_machine(args.wait_quiet)
    args.scratch.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    records: list[dict[str, Any]] = []
    for name in sorted({case.split(".")[0] for case in args.cases}, key=list(MODELS).index):
        options = _options(MODELS[name], name, args)
        rates = _rates(args, name, options)
        for case in args.cases:
            if case.split(".")[0] == name:
                records.append(_case(args, case, options, rates))
                _show(records[-1])
    errors = [abs(r["error"]) for r in records if "error" in r]
    if errors:
        within = sum(e <= AIM for e in errors)
        print(f"\nwithin {AIM:.0%}: {within} of {len(records)}; largest {max(errors):.0%}")
    if args.json:
        write_json(args.json, records, about)
    return 0 if errors and max(errors) <= AIM and len(errors) == len(records) else 1


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scratch", type=Path, required=True, help="for checkpoints, rows and rates")
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated model.layout")
    parser.add_argument("--quick", action="store_true", help="of each model only one core per side")
    parser.add_argument("--rates", type=Path, help="instead of measuring: a file of rates, or nominal")
    parser.add_argument("--steps", type=int, default=4, help="measured steps per round")
    parser.add_argument("--warmup", type=int, help="steps before them (default: 2, or what the model needs)")
    parser.add_argument("--rounds", type=int, default=1)
    add_common_arguments(parser)
    args = parser.parse_args(argv)
    args.cases = [case for case in args.cases.split(",") if case]
    for case in args.cases:
        model, _, layout = case.partition(".")
        if model not in MODELS or layout not in LAYOUTS:
            parser.error(f"unknown case {case}: models {', '.join(MODELS)}; layouts {', '.join(LAYOUTS)}")
    if args.quick:
        args.cases = [case for case in args.cases if case.split(".")[1] in QUICK]
    return args


def _options(model: Model, name: str, args: argparse.Namespace) -> list[str]:
    """Overrides of a model; its checkpoint and rows are written on first use."""
    common = [
        "optim=demo",
        "trainer.eval_every=0",
        "data.eval_fraction=0",
        "eval.after_training=0",
        f"trainer.batch_size={model.batch}",
    ]
    options = [*model.options, *common, "trainer.micro_batch_size=1"]
    if model.checkpoint:
        directory = args.scratch / name
        if not (directory / "config.json").is_file():
            shape, layers, fmt, *rest = model.checkpoint
            command = [sys.executable, "-m", "kt_ray.tools", "random", str(directory), "--model", shape]
            subprocess.run([*command, "--layers", layers, "--format", fmt, *rest], check=True, cwd=REPO)
        options += ["model=custom", f"model.path='{directory}'"]
    if isinstance(model.rows, int):
        rows = args.scratch / f"rows_{model.rows}.jsonl"
        rows.write_text(long_rows(64, CHARACTERS * model.rows), encoding="utf-8")
        options += ["data=jsonl", f"data.path='{rows}'", f"data.max_length={model.rows}"]
        return [*options, "data.overflow=truncate"]
    folder = os.environ.get("KT_RAY_TEST_DATA")
    if model.rows == "nekoqa" and folder:
        path = Path(folder).resolve()
        options += ["data=jsonl", f"data.path='{path / 'nekoqa' / 'neko_union_alpaca.json'}'"]
        return [*options, f"model.tokenizer='{path / 'tokenizers' / 'minimind'}'"]
    return [*options, "data=demo"]


def _rates(args: argparse.Namespace, name: str, options: Sequence[str]) -> Path:
    """Rates of this machine with the experts of this model among them."""
    if args.rates:
        return args.rates
    file = args.scratch / "rates.json"
    command = [sys.executable, "launch.py", "mode=doctor", *options, f"plan.rates='{file}'"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    if not file.is_file():
        sys.exit(f"mode=doctor stored no rates for {name}:\n{done.stdout[-3000:]}\n{done.stderr[-2000:]}")
    return file


def _case(args: argparse.Namespace, case: str, options: Sequence[str], rates: Path) -> dict[str, Any]:
    name, _, layout = case.partition(".")
    impl, further = LAYOUTS[layout]
    warmup = MODELS[name].warmup if args.warmup is None else args.warmup
    overrides = [*options, *further]
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(args.rounds):
            job = Job(impl, overrides, built_model_dir(overrides), warmup, args.steps, args.threads)
            try:
                results.append(run_job(job, Path(scratch), f"{case} {number + 1}/{args.rounds}"))
            except JobFailed as error:
                return {"case": case, "failed": str(error)}
    steps = [(i, s) for r in results for i, s in enumerate(r["steps"]) if i >= warmup]
    record = predicted([*overrides, *RULES[impl]], rates, warmup, args.steps)
    # Steps differ in length: both sides are sums over the same steps.
    median = {i: statistics.median(s["seconds"] for j, s in steps if j == i) for i, _ in steps}
    tokens = {i: s["tokens"] for i, s in steps}
    measured = sum(tokens.values()) / sum(median.values())
    return {
        "case": case,
        "overrides": list(overrides),
        "measured_tokens_per_s": measured,
        "measured_s": statistics.median(s["seconds"] for _, s in steps),
        "measured_attention_s": statistics.median(s.get("seconds_attention", 0.0) for _, s in steps),
        "measured_experts_s": statistics.median(s.get("seconds_experts", 0.0) for _, s in steps),
        "measured_optimizer_s": statistics.median(s.get("seconds_optimizer", 0.0) for _, s in steps),
        **record,
        "error": record["predicted_tokens_per_s"] / measured - 1,
        "cpus_used_by_others": max(r["cpus_used_by_others"] for r in results),
    }


def predicted(overrides: Sequence[str], rates: Path, first: int, count: int) -> dict[str, Any]:
    """The prediction for steps `first` and the `count` - 1 after it."""
    from kt_ray.config.compose import compose
    from kt_ray.hardware.rate_files import rates_for
    from kt_ray.runs.plan_time import predicted_run
    from kt_ray.runs.prepare import prepare

    config = compose([*overrides, f"plan.rates='{rates}'", f"trainer.max_steps={first + count}"])
    prepared = prepare(config)
    known = rates_for(config, prepared.plan.hardware)
    steps = [
        predicted_run(config, prepared.plan, known, prepared.batches.train(first + i)) for i in range(count)
    ]
    last = steps[-1]
    work = last.simulated.work
    return {
        "predicted_tokens_per_s": sum(s.tokens for s in steps) / sum(s.simulated.seconds for s in steps),
        "predicted_s": statistics.median(s.simulated.seconds for s in steps),
        "predicted_attention_s": max(v for k, v in work.items() if k.startswith("worker")),
        "predicted_experts_s": max(v for k, v in work.items() if k.startswith("experts")),
        "predicted_optimizer_s": last.simulated.seconds - last.simulated.pass_seconds,
        "terms": {term.name: term.seconds for term in last.terms},
        "rates": {"source": known.source, "date": known.date, "notes": list(known.notes)},
        "waves": prepared.plan.wave,
        "groups": prepared.plan.groups,
    }


def _show(record: dict[str, Any]) -> None:
    if "failed" in record:
        print(f"{record['case']:<34} {record['failed'].splitlines()[0]}", flush=True)
        return
    parts = "  ".join(
        f"{what} {record[f'measured_{what}_s']:.3f}/{record[f'predicted_{what}_s']:.3f}"
        for what in ("attention", "experts", "optimizer")
    )
    print(
        f"{record['case']:<34} measured {record['measured_tokens_per_s']:8.1f}  predicted "
        f"{record['predicted_tokens_per_s']:8.1f}  {record['error']:+.0%}   measured/predicted s: {parts}"
        f"  others {record['cpus_used_by_others']:.2f} CPUs",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
