"""Generation on one stage: the layer loop with key-value caches.

A step's batches are the groups of a layer loop without gradients. Rows of a batch are padded on the left,
so that the last position is everybody's newest token. A layer that is not affine in y waits for its experts
inside its one run: run twice, it would enter its keys twice.

Shapes: b rows of a batch, s new tokens of each, N = b·s, T valid tokens, H hidden, K experts per token, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from kt_ray.batch import MicroBatch, PassSpec
from kt_ray.generate.requests import Batch, Step
from kt_ray.model import caches
from kt_ray.model.clock import Clock
from kt_ray.model.handed_results import HandedResults
from kt_ray.model.latent_keys import latent_attention, unexpanded
from kt_ray.model.layer_loop import (
    ExpertExchange,
    LayerLoop,
    StageExchange,
    answer_with,
    require,
    valid_rows,
)
from kt_ray.model.stage import Stage
from kt_ray.model.state import GroupState, MicroState
from kt_ray.placement.order import Op


class DecodeExchange(ExpertExchange, Protocol):
    """An exchange that can leave the experts' LoRA out."""

    adapter: bool | str  # whether LoRA takes part in what is submitted from now on, or which adapter


@dataclass
class Cohort:
    """Rows with one cache."""

    rows: list[int]  # request numbers, as the cache's rows lie
    cache: Any  # transformers' Cache
    padding: np.ndarray  # int64 [b]: columns on the left that are no tokens
    columns: int  # of the cache, padding included


class Decoder:
    """The cohorts of one stage, with their caches, and one step after the other."""

    def __init__(self, stage: Stage) -> None:
        self.model = stage.model
        self.device = stage.device
        self.config = stage.model.base.config
        self.joint = caches.can_join(self.config)
        self._places = caches.places(self.config, self.model.layers, len(stage.model.base.layers))
        self._stage = stage
        if stage.streamed is not None:
            stage.streamed.slots.begin(wraps=True)
        absorbs, layers = stage.spec.absorbs_keys, self.model.layers
        self._latent = {index: latent_attention(layer) if absorbs else [] for index, layer in layers.items()}
        self._cohorts: dict[str, Cohort] = {}
        self._running: list[tuple[Batch, Cohort]] = []
        self._kept: Cohort | None = None  # a prompt for requests that wait: one row

    # ------------------------------------------------------------------ a step

    def begin(self, step: Step, experts: DecodeExchange, stages: StageExchange | None = None) -> DecodeLoop:
        """Let rows go that have ended, and come that have the kept prompt; record all call arguments."""
        self._drop(step.drop)
        if step.resumed is not None:
            assert self._kept is not None, "no prompt was kept"
            rows = step.resumed.rows
            self._enter(step.resumed.cohort, self._copied(self._kept, [0] * len(rows), rows))
        if step.forget:
            self._kept = None
        self._running, groups = [], []
        for batch in step.batches:
            if batch.fresh:
                cache = caches.new_cache(self.config, self._places)
                cohort = Cohort(list(batch.rows), cache, batch.ids.shape[1] - batch.lengths, 0)
            else:
                cohort = self._cohorts[batch.cohort]
            assert cohort.rows == list(batch.rows), f"cohort {batch.cohort} has other rows than the step"
            self._running.append((batch, cohort))
            groups.append(GroupState([self._record(batch, cohort)]))
        return DecodeLoop(self._stage, step, groups, experts, stages, self._latent)

    def _record(self, batch: Batch, cohort: Cohort) -> MicroState:
        b, s = batch.ids.shape
        places = cohort.columns + np.arange(s)[None, :] - cohort.padding[:, None]  # [b, s], < 0 on padding
        valid = (places >= 0).reshape(-1)
        tokens = np.arange(cohort.columns + s)[None, :] >= cohort.padding[:, None]
        positions = torch.from_numpy(np.maximum(places, 0)).to(self.device)
        micro = MicroState(
            batch=MicroBatch(batch.ids, batch.ids, batch.lengths, np.zeros(b, dtype=np.int64)),
            rows=None if valid.all() else torch.from_numpy(np.flatnonzero(valid)).to(self.device),
            keys_T=torch.zeros(int(valid.sum()), dtype=torch.int64),
            samples_N=torch.zeros(b * s, dtype=torch.int64, device=self.device),
            positions_N=positions.reshape(-1),
            mask=None if tokens.all() else torch.from_numpy(tokens.astype(np.int64)).to(self.device),
        )

        def note(index: int, hidden: Tensor) -> Tensor:
            if index == 0 and self._stage.first:
                micro.embedded = hidden
            return hidden

        inputs = {"input_ids": torch.from_numpy(batch.ids).to(self.device)}
        calls = self.model.capture.record(
            inputs, micro.mask, note, cache=cohort.cache, position_ids=positions
        )
        micro.calls = {layer: calls[layer] for layer in self.model.layers}
        micro.handed = HandedResults(self._stage.hands)
        return micro

    def finish(self) -> None:
        """End of a step: caches have grown, fresh rows join their cohorts."""
        for batch, cohort in self._running:
            cohort.columns += batch.ids.shape[1]
        for batch, cohort in self._running:
            if batch.fresh:
                if batch.keep is not None:
                    self._kept = self._copied(cohort, [batch.keep], [-1])
                if len(batch.ids) < len(batch.rows):
                    self._select(cohort, batch.prompts, batch.rows)
                self._enter(batch.cohort, cohort)

    # ------------------------------------------------------------------ cohorts

    def _enter(self, name: str, cohort: Cohort) -> None:
        older = self._cohorts.get(name)
        self._cohorts[name] = cohort if older is None else self._joined(older, cohort)

    def _select(self, cohort: Cohort, places: Sequence[int], rows: Sequence[int]) -> None:
        """`rows` go on from the cache's rows at `places`, which may come more than once or not at all."""
        padding = cohort.padding[list(places)]
        spare = int(padding.min()) if self.joint else 0
        caches.select(cohort.cache, places, spare, cohort.columns, self._places)
        cohort.rows, cohort.padding, cohort.columns = list(rows), padding - spare, cohort.columns - spare

    def _copied(self, cohort: Cohort, places: Sequence[int], rows: Sequence[int]) -> Cohort:
        """As `_select`, in a cache of their own."""
        other = Cohort(list(rows), caches.twin(cohort.cache), cohort.padding, cohort.columns)
        self._select(other, places, rows)
        return other

    def _joined(self, old: Cohort, new: Cohort) -> Cohort:
        total = max(old.columns, new.columns)
        cache = caches.join((old.cache, new.cache), total, self._places)
        padding = np.concatenate([c.padding + total - c.columns for c in (old, new)])
        return Cohort([*old.rows, *new.rows], cache, padding, total)

    def _drop(self, rows: Sequence[int]) -> None:
        gone = set(rows)
        for name, cohort in list(self._cohorts.items()):
            stay = [place for place, row in enumerate(cohort.rows) if row not in gone]
            if not stay:
                del self._cohorts[name]
            elif len(stay) < len(cohort.rows):
                self._select(cohort, stay, [cohort.rows[place] for place in stay])

    def close(self) -> None:
        """Forget every cache; leave the adapters as training wants them."""
        self._stage.adapters.switch_all(True)
        self._cohorts.clear()
        self._running, self._kept = [], None


