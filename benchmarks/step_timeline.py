#!/usr/bin/env python
"""What attention and experts do in a step: busy fractions, waits, and a Chrome trace per run.

    python -m kt_ray.tools random DIR --model mixtral_8x7b --layers 3 --set vocab_size=4096
    python benchmarks/step_timeline.py --case mixtral DIR --json out.json --traces traces/

    mixtral   attention on one core, experts on the other
    paced     attention replaced by waits with an RTX 4090's timing (paced_stage.py), experts on all cores
    shared    attention and experts both on all cores

Each variant runs under each cluster (--clusters local,ray) in a process of its own, anew in every round;
rounds go through them there and back. A variant is a name and further options: the first, `auto`, has none.
--vary takes more: `overlap_off=rule.overlap=false`, `groups_1=rule.groups=1`,
`both=rule.groups=4+rule.experts.activations=recompute`.

    busy.expert     CPU time of engine threads inside kernels / (wall time of the step * threads)
    busy.attention  CPU time of its threads / (wall time * threads); paced: waits for a GPU / wall
    cpu_bound_s     (CPU seconds of attention + CPU seconds of experts) / cores: no schedule is faster

Figures are medians over the measured steps of all rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import add_common_arguments, quiet_machine, run_child, write_json
from step_timeline_child import Job
from train_layers import CHARACTERS, configuration, long_rows

CASES = {
    "mixtral": ["rule.worker_threads=1", "rule.experts.threads=1"],
    "paced": ["rule.worker_threads=1", "rule.activations=group"],  # as a GPU's plan has it
    "shared": [],
}
CLUSTERS = {"local": ["cluster=local"], "ray": ["cluster=ray", "cluster.address=local"]}
Result = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    about = quiet_machine(args.wait_quiet)
    results: dict[tuple[str, str], list[Result]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        rows = Path(scratch) / "rows.jsonl"
        count = (args.warmup + args.steps) * args.rows
        rows.write_text(long_rows(count, CHARACTERS * args.tokens), encoding="utf-8")
        runs = [(variant, cluster) for variant in args.variants for cluster in args.clusters]
        for number in range(args.rounds):
            for variant, cluster in runs if number % 2 == 0 else list(reversed(runs)):
                job = _job(args, variant, cluster, rows)
                result = run_job(job, Path(scratch), args.spare_gb, args.timeout)
                results.setdefault((variant, cluster), []).append(result)
                _print(f"round {number + 1}/{args.rounds}", make_record(args, variant, cluster, [result]))
    records = [make_record(args, variant, cluster, results[variant, cluster]) for variant, cluster in runs]
    compare(records)
    print()
    for record in records:
        _print("all rounds", record)
    if args.json:
        write_json(args.json, records, about)
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir", type=Path, help="a Hugging Face directory in BF16")
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--clusters", default="local,ray")
    parser.add_argument("--vary", nargs="*", default=[], metavar="NAME=KEY=VALUE[+KEY=VALUE]")
    parser.add_argument("--only", nargs="*", help="these variants of --vary, and auto if named")
    parser.add_argument("--tokens", type=int, default=256, help="per row; a micro-batch is one row")
    parser.add_argument("--rows", type=int, default=4, help="per step")
    parser.add_argument("--rank", type=int, default=8, help="LoRA rank")
    parser.add_argument("--steps", type=int, default=3, help="measured steps per round")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--traces", type=Path, help="directory for a trace of each run's last step")
    parser.add_argument("--spare-gb", type=float, default=0.8, help="memory that must stay available")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for a run")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further options, for all")
    add_common_arguments(parser)
    args = parser.parse_args(argv)
    args.variants = {"auto": []}
    for text in args.vary:
        name, equals, rest = text.partition("=")
        if not equals or "=" not in rest:
            parser.error(f"--vary {text}: give NAME=KEY=VALUE")
        args.variants[name] = rest.split("+")
    if args.only:
        if unknown := [name for name in args.only if name not in args.variants]:
            parser.error(f"--only {', '.join(unknown)}: no such variant")
        args.variants = {name: args.variants[name] for name in args.only}
    args.clusters = [name for name in args.clusters.split(",") if name]
    if unknown := [name for name in args.clusters if name not in CLUSTERS]:
        parser.error(f"--clusters {', '.join(unknown)}: there are {', '.join(CLUSTERS)}")
    for name in ("tokens", "rows", "rank", "steps", "rounds", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if not (args.model_dir / "config.json").is_file():
        parser.error(
            f"{args.model_dir} is no Hugging Face directory: `python -m kt_ray.tools random` writes one"
        )
    return args


def _job(args: argparse.Namespace, variant: str, cluster: str, rows: Path) -> Job:
    overrides = [
        *configuration(rows, args.tokens, args.rows, args.rank),
        f"model.path='{args.model_dir.resolve()}'",
        "rule=auto",
        "rule.device=cpu",
        *CASES[args.case],
        *CLUSTERS[cluster],
        *args.variants[variant],
        *args.set,
    ]
    trace = None
    if args.traces:
        args.traces.mkdir(parents=True, exist_ok=True)
        trace = str(args.traces.resolve() / f"{args.case}_{variant}_{cluster}.json")
    label = f"{args.case} {variant} {cluster}"
    return Job(label, overrides, args.steps, args.warmup, args.threads, args.case == "paced", trace)


def run_job(job: Job, scratch: Path, spare_gb: float, timeout: float) -> Result:
    """A run in a process of its own. Raises JobFailed."""
    return run_child("step_timeline_child.py", job, job.label, scratch, int(spare_gb * 1e9), timeout)


def make_record(args: argparse.Namespace, variant: str, cluster: str, rounds: Sequence[Result]) -> Result:
    """Medians over all measured steps."""
    steps = [step for result in rounds for step in result["steps"]]

    def median(key: str) -> float:
        return statistics.median(step[key] for step in steps)

    seconds, first = median("seconds"), rounds[0]
    cores = args.threads
    bound = (median("attention_cpu_s") + median("expert_cpu_s")) / cores
    return {
        "configuration": args.case,
        "variant": variant,
        "options": args.variants[variant],
        "cluster": cluster,
        "model": args.model_dir.resolve().name,
        "tokens": steps[0]["tokens"],
        "row_tokens": args.tokens,
        "rank": args.rank,
        "steps": len(steps),
        "median_s": seconds,
        "all_s": [step["seconds"] for step in steps],
        "tokens_per_s": steps[0]["tokens"] / seconds,
        "busy": {"expert": median("busy_expert"), "attention": median("busy_attention")},
        "attention_cpu_s": median("attention_cpu_s"),
        "expert_cpu_s": median("expert_cpu_s"),
        "expert_kernel_s": median("expert_kernel_s"),
        "cpu_bound_s": bound,
        "wall_over_cpu_bound": seconds / bound,
        "process_tree_cpu_s": statistics.median(r["process_tree_cpu_s"] for r in rounds),
        "queue_depth": median("queue_depth"),
        "queue_max": max(step["queue_max"] for step in steps),
        "experts_first_wait_s": median("experts_first_wait_s"),
        "experts_after_last_call_s": median("experts_after_last_call_s"),
        "driver": steps[-1]["driver"],
        "actors": steps[-1]["actors"],
        "losses": first["losses"],
        "same_losses": all(r["losses"] == first["losses"] for r in rounds),
        "peak_rss_bytes": max(r["peak_rss_bytes"] for r in rounds),
        "cpus_used_by_others": max(r["cpus_used_by_others"] for r in rounds),
        **{
            key: first[key]
            for key in ("groups", "activations", "attention_threads", "expert_threads", "stand_in")
            if key in first
        },
    }


def compare(records: Sequence[Result]) -> None:
    """Times over the first variant's under the same cluster, and Ray's over the in-process cluster's."""
    found = {(r["variant"], r["cluster"]): r for r in records}
    base = records[0]["variant"]
    for (variant, cluster), record in found.items():
        if variant != base and (base, cluster) in found:
            record[f"time_over_{base}"] = record["median_s"] / found[base, cluster]["median_s"]
        if cluster == "ray" and (variant, "local") in found:
            local = found[variant, "local"]
            record["time_over_local"] = record["median_s"] / local["median_s"]
            record["same_losses_as_local"] = record["losses"] == local["losses"]


def _print(what: str, r: Result) -> None:
    busy = r["busy"]
    print(
        f"{what:<10} {r['variant']:<16}{r['cluster']:<6}{r['median_s']:8.2f} s {r['tokens_per_s']:8.1f}/s "
        f"busy experts {busy['expert']:.3f} attention {busy['attention']:.3f}  "
        f"wall/bound {r['wall_over_cpu_bound']:.2f}  "
        f"queue {r['queue_depth']:.2f}  first {r['experts_first_wait_s']:.2f} "
        f"last {r['experts_after_last_call_s']:.2f}  others {r['cpus_used_by_others']:.2f}"
        + (f"  x local {r['time_over_local']:.3f}" if "time_over_local" in r else ""),
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
