"""Several LoRA trainings over one base: their passes joined, and one after the other.

    python -m kt_ray.tools random DIR --model deepseek_v2_lite --layers 4 --sparse --set vocab_size=8192
    python benchmarks/joined_trainings.py --json out.json -- model=custom model.path=DIR

A round is a pass with backward and an optimizer step of each of --trainings trainings, each with one row of
so many tokens (--tokens: each number is measured), through the train server's backend in this process. Ways
that take turns:

    one after the other
    experts      joined, train_server.shared=experts
    layers       joined, train_server.shared=layers
    one training has all the rows in one micro-batch: the least that joined passes can take

Records, medians over rounds:

    median_s  a whole round; tokens_per_s: of all trainings together
    pass_s    the passes; the rest are steps and what moves trainings in and out of place
    experts_s the expert actors' calls within the passes, of the slowest actor: with attention on a GPU, the
              larger part of a pass
    ratio     by how much a way has more tokens/s than one after the other; ratio_of_passes,
              ratio_of_experts: of those seconds
    loss_difference, norm_difference
              from what a training has alone, relative, the largest of losses and of gradient norms

Steps are of learning rate 0, so all rounds compute the same: with shared experts losses and gradient norms
must be equal to the bit to those of passes one after the other.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import common
import numpy as np

sys.path.insert(0, str(common.REPO))

from kt_ray import torch_environment

torch_environment.apply()  # as the command line does: before torch is imported

from kt_ray.batch import WHOLE, PassSpec, TokenLoss  # noqa: E402
from kt_ray.config.compose import compose  # noqa: E402
from kt_ray.data.tokenizer_files import load_tokenizer  # noqa: E402
from kt_ray.placement.generation_memory import within_server  # noqa: E402
from kt_ray.runs.generation import generation_of  # noqa: E402
from kt_ray.runs.joined_waves import Mix, each_alone  # noqa: E402
from kt_ray.runs.prepare import prepare_model  # noqa: E402
from kt_ray.runs.start_cluster import started  # noqa: E402
from kt_ray.runs.train_backend import ClusterBackend  # noqa: E402
from kt_ray.train.reports import PassReport  # noqa: E402
from kt_ray.train_server.backend import AdamParams, Datum, Pass  # noqa: E402

STILL = AdamParams(0.0, 0.9, 0.999, 1e-8, 0.0, 0.0)


class Round(NamedTuple):
    """Seconds, and what was computed: losses and gradient norms."""

    all: float
    passes: float
    experts: float
    losses: list[float]
    norms: list[float]


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    about = common.quiet_machine(args.wait_quiet)
    config = within_server(
        compose(
            [
                "mode=train_server",
                "cluster=local",
                f"lora.rank={args.rank}",
                f"lora.alpha={2 * args.rank}",
                f"train_server.adapters={args.trainings}",
                # Memory for rows of all trainings in one group.
                f"data.max_length={max(args.tokens) + 1}",
                f"trainer.batch_size={args.trainings}",
                f"trainer.micro_batch_size={args.trainings}",
                "rule.groups=1",
                "train_server.shared=layers",
                *args.overrides,
            ]
        )
    )
    prepared = prepare_model(config, training=True)
    generation = generation_of(prepared, load_tokenizer(prepared.model_dir, "model.path"))
    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch, started(generation, "joined-trainings") as cluster:
        backend = ClusterBackend(generation, cluster, "base", "", Path(scratch, "snapshots"))
        models = [f"training {number}" for number in range(args.trainings)]
        for seed, model in enumerate(models):
            backend.create(model, seed, WHOLE)
            first = one_row(model, min(args.tokens), seed, backend)
            backend.run(model, first.data, first.loss, backward=True)
            backend.step(model, replace(STILL, learning_rate=1e-3))  # so that no B is zero
        for tokens in args.tokens:
            passes = [one_row(model, tokens, seed, backend) for seed, model in enumerate(models)]
            records += measured(backend, passes, tokens, args)
    if args.json:
        common.write_json(args.json, records, about)
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trainings", type=int, default=4)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 64, 128, 256], help="of each training")
    parser.add_argument("--rank", type=int, default=8, help="LoRA rank")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("overrides", nargs="*", help="of the configuration")
    common.add_common_arguments(parser)
    return parser.parse_args(argv)


def one_row(model: str, tokens: int, seed: int, backend: ClusterBackend) -> Pass:
    """A pass of one row of random tokens, the mean loss of which is trained."""
    ids = np.random.default_rng(seed).integers(5, backend.vocab_size, size=tokens + 1)
    weights = np.full(tokens, 1 / tokens, dtype=np.float32)
    return Pass(model, [Datum(ids[:-1], ids[1:], {"weights": weights})], TokenLoss("cross_entropy"))


def one_round(backend: ClusterBackend, parts: Sequence[Sequence[Pass]], mix: Mix) -> Round:
    """Each part is passed joined, and then its trainings step."""
    losses: list[float] = []
    norms: list[float] = []
    in_passes, in_experts, begun = 0.0, 0.0, time.perf_counter()
    run_pass, own_mix = backend._cluster.run_pass, backend._passes.mix

    def noted(spec: PassSpec) -> PassReport:
        nonlocal in_experts
        report = run_pass(spec)
        counters = [actor.counters for actor in report.experts]
        in_experts += max(count.forward_seconds + count.backward_seconds for count in counters)
        return report

    backend._cluster.run_pass = noted
    backend._passes.mix = mix
    try:
        for part in parts:
            before = time.perf_counter()
            losses += [result.loss for result in backend.join(part)]
            in_passes += time.perf_counter() - before
            norms += [backend.step(work.model, STILL)["grad_norm"] for work in part]
    finally:
        backend._passes.mix = own_mix
        del backend._cluster.run_pass
    return Round(time.perf_counter() - begun, in_passes, in_experts, losses, norms)


def measured(
    backend: ClusterBackend, passes: Sequence[Pass], tokens: int, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """The records of all ways, and a line about each."""
    rows = [datum for work in passes for datum in work.data]
    ways: dict[str, tuple[Sequence[Sequence[Pass]], Mix]] = {
        "one after the other": ([[work] for work in passes], each_alone),
        "experts": ([passes], each_alone),
        "layers": ([passes], backend._passes.mix),
        "one training": ([[replace(passes[0], data=rows)]], each_alone),
    }
    rounds: dict[str, list[Round]] = {name: [] for name in ways}
    for number in range(args.rounds + 1):  # the first is not counted
        for name in ways if number % 2 == 0 else reversed(ways):
            rounds[name].append(one_round(backend, *ways[name]))
    exact = [(one.losses, one.norms) for name in ("one after the other", "experts") for one in rounds[name]]
    assert all(found == exact[0] for found in exact), "not equal to the bit"
    total, made = tokens * len(passes), dict[str, dict[str, Any]]()
    for name, of_way in rounds.items():
        counted = of_way[1:]
        seconds = statistics.median(one.all for one in counted)
        in_passes = statistics.median(one.passes for one in counted)
        in_experts = statistics.median(one.experts for one in counted)
        made[name] = {
            "impl": name,
            "model": backend._generation.config.model.name,
            "tokens": total,
            "trainings": len(passes),
            "rank": args.rank,
            "median_s": seconds,
            "pass_s": in_passes,
            "experts_s": in_experts,
            "tokens_per_s": total / seconds,
            "rounds": args.rounds,
        }
        if name != "one training":
            found = of_way[-1].losses, of_way[-1].norms
            for what, alone, now in zip(("loss", "norm"), exact[0], found, strict=True):
                made[name][f"{what}_difference"] = max(
                    abs(a - b) / abs(b) for a, b in zip(now, alone, strict=True)
                )
    before = made["one after the other"]
    for name, record in made.items():
        ratios = [before[key] / record[key] for key in ("median_s", "pass_s", "experts_s")]
        names = ("ratio", "ratio_of_passes", "ratio_of_experts")
        record |= {key: round(value, 2) for key, value in zip(names, ratios, strict=True)}
        print(
            f"{len(passes)} x {tokens} tokens, {name}: {record['tokens_per_s']:.1f} tokens/s "
            f"({ratios[0]:.2f} times); passes {record['pass_s']:.2f} s ({ratios[1]:.2f} times), experts in "
            f"them {record['experts_s']:.2f} s ({ratios[2]:.2f} times); norms differ by "
            f"{record.get('norm_difference', 0):.1e}",
            flush=True,
        )
    return list(made.values())


if __name__ == "__main__":
    sys.exit(main())
