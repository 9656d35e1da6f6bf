"""Actors die at every kind of place: losses, evaluations and weights are those of an undisturbed run."""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kt_ray.actors.expert_actor import ExpertActor
from kt_ray.actors.specs import actor_specs
from kt_ray.checkpoint.index import CheckpointIndex
from kt_ray.checkpoint_dirs import step_name
from kt_ray.config.schema import Config
from kt_ray.data.batches import step_waves
from kt_ray.data.row_types import Row as DataRow
from kt_ray.errors import Stopped, UserError
from kt_ray.placement.expert_load import ExpertLoad
from kt_ray.train import stop_signals
from kt_ray.train.cluster_protocol import Cluster
from kt_ray.train.recovery import Point, Recovery
from kt_ray.train.trainer import Events, StepBatches, Summary, Trainer
from kt_ray.transport.messages import Address, LocalPort, Message
from tests.helpers.hf_reference import build_checkpoint, random_rows
from tests.helpers.mortal import Death, MortalCluster
from tests.helpers.runs import config_for, plan_for, save_state, waves_of

BATCHES = [random_rows(8, seed=s) for s in range(3)]
STEPS = 5
WORKERS = [("worker", 0), ("worker", 1)]
EXPERTS = [("experts", 0), ("experts", 1)]


class Run:
    """A whole run with the deaths asked for, and all that it told."""

    def __init__(self, model: Path, root: Path, deaths: list[Death], *settings: str) -> None:
        random = ("lora.dropout=0.1", "trainer.neftune_noise_alpha=0.2")
        common = ("optim.lr=0.02", *random, "trainer.eval_every=2", "trainer.micro_batch_size=2")
        self.config: Config = config_for(model, *common, *settings)
        self.root = root
        self.records: list[Any] = []
        self.evaluated: list[int] = []
        self.saved: list[int] = []
        self.back: list[int] = []
        self.lines: list[str] = []
        plan = plan_for(model, self.config)
        weights = CheckpointIndex.open(model).fingerprint
        specs = actor_specs(plan, self.config, str(model)).expecting(weights, weights)
        self.cluster = MortalCluster(plan, specs)
        self.cluster.deaths = deaths
        self.cluster.say = self.lines.append
        self.summary: Summary | None = None
        self.load = ExpertLoad()
        self.parameters: dict[str, torch.Tensor] = {}
        self.stop: stop_signals.StopSignals | None = None

    def go(self) -> Run:
        plan = self.cluster.plan
        batches = StepBatches(
            total_steps=STEPS,
            steps_per_epoch=len(BATCHES),
            train=lambda step: step_waves(
                [
                    DataRow(np.array(r.ids), np.array(r.labels), r.sample)
                    for r in BATCHES[step % len(BATCHES)]
                ],
                plan.micro_batch_rows,
                plan.replicas,
                plan.groups,
                plan.wave,
            ),
            evaluate=[[waves_of(random_rows(4, seed=9), self.config, plan)]],
            held_out=4,
        )
        events = Events(
            on_step=self.records.append,
            on_eval=lambda taken, _: self.evaluated.append(taken),
            save=self.save,
            on_repeat=self.back.append,
            say=self.lines.append,
        )
        try:
            self.cluster.start()
            trainer = Trainer(self.config, self.cluster, batches, events, stop=self.stop)
            self.summary = trainer.run()
            self.parameters = trainer.with_all_steps(self.cluster.parameters)
            self.load = trainer.load
        finally:
            self.cluster.shutdown()
        return self

    def save(self, taken: int) -> Path:
        return save_state(self.cluster, self.root, taken, lambda _: self.saved.append(taken))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("model"), "deepseek_v3")


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    made: dict[str, Run] = {}
    for rule in ("cpu_2workers_2sockets", "cpu_replicas_2"):
        made[rule] = Run(model, tmp_path_factory.mktemp("calm"), [], f"rule={rule}").go()
    return made


def passes(step: int) -> int:
    """Number of the pass of a step (from 1) in an undisturbed run: evaluations before 1, after 2 and 4."""
    return step + 1 + (step - 1) // 2


