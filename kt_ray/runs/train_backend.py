"""The cluster as the Tinker API's service uses it: trainings and samplers by name.

One training is *present* in the actors, the others are put aside in host memory; a call for another one
switches.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import numpy as np

from kt_ray.actors.cluster import ActorCluster
from kt_ray.batch import WHOLE, LoraPart, TokenLoss
from kt_ray.disk import write_atomic
from kt_ray.errors import BadStep, UserError
from kt_ray.generate.generator import Generator
from kt_ray.generate.requests import Request
from kt_ray.model.lora_part import changes
from kt_ray.optim.optimizers import AdamStep
from kt_ray.placement.memory import checkpoint_bytes
from kt_ray.runs.datum_passes import DatumPasses
from kt_ray.runs.disk_room import require_room
from kt_ray.runs.generation import PreparedGeneration, Revivals, generator_on
from kt_ray.runs.saving import lora_fields, write_adapter
from kt_ray.train.cluster_protocol import ActorLost
from kt_ray.train_server.backend import (
    AdamParams,
    Datum,
    NoRoomYet,
    Pass,
    PassResult,
    SamplingSession,
    Scores,
)

logger = logging.getLogger(__name__)

SCRATCH = ""  # the training in which a sampler's file is read, or one that has left; clients name none so
_STEPS = "steps.json"
SNAPSHOT_STEPS = 16  # optimizer steps after which a sampler, or twice as many after which a step, makes one

T = TypeVar("T")


@dataclass
class _Training:
    """One training, and how its state comes back after a death: a snapshot, and what followed.

    Attributes:
        part: of the LoRA that it changes.
        steps: optimizer steps taken. snapshot: directory and steps; None = initial LoRA of `seed`.
        journal: backward passes, steps and kept copies since then, as calls that repeat them.
        waiting: where in the journal the entries after the last optimizer step begin.
        steps_since: optimizer steps since a snapshot was tried.
        used: grows with every use. on_disk: snapshot and journal are all that there is of it.
        lost: why it could not be made again from them; "" = it was not tried, or it could.
    """

    seed: int
    part: LoraPart
    steps: int = 0
    snapshot: tuple[Path, int] | None = None
    journal: list[Callable[[], object]] = field(default_factory=list)
    waiting: int = 0
    steps_since: int = 0
    used: int = 0
    on_disk: bool = False
    lost: str = ""


class ClusterBackend:
    """`kt_ray.train_server.backend.Backend` on a started cluster.

    When an actor dies, the call that notices it brings all trainings and samplers back and is repeated.

    Args:
        generation: prepared for training and generation.
        name: the base model's name to clients. tokenizer: where they find it.
        directory: for snapshots, its own: emptied.
        unpadded: micro-batches hold rows of one length only.
    """

    def __init__(
        self,
        generation: PreparedGeneration,
        cluster: ActorCluster,
        name: str,
        tokenizer: str,
        directory: Path,
        *,
        unpadded: bool = False,
    ) -> None:
        self.base_model = name
        self.tokenizer = tokenizer
        self._generation = generation
        self._cluster = cluster
        self._directory = directory
        shutil.rmtree(directory, ignore_errors=True)  # of a server that was killed
        self._numbers = itertools.count(1)  # of directories
        self._passes = DatumPasses(generation, cluster, unpadded=unpadded)
        self._trainings: dict[str, _Training] = {}
        self._present: str | None = SCRATCH  # None = what the actors hold is nobody's
        self._files: dict[str, Callable[[], Path]] = {}  # samplers from disk
        self._samplers: set[str] = set()  # those that the actors hold
        self._wanted: dict[str, str] = {}  # those of trainings -> the training
        self._uses = itertools.count(1)
        self.busy: Callable[[], AbstractSet[str]] = frozenset
        self._lost: ActorLost | None = None  # what ended the last session
        self._revivals = Revivals(generation, cluster, self._rebuild)

    def close(self) -> None:
        """No training will be brought back any more."""
        shutil.rmtree(self._directory, ignore_errors=True)

    # -- what the model is --------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self._generation.config.lora.rank

    @property
    def settings(self) -> dict[str, Any]:
        stated = {"model": self._generation.fingerprint, **lora_fields(self._generation.config.lora)}
        return json.loads(json.dumps(stated))

    @property
    def max_length(self) -> int:
        longest = self._generation.config.data.max_length
        return min(longest, self._generation.context or longest)

    @property
    def vocab_size(self) -> int:
        return self._cluster.vocab_size

    @property
    def eos(self) -> tuple[int, ...]:
        return self._generation.eos

    @property
    def slots(self) -> int:
        return self._generation.config.train_server.trainings

    # -- after a death ------------------------------------------------------------------------

    def _surely(self, work: Callable[[], T], *, changes: bool = False, models: Sequence[str] = ()) -> T:
        """`work()`, again from the state before it whenever an actor is lost in it. Another error changes
        nothing, either.

        Args:
            changes: whether it changes parameters or moments, in several actors one by one.
            models: whose gradients it adds to, beside the present training's.
        """
        while True:
            try:
                return work()
            except ActorLost as lost:
                self._revivals.bring_back(lost)
            except NoRoomYet:
                raise  # before anything was done
            except BadStep as bad:
                self._undo(changes, models)
                # Its own remedy is keys of a run's configuration, which a client has not.
                raise UserError(
                    "the loss of a pass is not finite, and the pass changes nothing",
                    where=bad.where,
                    required="a finite number",
                    remedy="look at the weights, log-probabilities and advantages of these rows, or lower "
                    "the learning rate",
                ) from bad
            except Exception:
                self._undo(changes, models)
                raise

    def _undo(self, changes: bool = False, models: Sequence[str] = ()) -> None:
        """After an error in a call: its messages are forgotten, gradients that wait for a step made again."""
        try:
            self._cluster.discard()
            if changes or self._present is None:  # the latter: between two trainings
                self._cluster.restart()
                self._rebuild()
                return
            for model in dict.fromkeys((self._present, *models)):
                training = self._trainings.get(model)
                if training is None or training.on_disk:  # which no call adds to
                    continue
                if model != self._present:
                    self._take_up(model)
                    self._cluster.discard()
                for repeat in training.journal[training.waiting :]:
                    repeat()
        except ActorLost as lost:
            self._revivals.bring_back(lost)

    def _rebuild(self) -> None:
        """All trainings and samplers, on actors of which any may be new."""
        self._present = self._lost = None
        before, self._samplers = self._samplers, set()
        for sampler in before:
            self._cluster.drop_adapter(sampler)
        for model in self._trainings:
            self._cluster.end_training(model)
        for model in set(self._wanted.values()):
            if self._trainings[model].on_disk and not self._trainings[model].lost:
                self._keep_again(model)
        for model, training in self._trainings.items():
            if not training.on_disk:
                self._begin_again_or_lose(model)
        # Those of files follow when they are needed. What was kept before its training's snapshot is gone.

    def _begin_again(self, model: str) -> None:
        """From the training's snapshot, and what was asked of it since."""
        training = self._trainings[model]
        self._switch(model, training)
        self._present = None  # until it is whole
        if training.snapshot is not None:
            directory, steps = training.snapshot
            self._cluster.restore(str(directory), steps)
        self._present, training.on_disk = model, False
        for repeat in training.journal:
            repeat()

    def _begin_again_or_lose(self, model: str) -> None:
        """An error is this training's alone."""
        try:
            self._begin_again(model)
        except ActorLost:
            raise
        except Exception as error:
            logger.exception("a training is lost: it cannot be made again")
            training = self._trainings[model]
            training.lost = error.what if isinstance(error, UserError) else "the server's log says why"
            self._present, training.on_disk = None, True
            self._cluster.discard()

    def _keep_again(self, model: str) -> None:
        """Samplers of a training on disk, where it stays."""
        try:
            self._begin_again(model)
        except ActorLost:
            raise
        except Exception:
            logger.warning("samplers of a training on disk are lost: it cannot be read", exc_info=True)
            self._cluster.discard()
        finally:
            self._present, self._trainings[model].on_disk = None, True

    def _snapshot(self, model: str) -> None:
        """`_write_snapshot`, whose failure only means that a death would repeat more."""
        try:
            self._write_snapshot(model)
        except Exception as error:  # what it is taken after has been done
            reason = error.line() if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            logger.warning("no snapshot of a training, a death would repeat more: %s", reason)

    def _write_snapshot(self, model: str) -> None:
        """What a death makes to be repeated begins anew here, but for gradients that wait for a step."""
        training = self._trainings[model]
        training.steps_since = 0
        directory = self._directory / f"{next(self._numbers):08d}"
        try:
            self.save_state(model, directory)
        except Exception:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        self._forget_snapshot(training)
        training.snapshot = (directory, training.steps)
        training.journal = training.journal[training.waiting :]
        training.waiting = 0

    def _forget_snapshot(self, training: _Training) -> None:
        if training.snapshot is not None:
            shutil.rmtree(training.snapshot[0], ignore_errors=True)

    # -- trainings ----------------------------------------------------------------------------

    def create(self, model: str, seed: int, part: LoraPart) -> None:
        self._check_part(part)
        if part.rank == self.rank:  # modules may have ranks of their own
            part = replace(part, rank=None)
        training = _Training(seed, part, used=next(self._uses))

        def work() -> None:
            self._make_room()
            self._switch(model, training)

        self._surely(work)
        self._trainings[model] = training

    def _make_room(self) -> None:
        """In memory, for one more training: another goes to disk, one that waits for nothing if there is one,
        the one that was not used for longest; where it cannot be written, one that need not be."""
        held = {name: training for name, training in self._trainings.items() if not training.on_disk}
        if len(held) < self._generation.config.train_server.adapters:
            return
        busy = self.busy()
        first = sorted(held, key=lambda m: (m in busy, len(held[m].journal) > held[m].waiting, held[m].used))
        model = first[0]
        if held[model].waiting:  # else its snapshot is what it is
            config, dims = self._generation.config, self._generation.plan.dims
            where = "train_server.directory to another disk"
            try:
                require_room(
                    "no room for an idle training", checkpoint_bytes(dims, config), self._directory, where
                )
                self._write_snapshot(model)
            except ActorLost:
                raise
            except Exception:
                written = [other for other in first if not held[other].waiting]
                if not written:
                    raise
                model = written[0]
        if self._present == model:
            self._present = SCRATCH
        else:
            self._cluster.end_training(model)
        held[model].on_disk = True

    def _check_part(self, part: LoraPart) -> None:
        """Raises UserError: a part that this server's LoRA does not have."""
        lora = self._generation.config.lora
        if part.rank not in (None, lora.rank) and (lora.rank_pattern or lora.alpha_pattern):
            raise UserError(
                "modules have ranks of their own here, so all trainings have one",
                observed=f"rank {part.rank}",
                required=f"rank {lora.rank}",
                remedy=f"ask for rank={lora.rank}, or start the server without lora.rank_pattern and "
                "lora.alpha_pattern",
            )
        if not any(changes(part, name) for name in self._cluster.parameter_shapes()):
            raise UserError(
                "nothing would be trained",
                observed=f"train_attn={part.attn}, train_mlp={part.mlp}",
                required="a part that the LoRA of this server has",
                remedy="ask for more, or start the server with other lora.target_modules and lora.experts",
            )

    def forget(self, model: str) -> None:
        training = self._trainings.pop(model)
        self._forget_snapshot(training)
        self._wanted = {sampler: own for sampler, own in self._wanted.items() if own != model}
        if self._present == model:
            self._present = SCRATCH
        elif not training.on_disk:
            self._surely(lambda: self._cluster.end_training(model))

    def _known(self, model: str) -> _Training:
        """Raises UserError: it is lost."""
        training = self._trainings[model]
        if training.lost:
            raise UserError(
                "this training is lost: it could not be made again after a fault of the server",
                observed=training.lost,
                remedy="make another one, of its last saved state if there is one "
                "(create_training_client_from_state_with_optimizer)",
            )
        return training

    def _take_up(self, model: str) -> _Training:
        """Make a training the present one."""
        training = self._known(model)
        training.used = next(self._uses)
        if training.on_disk:
            try:
                self._make_room()
            except ActorLost:
                raise
            except Exception as error:
                reason = error.line() if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
                raise NoRoomYet(reason) from error
            self._begin_again_or_lose(model)
            self._known(model)
        elif self._present != model:
            self._switch(model)
        return training

    def take_up(self, model: str) -> None:
        self._surely(lambda: self._take_up(model))

    def _switch(self, model: str, new: _Training | None = None) -> None:
        """new: begins from its initial LoRA."""
        before = self._present if self._present in self._trainings else None
        self._present = None  # an error leaves it open
        self._cluster.switch_training(model, before, *(() if new is None else (new.seed, new.part)))
        self._present = model

    def run(self, model: str, data: Sequence[Datum], loss: TokenLoss, *, backward: bool) -> PassResult:
        self._known(model)
        work = Pass(model, data, loss)
        if backward:
            return self.join([work])[0]
        return self._surely(lambda: self._passed([work], "eval"))[0]

    def held(self, model: str) -> bool:
        return not self._trainings[model].on_disk

    def join(self, passes: Sequence[Pass]) -> list[PassResult]:
        models = [work.model for work in passes]
        results = self._surely(partial(self._passed, passes, "train"), models=models)
        for work in passes:  # a rebuild repeats each alone: the same bits, or with shared layers to rounding
            training = self._trainings[work.model]
            training.used = next(self._uses)
            training.journal.append(partial(self._passed, [work], "train"))
        return results

    def _passed(self, passes: Sequence[Pass], kind: str) -> list[PassResult]:
        return self._passes.run(passes, kind, self._take_up_one)

    def _take_up_one(self, models: AbstractSet[str]) -> tuple[str, int]:
        """One of them is the present training: its name and the steps that it has taken."""
        before = self._present
        present = before if before is not None and before in models else next(iter(models))
        return present, self._take_up(present).steps

    def discard(self, model: str) -> None:
        def work() -> None:
            self._take_up(model)
            self._cluster.discard()

        training = self._known(model)
        self._surely(work)
        self._forget_passes(training)

    def _forget_passes(self, training: _Training) -> None:
        """Gradients that waited are gone, so a death need not make them again; kept samplers stay."""
        since = training.journal[training.waiting :]
        kept = [call for call in since if not isinstance(call, partial) or call.func != self._passed]
        training.journal[training.waiting :] = kept
        training.waiting = len(training.journal)

    def step(self, model: str, params: AdamParams) -> dict[str, float]:
        training = self._known(model)
        number = training.steps

        def work() -> float:
            self._take_up(model)
            norm = math.sqrt(self._cluster.prepare(number))
            if not math.isfinite(norm):
                self._cluster.discard()
                return norm
            clip, most = 1.0, params.grad_clip_norm
            if most > 0 and norm > most:
                clip = most / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_
            adam = AdamStep((params.beta1, params.beta2), params.eps, params.weight_decay)
            self._cluster.commit(number, params.learning_rate, clip, adam)
            return norm

        norm = self._surely(work, changes=True)
        if not math.isfinite(norm):
            self._forget_passes(training)
            raise UserError(
                "the gradients are not finite, and were thrown away; no step was taken",
                observed=f"norm {norm}",
                remedy="lower the learning rate, or look at the rows, their weights and advantages",
            )
        training.journal.append(work)
        training.waiting = len(training.journal)
        training.steps += 1
        training.steps_since += 1
        if training.steps_since >= 2 * SNAPSHOT_STEPS:
            self._snapshot(model)
        return {"grad_norm": norm}

    # -- on disk ------------------------------------------------------------------------------

    def save_state(self, model: str, directory: Path) -> None:
        def work() -> None:
            training = self._take_up(model)
            shutil.rmtree(directory, ignore_errors=True)  # of an attempt that a death ended
            directory.mkdir(parents=True)
            self._cluster.save_shards(str(directory))
            write_atomic(directory / _STEPS, json.dumps({"steps": training.steps}))

        self._known(model)
        with _own_remedy():
            self._surely(work)

    def load_state(self, model: str, directory: Path, *, optimizer: bool) -> None:
        training = self._known(model)
        before = training.steps, training.waiting
        steps = int(json.loads((directory / _STEPS).read_text())["steps"]) if optimizer else 0

        def work() -> None:
            self._take_up(model)
            self._cluster.restore(str(directory), steps, optimizer)

        self._surely(work, changes=True)
        training.journal.append(work)
        training.steps, training.waiting = steps, len(training.journal)  # gradients are gone
        try:
            self._write_snapshot(model)  # of its own: the directory is the client's, who may delete it
        except Exception:
            training.journal.pop()
            training.steps, training.waiting = before
            self._undo(changes=True)
            raise

    def save_adapter(self, model: str, directory: Path) -> None:
        def work() -> None:
            training = self._take_up(model)
            shutil.rmtree(directory, ignore_errors=True)
            write_adapter(self._generation, directory, self._cluster, part=training.part)

        self._known(model)
        with _own_remedy():
            self._surely(work)

    # -- samplers -----------------------------------------------------------------------------

    def keep(self, model: str, sampler: str) -> None:
        # Before the copy, so that the latest one is in the journal.
        if self._known(model).steps_since >= SNAPSHOT_STEPS:
            self._snapshot(model)

        def work() -> None:
            self._take_up(model)
            self._cluster.keep_adapter(sampler)
            self._samplers.add(sampler)

        def again() -> None:
            if sampler in self._wanted:
                work()

        self._surely(work)
        self._wanted[sampler] = model
        self._trainings[model].journal.append(again)

    def load_sampler(self, sampler: str, find: Callable[[], Path]) -> None:
        directory = find()
        self._surely(lambda: self._load_sampler(sampler, directory))
        self._files[sampler] = find

    def _load_sampler(self, sampler: str, directory: Path) -> None:
        self._switch(SCRATCH, _Training(0, WHOLE))
        self._cluster.load_adapter(str(directory), one_of_several=True)  # it may be a part of the LoRA
        self._cluster.keep_adapter(sampler)
        self._samplers.add(sampler)

    def put_aside(self, sampler: str) -> Path:
        directory = self._directory / f"sampler-{next(self._numbers):08d}"

        def work() -> None:
            self.check(sampler)
            write_adapter(self._generation, directory, self._cluster, which=sampler)

        try:
            with _own_remedy():
                self._surely(work)
        except Exception:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        return directory

    def drop(self, sampler: str) -> None:
        self._samplers.discard(sampler)
        self._wanted.pop(sampler, None)
        self._files.pop(sampler, None)
        self._surely(lambda: self._cluster.drop_adapter(sampler))

    def score(self, sampler: str | bool, prompts: Sequence[np.ndarray], top: int) -> list[Scores]:
        def work() -> list[Scores]:
            self._load_again()
            return [] if self._is_gone(sampler) else self._passes.score(sampler, prompts, top)

        scored = self._surely(work)
        self.check(sampler)
        return scored

    def _load_again(self) -> None:
        """Samplers from files that a death took. One whose file is gone stays away, see `check`."""
        for sampler, find in self._files.items():
            if sampler not in self._samplers:
                try:
                    self._surely(partial(self._load_sampler, sampler, find()))
                except Exception:
                    logger.warning("a sampler's weights cannot be loaded again", exc_info=True)

    def check(self, sampler: bool | str) -> None:
        """Raises UserError: the sampler's weights are not there."""
        if self._is_gone(sampler):
            raise UserError(
                "the sampler's weights are gone",
                where=sampler,
                observed="an actor died; their file is no longer there"
                if sampler in self._files
                else "an actor died, and they were older than the training's last snapshot",
                remedy="make another sampler of the training, or save weights under a name and load them",
            )

    def _is_gone(self, sampler: bool | str) -> TypeGuard[str]:
        return isinstance(sampler, str) and sampler not in self._samplers

    @contextlib.contextmanager
    def sampling(self) -> Iterator[SamplingSession]:
        if self._lost is not None:
            lost, self._lost = self._lost, None
            self._revivals.bring_back(lost)
        self._load_again()
        generator = generator_on(self._generation, self._cluster)
        try:
            with generator:
                yield _Session(self, generator)
        finally:
            if isinstance(generator.error, ActorLost):
                self._lost = generator.error
            elif generator.error is not None:
                self._undo()


@dataclass(frozen=True)
class _Session:
    """A session of generation that knows which samplers there are."""

    backend: ClusterBackend
    generator: Generator

    def submit_all(
        self, requests: Sequence[Request], listeners: Sequence[Callable[[Any], None] | None] | None = None
    ) -> list[Any]:
        for adapter in {request.adapter for request in requests}:
            self.backend.check(adapter)
        return list(self.generator.submit_all(requests, listeners))


@contextlib.contextmanager
def _own_remedy() -> Iterator[None]:
    """A run's checkpoints lie in run.root, a server's do not."""
    try:
        yield
    except UserError as error:
        error.remedy = error.remedy.replace("run.root", "train_server.directory")
        error.args = (error.line(),)
        raise
