"""Rounds, advantages and weights of trainer.stage=grpo, against the papers' formulas in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kt_ray.batch import IGNORE, MicroBatch, Wave
from kt_ray.config.schema import Config
from kt_ray.data.batches import step_waves
from kt_ray.data.row_types import Row
from kt_ray.errors import UserError
from kt_ray.model.policy_losses import sequence_old, token_losses
from kt_ray.train.policy_steps import Policy, advantages, overlong_penalty
from kt_ray.train.rollouts import FILE, Rollout
from tests.helpers.composing import compose

PLAN: Any = SimpleNamespace(worker=lambda replica, stage: SimpleNamespace(rank=replica), stages=1)
LONGEST = 6
REWARDS = [1.0, 0.0, 0.25, 1.0, 0.5, 0.5, 0.5, 0.5]  # the second group's are equal


def config(*settings: str) -> Config:
    own = ("trainer.stage=grpo", "reward=regex", "trainer.batch_size=8", "grpo.group_size=4")
    return compose([*own, "data.max_length=64", f"generate.max_new_tokens={LONGEST}", *settings])


def prompts(number: int) -> list[Row]:
    """Two prompts of the batch of this number; the third batch, an epoch's last, has one."""
    rows = range(2 * number, 2 * number + (1 if number % 3 == 2 else 2))
    return [Row(np.arange(3, 5 + row), np.full(2 + row, IGNORE), row) for row in rows]


class Answers:
    """Rollouts of random tokens; remembers what was asked."""

    def __init__(self, rewards: Sequence[float] = REWARDS) -> None:
        self.rewards = rewards
        self.asked: list[tuple[int, list[int]]] = []
        self.seeds: list[int] = []

    def sample(self, asked: Sequence[tuple[Row, int]], step: int) -> list[Rollout]:
        self.asked.append((step, [row.sample_id for row, _ in asked]))
        self.seeds += [seed for _, seed in asked]
        return [self._answer(seed, self.rewards[i % len(self.rewards)]) for i, (_, seed) in enumerate(asked)]

    def _answer(self, seed: int, reward: float) -> Rollout:
        rng = np.random.default_rng(seed)
        n = int(rng.integers(1, LONGEST + 1))
        logprobs = -rng.random(n).astype(np.float32) * 3
        return Rollout(rng.integers(3, 90, n), logprobs, reward, n < LONGEST)

    def most_probable(self, prompts: Sequence[Row]) -> list[Rollout]:
        return [self._answer(row.sample_id, r) for row, r in zip(prompts, (1.0, math.nan, 0.5), strict=False)]


def current(sample: int, n: int) -> np.ndarray:
    """The policy's log-probabilities of a row's labels now."""
    return -np.random.default_rng(1000 + sample).random(n) * 3


def policy(config: Config, answers: Answers) -> Policy:
    def forward(step: int, wave: Wave, adapters: bool | str) -> Any:
        """The reference's are 0.1 more than the policy's."""
        assert adapters is False
        of_groups = [[logps_of(micro, 0.1) for micro in group] for group in wave[0]]
        return SimpleNamespace(workers=[SimpleNamespace(token_logps=of_groups)])

    return Policy(config, PLAN, prompts, lambda rows: step_waves(rows, 3, groups=2), answers, forward)


def logps_of(micro: MicroBatch, more: float = 0.0) -> np.ndarray:
    values = np.zeros((len(micro.lengths), micro.labels.shape[1] - 1))
    for i, (sample, n) in enumerate(zip(micro.sample_ids, micro.lengths, strict=True)):
        values[i, : n - 1] = current(int(sample), int(n) - 1) + more
    return values.astype(np.float32)


def micros(waves: Sequence[Wave]) -> list[MicroBatch]:
    return [micro for wave in waves for group in wave[0] for micro in group]


def summed(prepared: tuple[list[Wave], Any]) -> float:
    """The step's loss as the head adds it up."""
    waves, loss = prepared
    total = 0.0
    for micro in micros(waves):
        logps = torch.from_numpy(logps_of(micro)).double()
        given = {
            name: torch.from_numpy(values[:, :-1]).double() for name, values in micro.loss_inputs.items()
        }
        mask = torch.from_numpy(micro.labels[:, 1:] != IGNORE)
        if loss.name == "gspo":
            assert bool((given["sequence_ratio_mask"] == mask).all())
            given["logprobs"] = sequence_old(logps, given["logprobs"], mask)
        given["clip_low_threshold"] = torch.full_like(logps, loss.clip_low)
        given["clip_high_threshold"] = torch.full_like(logps, loss.clip_high)
        total += float(token_losses(logps, given, loss)[mask].sum())
    return total


