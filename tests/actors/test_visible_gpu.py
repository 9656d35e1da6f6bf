"""Which GPU an actor would see."""

from __future__ import annotations

import os

import pytest

from kt_ray.actors.specs import CUDA_VISIBLE, own_lane, show_own_gpu
from kt_ray.config.schema import LoraConfig, OptimConfig
from kt_ray.experts import LocalExpertsSpec
from kt_ray.placement.plan_types import LanePlan


def spec(lane: LanePlan | None) -> LocalExpertsSpec:
    return LocalExpertsSpec(
        0, -1, (), 1, (0,), "auto", "auto", "retain", lane=lane,
        model_dir="", lora=LoraConfig(), optim=OptimConfig(), seed=0,
    )  # fmt: skip


def test_an_actor_sees_the_gpus_of_its_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CUDA_VISIBLE, "")
    cards = {"cuda:0": "GPU-aa", "cuda:1": "GPU-bb"}
    for device, name in cards.items():
        made = own_lane(spec(LanePlan((device,), ((0, (1,)),))), cards)
        assert made.lane is not None and made.lane.devices == ("cuda:0",)
        assert made.lane.resident == ((0, (1,)),) and made.lane.names == (f"{device} ({name})",)
        show_own_gpu(made)
        assert os.environ[CUDA_VISIBLE] == name
    both = own_lane(spec(LanePlan(("cuda:1", "cuda:0"))), cards)
    show_own_gpu(both)
    assert both.lane is not None and both.lane.devices == ("cuda:0", "cuda:1")
    assert both.lane.names == ("cuda:1 (GPU-bb)", "cuda:0 (GPU-aa)")
    assert os.environ[CUDA_VISIBLE] == "GPU-bb,GPU-aa"
    for lane in (None, LanePlan(("cpu",))):
        monkeypatch.setenv(CUDA_VISIBLE, "7")
        made = own_lane(spec(lane), {})
        show_own_gpu(made)
        assert made.lane == lane and os.environ[CUDA_VISIBLE] == "7"


def test_too_late_for_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="too late"):
        show_own_gpu(own_lane(spec(LanePlan(("cuda:0",))), {"cuda:0": "GPU-aa"}))
