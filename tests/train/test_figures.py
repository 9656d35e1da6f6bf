"""From the actors' reports to a step's figures."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kt_ray.placement.plan_types import Plan
from kt_ray.train import figures
from kt_ray.train.figures import _gpu_memory
from kt_ray.train.reports import PassReport


def reported(*workers: tuple[str, int, int]) -> tuple[Plan, PassReport]:
    """A plan and reports of workers given as (device, process id, peak bytes)."""
    plan: Any = SimpleNamespace(workers=[SimpleNamespace(place=device) for device, _, _ in workers])
    found: Any = SimpleNamespace(
        workers=[SimpleNamespace(rank=i, pid=pid, gpu_bytes=b) for i, (_, pid, b) in enumerate(workers)]
    )
    return cast(Plan, plan), cast(PassReport, found)


def test_processes_that_share_a_gpu_add_up() -> None:
    assert _gpu_memory(*reported(("cuda:0", 1, 10), ("cuda:0", 2, 20), ("cuda:1", 3, 5))) == {
        "cuda:0": 30,
        "cuda:1": 5,
    }
    # In one process each worker reports what the process allocated on the device.
    assert _gpu_memory(*reported(("cuda:0", 1, 30), ("cuda:0", 1, 30))) == {"cuda:0": 30}
    assert _gpu_memory(*reported(("cpu", 1, 0))) == {}


def test_processes_of_two_hosts_with_one_id_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "expert_rank", lambda *_: 0)
    monkeypatch.setattr(figures, "expert_lora_share", lambda *_: 1)
    counters = SimpleNamespace(
        forward_seconds=9.0, backward_seconds=0.0, forward_slots=1, backward_slots=1, tokens_per_expert={}
    )

    def activity(actor: str, host: str) -> Any:
        return SimpleNamespace(
            actor=actor, host=host, cpu_seconds=1.0, kernel_seconds=1.0, threads=1, queue_mean=0.0
        )

    experts = [
        SimpleNamespace(
            rank=i, counters=counters, host_rss_bytes=100, pid=212, activity=activity(f"e{i}", f"pod{i}")
        )
        for i in range(2)
    ]
    terms = {"attention": 1.0, "head": 0.0, "experts": 9.5, "stages": 0.0}
    here = activity("w0", "pod2")
    worker = SimpleNamespace(
        rank=0, terms=terms, host_rss_bytes=7, gpu_bytes=0, pid=os.getpid(), activity=here
    )
    dims = SimpleNamespace(hidden_size=8, expert_intermediate=8, num_experts=4)
    lane = SimpleNamespace(activations="retain")
    plan: Any = SimpleNamespace(
        dims=dims, experts=[lane] * 2, workers=[SimpleNamespace(device="cpu", place="cpu")], first_copy=[]
    )
    report: Any = SimpleNamespace(loss=1.0, workers=[worker], experts=experts)
    numbers = {"tokens": 1, "loss_tokens": 1, "step": 1, "epoch": 0.1, "grad_norm": 1.0, "lr": 1.0}
    config: Any = SimpleNamespace(lora=None)
    found = figures.step_metrics(plan, config, report, **numbers, seconds=10.0, optimizer_seconds=0.1)
    assert found.host_rss_bytes["expert"] == 200 and found.host_rss_bytes["worker"] == 7
    assert found.seconds_transport == 0.5  # of 9.5 s of waiting the experts computed 9
    experts[1].activity.host, here.host = "pod0", socket.gethostname()
    found = figures.step_metrics(plan, config, report, **numbers, seconds=10.0, optimizer_seconds=0.1)
    assert found.host_rss_bytes["expert"] == 100 and "worker" not in found.host_rss_bytes
