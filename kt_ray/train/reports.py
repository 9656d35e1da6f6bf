"""What actors report of a pass: plain picklable facts, summed up by the driver."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kt_ray.experts import HostCounters
from kt_ray.timeline import Activity


def resident_bytes() -> int:
    """Resident memory of this process now (shared pages included)."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class ExpertPassReport:
    """One expert actor's pass: wall seconds, seconds waiting for messages, its counters, what it did when."""

    rank: int
    seconds: float
    seconds_waiting: float
    counters: HostCounters
    host_rss_bytes: int
    pid: int
    kernel_calls: int
    activity: Activity


@dataclass(frozen=True)
class WorkerPassReport:
    """One attention worker's pass.

    loss_sum: float64 sum of token losses (last stage only, else 0). seconds: by term
    ("attention", "experts" = waiting for expert actors, "stages" = waiting for other stages,
    "head"). activity: what it did when. logits: per group, per micro-batch, when asked for.
    """

    rank: int
    seconds: float
    loss_sum: float
    terms: dict[str, float]
    host_rss_bytes: int
    gpu_bytes: int
    pid: int
    activity: Activity
    logits: list[list[torch.Tensor]] = field(default_factory=list)


@dataclass(frozen=True)
class PassReport:
    """A whole pass: every actor's report. `loss` is the token mean over the step."""

    loss: float
    seconds: float
    workers: tuple[WorkerPassReport, ...]
    experts: tuple[ExpertPassReport, ...]
