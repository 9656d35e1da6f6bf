"""Whole runs by the command line under Ray: as a program, interrupted, and as a submitted job."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from kt_ray import cli
from kt_ray.errors import STOPPED
from kt_ray.native import available_isas
from tests.helpers.devices import CUDA
from tests.helpers.ray_place import REPO, Place, head_node, ray_place, until

pytestmark = pytest.mark.ray

# A slim Ray has no pages to show (benchmarks/bare_machine.sh).
DASHBOARD = (Path(ray.__file__).parent / "dashboard" / "client").is_dir()
RUN = ["trainer.max_steps=2", "data.limit=40", "run.name=a", "eval.after_training=0", "tracking.plot=false"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The demo model is built once, and not into the user's cache."""
    path = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KT_RAY_CACHE", str(path))
        for name in ("KT_RAY_ISA", "KT_RAY_DEBUG"):
            patch.delenv(name, raising=False)
        yield path


@pytest.fixture
def place(cache: Path) -> Iterator[Place]:
    with ray_place() as made:
        yield made


def _records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _check_actors(run: Path, driver: int | None = None, ran: bool = True) -> dict[str, Any]:
    """env.json: every actor a process of its own, the best ISA, and (at the end) kernels that ran."""
    env: dict[str, Any] = json.loads((run / "env.json").read_text())
    actors = {actor["actor"]: actor for actor in env["actors"]}
    pids = {actor["pid"] for actor in actors.values()}
    assert {"worker-0", "experts-0"} <= set(actors)
    assert len(pids) == len(actors) and env["pid"] not in pids
    assert driver is None or env["pid"] == driver
    for name, actor in actors.items():
        if name.startswith("experts"):
            assert actor["isa"] == available_isas()[-1] and actor["isa_reason"]
            assert actor["kernel_calls"] > 0 or not ran
    return env


@pytest.mark.accept("ray")
@pytest.mark.parametrize("device", ["auto", pytest.param("cuda", marks=CUDA)])
def test_launch_without_more_is_a_ray_run(place: Place, tmp_path: Path, device: str) -> None:
    """Ray, its processes, and nothing left of them; the losses of one process, bit for bit."""
    log = tmp_path / "output"
    on = [] if device == "auto" else [f"rule.device={device}"]
    on += [] if DASHBOARD else ["cluster.dashboard=false"]
    process = place.launch(*RUN, *on, log=log)
    assert process.wait(240) == 0, log.read_text()
    assert place.left() == []
    run = place.path / "runs" / "a"  # the working directory is the place
    env = _check_actors(run, process.pid)
    if DASHBOARD:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", env["dashboard"])
    output = log.read_text()
    assert "Ray: no running cluster found, started a local one" in output and "Traceback" not in output

    assert cli.main([*RUN, *on, "cluster=local", f"run.root={tmp_path}"]) == 0
    expected = [(r["step"], r.get("loss"), r.get("eval_loss")) for r in _records(tmp_path / "a")]
    assert [(r["step"], r.get("loss"), r.get("eval_loss")) for r in _records(run)] == expected
    assert len([loss for _, loss, _ in expected if loss]) == 2
    own, local = (p / "adapter" / "adapter_model.safetensors" for p in (run, tmp_path / "a"))
    assert own.read_bytes() == local.read_bytes()


@pytest.mark.exhaustive  # tests/actors/ray/test_ray_dashboard.py ends a run by Ctrl-C
def test_an_interrupted_run_leaves_no_process(place: Place, tmp_path: Path) -> None:
    """SIGTERM reaches the driver alone."""
    log = tmp_path / "output"
    process = place.launch(*RUN[1:], "trainer.max_steps=100000", "trainer.eval_every=0", log=log)
    metrics = place.path / "runs" / "a" / "metrics.jsonl"

    def stepped() -> bool:
        assert process.poll() is None, log.read_text()
        return metrics.exists() and len(metrics.read_text().splitlines()) >= 2

    until(stepped, 240)
    assert len(place.processes()) > 4  # the driver, Ray's own, the actors
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == STOPPED
    assert place.left() == []
    output = log.read_text()
    assert "SIGTERM: stopped after step" in output and "Traceback" not in output, output


