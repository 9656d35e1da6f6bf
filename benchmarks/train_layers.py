#!/usr/bin/env python
"""Tokens per second on some layers of a real model: kt_ray, Hugging Face + PEFT, DeepSpeed ZeRO-3.

    python -m kt_ray.tools random DIR --model deepseek_v2_lite --layers 8
    python benchmarks/train_layers.py DIR --json out.json

Every party takes the same steps: --accumulate micro-batches of one row of exactly --tokens tokens, LoRA of
--rank on attention, shared experts and dense layers, and on the routed experts where the party can:

    kt_ray_ray     under Ray (cluster=ray, rule=auto); LoRA on every expert
    hf             transformers' grouped_mm, experts frozen and without LoRA: its fastest
    hf_factored    the same, LoRA on the experts as two thin grouped products beside: a careful user's torch
    peft           the same, LoRA on the experts by PEFT's target_parameters (W + BA in every forward)
    zero3          `hf` under DeepSpeed ZeRO-3, parameters and optimizer offloaded. On a CPU this measures
                   gathering and partitioning, not PCIe (zero3_peer.py)

and each of the last four with gradient checkpointing (_ckpt). Each runs in a process of its own, anew in
every round; rounds go through them there and back. One that fails or needs more memory than the machine has
(--spare-gb must stay available) has an `error` instead of figures.

`ratio_to_ours` = its seconds per step / kt_ray_ray's.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import JobFailed, add_common_arguments, quiet_machine, write_json
from train_child import Job
from train_step import make_record, run_job

OURS = "kt_ray_ray"
LABELS = {
    "kt_ray_ray": "LoRA on attention and every routed expert",
    "kt_ray_local": "as kt_ray_ray, in one process without Ray",
    "kt_ray_recompute": "as kt_ray_local, every layer computed again in backward",
    "hf": "experts frozen, no LoRA on them (grouped_mm)",
    "hf_factored": "LoRA on the experts as thin grouped products",
    "peft": "LoRA on the experts by target_parameters: W + BA in every forward",
    "zero3": "experts frozen, no LoRA on them; ZeRO-3 offload on a CPU: gather and partition, not PCIe",
}
DEFAULT = "kt_ray_ray,hf,hf_ckpt,hf_factored,hf_factored_ckpt,peft,peft_ckpt,zero3,zero3_ckpt"  # as reported
# Characters per token of the demo's own tokenizer on its own text are about 3; other tokenizers have more.
CHARACTERS = 12
Result = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    about = quiet_machine(args.wait_quiet)
    model_dir = str(args.model_dir.resolve())
    results: dict[str, list[Result]] = {impl: [] for impl in args.parties}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        rows = Path(scratch) / "rows.jsonl"
        count = (args.warmup + args.steps) * args.accumulate
        rows.write_text(long_rows(count, CHARACTERS * args.tokens), encoding="utf-8")
        overrides = [*configuration(rows, args.tokens, args.accumulate, args.rank), *args.set]
        for number in range(args.rounds):
            for impl in args.parties if number % 2 == 0 else list(reversed(args.parties)):
                if impl in failed:
                    continue
                job = Job(impl, overrides, model_dir, args.warmup, args.steps, args.threads)
                label = f"round {number + 1}/{args.rounds}"
                try:
                    result = run_job(
                        job, Path(scratch), label, spare_bytes=int(args.spare_gb * 1e9), timeout=args.timeout
                    )
                except JobFailed as error:
                    failed[impl] = str(error)
                    print(f"{label}  {error}", file=sys.stderr, flush=True)
                    continue
                results[impl].append(result)
    records = [party_record(impl, args, results[impl], failed.get(impl)) for impl in args.parties]
    compare(records)
    show(records)
    if args.json:
        write_json(args.json, records, about)
    return 0 if not failed.get(OURS) else 1


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir", type=Path, help="a Hugging Face directory in BF16")
    parser.add_argument("--parties", default=DEFAULT, help="comma-separated")
    parser.add_argument("--tokens", type=int, default=512, help="per row; a micro-batch is one row")
    parser.add_argument("--accumulate", type=int, default=4, help="micro-batches per step")
    parser.add_argument("--rank", type=int, default=8, help="LoRA rank")
    parser.add_argument("--steps", type=int, default=3, help="measured steps per round")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--spare-gb", type=float, default=0.8, help="memory that must stay available")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for a party in one round")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further options, for all")
    add_common_arguments(parser)
    args = parser.parse_args(argv)
    args.parties = list(dict.fromkeys(name for name in args.parties.split(",") if name))
    allowed = {*LABELS, *(f"{name}_ckpt" for name in LABELS if not name.startswith("kt_ray"))}
    if unknown := [name for name in args.parties if name not in allowed]:
        parser.error(f"unknown party {', '.join(unknown)}; there are {', '.join(sorted(allowed))}")
    for name in ("tokens", "accumulate", "rank", "steps", "rounds", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if not (args.model_dir / "config.json").is_file():
        parser.error(
            f"{args.model_dir} is no Hugging Face directory: `python -m kt_ray.tools random` writes one"
        )
    # What make_record asks for, under train_step.py's names.
    args.batch, args.micro_batch, args.max_length = args.accumulate, 1, args.tokens
    args.model = str(args.model_dir)
    return args


def configuration(rows: Path, tokens: int, count: int, rank: int) -> list[str]:
    """Overrides for steps of `count` micro-batches, each one row of `tokens` tokens."""
    return [
        "model=custom",
        "optim=demo",
        "data=jsonl",
        f"data.path='{rows}'",
        "data.format=alpaca",
        "data.eval_fraction=0",
        "data.overflow=truncate",
        f"data.max_length={tokens}",
        f"trainer.batch_size={count}",
        "trainer.micro_batch_size=1",
        "trainer.eval_every=0",
        f"lora.rank={rank}",
        f"lora.alpha={2 * rank}",
    ]


def long_rows(count: int, characters: int) -> str:
    """`count` alpaca rows of at least `characters`: the demo's answers, in an order of each row's own."""
    from kt_ray.demo import persona_path

    lines = persona_path().read_text(encoding="utf-8").splitlines()
    answers = [str(json.loads(line)["output"]) for line in lines]
    rows = []
    for number in range(count):
        draw, text = random.Random(number), ""
        while len(text) < characters:
            text += draw.choice(answers) + " "
        rows.append(json.dumps({"instruction": f"Tale {number}.", "input": "", "output": text}))
    return "\n".join(rows) + "\n"


def party_record(impl: str, args: argparse.Namespace, rounds: Sequence[Result], error: str | None) -> Result:
    """A party's figures, or why there are none."""
    base = impl.removesuffix("_ckpt")
    about: dict[str, Any] = {
        "label": LABELS[base],
        "checkpointing": impl.endswith("_ckpt"),
        "accumulate": args.accumulate,
    }
    if error is not None or not rounds:
        why = error or "did not run"
        return {"impl": impl, "model": args.model_dir.resolve().name, **about, "error": why}
    record = make_record(impl, args, "demo, joined", rounds)
    record |= about | {"expert_lora": base not in ("hf", "zero3")}
    record |= {key: rounds[0][key] for key in ("compiled", "init_seconds", "deepspeed") if key in rounds[0]}
    wrong = [step["tokens"] for r in rounds for step in r["steps"] if step["tokens"] != record["tokens"]]
    if wrong or record["tokens"] != args.accumulate * args.tokens:
        required = args.accumulate * args.tokens
        record["error"] = f"steps of {sorted({record['tokens'], *wrong})} tokens, required {required}"
    return record


