"""Generation on one stage: the layer loop with key-value caches.

A step's batches are the groups of a layer loop without gradients. Rows of a batch are padded on the left,
so that the last position is everybody's newest token. A layer whose output is not affine in the experts'
waits for them inside its one run: run twice, it would enter its keys twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from kt_ray.batch import MicroBatch, PassSpec
from kt_ray.generate.requests import Batch, Step
from kt_ray.model import caches
from kt_ray.model.build import StageModel
from kt_ray.model.dropout import DropoutContext
from kt_ray.model.exchange import Exchange
from kt_ray.model.layer_loop import LayerLoop, _give, _handled, _present, _valid
from kt_ray.model.stage_metrics import Clock, Histogram
from kt_ray.model.state import GroupState, MicroState
from kt_ray.model.token_loss import Head


class DecodeExchange(Exchange, Protocol):
    """An exchange that can leave the experts' LoRA out.

    Attributes:
        adapter: whether LoRA takes part in what is submitted from now on, or which adapter.
    """

    adapter: bool | str


@dataclass
class Cohort:
    """Rows with one cache.

    Attributes:
        rows: request numbers, as the cache's rows lie.
        cache: transformers' Cache.
        padding: int64 [b] columns on the left that are no tokens.
        columns: of the cache, padding included.
    """

    rows: list[int]
    cache: Any
    padding: np.ndarray
    columns: int


class Decoder:
    """The cohorts of one stage, and one step after the other. Made by `Stage.decoder`.

    Args:
        model: the stage's modules.
        scales: MoE layer -> c, or None when not affine.
        dropout: read by the LoRA layers.
        head: of the last stage.
        device: of the stage.
        first: whether this stage embeds.
        parameters: LoRA parameters by name.
        kept: adapter's name -> its values for all of them.
    """

    def __init__(
        self,
        model: StageModel,
        scales: dict[int, float | None],
        dropout: DropoutContext,
        head: Head | None,
        device: torch.device,
        first: bool,
        parameters: Mapping[str, nn.Parameter],
        kept: Mapping[str, Mapping[str, Tensor]],
    ) -> None:
        self.model = model
        self.device = device
        self.config = model.base.config
        self.joint = caches.can_join(self.config)
        self.clock = Clock(device)
        self._scales = scales
        self._dropout = dropout
        self._head = head
        self._first = first
        self._cohorts: dict[str, Cohort] = {}
        self._adapters = _Adapters(model.layers, parameters, kept)
        self._batches: tuple[Batch, ...] = ()
        self._running: list[Cohort] = []  # of each batch
        self._groups: list[GroupState] = []
        self._loop: DecodeLoop | None = None

    # ------------------------------------------------------------------ a step

    def begin(self, step: Step, exchange: DecodeExchange) -> None:
        """Let rows go that have ended; record the call arguments of every batch."""
        self.clock.reset()
        self._drop(step.drop)
        self._batches, self._running, self._groups = step.batches, [], []
        for batch in step.batches:
            cohort = self._fresh(batch) if batch.fresh else self._cohorts[batch.cohort]
            assert cohort.rows == list(batch.rows), f"cohort {batch.cohort} has other rows than the step"
            self._running.append(cohort)
            self._groups.append(GroupState([self._record(batch, cohort)]))
        spec = PassSpec(step.number, 0, "generate", 0, (), 0)
        self._loop = DecodeLoop(
            self.model,
            self._scales,
            self._dropout,
            spec,
            self._groups,
            exchange,
            self.clock,
            Histogram(self.model.num_experts),
            self.device,
        )

    def _fresh(self, batch: Batch) -> Cohort:
        padding = batch.ids.shape[1] - batch.lengths
        return Cohort(list(batch.rows), caches.new_cache(self.config, self.model.layers), padding, 0)

    def _record(self, batch: Batch, cohort: Cohort) -> MicroState:
        b, s = batch.ids.shape
        places = cohort.columns + np.arange(s)[None, :] - cohort.padding[:, None]  # [b, s], < 0 on padding
        valid = (places >= 0).reshape(-1)
        tokens = int(valid.sum())
        total = cohort.columns + s
        padded = bool(cohort.padding.any())
        mask = (np.arange(total)[None, :] >= cohort.padding[:, None]).astype(np.int64) if padded else None
        positions = torch.from_numpy(np.maximum(places, 0)).to(self.device)
        whole = tokens == b * s
        micro = MicroState(
            batch=MicroBatch(batch.ids, batch.ids, batch.lengths, np.zeros(b, dtype=np.int64)),
            rows=None if whole else torch.from_numpy(np.flatnonzero(valid)).to(self.device),
            keys_T=torch.zeros(tokens, dtype=torch.int64),
            samples_N=torch.zeros(b * s, dtype=torch.int64, device=self.device),
            positions_N=positions.reshape(-1),
            mask=None if mask is None else torch.from_numpy(mask).to(self.device),
        )

        def note(index: int, hidden: Tensor) -> Tensor:
            if index == 0 and self._first:
                micro.embedded = hidden
            return hidden

        inputs = {"input_ids": torch.from_numpy(batch.ids).to(self.device)}
        calls = self.model.recorder.record(
            inputs, micro.mask, note, cache=cohort.cache, position_ids=positions
        )
        micro.calls = {layer: calls[layer] for layer in self.model.layers}
        return micro

    def embed(self, group: int) -> None:
        """First stage: the embedded tokens become the group's hidden state."""
        state = self._groups[group]
        assert state.micro[0].embedded is not None, "embed runs once per batch, on the first stage"
        state.hidden = [state.micro[0].embedded]
        state.micro[0].embedded = None

    def receive_hidden(self, group: int, tensors: Iterable[Tensor]) -> None:
        """Hidden state [b, s, *state_shape] of a batch, from the stage before."""
        self._groups[group].hidden = [t.to(self.device, self.model.dtype) for t in tensors]

    def forward(self, layer: int, group: int) -> None:
        """Run a layer for a batch; MoE layers submit its tokens."""
        assert self._loop is not None, "begin a step first"
        adapter = self._batches[group].adapter
        self._adapters.switch(layer, adapter)
        self._loop.exchange.adapter = adapter  # type: ignore[attr-defined]  # a DecodeExchange
        self._loop.forward(layer, group)

    def join(self, layer: int, group: int) -> None:
        """Wait for the experts of a layer and batch, and finish the layer."""
        assert self._loop is not None, "begin a step first"
        self._loop.join(layer, group)

    def hidden(self, group: int) -> list[Tensor]:
        """Hand over a batch's hidden state, on the device."""
        state = self._groups[group]
        hidden = _present(state.hidden, "handing over", max(self.model.layers), group)
        state.hidden = None
        return hidden

    def logits(self, group: int) -> Tensor:
        """Last stage: float32 logits [b, V] of every row's newest token."""
        assert self._head is not None, "logits belong to the last stage"
        (hidden,) = self.hidden(group)
        with torch.no_grad(), self.clock.device("loss"):
            return self._head.logits(hidden[:, -1:].contiguous())[:, -1].float()

    def finish(self) -> None:
        """End of a step: caches have grown, fresh rows join their cohorts."""
        for batch, cohort in zip(self._batches, self._running, strict=True):
            cohort.columns += batch.ids.shape[1]
        for batch, cohort in zip(self._batches, self._running, strict=True):
            if not batch.fresh:
                continue
            known = self._cohorts.get(batch.cohort)
            self._cohorts[batch.cohort] = cohort if known is None else self._joined(known, cohort)

    # ------------------------------------------------------------------ cohorts

    def _joined(self, old: Cohort, new: Cohort) -> Cohort:
        columns = (old.columns, new.columns)
        total = max(columns)
        cache = caches.join((old.cache, new.cache), columns, self.model.layers)
        padding = np.concatenate([c.padding + total - c.columns for c in (old, new)])
        return Cohort([*old.rows, *new.rows], cache, padding, total)

    def _drop(self, rows: Sequence[int]) -> None:
        gone = set(rows)
        for name, cohort in list(self._cohorts.items()):
            stay = [place for place, row in enumerate(cohort.rows) if row not in gone]
            if not stay:
                del self._cohorts[name]
            elif len(stay) < len(cohort.rows):
                padding = cohort.padding[stay]
                spare = int(padding.min()) if self.joint else 0
                caches.select(cohort.cache, stay, spare, cohort.columns, self.model.layers)
                cohort.rows = [cohort.rows[place] for place in stay]
                cohort.padding, cohort.columns = padding - spare, cohort.columns - spare

    @property
    def cached_bytes(self) -> int:
        """Bytes of all caches' keys and values."""
        total = 0
        for cohort in self._cohorts.values():
            for index in self.model.layers:
                held = vars(cohort.cache.layers[index]).values()
                tensors = [v for v in held if isinstance(v, Tensor)]
                tensors += [
                    t for v in held if isinstance(v, dict) for t in v.values() if isinstance(t, Tensor)
                ]
                total += sum(t.numel() * t.element_size() for t in tensors)
        return total

    def close(self) -> None:
        """Forget every cache; leave the adapters as training wants them."""
        self._adapters.switch_all(True)
        self._cohorts.clear()
        self._running, self._groups, self._batches, self._loop = [], [], (), None


