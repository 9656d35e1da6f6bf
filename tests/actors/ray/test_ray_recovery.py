"""SIGKILL of actors and of a node in mid-step under Ray: the run ends as an undisturbed one, bit for bit."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from kt_ray.actors.ray.ray_cluster import RayCluster, RayHandle
from kt_ray.actors.specs import actor_specs
from kt_ray.config.schema import Config
from kt_ray.errors import UserError
from kt_ray.train.trainer import Events, StepBatches, Summary, Trainer
from tests.helpers.hf_reference import build_checkpoint, random_rows
from tests.helpers.ray_place import Place, gone, head_node, ray_place, second_node, until
from tests.helpers.runs import config_for, local_cluster, plan_for, save_state, steps, waves_of

pytestmark = [pytest.mark.ray, pytest.mark.slow]

BATCHES = [random_rows(8, seed=s) for s in range(3)]
COMMON = (
    "cluster=ray",
    "cluster.dashboard=false",
    "optim.lr=0.02",
    "lora.dropout=0.1",
    "trainer.neftune_noise_alpha=0.2",
    "trainer.save_every=2",
)
Parameters = dict[str, torch.Tensor]


class Run:
    """A run of some steps under Ray; `disturb(step)` may kill while the step's pass is under way."""

    def __init__(self, model: Path, root: Path, config: Config, total: int) -> None:
        self.config, self.root, self.total = config, root, total
        plan = plan_for(model, config)
        specs = actor_specs(plan, config, str(model))
        self.cluster = RayCluster(plan, specs, config.cluster, config.rule.ray, "recovery")
        self.lines: list[str] = []
        self.told: list[int] = []
        self.seen: set[int] = set()

    def go(self, disturb: Callable[[int], None]) -> tuple[Summary, Parameters]:
        def train(step: int) -> list[Any]:
            if step not in self.seen:
                self.seen.add(step)
                disturb(step)
            return [waves_of(BATCHES[step % len(BATCHES)], self.config, self.cluster.plan)]

        def save(taken: int) -> Path:
            return save_state(self.cluster, self.root, taken)

        events = Events(on_step=lambda m: self.told.append(m.step), save=save, say=self.lines.append)
        trainer = Trainer(self.config, self.cluster, StepBatches(self.total, 3, train), events)
        summary = trainer.run()
        return summary, self.cluster.parameters()

    def through(self, disturb: Callable[[int], None]) -> tuple[Summary, Parameters, set[str]]:
        """`go` from start to shutdown; and the actors that were replaced meanwhile."""
        try:
            self.cluster.start()
            before = self.pids()
            summary, parameters = self.go(disturb)
            after = self.pids()
        finally:
            self.cluster.shutdown()
        return summary, parameters, {name for name in before if before[name] != after[name]}

    def pids(self) -> dict[str, int]:
        return {fact["actor"]: fact["pid"] for fact in self.cluster.info()}


