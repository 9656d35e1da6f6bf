"""Passes of clients' rows on a started cluster: cut into micro-batches as those of mode=train, so the same
rows give the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet

import numpy as np

from kt_ray.actors.cluster import ActorCluster
from kt_ray.batch import IGNORE, MicroBatch, PassSpec, TokenLoss, Wave
from kt_ray.data.batches import step_waves, with_loss_inputs
from kt_ray.data.row_types import Row
from kt_ray.runs.generation import PreparedGeneration
from kt_ray.runs.joined_waves import joined, mix_of, one_wave, room_for_several
from kt_ray.train.reports import PassReport
from kt_ray.train_server.backend import Datum, Pass, PassResult, Scores


class DatumPasses:
    """
    Args:
        unpadded: micro-batches hold rows of one length only.

    Attributes:
        mix: which micro-batches of several trainings pass the layers as one.
    """

    def __init__(self, generation: PreparedGeneration, cluster: ActorCluster, *, unpadded: bool) -> None:
        self.mix = mix_of(generation.config, generation.plan, unpadded=unpadded)
        self._generation = generation
        self._cluster = cluster
        self._unpadded = unpadded
        self._room = room_for_several(generation.config, generation.plan)
        self._numbers = itertools.count(1)

    def run(
        self, passes: Sequence[Pass], kind: str, take_up: Callable[[AbstractSet[str]], tuple[str, int]]
    ) -> list[PassResult]:
        """Passes of several trainings, in as few of the cluster's as there is room for.

        Args:
            take_up: makes one of these trainings the present one; returns its name and its steps.
        """
        totals = [0.0] * len(passes)
        logprobs = [[np.zeros(0, dtype=np.float32)] * len(work.data) for work in passes]
        for waves in joined([self._waves(work.data) for work in passes], self._room, self.mix):
            models = {passes[number].model: number for number in waves}
            present, step = take_up(models.keys())
            losses = {model: passes[number].loss for model, number in models.items()}
            loss = losses.pop(present)
            wave = one_wave({model: waves[number] for model, number in models.items()}, present, self.mix)
            spec = self._pass(wave, kind, loss, step=step, joined=losses)
            report = self._cluster.run_pass(spec)
            for micro, value, values in self._micro(wave, report):
                number = models[present if micro.training is True else str(micro.training)]
                totals[number] += value
                for row, (index, n) in enumerate(zip(micro.sample_ids, micro.lengths, strict=True)):
                    logprobs[number][index] = values[0][row, : n - 1]
        return [PassResult(*each) for each in zip(logprobs, totals, strict=True)]

    def score(self, sampler: str | bool, prompts: Sequence[np.ndarray], top: int) -> list[Scores]:
        """As `Backend.score`."""
        rows = [index for index, prompt in enumerate(prompts) if len(prompt) > 1]
        data = [Datum(prompts[index][:-1], prompts[index][1:]) for index in rows]
        nothing = Scores(np.zeros(0, dtype=np.float32), *_no_tops(0, top))
        scores = [nothing] * len(prompts)
        for wave in self._waves(data):
            spec = self._pass(wave, "eval", TokenLoss("cross_entropy"), adapters=sampler, return_top=top)
            report = self._cluster.run_pass(spec)
            for micro, _, (logprobs, *tops) in self._micro(wave, report):
                for row, (index, n) in enumerate(zip(micro.sample_ids, micro.lengths, strict=True)):
                    ids, values = (part[row, : n - 1] for part in tops) if tops else _no_tops(n - 1, 0)
                    scores[rows[index]] = Scores(logprobs[row, : n - 1], ids, values)
        return scores

    def _pass(self, wave: Wave, kind: str, loss: TokenLoss, *, step: int = 0, **more: object) -> PassSpec:
        return PassSpec(
            number=next(self._numbers),
            step=step,
            kind=kind,
            seed=self._generation.config.seed,
            wave=wave,
            loss_tokens=1,  # losses are sums
            objective=loss,
            **more,  # type: ignore[arg-type]
        )

    def _waves(self, data: Sequence[Datum]) -> list[Wave]:
        config, plan = self._generation.config, self._generation.plan
        waves = step_waves(
            [_row(datum, index) for index, datum in enumerate(data)],
            plan.micro_batch_rows,
            plan.replicas,
            plan.groups,
            plan.wave,
            multiple=config.data.pad_to_multiple_of,
            unpadded=self._unpadded,
            budget=plan.micro_batch_tokens,
        )
        return with_loss_inputs(waves, {index: datum.inputs for index, datum in enumerate(data)})

    def _micro(
        self, wave: Wave, report: PassReport
    ) -> Iterator[tuple[MicroBatch, float, tuple[np.ndarray, ...]]]:
        """Every training's micro-batches, each with its loss and log-probabilities, and the most probable
        tokens where asked for."""
        for replica, rank in enumerate(self._cluster.coordinators):
            worker = report.workers[rank]
            for number, group in enumerate(wave[replica]):
                parts = [part for micro in group for part in micro.of_one_training]
                for i, part in enumerate(parts):
                    tops = worker.tops[number][i] if worker.tops else ()
                    yield part, worker.losses[number][i], (worker.token_logps[number][i], *tops)


def _row(datum: Datum, index: int) -> Row:
    """The datum with its last target behind it: a position's target is the label of the next one."""
    ids = np.concatenate([datum.tokens, datum.targets[-1:]]).astype(np.int64)
    labels = np.concatenate([[IGNORE], datum.targets]).astype(np.int64)
    return Row(ids, labels, index)


def _no_tops(n: int, top: int) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((n, top), dtype=np.int64), np.zeros((n, top), dtype=np.float32)
