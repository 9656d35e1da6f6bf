"""One run of step_timeline.py, in a process of its own: steps, and what every actor did in each.

    python step_timeline_child.py job.json result.json

Started by step_timeline.py only.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import cpu_seconds, memory

from kt_ray import torch_environment


@dataclasses.dataclass(frozen=True)
class Job:
    """What one process runs.

    Attributes:
        label: for people.
        overrides: the configuration, as on kt_ray's command line.
        steps, warmup: measured steps, and those before them.
        threads: CPUs of the process tree.
        paced: replace attention by waits (benchmarks/paced_stage.py).
        trace: where the last step's trace goes; None = nowhere.
        traces: directory for a trace of every measured step; None = nowhere.
    """

    label: str
    overrides: list[str]
    steps: int
    warmup: int
    threads: int
    paced: bool = False
    trace: str | None = None
    traces: str | None = None


def main(job_file: str, result_file: str) -> None:
    job = Job(**json.loads(Path(job_file).read_text(encoding="utf-8")))
    # Before torch: its pools take their size from here, and the plan counts these CPUs.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: job.threads])
    torch_environment.apply()  # as the command line does
    Path(result_file).write_text(json.dumps(run(job)), encoding="utf-8")


def run(job: Job) -> dict[str, Any]:
    """All steps; figures of the measured ones."""
    from kt_ray.config.compose import compose
    from kt_ray.runs.prepare import prepare
    from kt_ray.runs.start_cluster import make_cluster
    from kt_ray.timeline import Activity
    from kt_ray.tracking import StepMetrics
    from kt_ray.tracking.chrome_trace import write_timeline
    from kt_ray.train.trainer import Events, Trainer

    total = job.warmup + job.steps
    config = compose([*job.overrides, f"trainer.max_steps={total}", "trainer.timeline_every=1"])
    prepared = prepare(config)
    cluster = make_cluster(prepared, f"benchmark-{os.getpid()}")
    facts: dict[str, Any] = {}
    if job.paced:
        from paced_stage import RTX_4090, PacedStage, pace_of

        pace = pace_of(prepared.plan.dims, config.data.max_length)
        stand_in = functools.partial(PacedStage, pace)
        cluster.specs = dataclasses.replace(cluster.specs, build_stage=stand_in)
        moe = prepared.plan.dims.moe_layers[0]
        facts["stand_in"] = {
            **RTX_4090,
            "us_per_token_and_layer": (pace.before[moe] + pace.after[moe]) * 1e6,
            "us_per_token_of_loss": pace.loss * 1e6,
        }
    seen: list[tuple[StepMetrics, Sequence[Activity]]] = []
    metrics: list[StepMetrics] = []
    events = Events(
        on_step=metrics.append, timeline=lambda _, activities: seen.append((metrics[-1], activities))
    )
    try:
        cluster.connect()
        cluster.start()
        trainer = Trainer(config, cluster, prepared.batches, events)
        for index in range(job.warmup):
            trainer.step(index)
        own, busy = cpu_seconds()
        for index in range(job.warmup, total):
            trainer.step(index)
        own_after, busy_after = cpu_seconds()
        used = memory()
    finally:
        cluster.shutdown()
    measured = seen[job.warmup :]
    wall = sum(m.seconds for m, _ in measured)
    if job.trace:
        trace = Path(job.trace)
        written = write_timeline(trace.parent, total, measured[-1][1], {"label": job.label})
        written.replace(trace)
    if job.traces:
        for index, (_, activities) in enumerate(measured, start=job.warmup):
            write_timeline(Path(job.traces), index + 1, activities, {"label": job.label})
    plan = prepared.plan
    return {
        "steps": [figures(m, activities, job.paced) for m, activities in measured],
        "losses": [m.loss for m, _ in seen],
        "cpus_used_by_others": max(0.0, (busy_after - busy) - (own_after - own)) / wall,
        "process_tree_cpu_s": (own_after - own) / job.steps,
        "groups": plan.groups,
        "activations": plan.experts[0].activations,
        "attention_threads": [w.threads for w in plan.workers],
        "expert_threads": [a.threads for a in plan.experts],
        **facts,
        **used,
    }


def figures(metrics: Any, activities: Sequence[Any], paced: bool) -> dict[str, Any]:
    """One step: wall time, CPU time of both sides, busy shares, and seconds by category of each actor."""
    workers = [a for a in activities if a.actor.startswith("worker")]
    experts = [a for a in activities if a.actor.startswith("experts")]
    (driver,) = (a for a in activities if a.actor == "driver")
    seconds, threads = metrics.seconds, sum(a.threads for a in experts)
    shares = [a.seconds["compute"] / seconds if paced else metrics.busy[a.actor] for a in workers]
    return {
        "seconds": seconds,
        "tokens": metrics.tokens,
        "busy_expert": sum(a.kernel_seconds for a in experts) / (seconds * threads),
        "busy_attention": sum(shares) / len(shares),
        "attention_cpu_s": sum(a.cpu_seconds for a in workers),
        "expert_cpu_s": sum(a.kernel_seconds + a.cpu_seconds for a in experts),
        "expert_kernel_s": sum(a.kernel_seconds for a in experts),
        "queue_depth": sum(a.queue_mean for a in experts) / len(experts),
        "queue_max": max(a.queue_max for a in experts),
        "driver": {e.name: e.end - e.start for e in driver.spans},
        "actors": {a.actor: {**a.seconds, "total": a.end - a.start} for a in (*workers, *experts)},
        "experts_first_wait_s": sum(_first_wait(a) for a in experts) / len(experts),
        "experts_after_last_call_s": sum(_after(a, driver) for a in experts) / len(experts),
    }


def _first_wait(actor: Any) -> float:
    """From the pass's beginning to the first engine call."""
    return float(next(e.start for e in actor.spans if e.category == "compute") - actor.start)


def _after(actor: Any, driver: Any) -> float:
    """From the last engine call to the step's end; CLOCK_MONOTONIC is one for all of a host."""
    return float(driver.end - [e.end for e in actor.spans if e.category == "compute"][-1])


if __name__ == "__main__":
    main(*sys.argv[1:])