def kill_in_mid_step(*pids: int, then: Callable[[], None] = lambda: None) -> None:
    """Stop processes now, so that the step which begins now cannot end; kill them when it is under way."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)

    def kill() -> None:
        time.sleep(0.5)
        then()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    threading.Thread(target=kill).start()


def check(run: Run, summary: Summary, parameters: Parameters, model: Path, recoveries: int) -> None:
    with local_cluster(model, run.config) as local:
        assert summary.losses == steps(local, run.config, BATCHES, run.total)
        expected = local.parameters()
    assert parameters.keys() == expected.keys()
    assert all(torch.equal(parameters[name], expected[name]) for name in expected)
    assert run.told == list(range(1, run.total + 1))
    assert summary.recoveries == recoveries and summary.seconds_lost > 0, run.lines


@pytest.fixture
def model(tmp_path: Path) -> Path:
    # Wide enough that messages within a node go through shared memory.
    return build_checkpoint(tmp_path, "deepseek_v3", hidden_size=256)


# Tests with a Ray of their own come first: from the first `local_ray` on this process is connected.


def test_killed_actors(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While loading an expert actor; in a pass the other one, worker 0 with masters and moments, and worker 1
    (which only freezes); and after a pass, when the others have applied the step, the first one again."""
    in_pass = {1: "experts-1", 3: "worker-0"}  # by step, from 0
    freezes = {4: "worker-1"}
    in_commit = {5: "experts-0"}
    victims = {*in_pass.values(), *in_commit.values(), *freezes.values()}
    layout = ("cluster.address=local", "rule=cpu_2workers_2sockets", "trainer.recoveries=5")
    config = config_for(model, *COMMON, *layout)
    with ray_place() as place:
        monkeypatch.setenv("RAY_TMPDIR", str(place.path))
        run = Run(model, tmp_path / "saved", config, 6)
        run.cluster.frozen = 10.0
        run.cluster.say = run.lines.append
        commit, load = run.cluster.commit, run.cluster._load

        def disturbed_load(*calls: Any) -> None:
            if not run.cluster.recoveries:
                facts = run.cluster._result(run.cluster.experts[0].control("info"))
                os.kill(facts["pid"], signal.SIGKILL)
            load(*calls)

        monkeypatch.setattr(run.cluster, "_load", disturbed_load)

        def disturb(step: int) -> None:
            if step in freezes:
                os.kill(run.pids()[freezes[step]], signal.SIGSTOP)
            if step in in_pass:
                kill_in_mid_step(run.pids()[in_pass[step]])

        def disturbed(step: int, lr: float, clip: float) -> float:
            if step in in_commit:
                kill_in_mid_step(run.pids()[in_commit.pop(step)])
            return commit(step, lr, clip)

        monkeypatch.setattr(run.cluster, "commit", disturbed)
        summary, parameters, replaced = run.through(disturb)
        assert place.left() == []
    assert in_commit == {} and replaced == victims
    back = [line.partition(": ")[2] for line in run.lines if line.startswith("back after")]
    assert back == [
        "no checkpoint yet (trainer.save_every), from the start of the run: step 1 is repeated",
        "from checkpoint step_000002: step 3 is repeated",
        "nothing committed was lost, on after step 4",
        "from checkpoint step_000004: step 5 is repeated",
    ]
    starts = [line.partition(": starting")[0] for line in run.lines if "starting it again" in line]
    assert starts[:3] == ["expert actor 0 died", "expert actor 1 died", "attention worker 0 died"]
    assert starts[3].startswith("attention worker 1 did not answer for 1") and starts[4:] == starts[:1]
    check(run, summary, parameters, model, 5)


@pytest.fixture
def nodes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """So many Ray nodes as processes on this machine; this process joins at the first."""
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(ray_place(own_token=False))
        stack.enter_context(head_node(place, tmp_path / "head", cpus=2, alert=True))
        for n in range(1, request.param):
            stack.enter_context(second_node(place, tmp_path / f"node {n}", cpus=2))
        stack.callback(ray.shutdown)
        yield place


@pytest.mark.exhaustive
@pytest.mark.parametrize("nodes", [2], indirect=True)
def test_killed_actors_of_another_host(model: Path, tmp_path: Path, nodes: Place) -> None:
    """Two hosts with a copy of the experts each: a lost worker costs a step, a lost copy the way back to a
    checkpoint."""
    config = config_for(
        model,
        *COMMON,
        f"cluster.address={nodes.address}",
        *("rule=multi_node", "rule.device=cpu", "rule.replicas=2", "rule.attention_hosts=all"),
        "rule.experts.copies=2",
    )
    run = Run(model, tmp_path / "run", config, 5)
    last = run.cluster.plan.experts[-1]
    lost = {1: "worker-1", 3: f"experts-{last.rank}"}
    assert (last.host, last.copy, run.cluster.plan.workers[1].host) == (1, 1, 1)

    def disturb(step: int) -> None:
        if step in lost:
            kill_in_mid_step(run.pids()[lost[step]])

    summary, parameters, replaced = run.through(disturb)
    assert replaced == set(lost.values())
    assert any("nothing committed was lost, on after step 1" in line for line in run.lines), run.lines
    assert any("from checkpoint step_000002" in line for line in run.lines), run.lines
    check(run, summary, parameters, model, 2)


