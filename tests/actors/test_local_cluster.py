"""One process: a stuck actor ends the run with a report of what all are at, and the process with it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kt_ray.errors import BAD_INPUT
from tests.helpers.ray_place import REPO

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
