#!/usr/bin/env python
"""Seconds per training step of kt_ray and of Hugging Face + PEFT: one run, one machine, same everything.

    python benchmarks/train_step.py --against hf,peft --json out.json

Model, rows, batches, LoRA rank, learning rates and CPUs are the same for all:

    kt_ray_ray      under Ray, on a local cluster of its own
    kt_ray_local    the same plan in one process, without Ray
    kt_ray_recompute  kt_ray_local with every layer computed again in backward
    kt_ray_ray_2x2  under Ray with two pipeline stages and two expert actors (rule=cpu_2workers_2sockets)
    hf_factored     Hugging Face with LoRA on every expert, written in torch for speed (always runs: the
                    losses are held against it)
    hf, peft        what --against names: see benchmarks/peers.py

With KT_RAY_TEST_DATA (or --data) naming the folder with nekoqa/ and tokenizers/, rows and tokenizer come
from there; otherwise they are the demo's, and the records say which. Each implementation runs in a process
of its own, anew in every round; rounds go through them in turn, there and back. Figures are medians over
the measured steps of all rounds. A short float32 run of kt_ray_local and hf_factored compares losses.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import JobFailed, add_common_arguments, quiet_machine, run_child, write_json
from train_child import RULES, Job

from kt_ray.errors import UserError

PEERS = ("hf", "peft", "hf_factored")
CHECK_EPS = 1e-3  # of AdamW, in the float32 comparison
TIMEOUT = 3600  # seconds for one implementation in one round
Result = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    impls = _implementations(args)
    overrides, data = _configuration(args)
    model_dir = built_model_dir(overrides)
    about = quiet_machine(args.wait_quiet)
    results: dict[str, list[Result]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(args.rounds):
            for impl in impls if number % 2 == 0 else reversed(impls):
                job = Job(impl, overrides, model_dir, args.warmup, args.steps, args.threads)
                results[impl].append(run_job(job, Path(scratch), f"round {number + 1}/{args.rounds}"))
        records = [make_record(impl, args, data, results[impl]) for impl in impls]
        if args.check_steps:
            records += _float32(args, overrides, data, model_dir, Path(scratch))
    _compare(records)
    _show(records)
    if args.json:
        write_json(args.json, records, about)
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", default="hf,peft", help="of hf, peft, hf_factored (comma-separated)")
    parser.add_argument("--impls", help="exactly these, comma-separated, instead of all with --against")
    parser.add_argument("--model", default="mini", help="a conf/model that is built locally, or a directory")
    parser.add_argument("--data", help="folder like KT_RAY_TEST_DATA, or a file of rows")
    parser.add_argument("--steps", type=int, default=5, help="measured steps per round")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--check-steps", type=int, default=4, help="steps of the float32 comparison; 0 = none"
    )
    parser.add_argument("--batch", type=int, default=8, help="rows per step")
    parser.add_argument("--micro-batch", type=int, default=2, help="rows per forward")
    parser.add_argument("--max-length", type=int, default=256, help="tokens per row")
    parser.add_argument("--rank", type=int, default=8, help="LoRA rank")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further options, for all")
    add_common_arguments(parser)
    args = parser.parse_args(argv)
    for name in ("steps", "rounds", "batch", "micro_batch", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return args


def _implementations(args: argparse.Namespace) -> list[str]:
    peers = [name for name in args.against.split(",") if name]
    chosen = args.impls.split(",") if args.impls else [*RULES, "hf_factored", *peers]
    unknown = [name for name in chosen if name not in (*RULES, *PEERS)]
    if unknown:
        sys.exit(f"unknown implementation {', '.join(unknown)}; there are {', '.join((*RULES, *PEERS))}")
    return list(dict.fromkeys(chosen))


def _configuration(args: argparse.Namespace) -> tuple[list[str], str]:
    """Overrides that all implementations share, and a name for the rows."""
    where = args.data or os.environ.get("KT_RAY_TEST_DATA")
    if args.data and not Path(args.data).exists():
        sys.exit(f"--data {args.data} does not exist")
    given = [
        "optim=demo",
        f"trainer.batch_size={args.batch}",
        f"trainer.micro_batch_size={args.micro_batch}",
        "trainer.eval_every=0",
        f"data.max_length={args.max_length}",
        f"lora.rank={args.rank}",
        f"lora.alpha={2 * args.rank}",
        *args.set,
    ]
    if Path(args.model).is_dir():
        given += ["model=custom", f"model.path='{args.model}'"]
    else:
        given += [f"model={args.model}"]
    if where is None:
        return [*given, "data=demo"], "demo"
    path = Path(where).resolve()
    if path.is_file():
        return [*given, "data=jsonl", f"data.path='{path}'"], path.stem
    rows, tokenizer = path / "nekoqa" / "neko_union_alpaca.json", path / "tokenizers" / "minimind"
    if not rows.is_file():
        sys.exit(f"{path} holds no nekoqa/neko_union_alpaca.json")
    given += ["data=jsonl", f"data.path='{rows}'", "data.format=alpaca"]
    if not Path(args.model).is_dir():
        given += [f"model.tokenizer='{tokenizer}'"]
    return given, "nekoqa"


def built_model_dir(overrides: Sequence[str]) -> str:
    """The checkpoint, built here if need be, so that no measured process builds it."""
    from kt_ray.config.compose import compose
    from kt_ray.demo import resolve_model_dir

    return os.path.abspath(resolve_model_dir(compose(list(overrides)).model))


def run_job(job: Job, scratch: Path, label: str, *, spare_bytes: int = 0, timeout: float = TIMEOUT) -> Result:
    """`run_child` of one implementation, whose time it prints."""
    result = run_child("train_child.py", job, job.impl, scratch, spare_bytes, timeout)
    measured = [step["seconds"] for step in result["steps"][job.warmup :]]
    print(f"{label}  {job.impl:<16} {statistics.median(measured):7.3f} s per step", flush=True)
    return result


def make_record(
    impl: str, args: argparse.Namespace, data: str, rounds: Sequence[Result], warmup: int = -1
) -> Result:
    """One implementation's figures over all rounds."""
    skip = args.warmup if warmup < 0 else warmup
    measured = [step for result in rounds for step in result["steps"][skip:]]
    tokens = statistics.fmean(step["tokens"] for step in measured)
    median = statistics.median(step["seconds"] for step in measured)
    terms = sorted({key for step in measured for key in step if key.startswith("seconds_")})
    first = rounds[0]
    return {
        "impl": impl,
        "model": args.model if not Path(args.model).is_dir() else Path(args.model).name,
        "tokens": round(tokens),
        "median_s": round(median, 4),
        "tokens_per_s": round(tokens / median, 1),
        "peak_rss_bytes": max(result["peak_rss_bytes"] for result in rounds),
        "pss_bytes": max(result["pss_bytes"] for result in rounds),
        "fastest_s": round(min(step["seconds"] for step in measured), 4),
        "dtype": first["dtype"],
        "isa": first.get("isa", ""),
        "threads": first["threads"],
        "cpus": args.threads,
        "data": data,
        "batch": args.batch,
        "micro_batch": args.micro_batch,
        "max_length": args.max_length,
        "set": args.set,
        "lora_rank": args.rank,
        "trainable_parameters": first["trainable_parameters"],
        "expert_lora": impl != "hf",
        "rounds": len(rounds),
        "warmup": skip,
        "steps": len(measured),
        "median_seconds_by_term": {
            key.removeprefix("seconds_"): round(statistics.median(step[key] for step in measured), 4)
            for key in terms
        },
        "load_seconds": round(statistics.median(result["load_seconds"] for result in rounds), 2),
        "cpu_seconds_per_step": round(statistics.median(r["cpu_seconds_per_step"] for r in rounds), 4),
        "cpus_used_by_others": round(max(result["cpus_used_by_others"] for result in rounds), 2),
        "losses": [step["loss"] for step in first["steps"]],
    }


