"""Steps that must not be applied: not finite, or far from the steps before them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from kt_ray.batch import MicroBatch, Wave
from kt_ray.errors import BadStep
from kt_ray.train.cluster_protocol import Cluster
from kt_ray.train.reports import PassReport

WINDOW = 16  # steps whose median is the measure; checkpoints keep their figures
ENOUGH = 4  # steps that must be known before any is called a spike
# Stages whose loss holds a negative log-likelihood per token, so that a ratio of two means something.
# The loss of dpo and kto approaches zero in good training (hinge: is zero; robust: may be negative).
POSITIVE = ("sft", "pt", "orpo")

_ROWS = "look at these rows with mode=preview; trainer.bad_steps=skip passes such steps over"
_REMEDY = (
    "lower optim.lr or optim.max_grad_norm and continue from the last checkpoint with trainer.resume=latest; "
    f"or {_ROWS}"
)
# Before the first update no learning rate has had an effect.
_FIRST = "compare the checkpoint's files with its release (download them again); or " + _ROWS


def judge(
    cluster: Cluster,
    step: int,
    waves: Sequence[Wave],
    report: PassReport,
    norm: float,
    losses: Sequence[float],
    norms: Sequence[float],
    spike: float,
    stage: str = "sft",
    samples_per_row: int = 1,
) -> BadStep | None:
    """Why a step (0-based) whose gradients are reduced must not be applied; None = it may.

    Args:
        cluster: asked for its largest gradients when there is something to report.
        waves, report, norm: the step's micro-batches, what it gave, its gradient norm before clipping.
        losses, norms: of the steps before it, oldest first; what is not finite does not count.
        spike: `trainer.spike`; 0 = only what is not finite is refused.
        stage: `trainer.stage`; of one whose loss may come near zero, or below, only the norm can spike.
        samples_per_row: see PassSpec.
    """
    for what, value, before in (("loss", report.loss, losses), ("gradient norm", norm, norms)):
        observed = None
        finite = [x for x in before[-WINDOW:] if math.isfinite(x)]
        if not math.isfinite(value):
            observed = f"{value}"
        elif spike and len(finite) >= ENOUGH and (what != "loss" or stage in POSITIVE):
            median = statistics.median(finite)
            if median <= 0 or value <= spike * median:
                continue
            observed = f"{value:.4g}, {value / median:.1f} times the median {median:.4g} of the steps before"
        if observed is not None:
            rows = _worst_rows(waves, report, stage, samples_per_row)
            bad = BadStep(
                f"the {what} of step {step + 1} is {observed}; the step was not applied",
                where="; ".join(filter(None, (rows, _worst_gradient(cluster)))),
                required="a finite number"
                + (f" of at most trainer.spike={spike:g} times the median" if spike else ""),
                remedy=_REMEDY if step else _FIRST,
            )
            bad.finite = math.isfinite(value)
            return bad
    return None


def _worst_rows(waves: Sequence[Wave], report: PassReport, stage: str, samples_per_row: int) -> str:
    """The micro-batch with the largest mean loss."""
    worst, where = -math.inf, ""
    for number, (wave, losses) in enumerate(zip(waves, report.micro_losses, strict=True)):
        for replica, groups in enumerate(losses):
            for group, sums in enumerate(groups):
                for i, total in enumerate(sums):
                    micro = wave[replica][group][i]
                    count, unit = _counted(micro, stage)
                    mean = total / max(1, count)
                    if mean > worst or not math.isfinite(mean):
                        worst = mean
                        rows = micro.named(samples_per_row)
                        place = f"wave {number}, " * (len(waves) > 1) + f"replica {replica}, " * (
                            len(wave) > 1
                        )
                        where = f"{place}group {group}, micro-batch {i} (rows {rows}; loss {mean:.4g}{unit})"
                    if not math.isfinite(mean):
                        return where
    return where


def _counted(micro: MicroBatch, stage: str) -> tuple[int, str]:
    """What a micro-batch's loss is a sum over: how many, and of what."""
    if stage in ("dpo", "orpo"):
        return len(micro.sample_ids) // 2, " per pair"
    if stage == "kto":
        return len(micro.sample_ids), " per row"
    if stage == "grpo":  # whose tokens have weights
        return 1, ""
    return micro.loss_tokens, " per token"


def _worst_gradient(cluster: Cluster) -> str:
    norms = cluster.largest_gradients(1)
    return f"largest gradient: {norms[0][1]}, norm {norms[0][0]:.4g}" if norms else ""
