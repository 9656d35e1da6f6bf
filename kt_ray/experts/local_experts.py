"""What one socket computes: its routed experts, their LoRA, gradients and optimizer.

Weights stay in the checkpoint's type and the native engine computes from them; LoRA masters, gradients and
moments are float32. Callers name experts by global id; inside they have local ids, 0..n-1.

Legend: T tokens, H hidden size, K experts per token, E local experts.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor

from kt_ray.checkpoint import CheckpointIndex, ExpertLayout, GgufExperts, load_experts
from kt_ray.checkpoint.index import check_unchanged
from kt_ray.checkpoint.load_experts import Target
from kt_ray.config.limits import INT8_BACKENDS
from kt_ray.experts.call_rows import Alloc, CallRows, new_memory
from kt_ray.experts.device_lane import LaneBackward, LaneForward, LaneInput, LaneSaved
from kt_ray.experts.experts_spec import ExpertCounters, LocalExpertsSpec
from kt_ray.experts.lane import Lane
from kt_ray.experts.lane_check import check_lane
from kt_ray.experts.process_memory import prefer_node
from kt_ray.experts.shared_experts import ExportedExperts, export_experts, put_into
from kt_ray.model.lora import init_lora_a, initial_lora
from kt_ray.native import (
    DropoutSpec,
    Engine,
    ExpertLora,
    ExpertWeights,
    MemoryFile,
    Saved,
    allocate,
    allocating,
)
from kt_ray.native.engine import SaveMode
from kt_ray.native.pages import in_huge_pages
from kt_ray.optim.optimizers import AdamStep, LoraOptimizer, state_kinds
from kt_ray.pulse import beat

Progress = Callable[[int, int, int], None]  # (layer, bytes done, bytes in total)
_SAVED: dict[str, SaveMode] = {"int8": "int8", "recompute": "recompute"}  # the engine's by the plan's word
# What a backend of the rule quantises experts to while it reads them; the others take them as stored.
_TARGETS: dict[str, Target] = {"AMXINT8": "int8", "AMXINT4": "int4", "W4A8": "int4"}


@dataclass(frozen=True)
class _Kept:
    """What one forward left for its backward: the engine's part, the lane's with its x, routed slots, shape
    of ids."""

    engine: Saved | None
    lane: tuple[LaneSaved, ...]
    lane_x: Tensor | None
    slots: int
    shape: torch.Size

    @property
    def bytes(self) -> int:
        own = 0 if self.lane_x is None else self.lane_x.nbytes
        return own + sum(part.bytes for part in (self.engine, *self.lane) if part is not None)


class _KeptLora(NamedTuple):
    """A LoRA by layer, and the file that it lies in, if others can map it."""

    lora: dict[int, ExpertLora]
    file: MemoryFile | None


class _State(NamedTuple):
    """A training's LoRA and its gradients, by layer."""

    lora: dict[int, ExpertLora]
    grads: dict[int, ExpertLora]