def _float32(
    args: argparse.Namespace, overrides: Sequence[str], data: str, model_dir: str, scratch: Path
) -> list[Result]:
    """The two that compute the same function, on a float32 copy of the checkpoint.

    With a small eps, AdamW moves an element whose gradient is mere rounding as far as any other, and two
    correct programs part within a few steps; CHECK_EPS keeps it from that.
    """
    copy = scratch / "float32"
    _widen(Path(model_dir), copy)
    overrides = [*overrides, f"optim.eps={CHECK_EPS}"]
    records = []
    for impl in ("kt_ray_local", "hf_factored"):
        job = Job(impl, overrides, str(copy), 1, max(1, args.check_steps - 1), args.threads)
        record = make_record(impl, args, data, [run_job(job, scratch, "float32  ")], warmup=1)
        records.append({**record, "set": [*args.set, f"optim.eps={CHECK_EPS}"]})
    return records


def _widen(source: Path, target: Path) -> None:
    """A copy of a checkpoint with every tensor in float32."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    for file in source.glob("*.safetensors"):
        wide = {name: tensor.float() for name, tensor in load_file(file).items()}
        save_file(wide, target / file.name, metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config = {**{k: v for k, v in config.items() if k != "torch_dtype"}, "dtype": "float32"}
    (target / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _compare(records: Sequence[Result]) -> None:
    """Note in each record how far its losses are from hf_factored's of the same dtype."""
    reference = {r["dtype"]: r["losses"] for r in records if r["impl"] == "hf_factored"}
    for record in records:
        losses = reference.get(record["dtype"])
        if losses is None or record["impl"] == "hf_factored":
            continue
        apart = [abs(a - b) / abs(b) for a, b in zip(record["losses"], losses, strict=True)]
        record["loss_difference"] = {"to": "hf_factored", "first_step": apart[0], "max": max(apart)}


def _show(records: Sequence[Result]) -> None:
    print(f"\n{'impl':<16}{'dtype':<10}{'s/step':>8}{'tokens/s':>10}{'peak RSS':>11}{'PSS':>9}  first loss")
    for r in records:
        apart = r.get("loss_difference", {}).get("first_step")
        print(
            f"{r['impl']:<16}{r['dtype']:<10}{r['median_s']:>8.3f}{r['tokens_per_s']:>10.0f}"
            f"{r['peak_rss_bytes'] / 2**20:>7.0f} MiB{r['pss_bytes'] / 2**20:>5.0f} MiB  {r['losses'][0]:.5f}"
            + (f"  {apart:.1e}" if apart is not None else "")
        )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (JobFailed, UserError) as error:
        sys.exit(str(error))