@pytest.mark.exhaustive  # tests/actors/ray/test_ray_recovery.py kills actors, too
def test_a_run_survives_a_killed_actor(place: Place, tmp_path: Path) -> None:
    """kill -9 from outside in mid-step: exit code 0, each step once, the adapter of an undisturbed run."""
    # So many steps that a loaded machine has not done them all by the time it looks.
    arguments = ["data.limit=40", "run.name=a", "trainer.max_steps=40", "trainer.save_every=5"]
    arguments += ["trainer.eval_every=0", "trainer.batch_size=2", "eval.after_training=0"]
    log = tmp_path / "output"
    process = place.launch(*arguments, log=log)
    run = place.path / "runs" / "a"

    def stepped() -> bool:
        assert process.poll() is None, log.read_text()
        return (run / "metrics.jsonl").exists() and len(_records(run)) >= 3

    until(stepped, 240, every=0.01)
    victim = _check_actors(run, process.pid, ran=False)["actors"][-1]
    assert victim["actor"] == "experts-0"
    os.kill(victim["pid"], signal.SIGSTOP)  # what is under way cannot end any more
    time.sleep(0.5)
    os.kill(victim["pid"], signal.SIGKILL)
    assert process.wait(240) == 0, log.read_text()
    assert place.left() == []
    output = log.read_text()
    assert "expert actor 0 died: starting it again (recovery 1 of 3)" in output, output
    assert re.search(r"back after [\d.]+ s: ", output) and "s lost" in output and "Traceback" not in output
    assert re.search(r"recoveries +1, ", output)
    assert {a["pid"] for a in json.loads((run / "env.json").read_text())["actors"]}.isdisjoint(
        {victim["pid"]}
    )

    assert cli.main([*arguments, "cluster=local", f"run.root={tmp_path}"]) == 0
    same = ("step", "loss", "grad_norm", "lr", "tokens")
    expected = [[r[key] for key in same] for r in _records(tmp_path / "a")]
    records = _records(run)
    assert [[r[key] for key in same] for r in records] == expected and len(expected) == 40
    assert "recoveries" not in records[0]
    own, local = (p / "adapter" / "adapter_model.safetensors" for p in (run, tmp_path / "a"))
    assert own.read_bytes() == local.read_bytes()


@pytest.mark.exhaustive  # a run that joins a cluster is in tests/actors/ray/test_ray_address.py
def test_a_submitted_job_joins_its_cluster(place: Place, tmp_path: Path) -> None:
    with head_node(place, tmp_path / "head") as url:
        submit = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--address", url, "--"]
        job = [sys.executable, str(REPO / "launch.py"), *RUN, f"run.root={tmp_path}"]
        env = {**place.env, "RAY_AUTH_MODE": "token"}
        done = subprocess.run(
            submit + job, env=env, capture_output=True, text=True, timeout=240, cwd=place.path
        )
        output = done.stdout + done.stderr
        assert done.returncode == 0, output
        assert "succeeded" in output and "Ray: joined the running cluster" in output
        env_json = _check_actors(tmp_path / "a")
        assert env_json["dashboard"] == url
        # The run is over, the cluster is not: its actors are gone, its own processes are there.
        names = until(lambda: _without_actors(place), 30)
        assert any("raylet" in name for name in names) and any("gcs_server" in name for name in names)
    assert place.left() == []
    assert [r["step"] for r in _records(tmp_path / "a") if "loss" in r] == [1, 2]
    assert (tmp_path / "a" / "adapter" / "adapter_model.safetensors").is_file()


def _without_actors(place: Place) -> list[str]:
    """Command lines of the place's processes, once none is an actor of ours; else nothing."""
    names = [command for _, command in place.commands()]
    return [] if any("ray::RayActor" in name for name in names) else names