CASES = {
    # what happens, trainer.save_every, how many steps are repeated
    "an expert actor in a pass": ([Death(EXPERTS[1], "run_pass", passes(4), 3)], 2, 1),
    "worker 0 in a pass": ([Death(WORKERS[0], "run_pass", passes(4), 2)], 2, 1),
    "worker 1 in a pass": ([Death(WORKERS[1], "run_pass", passes(4), 2)], 2, 0),
    "an expert actor, nothing saved": ([Death(EXPERTS[0], "run_pass", passes(4), 5)], 0, 3),
    "worker 0, nothing saved": ([Death(WORKERS[0], "run_pass", passes(3), 1)], 0, 2),
    "in the first step, then in evaluations": (
        [
            Death(EXPERTS[0], "run_pass", 1),
            Death(WORKERS[0], "run_pass", 3, 1),
            Death(WORKERS[1], "run_pass", 9, 1),
        ],
        0,
        0,
    ),
    "in prepare": (
        [Death(EXPERTS[0], "prepare", 3), Death(WORKERS[0], "prepare", 5), Death(WORKERS[1], "prepare", 7)],
        2,
        1,
    ),
    "in commit": (
        [
            Death(EXPERTS[0], "commit", 2),
            Death(EXPERTS[1], "commit", 6, "after"),
            Death(WORKERS[0], "commit", 8, "after"),
            Death(WORKERS[1], "commit", 10),
        ],
        3,
        2,
    ),
    "worker 1 in a commit, nothing saved": ([Death(WORKERS[1], "commit", 3)], 0, 0),
    "worker 1 after one": ([Death(WORKERS[1], "commit", 3, "after")], 0, 0),
    "two at once": ([Death(EXPERTS[0], "run_pass", 5), Death(WORKERS[1], "run_pass", 5)], 2, 0),
    "all at once": ([Death(a, "run_pass", passes(4)) for a in (*WORKERS, *EXPERTS)], 2, 1),
    "while saving": ([Death(EXPERTS[1], "save_shard", 2), Death(WORKERS[0], "save_shard", 4, "after")], 2, 3),
    "in recoveries": (
        [
            Death(WORKERS[0], "run_pass", passes(4), 2),
            Death(EXPERTS[1], "discard", 1),
            Death(EXPERTS[0], "discard", 2),
            Death(EXPERTS[1], "load_again", 1, "after"),
            Death(WORKERS[1], "parameter_shapes", 2, "after"),
            Death(EXPERTS[1], "restore", 1),
            Death(WORKERS[0], "publish", 2),
        ],
        2,
        1,
    ),
    "at the very end": ([Death(EXPERTS[0], "parameters", 1), Death(WORKERS[0], "parameters", 2)], 0, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_bit_identical_to_an_undisturbed_run(
    case: str, model: Path, tmp_path: Path, undisturbed: dict[str, Run]
) -> None:
    deaths, save_every, repeated = CASES[case]
    run = Run(
        model,
        tmp_path,
        deaths,
        "rule=cpu_2workers_2sockets",
        f"trainer.save_every={save_every}",
        "trainer.recoveries=20",
    ).go()
    check(run, undisturbed["cpu_2workers_2sockets"])
    assert run.cluster.happened == len(deaths), run.lines
    backs = sum(line.startswith("back after") for line in run.lines)
    assert len(run.back) - backs == repeated, run.lines


def test_adapters_of_some_layers_too(model: Path, tmp_path: Path) -> None:
    """The first worker's layers are frozen: it has no parameters, and no backward."""
    settings = ("rule=cpu_2workers_2sockets", "lora.layers=[2]")
    calm = Run(model, tmp_path / "calm", [], *settings).go()
    assert calm.parameters and all(".layers.2." in name for name in calm.parameters)
    deaths = [
        Death(EXPERTS[1], "run_pass", passes(3), 3),
        Death(WORKERS[0], "run_pass", 6, 1),
        Death(WORKERS[1], "commit", 4),
    ]
    more = ("trainer.save_every=2", "trainer.recoveries=20")
    run = Run(model, tmp_path / "run", deaths, *settings, *more).go()
    check(run, calm)
    assert run.cluster.happened == len(deaths), run.lines


def test_replicas_too(model: Path, tmp_path: Path, undisturbed: dict[str, Run]) -> None:
    deaths = [
        Death(WORKERS[1], "run_pass", passes(2), 2),
        Death(WORKERS[0], "run_pass", 6, 2),
        Death(EXPERTS[0], "commit", 5),
    ]
    streamed = "rule.resident_layers=1"  # the new worker writes its weights where the others read them
    run = Run(model, tmp_path, deaths, "rule=cpu_replicas_2", streamed, "trainer.save_every=3").go()
    check(run, undisturbed["cpu_replicas_2"])
    assert run.cluster.happened == 3


def test_waves_a_lane_and_no_overlap_too(model: Path, tmp_path: Path) -> None:
    """A death in a step's second wave gives the first one up as well."""
    settings = (
        *("rule=cpu_2workers_2sockets", "trainer.batch_size=8", "trainer.micro_batch_size=1"),
        *("rule.wave=4", "rule.groups=2"),
        *("rule.experts.lane_device=cpu", "rule.experts.gpu_resident=2", "rule.experts.stream=0.5"),
        *("rule.overlap=false", "trainer.save_every=2"),
    )
    calm = Run(model, tmp_path / "calm", [], *settings).go()
    assert calm.cluster.plan.wave == 4
    # Two passes per step: in the second ones of steps 1, 3 and 4, evaluations before the first and after the
    # second step included.
    deaths = [
        Death(EXPERTS[1], "run_pass", 3, 3),
        Death(WORKERS[1], "run_pass", 10, 2),
        Death(EXPERTS[0], "run_pass", 14, 5),
    ]
    run = Run(model, tmp_path / "run", deaths, *settings).go()
    assert run.cluster.happened == 3
    check(run, calm)


def test_workers_lanes_too(model: Path, tmp_path: Path) -> None:
    """Workers read the memory of the actor that takes a dead one's place, and a new worker reads all."""
    settings = (
        *("rule=cpu_2workers_2sockets", "rule.stages=1", "rule.replicas=2", "trainer.micro_batch_size=1"),
        *("rule.experts.lane_device=cpu", "rule.experts.stream=0.6", "rule.experts.stream_to=workers"),
        "trainer.save_every=2",
    )
    calm = Run(model, tmp_path / "calm", [], *settings).go()
    assert all(worker.lane is not None for worker in calm.cluster.plan.workers)
    deaths = [
        Death(EXPERTS[1], "run_pass", 3, 3),
        Death(WORKERS[1], "run_pass", 6, 2),
        Death(EXPERTS[0], "run_pass", 8, 5),
    ]
    run = Run(model, tmp_path / "run", deaths, *settings).go()
    assert run.cluster.happened == 3
    check(run, calm)


def check(run: Run, expected: Run) -> None:
    assert run.summary is not None and expected.summary is not None
    assert run.summary.losses == expected.summary.losses
    assert run.summary.eval_losses == expected.summary.eval_losses
    assert run.summary.tokens == expected.summary.tokens
    assert run.parameters.keys() == expected.parameters.keys()
    assert all(torch.equal(run.parameters[n], expected.parameters[n]) for n in run.parameters)
    # Each step, evaluation and checkpoint was told once, in order.
    assert [m.step for m in run.records] == list(range(1, STEPS + 1))
    assert [m.grad_norm for m in run.records] == [m.grad_norm for m in expected.records]
    # What a pass that was given up had counted is not counted again.
    assert run.load == expected.load and run.load.least_slots() > 0
    assert [m.expert_load_imbalance for m in run.records] == [
        m.expert_load_imbalance for m in expected.records
    ]
    assert run.evaluated == expected.evaluated == [0, 2, 4, 5]
    every = run.config.trainer.save_every
    assert run.saved == [t for t in range(1, STEPS + 1) if t == STEPS or (every and t % every == 0)]
    # And what it cost was told, too.
    assert run.summary.recoveries >= 1 and run.summary.seconds_lost > 0
    assert expected.records[-1].recoveries is None
    assert sum("s lost" in line for line in run.lines) >= 1


def test_no_recovery_was_asked_for(model: Path, tmp_path: Path) -> None:
    deaths = [Death(EXPERTS[1], "run_pass", 3)]
    run = Run(model, tmp_path, deaths, "rule=cpu_2workers_2sockets", "trainer.recoveries=0")
    with pytest.raises(UserError, match=r"^expert actor 1 died; found killed.*dmesg.*start the run again"):
        run.go()
    assert run.lines == [] and [m.step for m in run.records] == [1]


@pytest.mark.parametrize("save_every", [0, 1])
def test_recoveries_are_used_up(model: Path, tmp_path: Path, save_every: int) -> None:
    """An actor that runs out of memory does so again and again."""
    deaths = [Death(EXPERTS[1], "run_pass", call) for call in range(3, 20)]
    run = Run(
        model,
        tmp_path,
        deaths,
        "rule=cpu_2workers_2sockets",
        "trainer.recoveries=2",
        f"trainer.save_every={save_every}",
    )
    way_on = (
        r"continue: python launch\.py resume=\S+$" if save_every else r"start the run again \(.*save_every\)$"
    )
    with pytest.raises(
        UserError,
        match=r"^expert actor 1 died, and all recoveries are used up; found killed; required at most 2 "
        rf"\(trainer\.recoveries\)\. To fix: .*ran out of memory.*dmesg.*{way_on}",
    ):
        run.go()
    assert run.cluster.happened == 3


def test_the_way_on_names_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another run than the newest may be meant; the checkpoint that a run began from is not its own."""
    monkeypatch.chdir(tmp_path)
    point = Point(2, tmp_path / "runs/a/checkpoints/step_000002")
    of = {run: Recovery(cast(Cluster, None), 0, point, print, tmp_path / "runs" / run) for run in "ab"}
    assert of["a"].way_on == "continue: python launch.py resume=runs/a"
    assert of["b"].way_on.startswith(
        "start the same command again, with run.overwrite=true if run.name is set"
    )


def test_deaths_while_loading(model: Path, tmp_path: Path, undisturbed: dict[str, Run]) -> None:
    """...count like others; the survivors do not load again, and the run is an undisturbed one."""
    deaths = [
        Death(EXPERTS[1], "load", 1),
        Death(WORKERS[1], "load", 1, "after"),
        Death(WORKERS[0], "hold_masters", 1, "after"),
        Death(EXPERTS[0], "discard", 1),
        Death(WORKERS[1], "publish", 1, 1),
    ]
    settings = ("rule=cpu_2workers_2sockets", "trainer.recoveries=20")
    run = Run(model, tmp_path, deaths, *settings).go()
    expected = undisturbed["cpu_2workers_2sockets"]
    assert run.cluster.happened == len(deaths) and run.cluster.recoveries <= len(deaths), run.lines
    assert run.lines[0].endswith("died: starting it again (recovery 1 of 20)"), run.lines
    loads = {a: run.cluster._calls[a, "load"] for a in (*WORKERS, *EXPERTS)}
    assert loads == {WORKERS[0]: 2, WORKERS[1]: 3, EXPERTS[0]: 2, EXPERTS[1]: 2}
    assert run.summary is not None and expected.summary is not None
    assert run.summary.losses == expected.summary.losses
    assert run.summary.recoveries == run.cluster.recoveries == run.records[0].recoveries
    assert all(torch.equal(run.parameters[n], expected.parameters[n]) for n in run.parameters)


def test_an_actor_that_dies_again_and_again_while_loading(model: Path, tmp_path: Path) -> None:
    deaths = [Death(EXPERTS[1], "load", call) for call in range(1, 9)]
    run = Run(model, tmp_path, deaths, "rule=cpu_2workers_2sockets", "trainer.recoveries=2")
    with pytest.raises(
        UserError,
        match=r"^expert actor 1 died again while loading, and all recoveries are used up; found killed; the "
        r"plan needs .*iB of the memory of host 0, which has .*iB, .* free on this machine now; required at "
        r"most 2 \(trainer\.recoveries\)\. To fix: .*dmesg.*; then start the same command again$",
    ):
        run.go()
    assert run.cluster.happened == 3
    assert run.lines == [
        "expert actor 1 died: starting it again (recovery 1 of 2)",
        "expert actor 1 died again while loading: starting it again (recovery 2 of 2)",
    ]


def test_deaths_between_loading_and_the_first_step(model: Path, tmp_path: Path) -> None:
    """...as while a resumed run reads its checkpoint, or an adapter is read to answer questions."""
    saved = Run(model, tmp_path, [], "rule=cpu_2workers_2sockets").go()
    directory = str(tmp_path / step_name(STEPS))
    deaths = [Death(EXPERTS[0], "restore", 1, "after"), Death(WORKERS[0], "publish", 2)]
    run = Run(model, tmp_path, deaths, "rule=cpu_2workers_2sockets", "trainer.recoveries=2")
    try:
        run.cluster.start()
        run.cluster.at_start(lambda: run.cluster.restore(directory, STEPS))
        parameters = run.cluster.parameters()
        assert run.cluster._all("committed") == [STEPS] * 4
    finally:
        run.cluster.shutdown()
    assert run.cluster.happened == 2 and run.cluster.recoveries == 2, run.lines
    assert all(torch.equal(parameters[n], saved.parameters[n]) for n in saved.parameters)


def test_a_lost_message_costs_one_repeated_step(
    model: Path, tmp_path: Path, undisturbed: dict[str, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All wait and nobody is to blame: nobody is replaced."""
    send, replies = LocalPort.send, 0

    def forgetful(port: LocalPort, to: Sequence[Address], message: Message) -> int:
        nonlocal replies
        replies += message.tag[0] == "reply"
        return 0 if replies == 90 and message.tag[0] == "reply" else send(port, to, message)

    monkeypatch.setattr(LocalPort, "send", forgetful)
    run = Run(
        model, tmp_path, [], "rule=cpu_2workers_2sockets", "trainer.step_timeout=5", "trainer.save_every=0"
    ).go()
    assert replies > 90
    check(run, undisturbed["cpu_2workers_2sockets"])
    assert run.lines[0] == "no actor made progress for 5 s: starting it again (recovery 1 of 3)"
    assert "nothing committed was lost" in run.lines[1]


def moved(model: Path) -> str:
    model.rename(model.with_name("moved"))
    return ""


def trained_on(model: Path) -> str:
    """The same tensors with other values, as when another fine-tune is copied over the model."""
    file = next(model.glob("*.safetensors"))
    save_file({name: 2 * tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    return "the model's files are not those that this run began with"


@pytest.mark.parametrize("victim", [EXPERTS[0], WORKERS[1]])
@pytest.mark.parametrize("damage", [moved, trained_on])
def test_a_model_that_is_gone_or_another_ends_the_run(
    model: Path, tmp_path: Path, damage: Callable[[Path], str], victim: Address
) -> None:
    """...with one error: it names the directory, and says how the run goes on."""
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    run = Run(
        copy,
        tmp_path / "saved",
        [Death(victim, "run_pass", passes(4), 2)],
        "rule=cpu_2workers_2sockets",
        "trainer.save_every=2",
    )
    happens = run.cluster.due
    said: list[str] = []

    def due(*call: Any) -> Death | None:
        death = happens(*call)
        if death is not None:
            said.append(damage(copy))
        return death

    run.cluster.due = due  # type: ignore[method-assign]
    with pytest.raises(UserError, match=rf"{copy}.*continue: python launch\.py resume=\S+$") as error:
        run.go()
    assert said[0] in str(error.value)


def test_a_signal_during_a_recovery_does_not_wait_for_the_load(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job manager kills before hundreds of gigabytes are read; what is saved is saved."""
    monkeypatch.setattr(stop_signals, "GRACE", 0.0)
    run = Run(model, tmp_path, [Death(EXPERTS[1], "run_pass", 3)], "rule=cpu_2workers_2sockets")
    load, noticed = ExpertActor.load_again, threading.Event()

    class Noticed(stop_signals.StopSignals):
        def give_up(self) -> str:
            why = super().give_up()
            if why:
                noticed.set()
            return why

    stop = Noticed()

    def slow(actor: ExpertActor) -> object:
        stop.handle(signal.SIGTERM)
        assert noticed.wait(60)
        return load(actor)

    monkeypatch.setattr(ExpertActor, "load_again", slow)
    run.stop = stop
    with pytest.raises(Stopped, match="SIGTERM: expert actor 1 died before the state was saved"):
        run.go()
    assert not [line for line in run.lines if line.startswith("back after")]
