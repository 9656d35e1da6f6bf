"""What one generated token costs, in one process and under Ray, and what Ray adds per layer.

    python benchmarks/decode.py --rounds 3 --json out.json                       # the demo model
    python benchmarks/decode.py --rounds 3 -- model=custom model.path=DIR         # another one
    python benchmarks/decode.py --rows "" --groups 8x8 --prompt 256 --tokens 64   # 8 answers to each of 8

Each round is one process per cluster, in turn, so that both meet the same machine. A process answers `--rows`
prompts together with `--tokens` tokens each, after a warm-up of `--warmup` tokens. Records, per cluster and
number of rows, over the gaps between tokens of all rounds:

    median_s, p10_s, p90_s  from one token to the next as the driver gets them, rows together
    first_s                 from submit to the first token, median of rounds
    terms_s                 per step, as workers and expert actors count them, medians of rounds
    cpu_s                   CPU seconds of all processes per step, which other work disturbs little
    ray_per_layer_s         under Ray: what median_s is more than in one process, per MoE layer
    ray_per_layer_p10_s     the same of p10_s, which other work on the machine disturbs least

With `--groups`, all answers at once, to prompts of random tokens: those of a group share theirs, and for
comparison each has its own, as long (`shared`); with rule.replicas=2 each replica's tokens in engine calls of
their own, and for comparison joined (`joined`):

    read_s, seconds         until every answer has its first token, and its last; medians of rounds
    prompt_tokens           computed; shared_tokens: taken over from another answer's
    predicted_s             by kt_ray/timing/sampling_seconds.py, at the rates of plan.rates
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import common

sys.path.insert(0, str(common.REPO))

from kt_ray import torch_environment

PROMPT = "Who are you, and what do you like?"
KINDS = {"local": (), "ray": ("cluster.address=local", "cluster.dashboard=false")}


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    if args.child:
        return _child(args)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    about = common.quiet_machine(args.wait_quiet)
    kinds = args.clusters.split(",")
    rounds: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for number in range(args.rounds):
        for kind in kinds if number % 2 == 0 else reversed(kinds):
            rounds[kind].append(_process(args, kind))
    records = summary(rounds)
    for record in records:
        _show(record)
    if args.json:
        if args.note:
            about["note"] = args.note
        about["load_after"] = round(os.getloadavg()[0], 2)
        common.write_json(args.json, records, about)
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="1,8", help="answers at the same time")
    parser.add_argument("--groups", default="", help="prompts x answers to each, such as 8x8")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt of --groups")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--warmup", type=int, default=16, help="tokens of each answer before")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clusters", default="local,ray")
    parser.add_argument("--note", help="kept in the file, about the machine")
    parser.add_argument("--child", choices=list(KINDS), help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="of the configuration")
    common.add_common_arguments(parser)
    return parser.parse_args(argv)


def _process(args: argparse.Namespace, kind: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", kind, "--rows", args.rows, "--tokens", str(args.tokens)]
    command += ["--warmup", str(args.warmup), "--groups", args.groups, "--prompt", str(args.prompt)]
    command += ["--", *args.overrides]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=900)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# ------------------------------------------------------------------ one process


def _child(args: argparse.Namespace) -> int:
    torch_environment.apply()  # as the command line does
    from kt_ray.config.compose import compose
    from kt_ray.generate.generator import Generator
    from kt_ray.runs.generation import generating, prepare_generation

    overrides = ["mode=chat", f"cluster={args.child}", *KINDS[args.child], *args.overrides]
    generation = prepare_generation(compose([*overrides, "tracking.progress=false", "run.name=decode"]))
    prompt = generation.prompt(({"role": "user", "content": PROMPT},))
    found: dict[str, Any] = {
        "model": generation.config.model.name,
        "moe_layers": len(generation.plan.dims.moe_layers),
    }
    with generating(generation, "decode") as first:
        first.close()
        if args.groups:
            found["groups"] = _groups(first.cluster, generation, args)
        for rows in map(int, filter(None, args.rows.split(","))):
            with Generator(first.cluster, max_rows=rows) as warm:
                _answer(warm, prompt, rows, args.warmup)
            with Generator(first.cluster, max_rows=rows) as generator:
                measured = _answer(generator, prompt, rows, args.tokens)
            found[str(rows)] = {**measured, "terms_s": _terms(generator.reports)}
    print(json.dumps(found))
    return 0


def _answer(generator: Any, prompt: tuple[int, ...], rows: int, tokens: int) -> dict[str, Any]:
    """Gaps between the first answer's tokens; the first one's gap is from `submit` on."""
    from kt_ray.generate.requests import Request, Sampling

    before, start = common.cpu_seconds()[0], time.perf_counter()
    asked = [generator.submit(Request(prompt, Sampling(max_new_tokens=tokens))) for _ in range(rows)]
    times = [start]
    for _ in asked[0]:
        times.append(time.perf_counter())
    answers = [answer.result(600).tokens for answer in asked]
    cpu = common.cpu_seconds()[0] - before
    assert all(len(answer) == tokens for answer in answers)
    gaps = [late - early for early, late in itertools.pairwise(times)]
    return {"first_s": gaps[0], "gaps_s": gaps[1:], "cpu_s": cpu / tokens}


def _groups(cluster: Any, generation: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Answers to a few prompts, and to as many prompts as answers."""
    from kt_ray.config.mapping import with_keys
    from kt_ray.hardware.rate_files import rates_for
    from kt_ray.placement.generation_memory import absorbs_keys
    from kt_ray.timing.sampling_seconds import predict_sampling

    prompts, group = map(int, args.groups.split("x"))
    rows, found = prompts * group, []
    config = with_keys(generation.config, {"generate.batch_size": rows})
    rates = rates_for(config, generation.plan.hardware)
    draw = random.Random(0)
    ways = (False, True) if generation.plan.replicas > 1 else (False,)
    for shared, joined in itertools.product((True, False), ways):
        texts = [tuple(draw.randrange(cluster.vocab_size) for _ in range(args.prompt)) for _ in range(rows)]
        asked = [texts[place // group * group if shared else place] for place in range(rows)]
        with _generator(cluster, rows, config, joined) as warm:
            _sample(warm, [prompt[: args.prompt // 4] for prompt in asked[:2]], args.warmup)
        with _generator(cluster, rows, config, joined) as generator:
            measured = _sample(generator, asked, args.tokens)
        shape = {"prompt_tokens": args.prompt, "answer_tokens": args.tokens}
        time_ = predict_sampling(
            generation.plan, config, rates, prompts=prompts, group=group, shared=shared, **shape
        )
        report = next(r for r in generator.reports if "attention" in r.seconds)
        found.append(
            {
                "groups": args.groups,
                "prompt": args.prompt,
                "tokens": args.tokens,
                "shared": shared,
                "joined": joined,
                "latent_keys": "absorbed" if absorbs_keys(config) else "expanded",
                **measured,
                "prompt_tokens": report.prompt_tokens,
                "shared_tokens": report.shared_tokens,
                "predicted_s": {"prefill": time_.prefill, "decode": time_.decode},
                "rates": rates.source,
                "terms_s": _terms(generator.reports),
            }
        )
    return found


def _generator(cluster: Any, rows: int, config: Any, joined: bool) -> Any:
    from kt_ray.generate.generator import Generator

    return Generator(cluster, max_rows=rows, prefill_tokens=config.generate.prefill_tokens, joined=joined)


def _sample(generator: Any, prompts: Sequence[tuple[int, ...]], tokens: int) -> dict[str, float]:
    """Seconds until all answers have begun, and until all have ended."""
    from kt_ray.generate.requests import Request, Sampling

    begun: dict[int, float] = {}
    asked = [
        Request(p, Sampling(max_new_tokens=tokens, temperature=1.0, seed=n)) for n, p in enumerate(prompts)
    ]

    def listens(number: int) -> Any:
        return lambda piece: begun.setdefault(number, time.perf_counter())

    listeners = [listens(number) for number in range(len(prompts))]
    start = time.perf_counter()
    for answer in generator.submit_all(asked, listeners):
        answer.result(600)
    return {"read_s": max(begun.values()) - start, "seconds": time.perf_counter() - start}


def _terms(reports: Sequence[Any]) -> dict[str, float]:
    """Seconds per step, of worker 0 and of expert actor 0."""
    workers = [report for report in reports if "attention" in report.seconds]
    experts = [report for report in reports if "engine" in report.seconds]
    steps = workers[0].steps
    terms = {name: seconds / steps for name, seconds in workers[0].seconds.items() if name != "idle"}
    return {**terms, "engine": experts[0].seconds["engine"] / steps}


# ------------------------------------------------------------------ of all rounds


def summary(rounds: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Records of what the processes printed, by cluster."""
    records: list[dict[str, Any]] = []
    for kind, found in rounds.items():
        about = {"impl": f"kt_ray_{kind}", "model": found[0]["model"], "moe_layers": found[0]["moe_layers"]}
        for rows in (key for key in found[0] if key.isdigit()):
            parts = [one[rows] for one in found]
            gaps = sorted(gap for part in parts for gap in part["gaps_s"])
            middle = statistics.median(gaps)
            records.append(
                {
                    **about,
                    "rows": int(rows),
                    "tokens": len(gaps),
                    "median_s": middle,
                    "p10_s": gaps[len(gaps) // 10],
                    "p90_s": gaps[len(gaps) * 9 // 10],
                    "tokens_per_s": int(rows) / middle,
                    "first_s": statistics.median(part["first_s"] for part in parts),
                    "cpu_s": statistics.median(part["cpu_s"] for part in parts),
                    "terms_s": {
                        name: statistics.median(part["terms_s"][name] for part in parts)
                        for name in parts[0]["terms_s"]
                    },
                }
            )
    base = {record["rows"]: record for record in records if record["impl"] == "kt_ray_local"}
    for record in records:
        if record["impl"] == "kt_ray_ray" and record["rows"] in base:
            for key, out in (("median_s", "ray_per_layer_s"), ("p10_s", "ray_per_layer_p10_s")):
                record[out] = (record[key] - base[record["rows"]][key]) / record["moe_layers"]
    return records + [record for kind, found in rounds.items() for record in _group_records(kind, found)]


def _group_records(kind: str, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    records = []
    for parts in zip(*(one.get("groups", []) for one in found), strict=True):
        middle = {key: statistics.median(part[key] for part in parts) for key in ("read_s", "seconds")}
        prompts, group = map(int, parts[0]["groups"].split("x"))
        per_s = prompts * group * parts[0]["tokens"] / middle["seconds"]
        about = {"impl": f"kt_ray_{kind}", "model": found[0]["model"], "rounds": len(parts)}
        records.append({**about, **parts[0], **middle, "tokens_per_s": per_s})
    return records


def _show(record: dict[str, Any]) -> None:
    terms = ", ".join(f"{name} {seconds * 1e3:.2f}" for name, seconds in record["terms_s"].items())
    if "groups" in record:
        predicted = record["predicted_s"]
        print(
            f"{record['impl']} {record['groups']} {'shared' if record['shared'] else 'apart'}"
            f"{', joined' if record['joined'] else ''}: "
            f"all begun after {record['read_s']:.2f} s, ended after {record['seconds']:.2f} s, "
            f"{record['tokens_per_s']:.1f} tokens/s; prompt tokens {record['prompt_tokens']} computed, "
            f"{record['shared_tokens']} shared; predicted {predicted['prefill']:.2f} + "
            f"{predicted['decode']:.2f} s; {terms}"
        )
        return
    print(
        f"{record['impl']} {record['rows']} rows: token {record['median_s'] * 1e3:.2f} ms "
        f"(p10 {record['p10_s'] * 1e3:.2f}, p90 {record['p90_s'] * 1e3:.2f}), first "
        f"{record['first_s'] * 1e3:.1f} ms, CPU {record['cpu_s'] * 1e3:.2f} ms; {terms}"
        + (
            f"; Ray adds {record['ray_per_layer_s'] * 1e3:.2f} ms a layer"
            if "ray_per_layer_s" in record
            else ""
        )
    )


if __name__ == "__main__":
    raise SystemExit(main())
