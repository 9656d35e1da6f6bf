"""What actors report of a pass: plain picklable facts, summed up by the driver."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path

import numpy as np
import torch

from kt_ray.batch import Tops, Wave
from kt_ray.experts import ExpertCounters
from kt_ray.placement.plan_types import Plan
from kt_ray.timeline import Activity


def resident_bytes() -> int:
    """Resident memory of this process now (shared pages included)."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class ExpertPassReport:
    """One expert actor's pass: its counters, and what it did when."""

    rank: int
    counters: ExpertCounters
    host_rss_bytes: int
    pid: int
    activity: Activity


@dataclass(frozen=True)
class WorkerPassReport:
    """One attention worker's pass.

    loss_sum: float64 sum of losses (last stage only, else 0). terms: seconds by what they were spent on
    ("attention", "experts" = waiting for expert actors, "stages" = waiting for other stages,
    "head"). activity: what it did when. logits: per group, per micro-batch, when asked for.
    losses: likewise the summed losses (last stage only). logps: likewise float64 [b], when asked for.
    token_logps: likewise float32 [b, s - 1], with a TokenLoss: at a position for the label behind it, 0
    without one. tops: likewise, when asked for.
    routing: float64 [2, E], counts and probabilities of the routers, when asked for.
    """

    rank: int
    loss_sum: float
    terms: dict[str, float]
    host_rss_bytes: int
    gpu_bytes: int
    pid: int
    activity: Activity
    logits: list[list[torch.Tensor]] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)
    logps: list[list[np.ndarray]] = field(default_factory=list)
    token_logps: list[list[np.ndarray]] = field(default_factory=list)
    tops: list[list[Tops]] = field(default_factory=list)
    routing: np.ndarray | None = None


@dataclass(frozen=True)
class PassReport:
    """A whole pass: every actor's report. `loss` is the token mean over the step.

    micro_losses: per wave, replica and group the summed token losses of each micro-batch.
    """

    loss: float
    workers: tuple[WorkerPassReport, ...]
    experts: tuple[ExpertPassReport, ...]
    micro_losses: tuple[tuple[list[list[float]], ...], ...] = ()


def token_logps(plan: Plan, wave: Wave, report: PassReport) -> Iterator[tuple[int, np.ndarray]]:
    """(sample id, float32 [n - 1] the labels' log-probabilities) of every row of a pass with a TokenLoss."""
    for replica, groups in enumerate(wave):
        found = report.workers[plan.worker(replica, plan.stages - 1).rank].token_logps
        for group, values in zip(groups, found, strict=True):
            for micro, logps in zip(group, values, strict=True):
                for row, (sample, n) in enumerate(zip(micro.sample_ids, micro.lengths, strict=True)):
                    yield int(sample), logps[row, : n - 1]


def merged(passes: Sequence[PassReport]) -> PassReport:
    """One report of the passes of a step: seconds and counts add up, memory is the largest.

    Losses add up as well: each is a share of the step's token mean. Tensors are those of the last pass.
    """
    if len(passes) == 1:
        return passes[0]
    workers = tuple(_add_workers(parts) for parts in zip(*(p.workers for p in passes), strict=True))
    experts = tuple(_add_experts(parts) for parts in zip(*(p.experts for p in passes), strict=True))
    micro = tuple(wave for p in passes for wave in p.micro_losses)
    return PassReport(sum(p.loss for p in passes), workers, experts, micro)


def _add_workers(parts: Sequence[WorkerPassReport]) -> WorkerPassReport:
    return replace(
        parts[-1],
        loss_sum=sum(p.loss_sum for p in parts),
        terms={term: sum(p.terms[term] for p in parts) for term in parts[0].terms},
        host_rss_bytes=max(p.host_rss_bytes for p in parts),
        gpu_bytes=max(p.gpu_bytes for p in parts),
        activity=reduce(Activity.plus, (p.activity for p in parts)),
    )


def _add_experts(parts: Sequence[ExpertPassReport]) -> ExpertPassReport:
    return replace(
        parts[-1],
        counters=reduce(ExpertCounters.plus, (p.counters for p in parts)),
        activity=reduce(Activity.plus, (p.activity for p in parts)),
        host_rss_bytes=max(p.host_rss_bytes for p in parts),
    )