@pytest.mark.parametrize("nodes", [3], indirect=True)
def test_a_killed_node(model: Path, tmp_path: Path, nodes: Place) -> None:
    """A spare node takes over what ran on it; with no spare left, the error says what is missing."""
    config = config_for(
        model,
        *COMMON,
        f"cluster.address={nodes.address}",
        "cluster.start_timeout=240",
        "rule=cpu_1worker_1socket",
        "rule.ray.strategy=STRICT_SPREAD",
    )
    run = Run(model, tmp_path / "run", config, 5)
    killed: list[str] = []

    def disturb(step: int) -> None:
        if step == 3:
            name, node = next(pair for pair in sorted(places(run.cluster).items()) if not is_head(pair[1]))
            killed.append(node)
            pid = run.pids()[name]
            kill_in_mid_step(pid, then=lambda: kill_node(nodes, node))

    try:
        run.cluster.start()
        summary, parameters = run.go(disturb)
        where = set(places(run.cluster).values())
        assert len(where) == 2 and killed[0] not in where
        check(run, summary, parameters, model, 1)

        run.cluster.config = replace(run.cluster.config, start_timeout=6.0)
        ((name, last),) = [pair for pair in places(run.cluster).items() if not is_head(pair[1])]
        kill_node(nodes, last, run.pids()[name])
        with pytest.raises(UserError, match="died"):
            run.cluster.info()
        until(lambda: sum(node["Alive"] for node in ray.nodes()) == 1, 60)
        with pytest.raises(
            UserError,
            match=r"^no node has room for .*none came within 6 s; found 1 nodes; free now: CPU .*"
            r"required CPU .* on one node\. To fix: start a node",
        ):
            run.cluster.recover()
    finally:
        run.cluster.shutdown()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("local_ray")
def test_killed_actors_with_gloo(model: Path, tmp_path: Path) -> None:
    """Sends and receipts are under way to and from the dead process; the next group is met without it.

    Worker 0's process is the one that the group was met at, too.
    """
    victims = {1: "experts-1", 3: "worker-0"}
    common = (*COMMON, "cluster.address=local", "trainer.step_timeout=240")
    config = config_for(model, *common, "rule=cpu_2workers_2sockets", "rule.transport=gloo")
    run = Run(model, tmp_path / "saved", config, 5)

    def disturb(step: int) -> None:
        if step in victims:
            kill_in_mid_step(run.pids()[victims[step]])

    summary, parameters, replaced = run.through(disturb)
    assert replaced == set(victims.values())
    check(run, summary, parameters, model, 2)
    assert summary.seconds_lost < config.trainer.step_timeout  # nobody sat a time limit out


def places(cluster: RayCluster) -> dict[str, str]:
    """Node by actor."""
    handles = [handle for handle in cluster.handles if isinstance(handle, RayHandle)]
    return {f"{h.address[0]}-{h.address[1]}": ray.get(h.actor.place.remote())[0] for h in handles}


def is_head(node: str) -> bool:
    (entry,) = [n for n in ray.nodes() if n["NodeID"] == node]
    return "node:__internal_head__" in entry["Resources"]


def kill_node(place: Place, node: str, *actors: int) -> None:
    """Its raylet and all that belongs to it, and these actors, whose command lines do not say so."""
    (entry,) = [n for n in ray.nodes() if n["NodeID"] == node]
    of_it = [p for p, command in place.commands() if entry["RayletSocketName"] in command]
    assert any("raylet" in p.name() for p in of_it)
    for pid in actors:
        os.kill(pid, signal.SIGKILL)
    for process in of_it:
        process.kill()
    until(lambda: all(gone(p.pid) for p in of_it), 20, every=0.1)
