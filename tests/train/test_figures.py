"""From the actors' reports to a step's figures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from kt_ray.placement.plan_types import Plan
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
