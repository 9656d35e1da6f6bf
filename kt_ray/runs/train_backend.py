"""The cluster as the Tinker API's service uses it: trainings and samplers by name.

One training is *present* in the actors, the others are put aside in host memory; a call for another one
switches. Rows are cut into micro-batches as those of mode=train, so the same rows give the same bits.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kt_ray.actors.cluster import ActorCluster
from kt_ray.batch import IGNORE, MicroBatch, PassSpec, TokenLoss, Wave
from kt_ray.config.mapping import with_keys
from kt_ray.config.schema import Config
from kt_ray.data.batches import step_waves
from kt_ray.data.row_types import Row
from kt_ray.errors import UserError
from kt_ray.generate.generator import Generator
from kt_ray.optim.optimizers import AdamStep
from kt_ray.runs.generation import PreparedGeneration, generator_on
from kt_ray.runs.saving import write_adapter
from kt_ray.train.reports import PassReport
from kt_ray.train_server.backend import AdamParams, Datum, PassResult, Scores

logger = logging.getLogger(__name__)

SCRATCH = ""  # the training in which a sampler's file is read; clients name none so
_STEPS = "steps.json"


def planned(config: Config) -> Config:
    """What the plan is made for: training, and answers of serve.max_batch rows beside it."""
    rows = {"generate.batch_size": config.serve.max_batch, "eval.after_training": config.serve.max_batch}
    return with_keys(config, rows)


@dataclass
class _Training:
    steps: int = 0  # optimizer steps taken


class ClusterBackend:
    """`kt_ray.train_server.backend.Backend` on a started cluster.

    Args:
        generation: prepared for training and generation; its rows are not used.
        name: the base model's name to clients. unpadded: micro-batches hold rows of one length only.
    """

    def __init__(
        self, generation: PreparedGeneration, cluster: ActorCluster, name: str, *, unpadded: bool = False
    ) -> None:
        self.base_model = name
        self.tokenizer = generation.config.model.tokenizer or generation.model_dir
        self._generation = generation
        self._cluster = cluster
        self._unpadded = unpadded
        self._passes = itertools.count(1)
        self._trainings: dict[str, _Training] = {}
        self._present: str | None = SCRATCH  # None = what the actors hold is nobody's
        self._samplers: set[str] = set()

    # -- what the model is --------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self._generation.config.lora.rank

    @property
    def max_length(self) -> int:
        return self._generation.config.data.max_length

    @property
    def vocab_size(self) -> int:
        return self._cluster.vocab_size

    @property
    def eos(self) -> tuple[int, ...]:
        return self._generation.eos

    @property
    def slots(self) -> int:
        return self._generation.config.train_server.adapters

    # -- trainings ----------------------------------------------------------------------------

    def create(self, model: str, seed: int) -> None:
        self._switch(model, seed, new=True)
        self._trainings[model] = _Training()

    def forget(self, model: str) -> None:
        del self._trainings[model]
        if self._present == model:
            self._present = None
        else:
            self._cluster.end_training(model)

    def _take_up(self, model: str) -> _Training:
        """Make a training the present one."""
        if self._present != model:
            self._switch(model, 0, new=False)
        return self._trainings[model]

    def _switch(self, model: str, seed: int, *, new: bool) -> None:
        before = self._present if self._present in self._trainings else None
        self._cluster.switch_training(model, before, seed, new=new)
        self._present = model

    def run(self, model: str, data: Sequence[Datum], loss: TokenLoss, *, backward: bool) -> PassResult:
        training = self._take_up(model)
        kind = "train" if backward else "eval"
        total, logprobs = 0.0, [np.zeros(0, dtype=np.float32)] * len(data)
        for wave in self._waves(data):
            spec = self._pass(wave, kind, loss, step=training.steps)
            report = self._cluster.run_pass(spec)
            total += report.loss
            for micro, values in self._micro(wave, report):
                for row, (index, n) in enumerate(zip(micro.sample_ids, micro.lengths, strict=True)):
                    logprobs[index] = values[0][row, : n - 1]
        return PassResult(logprobs, total)

    def step(self, model: str, params: AdamParams) -> dict[str, float]:
        training = self._take_up(model)
        norm = math.sqrt(self._cluster.prepare(training.steps))
        if not math.isfinite(norm):
            self._cluster.discard()
            raise UserError(
                "the gradients are not finite, and were thrown away; no step was taken",
                observed=f"norm {norm}",
                remedy="lower the learning rate, or look at the rows, their weights and advantages",
            )
        clip, most = 1.0, params.grad_clip_norm
        if most > 0 and norm > most:
            clip = most / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_
        adam = AdamStep((params.beta1, params.beta2), params.eps, params.weight_decay)
        self._cluster.commit(training.steps, params.learning_rate, clip, adam)
        training.steps += 1
        return {"grad_norm": norm}

    def _pass(self, wave: Wave, kind: str, loss: TokenLoss, *, step: int = 0, **more: object) -> PassSpec:
        return PassSpec(
            number=next(self._passes),
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
            config.micro_batch_rows(plan.replicas),
            plan.replicas,
            plan.groups,
            plan.wave,
            multiple=config.data.pad_to_multiple_of,
            unpadded=self._unpadded,
            budget=config.micro_batch_tokens(plan.replicas),
        )

        def with_inputs(micro: MicroBatch) -> MicroBatch:
            names = {name for index in micro.sample_ids for name in data[index].inputs}
            inputs = {name: np.zeros(micro.input_ids.shape, dtype=np.float32) for name in names}
            for row, index in enumerate(micro.sample_ids):
                for name, values in data[index].inputs.items():
                    inputs[name][row, : len(values)] = values
            return replace(micro, loss_inputs=inputs)

        return [
            tuple(tuple(tuple(with_inputs(micro) for micro in group) for group in groups) for groups in wave)
            for wave in waves
        ]

    def _micro(self, wave: Wave, report: PassReport) -> Iterator[tuple[MicroBatch, tuple[np.ndarray, ...]]]:
        """Every micro-batch with its log-probabilities, and with the most probable tokens where asked for."""
        for replica, rank in enumerate(self._cluster.coordinators):
            worker = report.workers[rank]
            for number, group in enumerate(wave[replica]):
                for i, micro in enumerate(group):
                    tops = worker.tops[number][i] if worker.tops else ()
                    yield micro, (worker.token_logps[number][i], *tops)

    # -- on disk ------------------------------------------------------------------------------

    def save_state(self, model: str, directory: Path) -> None:
        training = self._take_up(model)
        directory.mkdir(parents=True)
        self._cluster.save_shards(str(directory))
        (directory / _STEPS).write_text(json.dumps({"steps": training.steps}))

    def load_state(self, model: str, directory: Path, *, optimizer: bool) -> None:
        training = self._take_up(model)
        steps = int(json.loads((directory / _STEPS).read_text())["steps"]) if optimizer else 0
        self._cluster.restore(str(directory), steps, optimizer)
        training.steps = steps

    def save_adapter(self, model: str, directory: Path) -> None:
        self._take_up(model)
        write_adapter(self._generation, directory, self._cluster)

    # -- samplers -----------------------------------------------------------------------------

    def keep(self, model: str, sampler: str) -> None:
        self._take_up(model)
        self._cluster.keep_adapter(sampler)
        self._samplers.add(sampler)

    def load_sampler(self, sampler: str, directory: Path) -> None:
        self._switch(SCRATCH, 0, new=True)
        self._cluster.load_adapter(str(directory))
        self._cluster.keep_adapter(sampler)
        self._samplers.add(sampler)

    def drop(self, sampler: str) -> None:
        self._samplers.remove(sampler)
        self._cluster.drop_adapter(sampler)

    def score(self, sampler: str | bool, prompts: Sequence[np.ndarray], top: int) -> list[Scores]:
        data = [Datum(prompt[:-1], prompt[1:]) for prompt in prompts]
        scores: list[Scores | None] = [None] * len(data)
        for wave in self._waves(data):
            more = {"adapters": sampler, "return_top": top}
            report = self._cluster.run_pass(self._pass(wave, "eval", TokenLoss("cross_entropy"), **more))
            for micro, (logprobs, *tops) in self._micro(wave, report):
                for row, (index, n) in enumerate(zip(micro.sample_ids, micro.lengths, strict=True)):
                    ids, values = (part[row, : n - 1] for part in tops) if tops else _no_tops(int(n) - 1)
                    scores[index] = Scores(logprobs[row, : n - 1], ids, values)
        return [score for score in scores if score is not None]

    def sampling(self) -> AbstractContextManager[Generator]:
        return generator_on(self._generation, self._cluster)


def _row(datum: Datum, index: int) -> Row:
    """The datum with its last target behind it: a position's target is the label of the next one."""
    ids = np.concatenate([datum.tokens, datum.targets[-1:]]).astype(np.int64)
    labels = np.concatenate([[IGNORE], datum.targets]).astype(np.int64)
    return Row(ids, labels, index)


def _no_tops(n: int) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((n, 0), dtype=np.int64), np.zeros((n, 0), dtype=np.float32)