class LocalExperts:
    """Load, forward, backward, LoRA and optimizer step of one socket's experts."""

    def __init__(self, spec: LocalExpertsSpec) -> None:
        self.spec = spec
        self.engine = Engine(
            isa=spec.isa,
            threads=spec.threads,
            cpus=spec.cpus or None,
            pinned=spec.pinned,
            int8_products=spec.backend in INT8_BACKENDS,
            tokens_per_row=spec.tokens_per_row,
        )
        self.lane: Lane | None = None
        if spec.lane is not None:
            self.lane = Lane(spec.lane, spec.threads, recompute=spec.activations == "recompute")
        # What others can map: weights and LoRA; of each kept copy in a file of its own.
        self._file = MemoryFile(f"kt_ray-lent-experts-{spec.rank}") if spec.shared else None
        # What the engine computes from; a layer whose experts all stay on the lane's device has none.
        self.weights: dict[int, ExpertWeights] = {}
        self.lora: dict[int, ExpertLora] = {}
        self.names: dict[int, list[dict[str, str]]] = {}  # layer -> local expert -> projection -> name prefix
        # layer -> global id of every local expert: ascending, except that those on the lane's device come
        # last, so that the engine's part of every stacked tensor is its beginning.
        self.order: dict[int, tuple[int, ...]] = {}
        self.counters = ExpertCounters()
        self.load_seconds = 0.0
        self.weight_bytes = 0
        self.huge_pages = True  # whether loaded weights have them, as far as that is known
        self._local_ids: dict[int, Tensor] = {}  # layer -> local id by global one
        self.rows = CallRows(self.engine, spec.answers)
        self._grads: dict[int, ExpertLora] = {}
        self._adapters: dict[bool | str, _KeptLora] = {}  # by name
        self._dropped: list[_KeptLora] = []  # memory of copies that were kept
        self._kept: dict[tuple[int, int], _Kept] = {}  # by layer and group
        # slots that attention workers computed, by layer and group, until their gradients are there
        self._elsewhere: dict[tuple[int, int], int] = {}
        self._dropout: DropoutSpec | None = None
        self._adapter: bool | str = True  # which one the present pass uses
        self._beside: list[_State] = []  # trainings that the present pass joins to the present one
        self._optimizer: LoraOptimizer | None = None
        self._parameters: dict[int, dict[str, torch.nn.Parameter]] = {}

    # -- loading -----------------------------------------------------------------------------

    def load(self, progress: Progress | None = None) -> None:
        """Read this socket's experts of every MoE layer, then make the LoRA and its optimizer."""
        start = time.monotonic()
        spec = self.spec
        index = CheckpointIndex.open(spec.model_dir)
        gguf: GgufExperts | None = None
        layout = ExpertLayout.detect(index)
        read: Callable[..., ExpertWeights]
        read = functools.partial(load_experts, index, layout, target=_TARGETS.get(spec.backend))
        file_bytes = index.nbytes
        if spec.experts_path is not None:
            gguf = GgufExperts.open(spec.experts_path, index, layout)
            layout, read, file_bytes = gguf.layout, gguf.load, gguf.layout.nbytes
        if spec.fingerprint:
            found = index.fingerprint if gguf is None else gguf.fingerprint_with(index)
            check_unchanged(found, spec.fingerprint, spec.experts_path or spec.model_dir)
        experts = {layer: spec.experts_of(layer) for layer in layout.moe_layers}
        outside = sorted({e for ids in experts.values() for e in ids if e >= layout.num_experts})
        if outside:
            raise ValueError(
                f"expert actor {spec.rank}: experts {outside} but the checkpoint has {layout.num_experts}"
            )
        total = sum(len(ids) * layout.expert_bytes[layer] for layer, ids in experts.items())
        # Two readers keep a disk busy while one waits for pages; beyond the cores they hold each other up.
        read = functools.partial(
            read,
            threads=min(8, max(2, spec.threads)),
            # Where file and experts do not fit in memory together, the file's pages must not push others out.
            drop_cache=total + file_bytes > psutil.virtual_memory().available,
        )
        done = 0
        shapes: dict[int, dict[str, tuple[int, int]]] = {}  # layer -> projection -> outputs, inputs
        with prefer_node(spec.node), allocating(self._file):
            for layer, ids in experts.items():
                resident = () if self.lane is None else self.lane.resident_of(layer)
                others = tuple(e for e in ids if e not in resident)
                stored = [
                    read(layer, some, formula=spec.formulas.get(layer)) if some else None
                    for some in (others, resident)
                ]
                if self._file is not None:
                    stored = [None if own is None else put_into(self._file, own) for own in stored]
                    self.huge_pages = self._file.huge
                if stored[0] is not None:
                    self.weights[layer] = stored[0]
                self.order[layer] = (*others, *resident)
                some = next(weights for weights in stored if weights is not None)
                if self.lane is not None:
                    plan = self.lane.plan
                    for device, name in () if done else zip(plan.devices, plan.names, strict=True):
                        check_lane(device, some, name, float8=plan.float8)
                    in_memory = [] if stored[0] is None else [stored[0]]
                    self.lane.add_layer(layer, self.order[layer], in_memory, stored[1])
                matrices = some.projections()
                shapes[layer] = {name: (int(m.shape[1]), int(m.shape[2])) for name, m in matrices.items()}
                self.names[layer] = [layout.names(layer, e, spec.root) for e in self.order[layer]]
                done += len(ids) * layout.expert_bytes[layer]
                if progress is not None:
                    progress(layer, done, total)
            self.weight_bytes = sum(weights.bytes for weights in self.weights.values())
            first = next(iter(self.weights.values()), None)
            if first is not None and self._file is None:
                self.huge_pages = all(
                    in_huge_pages(matrix.data) is not False for matrix in first.projections().values()
                )
            self.load_seconds = time.monotonic() - start
            if spec.lora.experts:
                self._make_lora(shapes)

    def _make_lora(self, shapes: Mapping[int, Mapping[str, tuple[int, int]]]) -> None:
        spec, rank = self.spec, self.spec.lora.rank
        for layer, experts in self.names.items():
            if not spec.lora.reaches(layer):
                continue
            matrices = self._parameters[layer] = {}
            for projection in experts[0]:
                out_features, in_features = shapes[layer][projection]
                a = self._for_lora(torch.empty, (len(experts), rank, in_features))
                for i, names in enumerate(experts):
                    name = f"{names[projection]}.lora_A.weight"
                    a[i] = init_lora_a(spec.seed, name, (rank, in_features), spec.lora.init)
                matrices[f"{projection}_a"] = torch.nn.Parameter(a)
                b = self._for_lora(torch.zeros, (len(experts), out_features, rank))
                matrices[f"{projection}_b"] = torch.nn.Parameter(b)
                beat()
        named = [item for layer in self._updated() for item in self._parameters[layer].items()]
        sides = [key[-1].upper() for key, _ in named]
        self._optimizer = LoraOptimizer([parameter for _, parameter in named], spec.optim, sides)
        for parameter in self._others():
            parameter.grad = torch.zeros_like(parameter)
        self.find_lora()
        if self.lane is not None:
            for lora in self.lora.values():
                self.lane.lock(lora.tensors())

    def find_lora(self) -> None:
        """The present LoRA and its gradients are where the parameters point now."""
        for layer, matrices in self._parameters.items():
            self.lora[layer] = _adapter({k: p.data for k, p in matrices.items()}, self.spec.lora.scale)
            self._grads[layer] = _adapter({k: _grad(p) for k, p in matrices.items()}, self.spec.lora.scale)

    def _for_lora(self, make: Callable[..., Tensor], shape: Sequence[int]) -> Tensor:
        """A matrix's memory: what `make` gives, or zeros where others can map them."""
        if self._file is None:
            # float32 by name: in one process a worker that builds its model changes the default type.
            return make(shape, dtype=torch.float32)
        return self._file.allocate(shape, torch.float32).zero_()  # touched here, not by who maps it

    def _updated(self) -> tuple[int, ...]:
        """Layers whose LoRA this actor's optimizer updates: all where there is one copy of the experts."""
        return self.spec.updates(tuple(self._parameters))

    def _others(self) -> list[torch.nn.Parameter]:
        """LoRA that another copy of these experts updates."""
        own = self._updated()
        return [p for layer, of in self._parameters.items() if layer not in own for p in of.values()]

    def restart_lora(self, seed: int | None = None) -> None:
        """As `load` left it, in place: initial values, no moments, no gradients, no step taken.

        Args:
            seed: of the initial values; None = the run's.
        """
        if self._optimizer is None:
            return
        seed = self.spec.seed if seed is None else seed
        for name, tensor in self.named("param", updated=False):
            tensor.copy_(initial_lora(seed, name, tensor.shape, self.spec.lora.init))
            beat()
        for what in state_kinds(self.spec.optim):
            for _, tensor in self.named(what):
                tensor.zero_()
        self.discard_gradients()
        self._optimizer.set_step(0)

    # -- computing ---------------------------------------------------------------------------

    def begin_pass(
        self,
        step: int,
        dropout: bool,
        adapters: bool | str = True,
        beside: Iterable[Sequence[Tensor]] = (),
    ) -> None:
        """Forget kept activations.

        Args:
            dropout: whether LoRA's is on. adapters: as `adapter` of `forward`.
            beside: states of trainings that take part beside the present one, as `training_state` gives
                them; their gradients are added to. Not with a lane.
        """
        self._beside = [self._state_of(state) for state in beside]
        assert self.lane is None or not self._beside, "a lane computes with one training's LoRA"
        self._kept.clear()
        self._elsewhere.clear()
        self.forget_calls()
        self._adapter = adapters
        p = self.spec.lora.dropout
        self._dropout = (
            DropoutSpec(p=p, seed=self.spec.seed, step=step) if dropout and p > 0 and self.lora else None
        )

    def forget_calls(self) -> None:
        """The next call does not depend on those before: where they come in no planned order."""
        if self.lane is not None:
            self.lane.forget_calls()

    def keep(self, name: str, *, copy: bool) -> None:
        """Keep the LoRA as it is now under a name; `copy` if it will be changed."""
        if not copy:
            self._adapters[name] = _KeptLora(dict(self.lora), self._file)
            return
        made = self._dropped.pop() if self._dropped else self._room_for_copy()
        for layer, lora in self.lora.items():
            for kept, value in zip(made.lora[layer].tensors(), lora.tensors(), strict=True):
                kept.copy_(value)
        self._adapters[name] = made

    def drop(self, name: str) -> None:
        """Forget a copy that `keep` made, if it is there; its memory is the next one's."""
        if name in self._adapters:
            self._dropped.append(self._adapters.pop(name))

    def _room_for_copy(self) -> _KeptLora:
        file = None if self._file is None else MemoryFile(f"kt_ray-kept-lora-{self.spec.rank}")
        with allocating(file):
            copy = {layer: lora.map(_alike) for layer, lora in self.lora.items()}
        if self.lane is not None:
            for lora in copy.values():
                self.lane.lock(lora.tensors())
        return _KeptLora(copy, file)

    def export(self) -> ExportedExperts:
        """For attention workers of this host, where `spec.shared`: weights, LoRA and what `keep` stored."""
        assert self._file is not None, "the plan has workers that read these experts"
        weights = {layer: (self.order[layer], own) for layer, own in self.weights.items()}
        kept = {True: _KeptLora(self.lora, self._file), **self._adapters}
        adapters = {name: (one.file or self._file, one.lora) for name, one in kept.items()}
        others = [one.file or self._file for one in self._dropped]
        files = dict.fromkeys([self._file, *(file for file, _ in adapters.values()), *others])
        return export_experts(list(files), self.spec.rank, weights, adapters)

    def local_ids(self, layer: int, ids_TK: Tensor, num_experts: int) -> Tensor:
        """Global expert ids [T, K] of a layer to local ones; other actors' experts become E (no expert)."""
        table = self._local_ids.get(layer)
        if table is None:  # made once: for a single token it would cost as much as the experts
            own = self.order[layer]
            table = self._local_ids[layer] = torch.full((num_experts + 1,), len(own), dtype=torch.int64)
            table[list(own)] = torch.arange(len(own))
        return table[ids_TK.long().clamp(max=num_experts)]

    def row_tokens(self, layer: int, slots: int) -> int:
        """`Engine.row_tokens` of a layer; 0 where all of its experts are on the lane's device."""
        weights = self.weights.get(layer)
        return 0 if weights is None else self.engine.row_tokens(weights, slots)

    def forward(
        self,
        layer: int,
        group: int,
        x: Sequence[Tensor],
        ids_TK: Tensor,
        weights_TK: Tensor,
        keys_T: Tensor,
        *,
        keep: bool,
        alloc: Alloc = new_memory,
        adapter: bool | str | None = None,
        trainings: Tensor | None = None,
        tokens_alone: int | None = None,
    ) -> Tensor:
        """Weighted sum over the local experts.

        Args:
            x: parts [T_i, H], one after another, float32 or bfloat16. ids_TK: local ids. weights_TK:
                float32 router weights.
            keys_T: int64 dropout keys. keep: a backward of (layer, group) follows.
            alloc: where y is to lie. adapter: with LoRA or without; a name = what `keep` stored under it;
                None = as begin_pass said.
            trainings: int64 [T], whose LoRA each token has: 0 = the present training's, then in the order of
                `begin_pass`; None = the present one's.
            tokens_alone: as of `Engine.forward`.

        Returns:
            y [T, H] in the type of `spec.answers`.
        """
        start = time.monotonic()
        experts = len(self.order[layer])
        counts = torch.bincount(ids_TK.reshape(-1), minlength=experts + 1)[:experts].tolist()
        which = self._adapter if adapter is None else adapter
        lora: ExpertLora | None = None
        if which is not False:
            lora = (self.lora if which is True else self._adapters[which].lora).get(layer)
        engine_ids_TK = ids_TK
        pending: list[Future[LaneForward]] = []
        shape = (len(ids_TK), x[0].shape[1])
        lane_x: Tensor | None = None
        chosen = () if self.lane is None else self.lane.choose(layer, counts, len(ids_TK))
        if self.lane is not None and any(chosen):
            there = [e for own in chosen for e in own]
            engine_ids_TK = self._without(layer, ids_TK, there)
            if keep:  # page-locked: it is copied to the devices once more
                lane_x = self.lane.room((layer, group), shape, self.lane.compute_dtype(layer))
            keys = keys_T.clone() if keep else keys_T
            dropout = None if lora is None else self._dropout
            call = LaneInput(x, ids_TK, weights_TK, lora, dropout, keys, lane_x, counts)
            pending = self.lane.forward(layer, chosen, call)
            self.counters.lane_slots += sum(counts[e] for e in there)
        saved: Saved | None = None
        try:
            x_TH = self.rows.joined("x", x, lane_x)
            y_TH = self.rows.result(shape, alloc)
            if layer in self.weights:
                weights = self.weights[layer]
                y_TH, saved = self.engine.forward(
                    weights,
                    x_TH,
                    engine_ids_TK,
                    weights_TK,
                    lora=self._with_beside(lora, layer, "lora"),
                    adapter_of_token=trainings if self._beside and lora is not None else None,
                    dropout=self._dropout,
                    keys=keys_T,
                    save=keep and _SAVED.get(self.spec.activations, True),
                    out=y_TH,
                    tokens_alone=tokens_alone,
                )
            else:
                y_TH.zero_()
        finally:
            wait(pending)  # they read the caller's tensors
        parts = [future.result() for future in pending]
        if parts:
            self.engine.add_rows([(part.tokens, part.y) for part in parts], y_TH)
        if keep:
            of_lane = tuple(part.saved for part in parts if part.saved is not None)
            self._kept[layer, group] = _Kept(saved, of_lane, lane_x, sum(counts), ids_TK.shape)
        self._count(layer, counts)
        y_TH = self.rows.answer(y_TH, alloc)
        self.counters.forward_seconds += time.monotonic() - start
        return y_TH

    def _count(self, layer: int, counts: Sequence[int]) -> None:
        """A forward whose local experts have `counts` slots."""
        counters = self.counters
        counters.forward_slots += sum(counts)
        kept_bytes = sum(kept.bytes for kept in self._kept.values())
        counters.kept_bytes_peak = max(counters.kept_bytes_peak, kept_bytes)
        self._count_tokens(layer, counts)

    def _count_tokens(self, layer: int, counts: Sequence[int]) -> None:
        tokens = self.counters.tokens_per_expert.setdefault(layer, [0] * len(counts))
        position = {e: i for i, e in enumerate(self.spec.experts_of(layer))}
        for expert, count in zip(self.order[layer], counts, strict=True):
            tokens[position[expert]] += count

    def backward(
        self,
        layer: int,
        group: int,
        dy: Sequence[Tensor],
        *,
        alloc: Alloc = new_memory,
        input_grad: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Gradients of the forward of (layer, group): dx [T, H] in the type of `spec.answers`, and d(router
        weights) [T, K], float32.

        LoRA gradients are added to those of the passes before.

        Args:
            alloc: where dx and dw are to lie. input_grad: whether dx is wanted; else it is [T, 0].
        """
        start = time.monotonic()
        kept, lora, grads = self._kept.pop((layer, group)), self.lora.get(layer), self._grads.get(layer)
        pending: list[Future[LaneBackward]] = []
        if self.lane is not None:
            pending = self.lane.backward(layer, kept.lane, dy, lora, input_grad=input_grad)
            self.counters.lane_slots += sum(len(part.routed.slots) for part in kept.lane)
        try:
            dy_TH = self.rows.joined("dy", dy)
            tokens, hidden = dy_TH.shape
            dx_TH = self.rows.result((tokens, hidden if input_grad else 0), alloc)
            dw_TK = alloc(kept.shape, torch.float32)
            if kept.engine is not None:
                weights = self.weights[layer]
                self.engine.backward(
                    weights,
                    kept.engine,
                    dy_TH,
                    lora=self._with_beside(lora, layer, "lora"),
                    lora_grads=self._with_beside(grads, layer, "grads"),
                    input_grad=input_grad,
                    out=(dx_TH, dw_TK),
                )
            else:
                dx_TH.zero_()
                dw_TK.zero_()
        finally:
            wait(pending)
        parts = [future.result() for future in pending]
        if parts:
            self.engine.add_rows([(part.tokens, part.dx) for part in parts], dx_TH)
        for part in parts:
            dw_TK.view(-1)[part.slots] = part.dw
        of_batches = [batch for part in parts for batch in part.lora]
        if of_batches:  # only now: the engine may touch the gradients of all its experts
            assert grads is not None
            for name, tensor in grads.named().items():
                self.engine.add_rows(
                    [(experts, own[name].contiguous()) for experts, own in of_batches], tensor
                )
        self.counters.backward_slots += kept.slots
        if self.spec.activations == "recompute":
            self.counters.recomputed_slots += kept.slots
        dx_TH = self.rows.answer(dx_TH, alloc)
        self.counters.backward_seconds += time.monotonic() - start
        return dx_TH, dw_TK

    def count_elsewhere(self, layer: int, group: int, rows: Sequence[int]) -> None:
        """A forward in which an attention worker computed so many rows of every expert (global ids)."""
        own = [rows[e] for e in self.order[layer]]
        self.counters.forward_slots += sum(own)
        self.counters.lane_slots += sum(own)
        self._count_tokens(layer, own)
        self._elsewhere[layer, group] = self._elsewhere.get((layer, group), 0) + sum(own)

    def add_gradients(self, layer: int, group: int, ids: Tensor, values: Mapping[str, Tensor]) -> None:
        """Add LoRA gradients of a backward that an attention worker computed.

        Args:
            ids: int64 [n] local ids, each once. values: float32 [n, ...] by matrix; empty without LoRA.
        """
        slots = self._elsewhere.pop((layer, group), 0)
        self.counters.backward_slots += slots
        self.counters.lane_slots += slots
        grads = self._grads.get(layer)
        for name, tensor in ({} if grads is None or not values else grads.named()).items():
            self.engine.add_rows([(ids, values[name])], tensor)

    def _without(self, layer: int, ids_TK: Tensor, chosen: Sequence[int]) -> Tensor:
        """Local ids for the engine: experts that the lane computes become "no expert"."""
        engine = self.weights[layer].E if layer in self.weights else 0
        table = torch.arange(len(self.order[layer]) + 1).clamp(max=engine)
        table[list(chosen)] = engine
        return table[ids_TK]

    # -- optimizer ---------------------------------------------------------------------------

    def gradient_norm_squared(self) -> float:
        """Sum of squares of the LoRA gradients, in float64."""
        return self.engine.squared_norm(self._optimizer.gradients()) if self._optimizer is not None else 0.0

    def apply_gradients(self, lr: float, clip: float, adam: AdamStep | None = None) -> None:
        """Clip, take the optimizer's step, zero the gradients."""
        if self._optimizer is not None:
            self._optimizer.apply(lr, clip, adam)
        self._discard_others()

    def discard_gradients(self) -> None:
        if self._optimizer is not None:
            self._optimizer.zero_grad()
        self._discard_others()

    def _discard_others(self) -> None:
        for parameter in self._others():
            assert parameter.grad is not None
            parameter.grad.zero_()

    def shares(self, what: str, copy: int) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """(layer, stacked LoRA tensors by matrix) of the layers that a copy of these experts updates; what =
        "param" or "grad"."""
        for layer in replace(self.spec, copy=copy).updates(tuple(self._parameters)):
            tensors = self._parameters[layer].items()
            yield layer, {key: p.data if what == "param" else _grad(p) for key, p in tensors}

    # -- by name -----------------------------------------------------------------------------

    def named(
        self, what: str, *, updated: bool = True, which: bool | str = True
    ) -> Iterator[tuple[str, Tensor]]:
        """(parameter name, live view) for what = "param", "grad", or one of the optimizer's `state_kinds`.

        Args:
            updated: only what this actor's optimizer updates.
            which: for "param", the name of a copy that `keep` made; True = the present LoRA.
        """
        for layer in self._updated() if updated else tuple(self._parameters):
            for key, parameter in self._parameters[layer].items():
                if what == "param":
                    kept = None if which is True else self._adapters[which].lora[layer]
                    stacked = parameter.data if kept is None else getattr(kept, key)
                elif what == "grad":
                    stacked = _grad(parameter)
                else:
                    assert self._optimizer is not None
                    stacked = self._optimizer.state(parameter, what)
                projection, side = key.split("_")
                for i, names in enumerate(self.names[layer]):
                    yield f"{names[projection]}.lora_{side.upper()}.weight", stacked[i]

    def training_state(self) -> Iterator[tuple[Tensor, bool]]:
        """All tensors that are one training's own, in one order: values, gradients, moments; and whether each
        stays where it is. Values do that others map or a lane copies from; see `find_lora`."""
        stay = self._file is not None or self.lane is not None
        for matrices in self._parameters.values():
            for parameter in matrices.values():
                yield from ((parameter, stay), (_grad(parameter), False))
        for moment in () if self._optimizer is None else self._optimizer.states():
            yield moment, False

    def _state_of(self, state: Iterable[Tensor]) -> _State:
        """What `training_state` gave, by layer."""
        found, rest = _State({}, {}), iter(state)
        for layer, matrices in self._parameters.items():
            values, grads = {}, {}
            for key in matrices:
                values[key], grads[key] = next(rest), next(rest)
            found.lora[layer] = _adapter(values, self.spec.lora.scale)
            found.grads[layer] = _adapter(grads, self.spec.lora.scale)
        return found

    def _with_beside(
        self, present: ExpertLora | None, layer: int, what: str
    ) -> ExpertLora | list[ExpertLora] | None:
        """The engine's part of a layer's LoRA ("lora") or gradients ("grads"), of all trainings in a pass."""
        if present is None:
            return None
        count = self.weights[layer].E
        own = present.map(lambda tensor: tensor[:count])
        return [own, *(getattr(state, what)[layer] for state in self._beside)] if self._beside else own

    def set_step(self, step: int) -> None:
        """Number of updates taken so far, on resume."""
        if self._optimizer is not None:
            self._optimizer.set_step(step)

    def take_counters(self) -> ExpertCounters:
        """The counters since the last call; they start again at zero."""
        counters, self.counters = self.counters, ExpertCounters()
        return counters

    def close(self) -> None:
        self._kept.clear()
        if self.lane is not None:
            self.lane.close()
        self.engine.close()


def _grad(parameter: torch.nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _alike(tensor: Tensor) -> Tensor:
    return allocate(tensor.shape, tensor.dtype)


def _adapter(matrices: Mapping[str, Tensor], scale: float) -> ExpertLora:
    """Experts without a gate have no matrices for it."""
    fields: dict[str, Any] = {"gate_a": None, "gate_b": None, **matrices}
    return ExpertLora(**fields, scale=scale)
