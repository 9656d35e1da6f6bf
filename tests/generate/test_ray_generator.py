"""Generation under Ray is generation in one process, token by token."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from kt_ray.actors.ray.ray_cluster import RayCluster
from kt_ray.actors.specs import actor_specs
from kt_ray.config.schema import Config
from kt_ray.errors import UserError
from kt_ray.generate.generator import Generator
from kt_ray.generate.requests import Request, Sampling
from tests.helpers.generation import answers, hugging_face, random_prompts, replicas_answers
from tests.helpers.hf_reference import build_checkpoint
from tests.helpers.ray_place import ray_place, until
from tests.helpers.runs import config_for, plan_for

pytestmark = pytest.mark.ray

RAY = ("cluster=ray", "cluster.address=local", "cluster.dashboard=false")
TWO_STAGES = "rule=cpu_2workers_2sockets"
TWO_REPLICAS = "rule=cpu_replicas_2"


@pytest.fixture
def started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[tuple[Path, Config, RayCluster]]:
    rule = getattr(request, "param", TWO_STAGES)
    # Wide enough that messages go through shared memory, not inside the call.
    path = build_checkpoint(tmp_path, "deepseek_v3", hidden_size=256)
    with ray_place() as place:
        monkeypatch.setenv("RAY_TMPDIR", str(place.path))
        config = config_for(path, *RAY, rule, "trainer.step_timeout=60")
        plan = plan_for(path, config)
        cluster = RayCluster(
            plan, actor_specs(plan, config, str(path)), config.cluster, config.rule.ray, "gen"
        )
        try:
            cluster.start()
            yield path, config, cluster
        finally:
            cluster.shutdown()
            ray.shutdown()


def test_answers_are_hugging_faces_and_a_death_reaches_those_who_wait(
    started: tuple[Path, Config, RayCluster],
) -> None:
    path, _, cluster = started
    prompts = random_prompts((5, 9, 3, 12, 7, 40))
    expected = hugging_face(path, prompts, max_new_tokens=20, eos_token_id=None)
    sampling = Sampling(max_new_tokens=20)
    assert answers(cluster, prompts, sampling) == expected
    assert answers(cluster, prompts, sampling, max_rows=2) == expected

    pid = next(fact["pid"] for fact in cluster.info() if fact["actor"] == "experts-1")
    with Generator(cluster) as generator:
        answer = generator.submit(Request(prompts[0], Sampling(max_new_tokens=1_000_000)))
        next(iter(answer))
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(UserError, match=r"expert actor 1 died.*start the same command again"):
            answer.result(60)
    with (
        Generator(cluster) as another,
        pytest.raises(UserError, match=r"ended with a death.*another cluster"),
    ):
        another.submit(Request(prompts[0])).result(60)


@pytest.mark.exhaustive
def test_a_frozen_actor_reaches_those_who_wait(started: tuple[Path, Config, RayCluster]) -> None:
    _, _, cluster = started
    cluster.frozen = 5.0
    pid = next(fact["pid"] for fact in cluster.info() if fact["actor"] == "experts-1")
    with Generator(cluster) as generator:
        answer = generator.submit(Request(random_prompts((5,))[0], Sampling(max_new_tokens=1_000_000)))
        next(iter(answer))
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(UserError, match=r"expert actor 1 did not answer for .*the same command again"):
            answer.result(60)
    until(lambda: not psutil.pid_exists(pid), 20)  # Ray kills it, although it is stopped


@pytest.mark.parametrize("started", [TWO_REPLICAS], indirect=True)
def test_replicas_share_calls_and_a_death_reaches_both(started: tuple[Path, Config, RayCluster]) -> None:
    """With the same bits as apart. A replica that waits for a dead one's tokens hears of it."""
    _, _, cluster = started
    apart, of_each = replicas_answers(cluster, 40, joined=False)
    calls = []
    for _ in range(3):  # replicas meet, unless the machine does other work
        together, joined = replicas_answers(cluster, 40, joined=True)
        assert together == apart
        calls.append(joined)
        if joined < of_each:
            break
    assert min(calls) < of_each

    pid = next(fact["pid"] for fact in cluster.info() if fact["actor"] == "worker-1")
    with Generator(cluster, joined=True) as generator:
        asked = [Request(prompt, Sampling(max_new_tokens=1_000_000)) for prompt in random_prompts((5, 6))]
        running = generator.submit_all(asked)
        for answer in running:
            next(iter(answer))
        os.kill(pid, signal.SIGKILL)
        for answer in running:
            with pytest.raises(UserError, match="attention worker 1 died"):
                answer.result(60)
