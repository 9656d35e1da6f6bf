"""One implementation's share of a round of train_step.py, in a process of its own.

    python train_child.py job.json result.json

The job says what to run (see `Job`); the result holds a record per step and what was seen of the
process tree. Started by train_step.py only.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kt_ray import torch_environment

Step = Callable[[int], dict[str, float]]


@dataclass(frozen=True)
class Job:
    """What one process runs.

    Attributes:
        impl: "kt_ray_ray", "kt_ray_local", "kt_ray_ray_2x2", one of peers.PEERS, or "zero3"; the peers
            also with "_ckpt".
        overrides: the configuration, as on kt_ray's command line.
        model_dir: checkpoint; its dtype is everybody's.
        warmup: steps before the measured ones.
        steps: measured steps.
        threads: CPUs of the process tree.
    """

    impl: str
    overrides: list[str]
    model_dir: str
    warmup: int
    steps: int
    threads: int


RULES = {
    "kt_ray_ray": ["rule=auto", "rule.device=cpu", "cluster=ray", "cluster.address=local"],
    "kt_ray_local": ["rule=auto", "rule.device=cpu", "cluster=local"],
    "kt_ray_recompute": ["rule=auto", "rule.device=cpu", "cluster=local", "rule.activations=group"],
    "kt_ray_ray_2x2": ["rule=cpu_2workers_2sockets", "cluster=ray", "cluster.address=local"],
}


def main(job_file: str, result_file: str) -> None:
    job = Job(**json.loads(Path(job_file).read_text(encoding="utf-8")))
    # Before torch: its pools take their size from here, and the plan counts these CPUs.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: job.threads])
    os.environ["OMP_NUM_THREADS"] = str(job.threads)
    if job.impl.startswith("kt_ray"):
        torch_environment.apply()  # as the command line does; peers run as their users start them
    begun = time.monotonic()
    with _opened(job) as (step, facts):
        loaded = time.monotonic() - begun
        result = {**facts, "load_seconds": loaded, **measure(job, step)}
    Path(result_file).write_text(json.dumps(result), encoding="utf-8")


def measure(job: Job, step: Step) -> dict[str, Any]:
    """All steps, and the machine's view of the measured ones."""
    from common import cpu_seconds, memory

    steps = [step(index) for index in range(job.warmup)]
    begun, (own, busy) = time.monotonic(), cpu_seconds()
    steps += [step(job.warmup + index) for index in range(job.steps)]
    wall, (own_after, busy_after) = time.monotonic() - begun, cpu_seconds()
    used = own_after - own
    return {
        "steps": steps,
        "cpu_seconds_per_step": used / job.steps,
        "cpus_used_by_others": max(0.0, busy_after - busy - used) / wall,
        **memory(),
    }


@contextmanager
def _opened(job: Job) -> Iterator[tuple[Step, dict[str, Any]]]:
    """The implementation, loaded: what takes a step, and facts about it."""
    from kt_ray.config.compose import compose

    total = job.warmup + job.steps
    given = [*job.overrides, f"model.path='{job.model_dir}'", f"trainer.max_steps={total}"]
    if job.impl in RULES:
        with _kt_ray(compose([*given, *RULES[job.impl]])) as opened:
            yield opened
        return
    if job.impl.startswith("zero3"):
        from zero3_peer import Zero3Peer as Peer
    else:
        from peers import Peer  # type: ignore[assignment]
    import torch

    torch.set_num_threads(job.threads)
    peer = Peer(job.impl, compose(given), job.model_dir, total)
    yield (
        peer.step,
        {
            "trainable_parameters": peer.trainable_parameters,
            "dtype": str(peer.model.dtype).removeprefix("torch."),
            "threads": {"torch": job.threads},
            **getattr(peer, "facts", {}),
        },
    )


@contextmanager
def _kt_ray(config: Any) -> Iterator[tuple[Step, dict[str, Any]]]:
    """kt_ray's own driver: its cluster and its Trainer, without the files of a run."""
    from kt_ray.runs.prepare import prepare
    from kt_ray.runs.start_cluster import make_cluster
    from kt_ray.tracking import StepMetrics
    from kt_ray.train.trainer import Events, Trainer

    prepared = prepare(config)
    cluster = make_cluster(prepared, f"benchmark-{os.getpid()}")
    try:
        cluster.connect()
        actors = cluster.start()
        taken: list[StepMetrics] = []
        trainer = Trainer(config, cluster, prepared.batches, Events(on_step=taken.append))

        def step(index: int) -> dict[str, float]:
            trainer.step(index)
            metrics = taken.pop()
            figures = {
                key: float(value) for key, value in metrics.to_dict().items() if key.startswith("seconds")
            }
            return {
                **figures,
                "tokens": float(metrics.tokens),
                "loss": metrics.loss,
                "grad_norm": metrics.grad_norm,
            }

        shapes = cluster.parameter_shapes().values()
        plan = prepared.plan
        yield (
            step,
            {
                "trainable_parameters": sum(_product(shape) for shape in shapes),
                "dtype": plan.dtype,
                "threads": {
                    "attention": [worker.threads for worker in plan.workers],
                    "experts": [actor.threads for actor in plan.experts],
                },
                "isa": next((str(a["isa"]) for a in actors if "isa" in a), ""),
            },
        )
    finally:
        cluster.shutdown()


def _product(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


if __name__ == "__main__":
    main(*sys.argv[1:])
