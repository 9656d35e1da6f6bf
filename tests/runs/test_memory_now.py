"""What other programs use is told before minutes of loading."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kt_ray.doctor import software_checks as software
from kt_ray.doctor.check import PASS, WARN
from kt_ray.placement.memory import GIB
from kt_ray.placement.plan import make_plan
from kt_ray.placement.plan_types import Plan
from kt_ray.runs import memory_now
from tests.helpers.composing import compose
from tests.placement.configs import make_hardware, small_dims


@pytest.fixture
def plan() -> Plan:
    host = make_hardware(gpus=2)
    cards = tuple(replace(gpu, uuid=f"GPU-{gpu.index}") for gpu in host.gpus)
    return make_plan(small_dims(), compose(["mode=plan", "rule.stages=2"]), replace(host, gpus=cards))


def test_a_card_that_others_use(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_now, "gpu_memory_free", lambda: {"GPU-0": 20 * GIB, "GPU-1": GIB // 2})
    monkeypatch.setattr(memory_now, "memory_free", lambda: 64 * GIB)
    (line,) = memory_now.in_use(plan)
    assert line.startswith("cuda:1 has 0.50 GiB free, the plan needs ") and "rule.gpu_memory" in line
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check = software.gpus(plan.hardware, compose(["mode=plan"]).rule, plan)
    assert check.status == WARN and "cuda:1 has 0.50 GiB free" in check.observed
    monkeypatch.setattr(memory_now, "gpu_memory_free", dict)  # an nvidia-smi that does not say
    assert memory_now.in_use(plan) == []
    assert software.gpus(plan.hardware, compose(["mode=plan"]).rule, plan).status == PASS


def test_host_memory_that_others_use(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_now, "gpu_memory_free", dict)
    monkeypatch.setattr(memory_now, "memory_free", lambda: GIB // 4)
    (line,) = memory_now.in_use(plan)
    assert line.startswith("host memory has 0.25 GiB free, the plan needs ")
    monkeypatch.setattr(memory_now, "memory_free", lambda: 0)  # /proc does not say
    assert memory_now.in_use(plan) == []