def compare(records: Sequence[Result]) -> None:
    """Each party's time over ours, and how far its first loss is from ours."""
    ours = next((r for r in records if r["impl"] == OURS and "error" not in r), None)
    for record in records:
        if ours is None or "error" in record:
            continue
        record["ratio_to_ours"] = round(record["median_s"] / ours["median_s"], 3)
        record["first_loss_difference"] = abs(record["losses"][0] - ours["losses"][0]) / abs(
            ours["losses"][0]
        )


def show(records: Sequence[Result]) -> None:
    """A table, and the two ratios that are asked for."""
    print(f"\n{'party':<18}{'s/step':>9}{'tokens/s':>10}{'x ours':>8}{'peak RSS':>11}  first loss")
    for r in records:
        if "error" in r:
            print(f"{r['impl']:<18} {r['error'].splitlines()[0]}")
            continue
        ratio = f"{r['ratio_to_ours']:.2f}" if "ratio_to_ours" in r else ""
        print(
            f"{r['impl']:<18}{r['median_s']:>9.3f}{r['tokens_per_s']:>10.1f}{ratio:>8}"
            f"{r['peak_rss_bytes'] / 1e9:>8.1f} GB  {r['losses'][0]:.4f}"
        )
    done = {r["impl"]: r["ratio_to_ours"] for r in records if "ratio_to_ours" in r}
    for name, parties in (("Hugging Face + PEFT", ("hf", "hf_ckpt")), ("ZeRO-3", ("zero3", "zero3_ckpt"))):
        if found := [done[p] for p in parties if p in done]:
            print(f"the faster {name}: {min(found):.2f} times our seconds per step")


if __name__ == "__main__":
    sys.exit(main())
