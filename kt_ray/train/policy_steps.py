"""What a step of trainer.stage=grpo is made of: groups of answers, their advantages, every token's weight.

A round samples `grpo.group_size` answers to each prompt of `grpo.steps_per_rollout` steps from the policy as
it is, and those steps are taken `grpo.iterations` times. The log-probabilities that ratios compare with are
the sampler's: sampler and trainer compute with the same weights, kernels and routing.

GRPO: Shao et al. 2024 (arXiv:2402.03300); Dr. GRPO: Liu et al. 2025 (arXiv:2503.20783); DAPO: Yu et al. 2025
(arXiv:2503.14476); GSPO: Zheng et al. 2025 (arXiv:2507.18071). Where papers leave it open, as trl's
GRPOTrainer.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kt_ray.batch import IGNORE, REFERENCE, TokenLoss, Wave
from kt_ray.config.schema import Config
from kt_ray.data.batches import with_loss_inputs
from kt_ray.data.row_types import Row
from kt_ray.errors import UserError
from kt_ray.placement.plan_types import Plan
from kt_ray.train import rollouts as rollout_file
from kt_ray.train.reports import PassReport, token_logps
from kt_ray.train.rollouts import Rollout, Rollouts

logger = logging.getLogger(__name__)

STAGE = "grpo"
_EPSILON = 1e-4  # added to a group's deviation, as trl does


@dataclass(frozen=True)
class Variant:
    """A value of grpo.loss."""

    token_loss: str  # of kt_ray.model.policy_losses
    epsilon: float  # a ratio's slope ends below 1 - epsilon
    epsilon_high: float  # and above 1 + epsilon_high
    scaled: bool = True  # whether advantages are divided by the group's deviation
    # what the tokens' losses are added up to: "answers" the mean of the answers' means, "tokens" the mean
    # token, "longest" their sum over answers times generate.max_new_tokens
    mean: str = "answers"


VARIANTS: Mapping[str, Variant] = {
    "grpo": Variant("ppo", 0.2, 0.2),
    "dr_grpo": Variant("ppo", 0.2, 0.2, scaled=False, mean="longest"),
    "dapo": Variant("ppo", 0.2, 0.28, mean="tokens"),
    "gspo": Variant("gspo", 3e-4, 4e-4),
}


def advantages(rewards: np.ndarray, *, scaled: bool) -> np.ndarray:
    """How much better each answer is than its group's mean, float64 [G].

    Args:
        rewards: float64 [G]; nan = none, which neither counts in the mean nor has an advantage.
        scaled: in units of the group's deviation (of a sample, as torch.std).
    """
    known = ~np.isnan(rewards)
    values = np.zeros(len(rewards))
    if known.any() and np.ptp(rewards[known]) > 0:
        values[known] = rewards[known] - rewards[known].mean()
    if scaled:
        values /= deviation(rewards) + _EPSILON
    return values


def deviation(rewards: np.ndarray) -> float:
    """That of a sample, as torch.std; 0 of fewer than two. `rewards` as in `advantages`."""
    known = rewards[~np.isnan(rewards)]
    return float(known.std(ddof=1)) if len(known) > 1 else 0.0


def token_weights(mean: str, lengths: np.ndarray, counted: np.ndarray, longest: int) -> np.ndarray:
    """By what every token of each answer is multiplied, so that the sum over all tokens is the step's loss.

    Args:
        mean: see `Variant`. lengths: int64 [N] tokens of the step's answers. counted: bool [N], False = its
        tokens
            do not count. longest: tokens that an answer may have.

    Returns:
        float64 [N].
    """
    each = {
        "answers": 1 / (len(lengths) * np.maximum(lengths, 1)),
        "tokens": np.full(len(lengths), 1 / max(1, lengths[counted].sum())),
        "longest": np.full(len(lengths), 1 / (len(lengths) * longest)),
    }[mean]
    return np.where(counted, each, 0.0)


def overlong_penalty(length: int, longest: int, buffer: int) -> float:
    """What the reward of an answer loses by its length, 0 to 1 (DAPO, equation 13)."""
    return min(1.0, max(0.0, (length - (longest - buffer)) / buffer)) if buffer else 0.0


@dataclass(frozen=True)
class _Answer:
    """An answer with its prompt, as a step takes it."""

    row: Row  # prompt and answer; the answer is trained
    rollout: Rollout
    advantage: float
    weight: float  # of each of its tokens

    def inputs(self, values: Sequence[float] | np.ndarray | float) -> np.ndarray:
        """float32 [s]: values for the answer's tokens, at the positions that predict them."""
        result = np.zeros(len(self.row.input_ids), dtype=np.float32)
        result[-len(self.rollout.ids) - 1 : -1] = values
        return result


