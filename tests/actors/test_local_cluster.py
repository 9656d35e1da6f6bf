"""One process: a stuck actor ends the run with a report of what all are at, and the process with it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from kt_ray.actors import cluster as actors_cluster
from kt_ray.actors.local_cluster import LocalCluster
from kt_ray.actors.specs import actor_specs
from kt_ray.errors import BAD_INPUT, INTERRUPTED
from tests.helpers.hf_reference import build_checkpoint
from tests.helpers.ray_place import REPO
from tests.helpers.runs import config_for, local_cluster, plan_for

# The second forward of the expert actor's pass never ends; shutting down waits a moment for it.
STUCK = """
import sys, threading
from kt_ray import cli
from kt_ray.actors import local_cluster
from kt_ray.actors.expert_actor import ExpertActor

compute, calls = ExpertActor._compute, []

def stuck(self, *args, **how):
    calls.append(args)
    if len(calls) == 2:
        threading.Event().wait()
    return compute(self, *args, **how)

ExpertActor._compute = stuck
local_cluster.GRACE = 1.0
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("seconds", [4])
def test_a_stuck_pass_ends_with_a_report(tiny_run: list[str], seconds: int) -> None:
    arguments = [*tiny_run, "cluster=local", f"trainer.step_timeout={seconds}", "run.name=stuck"]
    done = subprocess.run(
        [sys.executable, "-c", STUCK, *arguments], capture_output=True, text=True, timeout=240, cwd=REPO
    )
    assert done.returncode == BAD_INPUT, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert line.startswith(f"error: expert actor 0 made no progress for {seconds} s; found "), line
    assert "attention worker 0: pass 1, " in line and "waiting for ('reply', 'forward', " in line
    assert "expert actor 0: pass 1, layer " in line and "trainer.step_timeout" in line
    assert "Traceback" not in done.stderr


# Loading takes minutes, amid torch's short calls; SIGTERM comes as it begins.
SLOW = """
import os, signal, sys, time
import torch
from kt_ray import cli
from kt_ray.actors import local_cluster
from kt_ray.experts.local_experts import LocalExperts

def slow(self, *args, **how):
    os.kill(os.getpid(), signal.SIGTERM)
    end = time.monotonic() + 600
    while time.monotonic() < end:
        torch.ones(100, 100).to(torch.bfloat16)

LocalExperts.load = slow
local_cluster.GRACE = 1.0
sys.exit(cli.main(sys.argv[1:]))
"""


def test_a_signal_does_not_wait_for_loading(tiny_run: list[str]) -> None:
    arguments = [*tiny_run, "cluster=local", "run.name=slow"]
    done = subprocess.run(
        [sys.executable, "-c", SLOW, *arguments], capture_output=True, text=True, timeout=240, cwd=REPO
    )
    assert done.returncode == INTERRUPTED and done.stderr.splitlines()[-1] == "interrupted", done.stderr


@pytest.mark.parametrize(
    ("lora", "copies"), [([], 1), (["lora.init=pissa_niter_16", "lora.experts=false"], 2)]
)
def test_replicas_have_one_copy_of_streamed_weights(tmp_path: Path, lora: list[str], copies: int) -> None:
    """One per stage, in both replicas at the same place; PiSSA changes the weights, so each has its own."""
    path = build_checkpoint(tmp_path, "olmoe")
    layout = ("rule.device=cpu", "rule.replicas=2", "rule.stages=2", "rule.resident_layers=0")
    with local_cluster(path, config_for(path, *layout, *lora)) as cluster:
        weights = [cast(Any, handle).actor.stage.streamed for handle in cluster.workers]
        planned = sum(b.items["weights"] for b in cluster.plan.budgets)
        of_stage = [own.host_bytes for own in weights[:2]]
        slots = sum(own.device_bytes for own in weights)
        files = list(cluster._weights_files)
        assert len(files) == (2 if copies == 1 else 0)
        for stage in range(2):
            first, second = (list(weights[rank]._layers.values()) for rank in (stage, stage + 2))
            for one, other in zip(first, second, strict=True):
                assert torch.equal(one.block, other.block)
                one.block[0] ^= 1
                assert torch.equal(one.block, other.block) == (copies == 1)
                one.block[0] ^= 1
    # The plan counts norms with the matrices.
    assert planned == pytest.approx(copies * sum(of_stage) + slots, rel=0.05)
    for file in files:  # closed with the cluster
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(file)


def test_a_file_out_of_reach_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker in another container than the driver: it has a copy of its own, and says so."""
    path = build_checkpoint(tmp_path, "olmoe")
    config = config_for(path, "rule.device=cpu", "rule.replicas=2", "rule.resident_layers=0")
    plan = plan_for(path, config)
    specs = actor_specs(plan, config, str(path))
    gone = replace(specs.stages[1], weights_file=("/proc/1/fd/4242", "x"))
    out_of_reach = replace(specs, stages=(specs.stages[0], gone))
    monkeypatch.setattr(actors_cluster, "share_weights", lambda plan, specs: (out_of_reach, []))
    cluster = LocalCluster(plan, specs)
    try:
        notes = {fact["actor"]: fact.get("notes", []) for fact in cluster.start()}
    finally:
        cluster.shutdown()
    assert notes["worker-0"] == []
    (note,) = notes["worker-1"]
    assert note.startswith("attention worker 1 has a copy of its streamed layers' weights of its own, ")
    assert "/proc/1/fd/4242" in note
