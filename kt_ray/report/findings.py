"""What is out of the ordinary in a run's figures. docs/metrics.md gives the ranges."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Literal, NamedTuple

from kt_ray.runs.rundata import LAST, RunData, mean

# Each with its reason in docs/metrics.md, "Healthy ranges".
OVERFIT = 1.02  # last held-out loss over the best one
SPIKE = 10.0  # gradient norm over its median
EXPERT_IMBALANCE = 5.0
ACTOR_IMBALANCE = 1.25
WAITING = 0.5  # share of the step that attention waits while no experts compute
IDLE = 0.3  # busy share of the busiest actor
EQUAL = 0.9  # share of groups of equal rewards
GAP = 0.05  # nats between sampler and trainer
TRAINED = 0.05  # share of tokens with a loss
SKIPPED = 0.1  # share of steps


class Finding(NamedTuple):
    """One remark. level: "bad" = the result is in doubt, "look" = worth a look."""

    level: Literal["bad", "look"]
    text: str


def findings(run: RunData) -> list[Finding]:
    """Remarks on a run, bad ones first; none when every figure is in its range."""
    remarks = [
        *_rewards(run),
        *_loss(run),
        *_skipped(run),
        *_gradients(run),
        *_balance(run),
        *_time(run),
        *_tokens(run),
        *_recoveries(run),
    ]
    return sorted(remarks, key=lambda remark: remark.level != "bad")


def _rewards(run: RunData) -> Iterator[Finding]:
    rewards = run.values("policy_reward")
    if len(rewards) < 2 * LAST:
        return
    before, after = mean(rewards[:LAST]), mean(rewards[-LAST:])
    if after <= before < 1:
        yield Finding(
            "bad",
            f"The reward did not rise ({before:.3f} over the first {LAST} steps, {after:.3f} over the "
            "last): look at rollouts.jsonl, whether good answers are ever drawn and get their reward; change "
            "optim.lr.",
        )
    equal = run.values("policy_equal_groups")[-LAST:]
    if equal and mean(equal) > EQUAL and after < 1:
        yield Finding(
            "look",
            f"In {mean(equal):.0%} of the groups all answers have one reward and teach nothing: prompts of "
            "another difficulty, or a larger grpo.group_size.",
        )
    gap = run.values("policy_sampler_gap")[-LAST:]
    if gap and mean(gap) > GAP:
        yield Finding(
            "look",
            f"Sampler and trainer differ by {mean(gap):.2g} in a token's log-probability: please report it.",
        )


def _loss(run: RunData) -> Iterator[Finding]:
    applied = [r for r in run.records if not r.get("skipped")]
    for key, name in (("loss", "loss"), ("eval_loss", "held-out loss")):
        broken = [r.get("step") for r in applied if key in r and r[key] is None]
        if broken:
            yield Finding("bad", f"The {name} is not finite at step {broken[0]}: lower optim.lr.")
    without = [r.get("step") for r in run.records if "eval_reward" in r and r["eval_reward"] is None]
    if without:
        yield Finding(
            "bad", f"No held-out answer got a reward at step {without[0]}: look at what the reward returns."
        )
    values = run.values("loss") if not run.series("policy_reward") else []  # whose loss says nothing
    if len(values) >= 2 * LAST and mean(values[-LAST:]) >= mean(values[:LAST]):
        yield Finding(
            "bad",
            f"The training loss did not fall ({mean(values[:LAST]):.3f} over the first {LAST} steps, "
            f"{mean(values[-LAST:]):.3f} over the last): raise or lower optim.lr, look at the rows "
            "with mode=preview.",
        )
    held_out = run.series("eval_loss")
    if len(held_out) > 2:
        best_step, best = min(held_out, key=lambda point: point[1])
        last_step, last = held_out[-1]
        if last > OVERFIT * best and best_step < last_step:
            yield Finding(
                "look",
                f"The held-out loss rose from {best:.3f} after step {best_step} to {last:.3f}: the model "
                "overfits; train for fewer steps, or use the checkpoint nearest to the best.",
            )


def _skipped(run: RunData) -> Iterator[Finding]:
    skipped = run.series("skipped")
    if skipped:
        count, known = len(skipped), len(skipped) + len(run.series("loss"))
        yield Finding(
            "bad" if count > SKIPPED * known else "look",
            f"{count} of {known} steps {'were' if count > 1 else 'was'} skipped, the first at step "
            f"{skipped[0][0]}: train.log says which rows; lower optim.lr if they are many.",
        )


def _gradients(run: RunData) -> Iterator[Finding]:
    norms = run.series("grad_norm")
    if len(norms) < 2 * LAST:
        return
    middle = statistics.median(run.values("grad_norm"))
    spikes = [(step, value) for step, value in norms if value > SPIKE * middle > 0]
    if spikes:
        step, value = max(spikes, key=lambda point: point[1])
        yield Finding(
            "look",
            f"The gradient norm spiked {len(spikes)} time{'s' if len(spikes) > 1 else ''} (up to {value:.3g} "
            f"at step {step}, median {middle:.3g}): odd rows there, or optim.lr or warmup too steep.",
        )


def _balance(run: RunData) -> Iterator[Finding]:
    experts = run.values("expert_load_imbalance")[-LAST:]
    if experts and mean(experts) > EXPERT_IMBALANCE:
        yield Finding(
            "look",
            f"The fullest expert gets {mean(experts):.1f} times the mean: few experts do most of the work.",
        )
    actors = run.values("actor_load_imbalance")[-LAST:]
    if actors and mean(actors) > ACTOR_IMBALANCE:
        yield Finding(
            "look",
            f"The fullest expert actor gets {mean(actors):.2f} times the mean, the others wait for it: "
            "rule.experts.placement=balanced with rule.experts.load of this run evens it out.",
        )


def _time(run: RunData) -> Iterator[Finding]:
    whole, waiting = dict(run.series("seconds")), dict(run.series("seconds_transport"))
    sampling = dict(run.series("policy_seconds_sampling"))  # of GRPO; the other figures leave it out
    seconds = {step: value - sampling.get(step, 0.0) for step, value in whole.items()}
    steps = sorted(seconds.keys() & waiting.keys())[1:]
    total = sum(seconds[step] for step in steps)
    share = sum(waiting[step] for step in steps) / total if total > 0 else 0.0
    if share > WAITING:
        yield Finding(
            "look",
            f"Attention waits {share:.0%} of the time while no experts compute: messages, queueing or other "
            "stages take it; a timeline (trainer.timeline_every) shows where.",
        )
    training = sum(seconds.values()) / sum(whole.values()) if sum(whole.values()) > 0 else 1.0
    busy = [mean(run.values(key)) / training for key in run.keys("busy_")] if training > 0 else []
    if busy and max(busy) < IDLE:
        yield Finding(
            "look",
            f"No actor computes more than {max(busy):.0%} of the time: steps are too small "
            "(trainer.batch_size), or other programs use the machine.",
        )


def _tokens(run: RunData) -> Iterator[Finding]:
    tokens, trained = sum(run.values("tokens")), sum(run.values("loss_tokens"))
    if tokens and trained / tokens < TRAINED:
        yield Finding(
            "look",
            f"Only {trained / tokens:.1%} of the tokens are trained on: mode=preview shows whether "
            "answers are recognised.",
        )


def _recoveries(run: RunData) -> Iterator[Finding]:
    figures = run.figures()
    count = figures.get("recoveries", 0)
    if count:
        yield Finding(
            "look",
            f"{count:.0f} lost actor{'s were' if count > 1 else ' was'} brought back, "
            f"{figures.get('seconds_lost', 0):.0f} s lost: train.log says why.",
        )