class Policy:
    """Prepares the steps of trainer.stage=grpo.

    Args:
        prompts: number of a batch of prompts -> its rows.
        cut: rows into waves, as a step's.
        rollouts: answers and rewards.
        forward: step, wave, adapters as in PassSpec -> the labels' log-probabilities.
    """

    def __init__(
        self,
        config: Config,
        plan: Plan,
        prompts: Callable[[int], Sequence[Row]],
        cut: Callable[[Sequence[Row]], Sequence[Wave]],
        rollouts: Rollouts,
        forward: Callable[[int, Wave, bool | str], PassReport],
    ) -> None:
        self.config = config
        self._plan = plan
        self._prompts = prompts
        self._cut = cut
        self._rollouts = rollouts
        self._forward = forward
        self._variant = VARIANTS[config.grpo.loss]
        self._reference: bool | str = REFERENCE if config.keeps_reference else False
        own = config.grpo
        low = self._variant.epsilon if own.epsilon is None else own.epsilon
        high = self._variant.epsilon_high if own.epsilon_high is None else own.epsilon_high
        self._loss = TokenLoss(self._variant.token_loss, clip_low=1 - low, clip_high=1 + high)
        self._step_loss = self._loss  # of the step that was prepared last
        self._rounds: dict[int, list[Rollout]] = {}  # those that a recovery may come back to
        self._step: list[_Answer] = []  # the step that was prepared last
        self._inputs: dict[int, dict[str, np.ndarray]] = {}  # what its loss reads, by sample id
        self._on_policy = False  # whether it is the first of its round
        self._warned = False
        self._sampled = 0, 0.0  # tokens and seconds, where its round was drawn for it

    # -- rounds -------------------------------------------------------------------------------

    def _batch(self, number: int) -> list[Row]:
        """The prompts of a round, as many batches as steps sample together."""
        together = self.config.grpo.steps_per_rollout
        return [row for i in range(together) for row in self._prompts(number * together + i)]

    def _round(self, number: int, step: int) -> list[Rollout]:
        """The answers of a round, `group_size` to each prompt."""
        if number not in self._rounds:
            asked = [
                (row, _seed(self.config.seed, number, place, answer))
                for place, row in enumerate(self._batch(number))
                for answer in range(self.config.grpo.group_size)
            ]
            begin = time.monotonic()
            rollouts = self._rollouts.sample(asked, step)
            if all(math.isnan(rollout.reward) for rollout in rollouts):
                raise UserError(
                    "no answer of a round got a reward",
                    where=f"reward={self.config.reward}, the answers before step {step + 1}",
                    observed=f"{len(rollouts)} answers, all without one",
                    remedy="look at rollouts.jsonl, and at what the reward wants of prompts and answers",
                )
            self._rounds[number] = rollouts
            self._sampled = sum(len(r.ids) for r in rollouts), time.monotonic() - begin
        return self._rounds[number]

    def forget_before(self, step: int) -> None:
        """Rounds that ended before `step` will not be asked for again."""
        first = step // self.config.grpo.steps_of_round
        self._rounds = {number: drawn for number, drawn in self._rounds.items() if number >= first}

    def save(self, step: int, directory: Path) -> Path | None:
        """The answers that a run needs to go on from `step`, into a checkpoint; None = it needs none."""
        number, within = divmod(step, self.config.grpo.steps_of_round)
        return rollout_file.save(self._rounds[number], directory) if within else None

    def load(self, step: int, directory: Path) -> None:
        """Back from a checkpoint. Raises UserError: its answers cannot be read."""
        number, within = divmod(step, self.config.grpo.steps_of_round)
        if within and number not in self._rounds:
            self._rounds[number] = rollout_file.load(directory)

    # -- steps --------------------------------------------------------------------------------

    def prepared(self, step: int) -> tuple[list[Wave], TokenLoss]:
        """A step's waves with all that its loss reads, and the loss: its sum is the step's."""
        own = self.config.grpo
        number, within = divmod(step, own.steps_of_round)
        self._sampled, self._on_policy = (0, 0.0), within == 0
        # Where every ratio is 1 but for rounding, gspo's bounds would cut slopes by that rounding.
        exact = self._on_policy and self._loss.name == "gspo"
        self._step_loss = TokenLoss("importance_sampling") if exact else self._loss
        answers = self._round(number, step)
        first, part = number * own.steps_per_rollout, within % own.steps_per_rollout
        rows = self._prompts(first + part)
        start = own.group_size * sum(len(self._prompts(first + i)) for i in range(part))
        self._step = self._answers(rows, answers[start : start + len(rows) * own.group_size])
        # Of a group of equal rewards nothing is learnt, but for the divergence.
        teaching = [a for a in self._step if a.weight and (a.advantage or own.kl_coef)] or self._step
        if not self._warned and not any(a.weight and a.advantage for a in self._step):
            self._warned = True
            logger.warning(
                "nothing is learnt from the rewards of step %d: the answers to each prompt have one reward, "
                "or do not count. Look at rollouts.jsonl, and at policy_equal_groups of later steps",
                step + 1,
            )
        waves = list(self._cut([answer.row for answer in teaching]))
        self._inputs = {answer.row.sample_id: self._inputs_of(answer) for answer in teaching}
        if own.kl_coef:
            for wave in waves:
                report = self._forward(step, wave, self._reference)
                for sample, logps in token_logps(self._plan, wave, report):
                    self._inputs[sample]["reference_logprobs"] = logps
        return with_loss_inputs(waves, self._inputs), self._step_loss

    def _answers(self, rows: Sequence[Row], rollouts: Sequence[Rollout]) -> list[_Answer]:
        own, longest = self.config.grpo, self.config.generate.max_new_tokens
        size = own.group_size
        lengths = np.array([len(r.ids) for r in rollouts], dtype=np.int64)
        rewards = np.array([r.reward for r in rollouts])
        rewards -= [overlong_penalty(n, longest, own.overlong_buffer) for n in lengths.tolist()]
        counted = ~np.isnan(rewards) & [r.finished or not own.mask_truncated for r in rollouts]
        weights = token_weights(self._variant.mean, lengths, counted, longest)
        groups = [
            advantages(rewards[i : i + size], scaled=self._variant.scaled)
            for i in range(0, len(rewards), size)
        ]
        answers = []
        for i, (rollout, advantage) in enumerate(zip(rollouts, np.concatenate(groups), strict=True)):
            prompt = rows[i // size]
            ids = np.concatenate([prompt.input_ids, rollout.ids])
            labels = np.concatenate([np.full(len(prompt.input_ids), IGNORE), rollout.ids])
            row = Row(ids, labels, prompt.sample_id * size + i % size)
            answers.append(_Answer(row, rollout, float(advantage), float(weights[i])))
        return answers

    def _inputs_of(self, answer: _Answer) -> dict[str, np.ndarray]:
        # Losses are linear in advantages, so that a token's weight is a factor of its own.
        inputs = {
            "logprobs": answer.inputs(answer.rollout.logprobs),
            "advantages": answer.inputs(answer.advantage * answer.weight),
        }
        if self._step_loss.name == "gspo":
            inputs["sequence_ratio_mask"] = answer.inputs(1.0)
        if self.config.grpo.kl_coef:
            inputs["kl_weights"] = answer.inputs(self.config.grpo.kl_coef * answer.weight)
        return inputs

    def figures(self, waves: Sequence[Wave], reports: Sequence[PassReport]) -> dict[str, float]:
        """Of the prepared step.

        reward: mean as given, nan left out. reward_std: mean deviation within groups. equal_groups: share of
        groups whose answers have one reward, lengths punished, so that they teach nothing. answer_tokens:
        mean. truncated: share. entropy: minus the mean log-probability of the answers' tokens when drawn, an
        estimate of the policy's entropy in nats per token. clipped: share of trained tokens whose slope had
        ended. sampler_gap: mean difference of trainer's and sampler's log-probabilities, of a round's first
        step. kl: mean per trained token (Schulman's k3). seconds_sampling, sampled_tokens_per_s: of a
        round's first step.
        """
        rollouts = [answer.rollout for answer in self._step]
        rewards = np.array([r.reward for r in rollouts])
        groups = rewards.reshape(-1, self.config.grpo.group_size)
        drawn = np.concatenate([r.logprobs for r in rollouts])
        figures = {
            "answer_tokens": len(drawn) / len(rollouts),
            "truncated": float(np.mean([not r.finished for r in rollouts])),
            "entropy": -float(drawn.astype(np.float64).mean()),
        }
        if not np.isnan(rewards).all():
            some = ~np.isnan(groups).all(axis=1)
            advantages = np.array([answer.advantage for answer in self._step]).reshape(groups.shape)
            figures["reward"] = float(np.nanmean(rewards))
            figures["reward_std"] = float(np.mean([deviation(group) for group in groups[some]]))
            figures["equal_groups"] = float((~advantages[some].any(axis=1)).mean())
        figures |= self._ratios(waves, reports)
        tokens, seconds = self._sampled
        if tokens:
            figures["seconds_sampling"] = seconds
            figures["sampled_tokens_per_s"] = tokens / seconds
        return figures

    def _ratios(self, waves: Sequence[Wave], reports: Sequence[PassReport]) -> dict[str, float]:
        """What the passes tell of the trained tokens."""
        by_sample = {answer.row.sample_id: answer for answer in self._step}
        gaps, clipped, kls = [], [], []
        for wave, report in zip(waves, reports, strict=True):
            for sample, logps in token_logps(self._plan, wave, report):
                answer = by_sample[sample]
                at = slice(len(logps) - len(answer.rollout.ids), None)
                mine = logps[at].astype(np.float64)
                gap = mine - answer.rollout.logprobs
                gaps.append(np.abs(gap))
                ratio = np.exp(gap.mean() if self._loss.name == "gspo" else gap) * np.ones(len(gap))
                low, high = self._step_loss.clip_low, self._step_loss.clip_high
                if low is None or high is None:
                    over = np.zeros(len(gap), dtype=bool)
                else:
                    over = ratio > high if answer.advantage > 0 else ratio < low
                clipped.append(over & (answer.advantage != 0))
                if (reference := self._inputs[sample].get("reference_logprobs")) is not None:
                    distance = reference[at] - mine
                    kls.append(np.exp(distance) - distance - 1)
        figures = {"clipped": float(np.concatenate(clipped).mean())}
        if self._on_policy:
            figures["sampler_gap"] = float(np.concatenate(gaps).mean())
        return figures | ({"kl": float(np.concatenate(kls).mean())} if kls else {})

    def held_out_reward(self, prompts: Sequence[Row]) -> tuple[float, int]:
        """Mean reward of the greedy answers, and of how many.

        Raises:
            UserError: none has one.
        """
        rewards = np.array([rollout.reward for rollout in self._rollouts.most_probable(prompts)])
        known = rewards[~np.isnan(rewards)]
        if not len(known):
            raise UserError(
                "no answer to a held-out prompt got a reward",
                where=f"reward={self.config.reward}",
                observed=f"{len(rewards)} answers, all without one",
                remedy="look at what the reward wants of these rows (data.eval_path, data.eval_fraction), or "
                "set trainer.eval_every=0",
            )
        return float(known.mean()), len(known)


def _seed(*counters: int) -> int:
    """A seed of its own for each answer, less than 2**63."""
    words = np.random.SeedSequence(counters).generate_state(2, dtype=np.uint32)
    return int(words[0]) << 31 | int(words[1]) >> 1
