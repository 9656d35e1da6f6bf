"""What one socket holds: its routed experts, their LoRA, gradients and optimizer.

Weights stay in the checkpoint's type and are computed by the native engine; LoRA masters,
gradients and moments are float32. Everything is addressed by global expert ids from outside and
by local ids (0..n-1) inside.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from typing import Literal

import torch

from kt_ray.checkpoint import CheckpointIndex, ExpertLayout, GgufExperts, load_experts
from kt_ray.checkpoint.load_experts import Target
from kt_ray.experts.experts_spec import ExpertCounters, LocalExpertsSpec
from kt_ray.experts.lane import DeviceLane, LaneSaved
from kt_ray.experts.parts import Alloc, Kept, as_adapter, first_experts, new_memory, shapes_of
from kt_ray.experts.process_memory import PreferNode, available_memory
from kt_ray.model.lora import init_lora_a, initial_lora
from kt_ray.native import DropoutSpec, Engine, ExpertLora, ExpertWeights, Saved
from kt_ray.optim.optimizers import LoraOptimizer, squared_norm, state_kinds

Progress = Callable[[int, int, int], None]  # (layer, bytes done, bytes in total)
# What a backend of the rule quantises experts to while they are read; the others take them as stored.
_TARGETS: dict[str, Target] = {"AMXINT8": "int8", "AMXINT4": "int4"}


class LocalExperts:
    """Load, forward, backward, LoRA and optimizer step of one socket's experts."""

    def __init__(self, spec: LocalExpertsSpec) -> None:
        self.spec = spec
        self.engine = Engine(
            isa=spec.isa,
            threads=spec.threads,
            cpus=spec.cpus or None,
            int8_products=spec.backend == "AMXINT8",
        )
        self.lane: DeviceLane | None = None
        if spec.lane is not None:
            self.lane = DeviceLane(spec.lane, spec.threads, recompute=spec.activations == "recompute")
        # What the engine computes from; a layer whose experts all stay on the lane's device has none.
        self.weights: dict[int, ExpertWeights] = {}
        self.lora: dict[int, ExpertLora] = {}
        self.names: dict[int, list[dict[str, str]]] = {}  # layer -> local expert -> projection -> name prefix
        # layer -> global id of every local one: ascending, but for those that stay on the lane's device,
        # which come last, so that the engine's part of every stacked tensor is its beginning.
        self.order: dict[int, tuple[int, ...]] = {}
        self._local: dict[int, torch.Tensor] = {}  # layer -> global id to local one
        self.counters = ExpertCounters()
        self.load_seconds = 0.0
        self.weight_bytes = 0
        self._grads: dict[int, ExpertLora] = {}
        self._kept: dict[str, dict[int, ExpertLora]] = {}  # adapters for generation, by name
        # (layer, group) -> what its backward needs, and its routed slots
        self._saved: dict[tuple[int, int], Kept] = {}
        self._dropout: DropoutSpec | None = None
        self._adapters = True
        self._optimizer: LoraOptimizer | None = None
        self._parameters: dict[int, dict[str, torch.nn.Parameter]] = {}
        self._shapes: dict[int, dict[str, tuple[int, int]]] = {}  # layer -> projection -> outputs, inputs

    # -- loading -----------------------------------------------------------------------------

    def load(self, progress: Progress | None = None) -> None:
        """Read this socket's experts of every MoE layer, then make the LoRA and its optimizer."""
        start = time.monotonic()
        spec = self.spec
        index = CheckpointIndex.open(spec.model_dir)
        layout = ExpertLayout.detect(index)
        read: Callable[..., ExpertWeights]
        read = functools.partial(load_experts, index, layout, target=_TARGETS.get(spec.backend))
        file_bytes = index.nbytes
        if spec.experts_path is not None:
            gguf = GgufExperts.open(spec.experts_path, index, layout)
            layout, read, file_bytes = gguf.layout, gguf.load, gguf.file_bytes
        held = {layer: spec.experts_of(layer) for layer in layout.moe_layers}
        outside = sorted({e for ids in held.values() for e in ids if e >= layout.num_experts})
        if outside:
            raise ValueError(
                f"expert actor {spec.rank}: experts {outside} but the checkpoint has {layout.num_experts}"
            )
        total = sum(len(ids) * layout.expert_bytes[layer] for layer, ids in held.items())
        # Where file and experts do not fit in memory together, the file's pages must not push others out.
        drop_cache = total + file_bytes > available_memory()
        # Two keep a disk busy while one waits for pages; beyond the cores they hold each other up.
        readers = min(8, max(2, spec.threads))
        done = 0
        with PreferNode(spec.node):
            for layer, ids in held.items():
                stay = () if self.lane is None else self.lane.resident_of(layer)
                others = tuple(e for e in ids if e not in stay)
                made = [
                    read(
                        layer, some, formula=spec.formulas.get(layer), threads=readers, drop_cache=drop_cache
                    )
                    if some
                    else None
                    for some in (others, stay)
                ]
                if made[0] is not None:
                    self.weights[layer] = made[0]
                self.order[layer] = (*others, *stay)
                if self.lane is not None:
                    self.lane.add_layer(layer, self.order[layer], *made)
                self._shapes[layer] = shapes_of(next(weights for weights in made if weights is not None))
                self.names[layer] = [layout.names(layer, e, spec.root) for e in self.order[layer]]
                done += len(ids) * layout.expert_bytes[layer]
                if progress is not None:
                    progress(layer, done, total)
            self.weight_bytes = sum(weights.bytes for weights in self.weights.values())
            self.load_seconds = time.monotonic() - start
            if spec.lora.experts:
                self._make_lora()

    def _make_lora(self) -> None:
        spec, rank = self.spec, self.spec.lora.rank
        parameters: list[torch.nn.Parameter] = []
        for layer, named in self.names.items():
            matrices: dict[str, torch.nn.Parameter] = {}
            for projection in named[0]:
                experts, (out_features, in_features) = len(named), self._shapes[layer][projection]
                # float32 by name: in one process a worker that builds its model changes the default type.
                a = torch.empty(experts, rank, in_features, dtype=torch.float32)
                for i, names in enumerate(named):
                    name = f"{names[projection]}.lora_A.weight"
                    a[i] = init_lora_a(spec.seed, name, (rank, in_features), spec.lora.init)
                matrices[f"{projection}_a"] = torch.nn.Parameter(a)
                b = torch.zeros(experts, out_features, rank, dtype=torch.float32)
                matrices[f"{projection}_b"] = torch.nn.Parameter(b)
            self._parameters[layer] = matrices
            parameters.extend(matrices.values())
        sides = [key[-1].upper() for matrices in self._parameters.values() for key in matrices]
        self._optimizer = LoraOptimizer(parameters, spec.optim, sides)
        for layer, matrices in self._parameters.items():
            self.lora[layer] = as_adapter({k: p.data for k, p in matrices.items()}, spec.lora.scale)
            grads = {k: p.grad for k, p in matrices.items() if p.grad is not None}
            self._grads[layer] = as_adapter(grads, spec.lora.scale)
            if self.lane is not None:
                self.lane.lock(self.lora[layer])

    def restart_lora(self) -> None:
        """As `load` left it, in place: initial values, no moments, no gradients, no step taken."""
        if self._optimizer is None:
            return
        for name, tensor in self.named("param"):
            tensor.copy_(initial_lora(self.spec.seed, name, tensor.shape, self.spec.lora.init))
        for what in state_kinds(self.spec.optim):
            for _, tensor in self.named(what):
                tensor.zero_()
        self._optimizer.zero_grad()
        self._optimizer.set_step(0)

    # -- computing ---------------------------------------------------------------------------

    def begin_pass(self, step: int, dropout: bool, adapters: bool = True) -> None:
        """Forget kept activations. dropout: whether LoRA's is on. adapters: False = without LoRA."""
        self._saved.clear()
        self._adapters = adapters
        p = self.spec.lora.dropout
        self._dropout = (
            DropoutSpec(p=p, seed=self.spec.seed, step=step) if dropout and p > 0 and self.lora else None
        )

    def keep(self, name: str, *, copy: bool) -> None:
        """Keep the LoRA as it is now as an adapter for generation; `copy` if it will be changed."""
        kept = {layer: lora.map(torch.Tensor.clone) if copy else lora for layer, lora in self.lora.items()}
        if copy and self.lane is not None:
            for lora in kept.values():
                self.lane.lock(lora)
        self._kept[name] = kept

    def local_ids(self, layer: int, ids: torch.Tensor, num_experts: int) -> torch.Tensor:
        """Global expert ids [T, K] of a layer to local ones; experts held elsewhere become n (no expert)."""
        table = self._local.get(layer)
        if table is None:  # made once: for a single token it would cost as much as the experts
            held = self.order[layer]
            table = self._local[layer] = torch.full((num_experts + 1,), len(held), dtype=torch.int64)
            table[list(held)] = torch.arange(len(held))
        return table[ids.long().clamp(max=num_experts)]

    def forward(
        self,
        layer: int,
        group: int,
        x: torch.Tensor,
        ids: torch.Tensor,
        router_weights: torch.Tensor,
        keys: torch.Tensor,
        *,
        keep: bool,
        alloc: Alloc = new_memory,
        adapter: bool | str | None = None,
    ) -> torch.Tensor:
        """Weighted sum over this host's experts.

        Args:
            x: [T, H] float32 or bfloat16. ids: [T, K] local ids. router_weights: [T, K] float32.
            keys: [T] int64 dropout keys. keep: a backward of (layer, group) follows.
            alloc: where y is to lie. adapter: with LoRA or without; a name = with what `keep` kept under it;
                None = as begin_pass said.

        Returns:
            y [T, H] float32.
        """
        start = time.monotonic()
        held = len(self.order[layer])
        counts = torch.bincount(ids.reshape(-1), minlength=held + 1)[:held].tolist()
        which = self._adapters if adapter is None else adapter
        lora = None
        if which is not False:
            lora = (self.lora if which is True else self._kept[which]).get(layer)
        engine_ids, pending = ids, None
        if self.lane is not None:
            chosen = self.lane.choose(layer, counts, len(x))
            engine_ids = self._without(layer, ids, chosen)
            if chosen:
                pending = self.lane.forward(
                    layer, chosen, x, ids, router_weights, lora, self._dropout, keys, keep=keep
                )
                self.counters.lane_slots += sum(counts[e] for e in chosen)
        saved: Saved | None = None
        try:
            if layer in self.weights:
                save: bool | Literal["recompute"] = keep
                if keep and self.spec.activations == "recompute":
                    save = "recompute"
                weights = self.weights[layer]
                y, saved = self.engine.forward(
                    weights,
                    x,
                    engine_ids,
                    router_weights,
                    lora=first_experts(lora, weights.E),
                    dropout=self._dropout,
                    keys=keys,
                    save=save,
                    out=alloc(x.shape, torch.float32),
                )
            else:
                y = alloc(x.shape, torch.float32).zero_()
        finally:
            if pending is not None:
                wait([pending])  # it reads the caller's tensors
        lane_saved: LaneSaved | None = None
        if pending is not None:
            part = pending.result()
            y.index_add_(0, part.tokens, part.y)
            lane_saved = part.saved
        self.counters.forward_slots += sum(counts)
        if keep:
            self._saved[layer, group] = Kept(saved, lane_saved, sum(counts), ids.shape)
            kept = sum(k.bytes for k in self._saved.values())
            self.counters.kept_bytes_peak = max(self.counters.kept_bytes_peak, kept)
        seen = self.counters.tokens_per_expert.setdefault(layer, [0] * held)
        place = {e: i for i, e in enumerate(self.spec.experts_of(layer))}
        for expert, count in zip(self.order[layer], counts, strict=True):
            seen[place[expert]] += count
        self.counters.forward_seconds += time.monotonic() - start
        return y

    def backward(
        self, layer: int, group: int, dy: torch.Tensor, *, alloc: Alloc = new_memory
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of the forward of (layer, group): dx [T, H] and d(router weights) [T, K], float32.

        LoRA gradients are added to the ones kept here.

        Args:
            alloc: where dx and dw are to lie.
        """
        start = time.monotonic()
        kept, lora, grads = self._saved.pop((layer, group)), self.lora.get(layer), self._grads.get(layer)
        out = alloc(dy.shape, torch.float32), alloc(kept.shape, torch.float32)
        pending = None
        if self.lane is not None and kept.lane is not None:
            pending = self.lane.backward(layer, kept.lane, dy, lora)
            self.counters.lane_slots += len(kept.lane.routed.slots)
        try:
            if kept.engine is not None:
                weights = self.weights[layer]
                dx, dw = self.engine.backward(
                    weights,
                    kept.engine,
                    dy,
                    lora=first_experts(lora, weights.E),
                    lora_grads=first_experts(grads, weights.E),
                    out=out,
                )
            else:
                dx, dw = out[0].zero_(), out[1].zero_()
        finally:
            if pending is not None:
                wait([pending])
        if pending is not None:
            part = pending.result()
            dx.index_add_(0, part.tokens, part.dx)
            dw.view(-1)[part.slots] = part.dw
            # Only now: the engine may touch the gradients of all its experts.
            for expert, own in part.lora:
                assert grads is not None
                for name, tensor in grads.named().items():
                    tensor[expert] += own[name]
        self.counters.backward_slots += kept.slots
        if self.spec.activations == "recompute":
            self.counters.recomputed_slots += kept.slots
        self.counters.backward_seconds += time.monotonic() - start
        return dx, dw

    def _without(self, layer: int, ids: torch.Tensor, chosen: Sequence[int]) -> torch.Tensor:
        """Local ids for the engine: experts that the lane computes become "no expert"."""
        engine = self.weights[layer].E if layer in self.weights else 0
        table = torch.arange(len(self.order[layer]) + 1).clamp(max=engine)
        table[list(chosen)] = engine
        return table[ids]

    # -- optimizer ---------------------------------------------------------------------------

    def gradient_norm_squared(self) -> float:
        """Sum of squares of this host's LoRA gradients, in float64."""
        return squared_norm(self._optimizer.gradients()) if self._optimizer is not None else 0.0

    def apply_gradients(self, lr: float, clip: float) -> None:
        """Clip, take the optimizer's step, zero the gradients."""
        if self._optimizer is not None:
            self._optimizer.apply(lr, clip)

    def discard_gradients(self) -> None:
        if self._optimizer is not None:
            self._optimizer.zero_grad()

    # -- by name -----------------------------------------------------------------------------

    def named(self, what: str) -> Iterator[tuple[str, torch.Tensor]]:
        """(parameter name, live view) for what = "param", "grad", or one of the optimizer's `state_kinds`."""
        for layer, matrices in self._parameters.items():
            for key, parameter in matrices.items():
                if what == "param":
                    stacked = parameter.data
                elif what == "grad":
                    assert parameter.grad is not None
                    stacked = parameter.grad
                else:
                    assert self._optimizer is not None
                    stacked = self._optimizer.state(parameter, what)
                projection, side = key.split("_")
                for i, names in enumerate(self.names[layer]):
                    yield f"{names[projection]}.lora_{side.upper()}.weight", stacked[i]

    def set_step(self, step: int) -> None:
        """Number of updates taken so far, on resume."""
        if self._optimizer is not None:
            self._optimizer.set_step(step)

    def take_counters(self) -> ExpertCounters:
        """The counters since the last call; they start again at zero."""
        counters, self.counters = self.counters, ExpertCounters()
        return counters

    def close(self) -> None:
        self._saved.clear()
        if self.lane is not None:
            self.lane.close()
        self.engine.close()


def bind_to_cpus(cpus: tuple[int, ...]) -> None:
    """Restrict this process to `cpus` (those of them it may use), before anything is allocated."""
    allowed = set(cpus) & os.sched_getaffinity(0)
    if allowed:
        os.sched_setaffinity(0, allowed)
