"""What a preference step needs beside its training pass: reference log-probabilities, KTO's reference point.

The reference is the same model with adapters off (one base in memory): a forward-only pass in which neither
workers nor expert actors apply LoRA; or apply the one that the run started from. See docs/decisions/013.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from kt_ray.batch import IGNORE, REFERENCE, MicroBatch, Objective, Wave
from kt_ray.config.schema import Config
from kt_ray.data.batches import mismatched
from kt_ray.data.row_types import Row
from kt_ray.placement.plan_types import Plan
from kt_ray.train.reports import PassReport

Forward = Callable[[int, Wave, bool | str], PassReport]  # step, wave, adapters as in PassSpec

STAGES = ("dpo", "orpo", "kto")


class Preference:
    """Prepares the steps of DPO, ORPO and KTO."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        forward: Forward,
        cut: Callable[[Sequence[Row]], Sequence[Wave]] | None,
    ) -> None:
        self.config = config
        self.stage = config.trainer.stage
        self._simpo = self.stage == "dpo" and config.preference.loss == "simpo"
        self._last = [plan.worker(replica, plan.stages - 1).rank for replica in range(plan.replicas)]
        self._forward = forward
        self._reference: bool | str = REFERENCE if config.keeps_reference else False
        self._cut = cut

    def prepared(self, step: int, waves: Sequence[Wave]) -> tuple[list[Wave], Objective]:
        """A step's waves with reference log-probabilities, and its objective."""
        own = self.config.preference
        rows = sum(len(micro.signs) for micro in _micro(waves))
        objective = Objective(
            stage=self.stage,
            units=rows if self.stage == "kto" else rows // 2,
            kind=own.loss,
            beta=own.beta,
            gamma=own.gamma,
            label_smoothing=own.label_smoothing,
            desirable_weight=own.desirable_weight,
            undesirable_weight=own.undesirable_weight,
            nll_tokens=sum(int((m.lengths[m.signs > 0] - 1).sum()) for m in _micro(waves)),
        )
        if not self.config.has_reference:
            return list(waves), objective
        if self.stage == "kto":
            objective = replace(objective, kl=self._kl(step, waves))
        return [self._with_reference(step, wave) for wave in waves], objective

    def figures(
        self, waves: Sequence[Wave], objective: Objective, reports: Sequence[PassReport]
    ) -> dict[str, float]:
        """Mean rewards (beta times the log-ratio to the reference; for ORPO to 1; for SimPO beta times the
        mean log-probability) and how they differ."""
        rewards, signs = [], []
        for wave, report in zip(waves, reports, strict=True):
            for replica, groups in enumerate(self._logps(report)):
                for group, values in zip(wave[replica], groups, strict=True):
                    for micro, logps in zip(group, values, strict=True):
                        reference = 0.0 if micro.reference is None else micro.reference
                        rewards.append(objective.beta * (logps - reference) / self._lengths(micro))
                        signs.append(micro.signs)
        reward, sign = np.concatenate(rewards), np.concatenate(signs)
        figures = {
            name: float(reward[chosen].mean())
            for name, chosen in (("reward_chosen", sign > 0), ("reward_rejected", sign < 0))
            if chosen.any()
        }
        if self.stage == "kto":
            return {**figures, "kl": objective.kl}
        margin = reward[0::2] - reward[1::2]
        return {**figures, "margin": float(margin.mean()), "accuracy": float((margin > 0).mean())}

    def _lengths(self, micro: MicroBatch) -> np.ndarray | float:
        """By what a reward is divided."""
        return (micro.labels[:, 1:] != IGNORE).sum(axis=1) if self._simpo else 1.0

    def _kl(self, step: int, waves: Sequence[Wave]) -> float:
        # In the data's order: which answer meets which prompt must not depend on how the step is cut.
        rows = sorted((row for m in _micro(waves) for row in _rows(m)), key=lambda row: row.sample_id)
        rows = mismatched(rows, self.config.data.max_length)
        if not rows:
            return 0.0
        assert self._cut is not None, "KTO also cuts mismatched rows"
        ratios = []
        for wave in self._cut(rows):
            policy, reference = (self._logps(self._forward(step, wave, on)) for on in (True, self._reference))
            for mine, theirs in zip(policy, reference, strict=True):
                for group, other in zip(mine, theirs, strict=True):
                    ratios += [a - b for a, b in zip(group, other, strict=True)]
        return max(0.0, float(np.concatenate(ratios).mean()))

    def _with_reference(self, step: int, wave: Wave) -> Wave:
        logps = self._logps(self._forward(step, wave, self._reference))
        return tuple(
            tuple(
                tuple(replace(m, reference=value) for m, value in zip(group, values, strict=True))
                for group, values in zip(groups, of_replica, strict=True)
            )
            for groups, of_replica in zip(wave, logps, strict=True)
        )

    def _logps(self, report: PassReport) -> list[list[list[np.ndarray]]]:
        """Per replica, group and micro-batch: float64 [b]."""
        return [report.workers[rank].logps for rank in self._last]


def _micro(waves: Sequence[Wave]) -> list[MicroBatch]:
    return [micro for wave in waves for replica in wave for group in replica for micro in group]


def _rows(micro: MicroBatch) -> list[Row]:
    return [
        Row(micro.input_ids[i, :n], micro.labels[i, :n], int(micro.sample_ids[i]), sign=int(micro.signs[i]))
        for i, n in enumerate(micro.lengths.tolist())
    ]


def check_units(stage: str, units: Sequence[object]) -> str | None:
    """What is wrong with a stage's rows; None = nothing."""
    from kt_ray.data.row_types import Pair

    if stage in ("dpo", "orpo"):
        bad = sum(
            not isinstance(u, Pair) or not (_answers(u.chosen, 1) and _answers(u.rejected, -1)) for u in units
        )
        return f"{bad} of {len(units)} rows are no pairs of a chosen and a rejected answer" if bad else None
    if stage == "kto":
        bad = sum(not isinstance(u, Row) or not (_answers(u, 1) or _answers(u, -1)) for u in units)
        return f"{bad} of {len(units)} rows are not marked as wanted or unwanted" if bad else None
    if bad := sum(not isinstance(u, Row) for u in units):
        return f"{bad} of {len(units)} rows are preference pairs"
    bad = sum(isinstance(u, Row) and u.sign < 0 for u in units)  # which would be learnt like the others
    return f"{bad} of {len(units)} rows are answers marked as unwanted" if bad else None


def _answers(row: Row, sign: int) -> bool:
    return row.sign == sign and row.trained > 0
