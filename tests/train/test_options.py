"""The trainer's options against a cluster whose figures are scripted, and what only a real one shows."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

import kt_ray.train.trainer as loop
from kt_ray.batch import IGNORE, MicroBatch, PassSpec
from kt_ray.errors import BadStep, UserError
from kt_ray.placement.expert_load import ExpertLoad
from kt_ray.tracking.metrics import StepMetrics
from kt_ray.train.cluster_protocol import ActorLost, Cluster
from kt_ray.train.guard import judge
from kt_ray.train.reports import PassReport
from kt_ray.train.trainer import Events, StepBatches, Trainer
from tests.helpers.composing import compose
from tests.helpers.hf_reference import build_checkpoint, random_rows
from tests.helpers.runs import config_for, local_cluster, steps, waves_of

LABELS = np.array([[IGNORE, 1, 2]])
WAVE = ((tuple(MicroBatch(LABELS, LABELS, np.array([3]), np.array([n])) for n in (40, 41)),),)


class Scripted:
    """A cluster that computes nothing: losses and norms by step, held-out losses by steps taken."""

    plan = None
    recoveries = 0

    def __init__(self, losses: dict[int, float], norms: dict[int, float], held_out: dict[int, float]) -> None:
        self.losses, self.norms, self.held_out = losses, norms, held_out
        self.calls: list[str] = []

    def run_pass(self, spec: PassSpec) -> PassReport:
        if spec.kind == "eval":
            if math.isnan(self.held_out[spec.step]):
                raise BadStep("the loss of a forward pass is nan")
            return PassReport(self.held_out[spec.step], (), ())
        loss = self.losses.get(spec.step, 1.0)
        if math.isnan(loss):
            raise BadStep(f"the loss of step {spec.step + 1} is nan; the step was not applied")
        return PassReport(loss, (), (), (([[1.0, 4 * loss - 1.0]],),))

    def prepare(self, step: int) -> float:
        return self.norms.get(step, 1.0) ** 2

    def commit(self, step: int, lr: float, clip: float) -> float:
        self.calls.append(f"commit {step}")
        return 0.0

    def discard(self) -> None:
        self.calls.append("discard")

    def skip(self, step: int) -> None:
        self.calls.append(f"skip {step}")

    def recover(self) -> None:
        self.calls.append("recover")

    def restart(self) -> None:
        self.calls.append("restart")

    def largest_gradients(self, count: int) -> list[tuple[float, str]]:
        return [(7.0, "model.layers.2.mlp.experts.1.up_proj.lora_B.weight")]


Go = Callable[..., tuple[Trainer, Scripted, list[str]]]


@pytest.fixture
def go(monkeypatch: pytest.MonkeyPatch) -> Go:
    monkeypatch.setattr(loop, "tokens_per_expert", lambda *_: {})
    monkeypatch.setattr(ExpertLoad, "plus", lambda self, _: self)
    figures = StepMetrics(1, 0.0, 0.0, 0.0, 0.0, 1, 1.0, 1.0)
    monkeypatch.setattr(loop, "step_metrics", lambda *_, step, **__: dataclasses.replace(figures, step=step))

    def run(
        *settings: str,
        total: int = 8,
        losses: dict[int, float] | None = None,
        norms: dict[int, float] | None = None,
        held_out: list[float] | None = None,
        more_held_out: dict[int, float] | None = None,
        lost_at_best: tuple[int, ...] = (),
        steps_per_epoch: int = 8,
        **options: Any,
    ) -> tuple[Trainer, Scripted, list[str]]:
        config = compose(["cluster=local", "trainer.eval_every=0", *settings])
        every = config.trainer.eval_every if isinstance(config.trainer.eval_every, int) else 0
        by_step = {i * (every or 1): x for i, x in enumerate(held_out or [])} | (more_held_out or {})
        cluster = Scripted(losses or {}, norms or {}, by_step)
        told: list[str] = []

        def save(taken: int) -> None:
            told.append(f"save {taken}")

        def best(taken: int, loss: float) -> None:
            if fail.pop(taken, None):
                raise ActorLost("gone")
            told.append(f"best {taken} {loss}")

        fail = dict.fromkeys(lost_at_best, True)

        def skipped(taken: int, loss: float, norm: float) -> None:
            told.append(f"skipped {taken} {loss} {norm}")

        events = Events(save=save, say=told.append, best=best, on_skip=skipped)
        batches = StepBatches(total, steps_per_epoch, lambda step: [WAVE], [[WAVE]] if held_out else (), 4)
        trainer = Trainer(config, cast(Cluster, cluster), batches, events, **options)
        try:
            trainer.run()
        except BadStep as bad:
            told.append(bad.line())
        return trainer, cluster, told

    return run


def test_early_stopping(go: Go) -> None:
    held_out = [3.0, 2.0, 2.5, 2.4, 1.0]
    trainer, cluster, told = go("trainer.eval_every=2", "trainer.early_stopping=2", held_out=held_out)
    assert trainer.summary.steps == 6 and trainer.best == (2, 2.0)
    assert told[-1] == "save 6" and "stopped after step 6 of 8: 2 evaluations" in told[-2]
    assert trainer.with_all_steps(lambda: "work") == "work" and cluster.calls[-1] == "commit 5"
    trainer, _, _ = go("trainer.eval_every=2", "trainer.early_stopping=3", held_out=held_out)
    assert trainer.summary.steps == 8 and not trainer.summary.stopped and trainer.best == (8, 1.0)
    trainer, cluster, _ = go(
        "trainer.eval_every=2", "trainer.early_stopping=2", held_out=[3.0, *[math.nan] * 4]
    )
    assert trainer.summary.steps == 4 and trainer.summary.stopped and trainer.best == (0, 3.0)
    assert list(trainer.summary.eval_losses) == [0, 2, 4] and cluster.calls.count("discard") == 2


def test_early_stopping_threshold(go: Go) -> None:
    settings = ["trainer.eval_every=2", "trainer.early_stopping=2", "trainer.early_stopping_threshold=0.5"]
    trainer, _, _ = go(*settings, held_out=[3.0, 2.9, 2.8, 1.0, 1.0])
    assert trainer.summary.steps == 4 and trainer.best == (0, 3.0)


@pytest.mark.parametrize("kept", [None, (2, 2.0)])
def test_early_stopping_counts_what_drivers_before_evaluated(go: Go, kept: tuple[int, float] | None) -> None:
    before = {"first_step": 4, "kept": kept, "evaluated": [(0, 3.0), (2, 2.0), (4, 2.5)]}
    before["longest_step"] = 0.0
    held_out = [3.0, 2.0, 2.5, 2.4, 1.0]
    trainer, _, _ = go("trainer.eval_every=2", "trainer.early_stopping=2", held_out=held_out, **before)
    assert trainer.summary.steps == 2 and trainer.summary.stopped and trainer.best == (2, 2.0)


@pytest.mark.parametrize(
    ("known", "setting", "steps"),
    [
        (4, "trainer.early_stopping=2", 0),
        (3, "trainer.early_stopping=2", 0),  # the deciding evaluation is still owed
        (3, "trainer.max_hours=1", 0),
        (4, "trainer.early_stopping=3", 2),
        (4, "trainer.max_hours=2", 2),
        (4, "trainer.max_hours=1.01", 0),  # it would pass in a step as long as those before
        (0, "trainer.max_hours=1", 1),  # not a restart: a command takes a step
    ],
)
def test_a_restart_takes_no_step_beyond_the_end_that_was_decided(
    go: Go, known: int, setting: str, steps: int
) -> None:
    held_out = [3.0, 2.0, 2.5, 2.4, 2.3]
    before = {"first_step": 6, "evaluated": [(0, 3.0), (2, 2.0), (4, 2.5), (6, 2.4)][:known]}
    hour_ago = time.monotonic() - 3601
    more = {"more_held_out": {7: 2.3}, "owes_evaluation": known == 3, "began": hour_ago}
    more["longest_step"] = 60.0 if known else None
    trainer, _, _ = go("trainer.eval_every=2", setting, held_out=held_out, **before, **more)
    assert trainer.summary.steps == steps and trainer._taken == 6 + steps
    assert bool(trainer.summary.stopped) == (steps < 2)


def test_best_is_saved_where_it_is_found(go: Go) -> None:
    _, _, told = go("trainer.eval_every=2", "trainer.save_best=true", held_out=[3.0, 2.0, 2.5, 1.5, 1.6])
    assert told == ["save 2", "best 2 2.0", "save 6", "best 6 1.5", "save 8"]
    # a continued run knows what it has to beat
    _, _, told = go(
        "trainer.eval_every=2",
        "trainer.save_best=true",
        held_out=[3.0, 2.0, 2.5, 1.5, 1.6],
        first_step=4,
        kept=(2, 1.55),
    )
    assert told == ["save 6", "best 6 1.5", "save 8"]


def test_what_is_kept_is_compared_with_trained_states_only(go: Go) -> None:
    settings = ["trainer.eval_every=2", "trainer.save_best=true", "trainer.early_stopping=9"]
    settings.append("trainer.early_stopping_threshold=0.5")
    trainer, _, told = go(*settings, held_out=[1.0, 2.0, 1.9, 1.95, math.nan])
    assert told == ["save 2", "best 2 2.0", "save 4", "best 4 1.9", "save 8"]
    assert trainer.kept == (4, 1.9) and trainer.best == (0, 1.0)


def test_an_actor_lost_while_the_best_is_marked(go: Go) -> None:
    settings = ["trainer.eval_every=2", "trainer.save_best=true"]
    trainer, cluster, told = go(*settings, held_out=[3.0, 2.0, 1.5, 1.6, 1.7], lost_at_best=(4,))
    assert "restart" in cluster.calls and cluster.calls.count("commit 0") == 2
    assert told.count("best 2 2.0") == 1 and told.count("best 4 1.5") == 1 and trainer.kept == (4, 1.5)


def test_repeated_steps_decide_nothing_again(go: Go) -> None:
    settings = ["trainer.eval_every=1", "trainer.save_best=true", "trainer.early_stopping=2"]
    held_out = [3.0, 2.0, 2.5, 1.5, 1.6, 1.4, 1.3, 1.2, 1.1]
    trainer, cluster, _ = go(*settings, held_out=held_out, lost_at_best=(5,))
    assert "restart" in cluster.calls and trainer.summary.steps == 8 and not trainer.summary.stopped


def test_the_last_state_of_a_run_that_stops_is_evaluated(go: Go) -> None:
    held_out = {0: 3.0, 1: 2.0}
    trainer, _, told = go(
        "trainer.eval_every=4",
        "trainer.save_best=true",
        "trainer.max_hours=1",
        held_out=[3.0],
        more_held_out=held_out,
        began=time.monotonic() - 3601,
    )
    assert trainer.summary.eval_losses == held_out and told[-2:] == ["save 1", "best 1 2.0"]


def test_evaluations_and_checkpoints_count_as_time(go: Go, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ["trainer.eval_every=1", "trainer.max_hours=1"]
    held_out = [3.0] * 9
    began = time.monotonic() - 3590
    assert not go(*settings, held_out=held_out, began=began)[0].summary.stopped
    clock = time.monotonic
    slow = Scripted.run_pass
    late = [0.0]

    def run_pass(self: Scripted, spec: PassSpec) -> PassReport:
        late[0] += 6.0 if spec.kind == "eval" else 0.0
        return slow(self, spec)

    monkeypatch.setattr(Scripted, "run_pass", run_pass)
    monkeypatch.setattr(loop.time, "monotonic", lambda: clock() + late[0])
    # 18 s of evaluations by step 2; that of a third step would end beyond the hour
    trainer, _, _ = go(*settings, held_out=held_out, began=clock() - 3580)
    assert trainer.summary.steps == 2 and "max_hours" in trainer.summary.stopped


def test_time_limit_stops_with_a_checkpoint(go: Go) -> None:
    trainer, _, told = go("trainer.max_hours=1", began=time.monotonic() - 3601)
    assert trainer.summary.steps == 1 and told[-1] == "save 1"
    assert "trainer.max_hours=1" in trainer.summary.stopped
    trainer, _, _ = go("trainer.max_hours=1", began=time.monotonic() - 3000)
    assert trainer.summary.steps == 8 and not trainer.summary.stopped


def test_a_loss_that_is_not_finite_stops_or_is_skipped(go: Go) -> None:
    trainer, cluster, told = go(losses={2: math.nan})
    assert cluster.calls == ["commit 0", "commit 1", "discard"] and "step 3 is nan" in told[-1]
    trainer, cluster, told = go("trainer.bad_steps=skip", losses={2: math.nan}, total=4)
    assert cluster.calls == ["commit 0", "commit 1", "discard", "skip 2", "commit 3"]
    assert trainer.summary.skipped == 1 and trainer.summary.steps == 3 and len(trainer.summary.losses) == 4
    assert told[0].startswith("step 3 skipped") and told[1:] == ["skipped 3 nan nan", "save 4"]


def test_spikes_are_named(go: Go) -> None:
    _, cluster, told = go("trainer.spike=3", losses={5: 3.5})
    assert "commit 5" not in cluster.calls and "commit 4" in cluster.calls
    line = told[-1]
    assert "loss of step 6 is 3.5, 3.5 times the median 1 of the steps before" in line
    assert "group 0, micro-batch 1 (rows 41; loss 6.5 per token)" in line
    assert "largest gradient: model.layers.2.mlp.experts.1.up_proj.lora_B.weight, norm 7" in line
    trainer, _, told = go("trainer.spike=3", "trainer.bad_steps=skip", norms={5: 3.5})
    assert trainer.summary.skipped == 1 and "skipped 6 1.0 3.5" in told
    trainer, _, _ = go("trainer.spike=4", losses={5: 3.5}, norms={5: 3.5})
    assert trainer.summary.steps == 8
    trainer, _, _ = go("trainer.spike=3", losses={3: 50.0})  # too early to know what is usual
    assert trainer.summary.steps == 8


def test_rows_are_those_of_the_data(go: Go) -> None:
    """Not the sample ids of a pair's rows, or of a prompt's answers: mode=preview knows pairs and prompts."""
    dpo = "trainer.stage=dpo", "preference.loss=simpo"
    grpo = "trainer.stage=grpo", "grpo.group_size=8", "reward=regex"
    assert [compose([*stage]).samples_per_row for stage in (dpo, grpo, ())] == [2, 8, 1]
    report = PassReport(math.nan, (), (), (([[1.0, 1.0]],),))
    cluster = cast(Cluster, Scripted({}, {}, {}))
    bad = judge(cluster, 5, [WAVE], report, 1.0, [], [], 0.0, "dpo", 2)
    assert bad is not None and "(rows 20; " in bad.line()
    ids = np.arange(30)
    assert MicroBatch(LABELS, LABELS, ids, ids).named(2) == "0, 1, 2, 3, 4, 5, 6, 7, ..."


def test_a_continued_run_knows_what_was_usual(go: Go) -> None:
    stopped, _, _ = go("trainer.spike=3", losses={5: 3.5, 7: 3.5})
    before = stopped.recent(5)
    assert before == [(1.0, 1.0)] * 5
    skip = ("trainer.spike=3", "trainer.bad_steps=skip")
    whole, _, _ = go(*skip, losses={5: 3.5, 7: 3.5})
    again, cluster, _ = go(*skip, losses={5: 3.5, 7: 3.5}, first_step=5, before=before)
    assert cluster.calls == ["discard", "skip 5", "commit 6", "discard", "skip 7"]
    assert again.summary.losses == whole.summary.losses[5:] and again.recent(8) == whole.recent(8)
    assert again.summary.applied_losses == [1.0]


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        ("sft", "loss 0.25 per token)"),
        ("orpo", "loss 1 per pair)"),
        ("dpo", "loss 1 per pair)"),
        ("kto", "loss 0.5 per row)"),
        ("grpo", "loss 1)"),
    ],
)
def test_the_loss_of_the_worst_rows_says_what_it_is_of(stage: str, said: str) -> None:
    labels = np.array([[IGNORE, 1, 2]] * 2)
    micro = MicroBatch(labels, labels, np.array([3, 3]), np.arange(2))
    report = PassReport(math.nan, (), (), (([[1.0]],),))
    cluster = cast(Cluster, Scripted({}, {}, {}))
    bad = judge(cluster, 5, [(((micro,),),)], report, 1.0, [], [], 0.0, stage)
    assert bad is not None and said in bad.line()


@pytest.mark.parametrize("stage", ["sft", "dpo", "kto"])
@pytest.mark.parametrize("usual", [1.0, 0.0, -0.5])
def test_a_loss_spikes_only_where_it_is_positive_by_nature(stage: str, usual: float) -> None:
    def judged(loss: float, norm: float) -> BadStep | None:
        report = PassReport(loss, (), (), (([[1.0, 1.0]],),))
        cluster = cast(Cluster, Scripted({}, {}, {}))
        return judge(cluster, 5, [WAVE], report, norm, [usual] * 5, [abs(usual)] * 5, 3.0, stage)

    assert (judged(9.0, abs(usual)) is not None) == (stage == "sft" and usual > 0)
    assert (judged(usual, 9.0) is not None) == (usual != 0)
    assert judged(math.nan, abs(usual)) is not None


def test_a_gradient_that_is_not_finite(go: Go) -> None:
    _, cluster, told = go(norms={1: math.inf})
    assert "gradient norm of step 2 is inf" in told[-1] and "commit 1" not in cluster.calls


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("trainer.early_stopping=2", r"early_stopping=2 goes by the held-out loss.*eval_every"),
        ("trainer.save_best=true", r"save_best=true goes by the held-out loss"),
        ("trainer.early_stopping_threshold=0.1", r"no meaning with trainer\.early_stopping=0\."),
        ("trainer.spike=0.5", r"spike=0\.5 would refuse ordinary steps"),
        ("trainer.profile_steps=[0]", r"counts steps from 1"),
        ("preference.beta=0.5", r"beta=0\.5 has no meaning for trainer\.stage=sft; .*stage=orpo"),
        ("preference.desirable_weight=2", r"desirable_weight=2.* required trainer\.stage=kto\."),
        ("optim.decay=0.5", r"optim\.decay=0\.5 has no meaning with optim\.schedule=cosine; .*schedule=wsd"),
        ("optim.min_lr_ratio=0.1 optim.schedule=constant", r"min_lr_ratio.*schedule=constant; .*linear"),
        ("preference.label_smoothing=0.1", r"label_smoothing.*has no meaning for trainer\.stage=sft"),
        ("trainer.stage=rlhf", r"trainer\.stage=rlhf is not known"),
    ],
)
def test_refused_before_anything_starts(setting: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        compose(["trainer.eval_every=0", *setting.split()])


@pytest.mark.parametrize(
    "setting",
    [
        "trainer.stage=dpo preference.desirable_weight=2",
        "optim.schedule=constant optim.min_lr_ratio=0.2",
        "trainer.early_stopping_threshold=0.1",
    ],
)
def test_a_run_goes_on_with_what_means_nothing_to_it(setting: str) -> None:
    """Its checkpoint names it, or an earlier version took it."""
    with pytest.raises(UserError, match="has no meaning"):
        compose(setting.split())
    assert compose([*setting.split(), "trainer.resume=latest", "run.name=a"]).trainer.resume == "latest"


def test_skipping_leaves_no_trace_and_counts(tmp_path: Path) -> None:
    path = build_checkpoint(tmp_path, "deepseek_v3")
    rows = random_rows(8)
    config = config_for(path, "rule=cpu_2workers_2sockets", "optim.lr=0.02", "trainer.bad_steps=skip")
    name = "model.layers.1.self_attn.o_proj.lora_B.weight"
    with local_cluster(path, config) as cluster:
        start = cluster.parameters()
        cluster.set_parameters({name: torch.full_like(start[name], float("nan"))})
        skipped = steps(cluster, config, [rows], 2, stop=1)
        assert math.isnan(skipped[0])
        cluster.set_parameters(start)
        assert all(torch.equal(value, start[n]) for n, value in cluster.parameters().items())
        first = steps(cluster, config, [rows], 2, first=1)
        assert all(handle.actor.committed() == 2 for handle in cluster.handles)  # type: ignore[attr-defined]
        largest = cluster.largest_gradients(2)
        assert len(largest) == 2
    assert math.isfinite(first[0])


def test_profile_of_a_step(tmp_path: Path) -> None:
    path = build_checkpoint(tmp_path, "deepseek_v3")
    config = config_for(path, "rule=cpu_2workers_2sockets", "trainer.profile_steps=[2]")
    with local_cluster(path, config) as cluster:
        wave = waves_of(random_rows(4), config, cluster.plan)
        Trainer(config, cluster, StepBatches(3, 3, lambda _: [wave]), directory=tmp_path).run()
    (file,) = (tmp_path / "profile").iterdir()
    assert file.name.startswith("step_000002_pass_2_worker-")
    events = json.loads(file.read_text())["traceEvents"]
    assert any(event.get("name", "").startswith("aten::") for event in events)
