"""A lane in the processes of Ray's actors: the bits of one process; which GPU an actor would see."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from kt_ray.actors.ray.ray_cluster import RayCluster
from kt_ray.actors.specs import actor_specs
from kt_ray.actors.visible_gpu import VARIABLE, own_lane, show_own_gpu
from kt_ray.config.schema import LoraConfig, OptimConfig
from kt_ray.experts import LocalExpertsSpec
from kt_ray.placement.plan_types import LanePlan
from tests.helpers.hf_reference import build_checkpoint, random_rows
from tests.helpers.ray_place import Place, ray_place
from tests.helpers.runs import config_for, local_cluster, plan_for, steps

BATCHES = [random_rows(8, seed=s) for s in range(3)]


def spec(lane: LanePlan | None) -> LocalExpertsSpec:
    return LocalExpertsSpec(
        0, "", (0,), LoraConfig(), OptimConfig(), 0, "auto", 1, (), -1, "retain", lane=lane
    )


def test_an_actor_sees_the_gpu_of_its_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    for visible, name in ((None, "1"), ("3,5", "5"), ("GPU-aa, GPU-bb", "GPU-bb")):
        made = own_lane(spec(LanePlan("cuda:1", ((0, (1,)),))), visible)
        assert made.lane is not None and made.lane.device == "cuda:0" and made.lane.resident == ((0, (1,)),)
        show_own_gpu(made)
        assert os.environ[VARIABLE] == name
    for lane in (None, LanePlan("cpu")):
        monkeypatch.setenv(VARIABLE, "7")
        made = own_lane(spec(lane), "0,1")
        show_own_gpu(made)
        assert made.lane == lane and os.environ[VARIABLE] == "7"


def test_too_late_for_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="too late"):
        show_own_gpu(own_lane(spec(LanePlan("cuda:0")), None))


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    with ray_place() as place:
        monkeypatch.setenv("RAY_TMPDIR", str(place.path))
        yield place
        ray.shutdown()


@pytest.mark.ray
@pytest.mark.usefixtures("place")
def test_bit_identical_to_one_process(tmp_path: Path) -> None:
    path = build_checkpoint(tmp_path, "deepseek_v3", hidden_size=256)
    config = config_for(
        path,
        *("cluster=ray", "cluster.address=local", "cluster.dashboard=false", "optim.lr=0.02"),
        *("lora.dropout=0.1", "rule=cpu_2workers_2sockets", "rule.experts.lane_device=cpu"),
        *("rule.experts.gpu_resident=2", "rule.experts.stream=0.5"),
    )
    plan = plan_for(path, config)
    cluster = RayCluster(plan, actor_specs(plan, config, str(path)), config.cluster, config.rule.ray, "lane")
    try:
        facts = cluster.start()
        observed = steps(cluster, config, BATCHES, 3)
        parameters = cluster.parameters()
        lanes = [fact["lane"] for fact in cluster.info() if "lane" in fact]
    finally:
        cluster.shutdown()
    assert len(lanes) == 2 and all(lane["carried_bytes"] > 0 and lane["resident_bytes"] > 0 for lane in lanes)
    assert all(fact["notes"] == [] for fact in facts if "lane" in fact)
    with local_cluster(path, config) as local:
        assert observed == steps(local, config, BATCHES, 3)
        reference = local.parameters()
    assert all((parameters[name] == reference[name]).all() for name in reference)
