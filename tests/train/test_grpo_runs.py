"""trainer.stage=grpo through the whole system: against Hugging Face, after deaths, resumed amid a round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kt_ray.actors.cluster import ActorCluster
from kt_ray.actors.specs import actor_specs
from kt_ray.batch import IGNORE
from kt_ray.checkpoint.index import CheckpointIndex
from kt_ray.checkpoint_dirs import step_name
from kt_ray.config.schema import Config, LoraConfig
from kt_ray.data.batches import step_waves
from kt_ray.data.row_types import Row
from kt_ray.generate.generator import Generator
from kt_ray.generate.requests import Request, Sampling
from kt_ray.runs.policy_rollouts import handed_in
from kt_ray.train.rollouts import Rollout
from kt_ray.train.trainer import Events, StepBatches, Trainer
from tests.helpers.devices import CARD, by_name
from tests.helpers.generation import random_prompts
from tests.helpers.hf_reference import Reference, build_checkpoint
from tests.helpers.mortal import Death, MortalCluster
from tests.helpers.runs import config_for, local_cluster, plan_for, relative, save_state

LORA = LoraConfig(rank=4, alpha=8.0)
LONGEST = 6
LAYOUTS = {
    "one worker": ["rule=cpu_1worker_1socket", "trainer.micro_batch_size=auto"],
    "two stages, two sockets": ["rule=cpu_2workers_2sockets"],
    "two replicas": ["rule=cpu_replicas_2"],
    CARD: ["rule=cpu_1worker_1socket", "rule.device=cuda", "trainer.micro_batch_size=auto"],
}
GRPO = (
    *("trainer.stage=grpo", "reward=regex", "grpo.group_size=4", "trainer.batch_size=8"),
    *("data.max_length=64", f"generate.max_new_tokens={LONGEST}", "optim.lr=0.02", "generate.batch_size=5"),
)


class Sampler:
    """Answers of the policy; an even token is worth something."""

    def __init__(self, cluster: ActorCluster) -> None:
        self.cluster = cluster
        self.steps: list[int] = []

    def sample(self, asked: Sequence[tuple[Row, int]], step: int) -> list[Rollout]:
        self.steps.append(step)
        return self._answers(asked, temperature=1.0)

    def most_probable(self, prompts: Sequence[Row]) -> list[Rollout]:
        return self._answers([(row, 0) for row in prompts], temperature=0.0)

    def _answers(self, asked: Sequence[tuple[Row, int]], temperature: float) -> list[Rollout]:
        requests = [
            Request(
                tuple(row.input_ids.tolist()),
                Sampling(LONGEST, temperature=temperature, seed=seed, logprobs=0, eos=(7,)),
            )
            for row, seed in asked
        ]
        with Generator(self.cluster, max_rows=5) as generator:
            answers = [answer.result(120) for answer in handed_in(generator, requests)]
        return [
            Rollout(
                np.array(answer.tokens),
                np.array([token.logprob for token in answer.logprobs], dtype=np.float32),
                float(np.mean([token % 2 == 0 for token in answer.tokens])),
                answer.finish == "stop",
            )
            for answer in answers
        ]


def prompts(number: int) -> list[Row]:
    texts = random_prompts((4, 7), seed=number % 3)
    return [
        Row(np.array(ids), np.full(len(ids), IGNORE), 2 * (number % 3) + i) for i, ids in enumerate(texts)
    ]


def batches(config: Config, cluster: ActorCluster) -> StepBatches:
    plan = cluster.plan

    def cut(rows: Sequence[Row]) -> list[object]:
        return step_waves(  # type: ignore[return-value]
            rows,
            plan.micro_batch_rows,
            plan.replicas,
            plan.groups,
            plan.wave,
            budget=plan.micro_batch_tokens,
        )

    return StepBatches(
        total_steps=6,
        steps_per_epoch=3,
        train=lambda step: [],
        held_out=2,
        cut=cut,  # type: ignore[arg-type]
        prompts=prompts,
        held_out_prompts=prompts(1),
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_moe")


def answer_logps(model: Reference, row: Row, n: int) -> Tensor:
    """float64 [n] log-probabilities of a row's last tokens."""
    model._sample = row.sample_id
    ids = torch.from_numpy(row.input_ids)
    logits = model.model(input_ids=ids[None], use_cache=False).logits[0, :-1].double()
    return logits.log_softmax(dim=-1).gather(1, ids[1:, None])[-n:, 0]