class DecodeLoop(LayerLoop):
    """The layer loop of one step; each group is one batch."""

    def forward(self, layer: int, group: int) -> None:
        context = self.model.experts.get(layer)
        if context is None or self.scales[layer] is not None:
            super().forward(layer, group)
            return
        state = self.groups[group]
        (hidden,) = _present(state.hidden, "forward", layer, group)
        (micro,) = state.micro

        def handler(hidden_NH: Tensor, ids_NK: Tensor, weights_NK: Tensor) -> Tensor:
            self._submit_forward(layer, group, [_valid(micro, hidden_NH, ids_NK, weights_NK)])
            with self.clock.host("experts_wait"):
                y_TH = self.exchange.join_forward(layer, group).to(self.device, non_blocking=True)
            return _give(micro, y_TH)(hidden_NH, ids_NK, weights_NK)

        with torch.no_grad(), _handled(context, handler), self.clock.device("attention"):
            state.hidden = [self._run(layer, micro, hidden)]

    def join(self, layer: int, group: int) -> None:
        if self.scales[layer] is not None:
            super().join(layer, group)


class _Adapters:
    """Which adapter the LoRA modules of a layer use: True = the one that trains, False = none, or a kept one.

    Training finds them on, with values of their own: `switch_all(True)`.
    """

    def __init__(
        self,
        layers: dict[int, nn.Module],
        parameters: Mapping[str, nn.Parameter],
        kept: Mapping[str, Mapping[str, Tensor]],
    ) -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer

        self._modules: dict[int, list[Any]] = {
            index: [m for m in layer.modules() if isinstance(m, BaseTunerLayer)]
            for index, layer in layers.items()
        }
        names = {id(parameter): name for name, parameter in parameters.items()}
        self._parameters = {
            index: {names[id(p)]: p for p in layer.parameters() if id(p) in names}
            for index, layer in layers.items()
        }
        own = {name: parameter.data for name, parameter in parameters.items()}
        self._values: dict[bool | str, Mapping[str, Tensor]] = {True: own}
        self._values.update(kept)
        self._state: dict[int, bool | str] = dict.fromkeys(layers, True)
        self._holds: dict[int, bool | str] = dict.fromkeys(layers, True)

    def switch(self, layer: int, which: bool | str) -> None:
        if self._state[layer] == which:
            return
        if (self._state[layer] is False) != (which is False):
            for module in self._modules[layer]:
                # not enable_adapters(): that sets requires_grad of the parameters, too
                module._disable_adapters = which is False
        if which is not False and self._holds[layer] != which:
            values = self._values[which]
            for name, parameter in self._parameters[layer].items():
                parameter.data = values[name]
            self._holds[layer] = which
        self._state[layer] = which

    def switch_all(self, which: bool | str) -> None:
        for layer in self._state:
            self.switch(layer, which)
