"""What one socket computes: its routed experts, with their LoRA (experts_lora.py).

Weights stay in the checkpoint's type and the native engine computes from them. Callers name experts by global
id; inside they have local ids, 0..n-1.

Legend: T tokens, H hidden size, K experts per token, E local experts.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from kt_ray.checkpoint import CheckpointIndex, ExpertLayout, GgufExperts, load_experts
from kt_ray.checkpoint.index import check_unchanged
from kt_ray.checkpoint.load_experts import Target
from kt_ray.config.limits import INT8_BACKENDS
from kt_ray.experts.call_rows import Alloc, CallRows, new_memory
from kt_ray.experts.device_lane import LaneBackward, LaneForward, LaneInput, LaneSaved
from kt_ray.experts.experts_lora import ExpertsLora, KeptLora
from kt_ray.experts.experts_spec import ExpertCounters, LocalExpertsSpec
from kt_ray.experts.lane import Lane
from kt_ray.experts.lane_check import check_lane
from kt_ray.experts.process_memory import prefer_node
from kt_ray.experts.shared_experts import ExportedExperts, export_experts, put_into
from kt_ray.native import (
    DropoutSpec,
    Engine,
    ExpertWeights,
    MemoryFile,
    Saved,
    allocating,
)
from kt_ray.native.engine import SaveMode
from kt_ray.native.pages import in_huge_pages

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
        self.lora = ExpertsLora(spec, self.engine, self.lane, self._file)
        # What the engine computes from; a layer whose experts all stay on the lane's device has none.
        self.weights: dict[int, ExpertWeights] = {}
        # layer -> global id of every local expert: ascending, except that those on the lane's device come
        # last, so that the engine's part of every stacked tensor is its beginning.
        self.order: dict[int, tuple[int, ...]] = {}
        self.counters = ExpertCounters()
        self.load_seconds = 0.0
        self.weight_bytes = 0
        self.huge_pages = True  # whether loaded weights have them, as far as that is known
        self._local_ids: dict[int, Tensor] = {}  # layer -> local id by global one
        self.rows = CallRows(self.engine, spec.answers)
        self._kept: dict[tuple[int, int], _Kept] = {}  # by layer and group
        # slots that attention workers computed, by layer and group, until their gradients are there
        self._elsewhere: dict[tuple[int, int], int] = {}
        self._dropout: DropoutSpec | None = None
        self._adapter: bool | str = True  # which one the present pass uses

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
        names: dict[int, list[dict[str, str]]] = {}  # as of `ExpertsLora.make`
        shapes: dict[int, dict[str, tuple[int, int]]] = {}
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
                names[layer] = [layout.names(layer, e, spec.root) for e in self.order[layer]]
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
                self.lora.make(names, shapes)

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
            beside: as of `ExpertsLora.join`. Not with a lane.
        """
        self.lora.join(beside)
        assert self.lane is None or not self.lora.joins, "a lane computes with one training's LoRA"
        self._kept.clear()
        self._elsewhere.clear()
        self.forget_calls()
        self._adapter = adapters
        p = self.spec.lora.dropout
        drops = dropout and p > 0 and self.lora.present
        self._dropout = DropoutSpec(p=p, seed=self.spec.seed, step=step) if drops else None

    def forget_calls(self) -> None:
        """The next call does not depend on those before: where they come in no planned order."""
        if self.lane is not None:
            self.lane.forget_calls()

    def export(self) -> ExportedExperts:
        """For attention workers of this host, where `spec.shared`: weights, LoRA and kept copies of it."""
        assert self._file is not None, "the plan has workers that read these experts"
        weights = {layer: (self.order[layer], own) for layer, own in self.weights.items()}
        kept = {True: KeptLora(self.lora.present, self._file), **self.lora.kept}
        adapters = {name: (one.file or self._file, one.lora) for name, one in kept.items()}
        others = [one.file or self._file for one in self.lora.dropped]
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
            alloc: where y is to lie. adapter: with LoRA or without; a name = what `ExpertsLora.keep` stored;
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
        lora = self.lora.of_layer(layer, which)
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
                    lora=self.lora.with_beside(lora, layer, "lora", weights.E),
                    adapter_of_token=trainings if self.lora.joins and lora is not None else None,
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
        kept = self._kept.pop((layer, group))
        lora, grads = self.lora.present.get(layer), self.lora.grads.get(layer)
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
                    lora=self.lora.with_beside(lora, layer, "lora", weights.E),
                    lora_grads=self.lora.with_beside(grads, layer, "grads", weights.E),
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
        grads = self.lora.grads.get(layer)
        for name, tensor in ({} if grads is None or not values else grads.named()).items():
            self.engine.add_rows([(ids, values[name])], tensor)

    def _without(self, layer: int, ids_TK: Tensor, chosen: Sequence[int]) -> Tensor:
        """Local ids for the engine: experts that the lane computes become "no expert"."""
        engine = self.weights[layer].E if layer in self.weights else 0
        table = torch.arange(len(self.order[layer]) + 1).clamp(max=engine)
        table[list(chosen)] = engine
        return table[ids_TK]

    def take_counters(self) -> ExpertCounters:
        """The counters since the last call; they start again at zero."""
        counters, self.counters = self.counters, ExpertCounters()
        return counters

    def close(self) -> None:
        self._kept.clear()
        if self.lane is not None:
            self.lane.close()
        self.engine.close()