def by_the_papers(kind: str, rollouts: Sequence[Rollout], rewards: Sequence[float], config: Config) -> float:
    """The same from the formulas, answer by answer and token by token."""
    own = config.grpo
    low, high = {"dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4)}.get(kind, (0.2, 0.2))
    answers, tokens = [], []
    for i, rollout in enumerate(rollouts):
        group = [r for r in rewards[i // 4 * 4 : i // 4 * 4 + 4] if not math.isnan(r)]
        if math.isnan(rewards[i]) or (own.mask_truncated and not rollout.finished):
            answers.append(0.0)
            continue
        mean = sum(group) / len(group)
        deviation = math.sqrt(sum((r - mean) ** 2 for r in group) / (len(group) - 1))
        advantage = (rewards[i] - mean) / (1.0 if kind == "dr_grpo" else deviation + 1e-4)
        sample = prompts(0)[i // 4].sample_id * 4 + i % 4
        n = len(rollout.ids)
        now = current(sample, len(prompts(0)[i // 4].input_ids) + n - 1)[-n:].astype(np.float32).tolist()
        old = rollout.logprobs.tolist()
        whole = math.exp(sum(a - b for a, b in zip(now, old, strict=True)) / n)
        losses = []
        for a, b in zip(now, old, strict=True):
            ratio = whole if kind == "gspo" else math.exp(a - b)
            clipped = min(max(ratio, 1 - low), 1 + high)
            divergence = math.exp(0.1) - 0.1 - 1
            losses.append(-min(ratio * advantage, clipped * advantage) + own.kl_coef * divergence)
        tokens += losses
        answers.append(sum(losses) / n)
    if kind == "dr_grpo":
        return sum(tokens) / (len(rollouts) * LONGEST)
    return sum(tokens) / len(tokens) if kind == "dapo" else sum(answers) / len(answers)


@pytest.mark.parametrize("more", [(), ("grpo.kl_coef=0.3",), ("grpo.mask_truncated=true",)], ids=str)
@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "dapo", "gspo"])
def test_losses_are_those_of_the_papers(kind: str, more: tuple[str, ...]) -> None:
    """Taken again, off-policy: on-policy there is nothing to clip."""
    settings = (f"grpo.loss={kind}", "grpo.iterations=2", *more)
    own, answers = config(*settings), Answers([*REWARDS[:6], math.nan, 0.0])
    made = policy(own, answers)
    prepared = made.prepared(1)
    rollouts = made._rounds[0]
    assert any(not r.finished for r in rollouts) and any(r.finished for r in rollouts)
    expected = by_the_papers(kind, rollouts, answers.rewards, own)
    assert abs(expected) > 1e-3
    assert summed(prepared) == pytest.approx(expected, rel=2e-5, abs=1e-6)


def test_gspo_does_not_clip_where_ratios_are_one() -> None:
    made = policy(config("grpo.loss=gspo", "grpo.iterations=2"), Answers())
    waves, loss = made.prepared(0)
    assert loss.name == "importance_sampling"
    assert made.figures(waves, [reports(wave) for wave in waves])["clipped"] == 0
    assert made.prepared(1)[1].name == "gspo"


def test_a_round_without_a_reward_ends_the_run() -> None:
    with pytest.raises(UserError, match="no answer of a round got a reward"):
        policy(config(), Answers([math.nan])).prepared(0)


def test_a_penalty_for_length() -> None:
    assert [overlong_penalty(n, 10, 4) for n in (1, 6, 7, 9, 10)] == [0, 0, 0.25, 0.75, 1]
    assert overlong_penalty(10, 10, 0) == 0
    made = policy(config("grpo.overlong_buffer=5"), Answers([1.0]))
    made.prepared(0)
    lengths = [len(answer.rollout.ids) for answer in made._step[:4]]
    expected = advantages(1 - (np.array(lengths) - 1) / 5, scaled=True)
    assert [answer.advantage for answer in made._step[:4]] == pytest.approx(expected.tolist())


def test_advantages_of_groups_without_rewards() -> None:
    assert advantages(np.full(3, math.nan), scaled=True).tolist() == [0, 0, 0]
    assert advantages(np.array([math.nan, 2.0]), scaled=True).tolist() == [0, 0]
    for n in range(2, 16):  # whose mean may be a rounding away
        assert not advantages(np.full(n, 0.1), scaled=True).any()


def test_equal_rewards_are_not_trained_on(caplog: pytest.LogCaptureFixture) -> None:
    made = policy(config(), Answers())
    waves, _ = made.prepared(0)
    assert not caplog.messages
    samples = sorted(int(s) for micro in micros(waves) for s in micro.sample_ids)
    assert samples == [0, 1, 2, 3]  # of the first group only
    figures = made.figures(waves, [reports(wave) for wave in waves])
    assert figures["reward"] == pytest.approx(np.mean(REWARDS)) and figures["equal_groups"] == 0.5
    assert figures["reward_std"] == pytest.approx(np.std(REWARDS[:4], ddof=1) / 2)  # advantages' deviation
    waves, _ = policy(config("grpo.kl_coef=0.1"), Answers()).prepared(0)
    assert sum(len(micro.sample_ids) for micro in micros(waves)) == 8  # the divergence is theirs, too
    made = policy(config(), Answers([0.0]))
    for step in range(2):
        waves, _ = made.prepared(step)
        assert sum(len(micro.sample_ids) for micro in micros(waves)) == 8  # a pass takes some rows
    assert len(caplog.messages) == 1 and "nothing is learnt from the rewards of step 1" in caplog.text


def reports(wave: Wave) -> Any:
    found = [[logps_of(micro) for micro in group] for group in wave[0]]
    return SimpleNamespace(workers=[SimpleNamespace(token_logps=found)])


def test_figures_of_ratios() -> None:
    made = policy(config("grpo.kl_coef=0.1", "grpo.loss=dapo"), Answers())
    waves, loss = made.prepared(0)
    figures = made.figures(waves, [reports(wave) for wave in waves])
    assert figures["kl"] == pytest.approx(math.exp(0.1) - 0.1 - 1, rel=1e-4)
    gaps, over = [], []
    for answer in made._step:
        n = len(answer.rollout.ids)
        now = current(answer.row.sample_id, len(answer.row.input_ids) - 1)[-n:]
        gaps += np.abs(now - answer.rollout.logprobs).tolist()
        ratio = np.exp(now - answer.rollout.logprobs)
        ends = ratio > loss.clip_high if answer.advantage > 0 else ratio < loss.clip_low
        over += (ends & (answer.advantage != 0)).tolist()
    assert 0 < sum(over) < len(over)
    assert figures["clipped"] == pytest.approx(np.mean(over))
    assert figures["sampler_gap"] == pytest.approx(np.mean(gaps), rel=1e-4)
    assert figures["sampled_tokens_per_s"] > 0


def test_a_round_serves_its_steps(tmp_path: Path, flushed: set[int]) -> None:
    """Two batches of prompts, taken twice: four steps, of which the last two are off-policy by more."""
    settings = ("grpo.steps_per_rollout=2", "grpo.iterations=2")
    answers = Answers()
    made = policy(config(*settings), answers)
    rows: list[Mapping[int, bytes]] = []
    gaps = []
    for step in range(8):
        waves, _ = made.prepared(step)
        gaps.append("sampler_gap" in made.figures(waves, [reports(wave) for wave in waves]))
        rows.append({a.row.sample_id: a.row.input_ids.tobytes() for a in made._step})
    assert answers.asked == [
        (0, [p for p in (0, 1, 2, 3) for _ in range(4)]),
        (4, [p for p in (4, 6, 7) for _ in range(4)]),  # a short batch ends an epoch
    ]
    assert len(set(answers.seeds)) == len(answers.seeds)
    assert gaps == [True, False, False, False] * 2
    assert [sorted({s // 4 for s in of_step}) for of_step in rows[:5]] == [
        [0, 1],
        [2, 3],
        [0, 1],
        [2, 3],
        [4],
    ]
    assert rows[0] == rows[2] and rows[5] == rows[7]

    assert made.save(4, tmp_path) is None  # between two rounds there is nothing to keep
    assert made.save(6, tmp_path) == tmp_path / FILE
    assert (tmp_path / FILE).stat().st_ino in flushed
    again = policy(config(*settings), Answers([]))
    again.load(6, tmp_path)
    before, after = micros(made.prepared(6)[0]), micros(again.prepared(6)[0])
    for one, other in zip(before, after, strict=True):
        assert one.input_ids.tobytes() == other.input_ids.tobytes()
        assert all(one.loss_inputs[n].tobytes() == other.loss_inputs[n].tobytes() for n in one.loss_inputs)
    made.prepared(3)  # a recovery may go back
    made.forget_before(4)
    assert list(made._rounds) == [1]
    (tmp_path / FILE).write_bytes(b"PK\x03\x04 cut")
    with pytest.raises(UserError, match="amid a round"):
        policy(config(*settings), answers).load(6, tmp_path)


def test_held_out_rewards_leave_out_what_has_none() -> None:
    assert policy(config(), Answers()).held_out_reward(prompts(0) + prompts(2)) == (0.75, 2)
    answers = Answers()
    answers.most_probable = lambda prompts: answers.sample([(prompts[0], 0)], 0)  # type: ignore[method-assign]
    answers.rewards = [math.nan]
    with pytest.raises(UserError, match="no answer to a held-out prompt got a reward"):
        policy(config(), answers).held_out_reward(prompts(0))