@pytest.mark.parametrize("layout", by_name(LAYOUTS))
def test_loss_and_gradients(path: Path, layout: str) -> None:
    """Of DAPO with a divergence, off-policy: the answers are those of other weights."""
    settings = ("grpo.loss=dapo", "grpo.kl_coef=0.2", "grpo.epsilon=0.1", "grpo.epsilon_high=0.15")
    config = config_for(path, *LAYOUTS[layout], *GRPO, *settings)
    mine, base = Reference(path, LORA, seed=3), Reference(path, LORA, seed=3)
    mine.randomize_b(1)
    with local_cluster(path, config) as cluster:
        trainer = Trainer(config, cluster, batches(config, cluster), rollouts=Sampler(cluster))
        assert trainer.policy is not None
        trainer.policy._round(0, 0)  # answers of the base
        cluster.set_parameters({k: v.detach() for k, v in mine.parameters.items()})
        waves, objective = trainer.policy.prepared(0)
        reports = [trainer._passes.run(0, "train", wave, 1, objective=objective)[1] for wave in waves]
        gradients, figures = cluster.gradients(), trainer.policy.figures(waves, reports)
        taken = trainer.policy._step
    losses, gaps = [], []
    for answer in taken:
        n, old = len(answer.rollout.ids), torch.from_numpy(answer.rollout.logprobs).double()
        now = answer_logps(mine, answer.row, n)
        with torch.no_grad():
            reference = answer_logps(base, answer.row, n)
        assert torch.allclose(reference, old, atol=1e-5, rtol=0)  # the sampler is the trainer
        ratio, distance = torch.exp(now - old), reference - now
        clipped = ratio.clamp(0.9, 1.15)
        losses.append(-torch.minimum(ratio * answer.advantage, clipped * answer.advantage))
        losses.append(0.2 * (torch.exp(distance) - distance - 1))
        gaps += (now - old).abs().tolist()
    loss = torch.cat(losses).sum() / sum(len(answer.rollout.ids) for answer in taken)
    loss.backward()
    expected = {n: torch.zeros_like(t) if t.grad is None else t.grad for n, t in mine.parameters.items()}
    assert sum(r.loss for r in reports) == pytest.approx(float(loss.detach()), rel=1e-4)
    errors = relative(gradients, expected)
    assert max(errors.values()) <= 1e-4, max(errors.items(), key=lambda item: item[1])
    assert 0 < figures["clipped"] < 1 and figures["sampler_gap"] == pytest.approx(np.mean(gaps), rel=1e-3)


class Run:
    """Six steps of rounds of two, evaluations and checkpoints in between, with the deaths asked for."""

    def __init__(self, model: Path, root: Path, deaths: list[Death], first: int = 0) -> None:
        config = config_for(
            model,
            *("rule=cpu_2workers_2sockets", "grpo.steps_per_rollout=2", "grpo.kl_coef=0.1"),
            *("trainer.eval_every=3", "trainer.save_every=3", *GRPO),
        )
        plan = plan_for(model, config)
        weights = CheckpointIndex.open(model).fingerprint
        self.cluster = MortalCluster(plan, actor_specs(plan, config, str(model)).expecting(weights, weights))
        self.cluster.deaths = deaths
        self.root = root
        self.rewards: list[float] = []
        try:
            self.cluster.start()
            self.sampler = Sampler(self.cluster)
            checkpoint = root / step_name(first) if first else None
            self.trainer = Trainer(
                config,
                self.cluster,
                batches(config, self.cluster),
                Events(on_step=lambda m: self.rewards.append(m.policy["reward"]), save=self._save),
                first_step=first,
                resumed_from=checkpoint,
                rollouts=self.sampler,
            )
            if checkpoint is not None:
                self.cluster.restore(str(checkpoint), first)
            self.summary = self.trainer.run()
            self.parameters = self.trainer.with_all_steps(self.cluster.parameters)
        finally:
            self.cluster.shutdown()

    def _save(self, taken: int) -> Path:
        def answers(partial: Path) -> None:
            assert self.trainer.policy is not None
            assert (self.trainer.policy.save(taken, partial) is not None) is (taken == 3)

        return save_state(self.cluster, self.root, taken, answers)

    def same(self, other: Run) -> bool:
        return all(bool((value == other.parameters[name]).all()) for name, value in self.parameters.items())


@pytest.fixture(scope="module")
def undisturbed(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(path, tmp_path_factory.mktemp("calm"), [])


def test_it_learns(undisturbed: Run) -> None:
    assert undisturbed.sampler.steps == [0, 2, 4]
    assert undisturbed.summary.rewards == undisturbed.rewards and len(undisturbed.rewards) == 6
    evaluated = undisturbed.summary.eval_losses
    assert list(evaluated) == [0, 3, 6] and all(-1 <= loss <= 0 for loss in evaluated.values())
    assert np.mean(undisturbed.rewards[-2:]) > np.mean(undisturbed.rewards[:2])
    assert not any(math.isnan(loss) for loss in undisturbed.summary.losses)


DEATHS = {
    "a worker in a round's answers": [Death(("worker", 0), "generate", 3, 2)],
    "an expert actor in answers, then in a pass": [
        Death(("experts", 1), "generate", 4, "before"),
        Death(("experts", 0), "run_pass", 5, 3),
    ],
    "a worker that is found dead when a session opens": [Death(("worker", 0), "open_outbox", 3, "before")],
    "amid a round that a checkpoint begins with": [Death(("worker", 1), "prepare", 4, "before")],
}


@pytest.mark.parametrize("case", DEATHS)
def test_deaths_change_nothing(path: Path, tmp_path: Path, undisturbed: Run, case: str) -> None:
    run = Run(path, tmp_path, list(DEATHS[case]))
    assert run.cluster.happened == len(DEATHS[case])
    assert run.same(undisturbed)
    assert run.rewards == undisturbed.rewards
    assert run.summary.eval_losses == undisturbed.summary.eval_losses


def test_resumed_amid_a_round(path: Path, undisturbed: Run) -> None:
    """The answers of the third step's round are read, not drawn again from other weights."""
    run = Run(path, undisturbed.root, [], first=3)
    assert run.sampler.steps == [4]
    assert run.same(undisturbed) and run.rewards == undisturbed.rewards[3:]