class DecodeLoop(LayerLoop):
    """The layer loop of one step; each group is one batch."""

    OPERATIONS: ClassVar[Mapping[str, str]] = {**LayerLoop.OPERATIONS, "logits": "last_logits"}

    experts: DecodeExchange

    def __init__(
        self,
        stage: Stage,
        step: Step,
        groups: list[GroupState],
        experts: DecodeExchange,
        stages: StageExchange | None,
        latent: Mapping[int, Sequence[Any]],
    ) -> None:
        spec = PassSpec(step.number, 0, "generate", 0, (), 0)
        own = (stage.model, stage.scales, stage.adapters, stage.dropout, stage.head)
        super().__init__(*own, spec, groups, experts, stages, Clock(stage.device))
        self.step, self._latent = step, latent

    def program(self, layers: tuple[int, int], *, first: bool, last: bool) -> Iterator[Op]:
        """The operations of this step on a stage with `layers` (half-open): layer by layer, all batches."""
        start, stop = layers
        groups = range(len(self.groups))
        for layer in range(start, stop):
            for group in groups:
                if layer == start:
                    yield Op("embed" if first else "recv_hidden", layer, group)
                elif layer - 1 in self.model.experts:
                    yield Op("join", layer - 1, group)
                yield Op("forward", layer, group)
        for group in groups:
            if stop - 1 in self.model.experts:
                yield Op("join", stop - 1, group)
            yield Op("logits" if last else "send_hidden", stop - 1, group)

    def forward(self, layer: int, group: int) -> None:
        """As in a pass, with the batch's adapter, and latent keys as they are cached."""
        batch = self.step.batches[group]
        self.adapters.switch(layer, batch.adapter)
        self.experts.adapter = batch.adapter
        one_token = not batch.fresh and batch.ids.shape[1] == 1
        with unexpanded(self._latent[layer] if one_token else ()):
            self._forward(layer, group)

    def _forward(self, layer: int, group: int) -> None:
        """A layer that is not affine in y runs to its end."""
        context = self.model.experts.get(layer)
        if context is None or self.scales[layer] is not None:
            super().forward(layer, group)
            return
        state = self.groups[group]
        (hidden,) = require(state.hidden, "forward", layer, group)
        (micro,) = state.micro

        def handler(hidden_NH: Tensor, ids_NK: Tensor, weights_NK: Tensor) -> Tensor:
            self._submit_forward(layer, group, [valid_rows(micro, hidden_NH, ids_NK, weights_NK)])
            with self.clock.host("experts_wait"):
                y_TH = self.experts.join_forward(layer, group).to(self.device, non_blocking=True)
            return answer_with(micro, y_TH)(hidden_NH, ids_NK, weights_NK)

        with torch.no_grad(), context.handled_by(handler), self.clock.device("attention"):
            state.hidden = [self._run(layer, micro, hidden)]

    def join(self, layer: int, group: int) -> None:
        if self.scales[layer] is not None:
            super().join(layer, group)

    def last_logits(self, layer: int, group: int) -> None:
        """Last stage: keep float32 logits [b, V] of every row's newest token."""
        assert self.head is not None, "logits belong to the last stage"
        state = self.groups[group]
        (hidden,) = require(state.hidden, "logits", layer, group)
        state.hidden = None
        with torch.no_grad(), self.clock.device("loss"):
            state.logits = [self.head.logits(hidden[:, -1:].contiguous())[:, -1].float()]
