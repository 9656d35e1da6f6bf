"""Attention workers in processes of their own read the experts of actors in theirs."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kt_ray.actors.ray.ray_cluster import RayCluster
from kt_ray.actors.specs import actor_specs
from kt_ray.placement.plan_types import LanePlan
from tests.helpers.hf_reference import build_checkpoint, random_rows
from tests.helpers.runs import config_for, local_cluster, plan_for, steps

pytestmark = pytest.mark.ray

BATCHES = [random_rows(8, seed=s) for s in range(2)]


def mapped(pid: int) -> dict[str, set[str]]:
    """Names of the files of experts that a process has mapped, random part and all -> their inodes."""
    found: dict[str, set[str]] = {}
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if match := re.search(r" (\d+) +/memfd:(kt_ray-lent-experts-\S+)", line):
            found.setdefault(match[2], set()).add(match[1])
    return found


def test_workers_map_what_their_actors_hold(tmp_path: Path, local_ray: None) -> None:
    """The bits of a run without; a killed actor's memory goes with it."""
    path = build_checkpoint(tmp_path, "deepseek_v3", hidden_size=256)
    config = config_for(path, "cluster=ray", "rule=cpu_2workers_2sockets", "optim.lr=0.02")
    plan = plan_for(path, config)
    lane = LanePlan(("cpu",))
    lanes = replace(plan, workers=tuple(replace(worker, lane=lane) for worker in plan.workers))
    specs = actor_specs(lanes, config, str(path))
    cluster = RayCluster(lanes, specs, config.cluster, config.rule.ray, "lent")
    try:
        pids = {fact["actor"]: fact["pid"] for fact in cluster.start()}
        held = {actor: mapped(pids[actor]) for actor in ("experts-0", "experts-1")}
        assert [len(files) for files in held.values()] == [1, 1]
        for worker in ("worker-0", "worker-1"):
            assert mapped(pids[worker]) == held["experts-0"] | held["experts-1"]
        losses = steps(cluster, config, BATCHES, 3)

        os.kill(pids["experts-1"], signal.SIGKILL)
        time.sleep(0.5)
        cluster.recover()
        pids = {fact["actor"]: fact["pid"] for fact in cluster.info()}
        new = mapped(pids["experts-1"])
        assert len(new) == 1 and new != held["experts-1"]
        for worker in ("worker-0", "worker-1"):
            assert mapped(pids[worker]) == held["experts-0"] | new
    finally:
        cluster.shutdown()
    with local_cluster(path, config) as local:
        assert losses == steps(local, config, BATCHES, 3)
