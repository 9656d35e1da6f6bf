"""DPO, ORPO and KTO through the whole system, against Hugging Face with factored LoRA and autograd."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kt_ray.actors.cluster import ActorCluster
from kt_ray.batch import IGNORE, Objective
from kt_ray.config.schema import Config, LoraConfig
from kt_ray.data.batches import Batches, eval_waves, flat, mismatched
from kt_ray.data.row_types import Pair, Row
from kt_ray.errors import UserError
from kt_ray.model.preference_losses import dpo_losses, kto_losses, orpo_losses, simpo_losses
from kt_ray.runs.prepare import check_stage
from kt_ray.train.trainer import StepBatches, Trainer
from tests.helpers.devices import CARD, by_name
from tests.helpers.hf_reference import Reference, build_checkpoint, random_rows
from tests.helpers.runs import config_for, local_cluster, relative

LORA = LoraConfig(rank=4, alpha=8.0)
LAYOUTS = {
    "one worker": ["rule=cpu_1worker_1socket"],
    "waves of one pair, two stages, two sockets": ["rule=cpu_2workers_2sockets", "rule.wave=1"],
    "two replicas": ["rule=cpu_replicas_2"],
    "ranges of heads": ["rule=cpu_1worker_1socket", "rule.activations=ranges"],
    CARD: ["rule=cpu_1worker_1socket", "rule.device=cuda"],
}


def data_rows(signs: list[int]) -> list[Row]:
    return [
        Row(np.array(r.ids), np.array(r.labels), r.sample, sign=sign)
        for r, sign in zip(random_rows(len(signs), lengths=(9, 5, 12, 7, 8)), signs, strict=True)
    ]


def pairs(count: int = 3) -> list[Pair]:
    rows = data_rows([1, -1] * count)
    return [Pair(a, b) for a, b in zip(rows[0::2], rows[1::2], strict=True)]


def token_logps(model: Reference, row: Row) -> Tensor:
    """[s - 1] log-probability of every next token."""
    model._sample = row.sample_id
    ids = torch.from_numpy(row.input_ids)
    logits = model.model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(dim=-1).gather(1, ids[1:, None])[:, 0]


def answers(model: Reference, rows: list[Row]) -> Tensor:
    return torch.stack([token_logps(model, r)[torch.from_numpy(r.labels[1:] != IGNORE)].sum() for r in rows])


def expected_loss(stage: str, policy: Reference, base: Reference, rows: list[Row]) -> Tensor:
    mine = answers(policy, rows)
    with torch.no_grad():
        theirs = answers(base, rows)
    if stage == "kto":
        others = mismatched(rows, 512)
        with torch.no_grad():
            ratios = answers(policy, others) - answers(base, others) if others else torch.zeros(1)
        kl = max(0.0, float(ratios.mean()))
        wanted = torch.tensor([r.sign > 0 for r in rows])
        return kto_losses(mine - theirs, wanted, Objective("kto", 0, kl=kl)).mean()
    mean = mine / torch.tensor([r.trained for r in rows])
    if stage == "simpo":
        return simpo_losses(mean, Objective("dpo", 0, beta=2.0, gamma=1.0)).mean()
    if stage == "orpo":
        nll = -torch.cat([token_logps(policy, r) for r in rows[0::2]]).mean()
        return nll + orpo_losses(mean, Objective("orpo", 0)).mean()
    return dpo_losses(mine - theirs, torch.zeros(()), Objective("dpo", 0)).mean()


def trainer_for(cluster: ActorCluster, config: Config, units: list[Row] | list[Pair]) -> Trainer:
    plan = cluster.plan
    sizes = (config.trainer.batch_size, config.trainer.micro_batch_size, plan.replicas, plan.groups)
    batches = Batches(units, *sizes, shuffle=False, largest_wave=plan.wave)
    held_out = eval_waves(units, *sizes, largest=plan.wave)
    return Trainer(config, cluster, StepBatches(4, 1, batches.waves, held_out, cut=batches.waves_of))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_moe")


@pytest.mark.parametrize("layout", by_name(LAYOUTS))
@pytest.mark.parametrize("stage", ["dpo", "simpo", "orpo", "kto"])
def test_loss_and_gradients(path: Path, stage: str, layout: str) -> None:
    units = data_rows([1, -1, -1, 1, 1]) if stage == "kto" else pairs()
    rows = [r for u in units for r in ((u.chosen, u.rejected) if isinstance(u, Pair) else (u,))]
    policy, base = Reference(path, LORA, seed=3), Reference(path, LORA, seed=3)
    policy.randomize_b(1)
    wanted = expected_loss(stage, policy, base, rows)
    wanted.backward()
    expected = {n: torch.zeros_like(t) if t.grad is None else t.grad for n, t in policy.parameters.items()}
    simpo = ["trainer.stage=dpo", "preference.loss=simpo", "preference.beta=2", "preference.gamma=1"]
    settings = simpo if stage == "simpo" else [f"trainer.stage={stage}"]
    config = config_for(path, *LAYOUTS[layout], *settings)
    with local_cluster(path, config) as cluster:
        cluster.set_parameters({k: v.detach() for k, v in policy.parameters.items()})
        trainer = trainer_for(cluster, config, units)
        assert trainer._preference is not None
        waves, objective = trainer._preference.prepared(0, trainer.batches.train(0))
        passes = trainer._passes.number
        reports = [
            trainer._passes.run(0, "train", wave, objective.units, objective=objective)[1] for wave in waves
        ]
        gradients = cluster.gradients()
        held_out, units_of_it = trainer._held_out_loss(0)
        smaller = replace(config, trainer=replace(config.trainer, batch_size=2))
        in_batches = (
            trainer_for(cluster, smaller, units)._held_out_loss(0) if layout == "one worker" else None
        )
        figures = trainer._preference.figures(waves, objective, reports)
    assert sum(r.loss for r in reports) == pytest.approx(float(wanted.detach()), rel=1e-5)
    assert held_out == pytest.approx(float(wanted.detach()), rel=1e-5) and units_of_it == len(units)
    if in_batches is not None:  # of which each has its own reference point (KTO) and weighs by its rows
        with torch.no_grad():
            parts = [flat(units[i : i + 2])[0] for i in range(0, len(units), 2)]
            means = [float(expected_loss(stage, policy, base, part)) * len(part) for part in parts]
        assert in_batches == (pytest.approx(sum(means) / len(rows), rel=1e-5), len(units))
    errors = relative(gradients, expected)
    assert max(errors.values()) <= 1e-4, max(errors.items(), key=lambda item: item[1])
    assert {"reward_chosen", "reward_rejected"} < set(figures)
    assert (passes == 0) is (stage in ("simpo", "orpo"))  # what has no reference makes no pass for it
    if stage == "simpo":
        with torch.no_grad():
            rewards = 2.0 * answers(policy, rows) / torch.tensor([r.trained for r in rows])
        margin = float((rewards[0::2] - rewards[1::2]).mean())
        assert figures["margin"] == pytest.approx(margin, rel=1e-4)


def test_a_fresh_adapter_is_its_own_reference_and_learns(path: Path) -> None:
    config = config_for(path, "rule=cpu_2workers_2sockets", "trainer.stage=dpo", "optim.lr=0.02")
    with local_cluster(path, config) as cluster:
        trainer = trainer_for(cluster, config, pairs())
        for step in range(4):
            trainer.step(step)
    assert trainer.summary.losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert trainer.summary.losses[-1] < trainer.summary.losses[0] - 1e-3


def masked(pair: Pair) -> Pair:
    """Without an answer in the rejected row: its mean log-probability would be 0 / 0."""
    row = pair.rejected
    return Pair(
        pair.chosen, Row(row.input_ids, np.full_like(row.labels, IGNORE), row.sample_id, sign=row.sign)
    )


@pytest.mark.parametrize(
    ("stage", "rows", "message"),
    [
        ("dpo", data_rows([0, 0]), r"stage=dpo.*2 of 2 rows are no pairs"),
        ("orpo", [masked(pairs(2)[0]), pairs(2)[1]], r"stage=orpo.*1 of 2 rows are no pairs"),
        ("kto", data_rows([1, 0]), r"stage=kto.*1 of 2 rows are not marked"),
        ("sft", pairs(1), r"stage=sft.*1 of 1 rows are preference pairs"),
        ("sft", data_rows([1, -1]), r"stage=sft.*1 of 2 rows are answers marked as unwanted.*data\.format"),
        ("pt", data_rows([-1, -1]), r"stage=pt.*2 of 2 rows are answers marked as unwanted"),
    ],
)
def test_rows_of_another_kind_are_refused(stage: str, rows: list[Row] | list[Pair], message: str) -> None:
    from types import SimpleNamespace
    from typing import Any

    data: Any = SimpleNamespace(train=rows, eval=[])
    with pytest.raises(UserError, match=message):
        check_stage(stage, data)
