"""What other programs have taken of the memory that a plan needs. The plan counts what a machine has."""

from __future__ import annotations

from kt_ray.hardware.describe import gpu_memory_free, memory_free
from kt_ray.placement.plan_types import Plan
from kt_ray.placement.render import gib


def gpus_in_use(plan: Plan) -> list[str]:
    """Of this host's GPUs those with less free memory than the plan needs, and how much."""
    uuids = {f"cuda:{gpu.index}": gpu.uuid for gpu in plan.hardware.gpus if gpu.uuid}
    needed = [(b.device, b.total) for b in plan.budgets if b.host == 0 and b.device in uuids]
    free = gpu_memory_free() if needed else {}
    short = [(device, total, free.get(uuids[device], total)) for device, total in needed]
    return [
        f"{device} has {gib(now)} free, the plan needs {gib(total)}: other programs use the card"
        for device, total, now in short
        if now < total
    ]


def in_use(plan: Plan) -> list[str]:
    """The same with what to do, and of host memory."""
    lines = [
        f"{line} (nvidia-smi lists them); end them, or plan for less with rule.gpu_memory=<GiB>"
        for line in gpus_in_use(plan)
    ]
    need, free = sum(b.total for b in plan.budgets if b.is_socket and b.host == 0), memory_free()
    if 0 < free < need:
        lines.append(
            f"host memory has {gib(free)} free, the plan needs {gib(need)}: end other programs before Linux "
            "ends the run"
        )
    return lines
