"""LoRA of one socket's experts: values, gradients and moments, float32, stacked by matrix.

Also copies of the values that are kept under names, and the LoRA of other trainings that a pass joins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kt_ray.experts.experts_spec import LocalExpertsSpec
from kt_ray.experts.lane import Lane
from kt_ray.model.lora import init_lora_a, initial_lora
from kt_ray.native import Engine, ExpertLora, MemoryFile, allocate, allocating
from kt_ray.optim.optimizers import AdamStep, LoraOptimizer, state_kinds
from kt_ray.pulse import beat


class KeptLora(NamedTuple):
    """A LoRA by layer, and the file that it lies in, if others can map it."""

    lora: dict[int, ExpertLora]
    file: MemoryFile | None


class _State(NamedTuple):
    """A training's LoRA and its gradients, by layer."""

    lora: dict[int, ExpertLora]
    grads: dict[int, ExpertLora]


class ExpertsLora:
    """Empty until `make`.

    Args:
        file: where the values lie, if others can map them.
    """

    def __init__(
        self, spec: LocalExpertsSpec, engine: Engine, lane: Lane | None, file: MemoryFile | None
    ) -> None:
        self.spec = spec
        self.present: dict[int, ExpertLora] = {}
        self.grads: dict[int, ExpertLora] = {}
        self.kept: dict[bool | str, KeptLora] = {}  # by name
        self.dropped: list[KeptLora] = []  # memory of copies that were kept
        self._engine = engine
        self._lane = lane
        self._file = file
        # layer -> local expert -> projection -> name prefix
        self._names: Mapping[int, Sequence[Mapping[str, str]]] = {}
        self._beside: list[_State] = []  # trainings that the present pass joins to the present one
        self._optimizer: LoraOptimizer | None = None
        self._parameters: dict[int, dict[str, torch.nn.Parameter]] = {}

    # -- making ------------------------------------------------------------------------------

    def make(
        self,
        names: Mapping[int, Sequence[Mapping[str, str]]],
        shapes: Mapping[int, Mapping[str, tuple[int, int]]],
    ) -> None:
        """Initial values, and the optimizer.

        Args:
            names: layer -> local expert -> projection -> name prefix. shapes: layer -> projection -> outputs,
                inputs.
        """
        self._names = names
        spec, rank = self.spec, self.spec.lora.rank
        for layer, experts in names.items():
            if not spec.lora.reaches(layer):
                continue
            matrices = self._parameters[layer] = {}
            for projection in experts[0]:
                out_features, in_features = shapes[layer][projection]
                a = self._memory(torch.empty, (len(experts), rank, in_features))
                for i, prefixes in enumerate(experts):
                    name = f"{prefixes[projection]}.lora_A.weight"
                    a[i] = init_lora_a(spec.seed, name, (rank, in_features), spec.lora.init)
                matrices[f"{projection}_a"] = torch.nn.Parameter(a)
                b = self._memory(torch.zeros, (len(experts), out_features, rank))
                matrices[f"{projection}_b"] = torch.nn.Parameter(b)
                beat()
        named = [item for layer in self._updated() for item in self._parameters[layer].items()]
        sides = [key[-1].upper() for key, _ in named]
        self._optimizer = LoraOptimizer([parameter for _, parameter in named], spec.optim, sides)
        for parameter in self._others():
            parameter.grad = torch.zeros_like(parameter)
        self.find()
        if self._lane is not None:
            for lora in self.present.values():
                self._lane.lock(lora.tensors())

    def find(self) -> None:
        """The present LoRA and its gradients are where the parameters point now."""
        for layer, matrices in self._parameters.items():
            self.present[layer] = _adapter({k: p.data for k, p in matrices.items()}, self.spec.lora.scale)
            self.grads[layer] = _adapter({k: _grad(p) for k, p in matrices.items()}, self.spec.lora.scale)

    def _memory(self, make: Callable[..., Tensor], shape: Sequence[int]) -> Tensor:
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

    def restart(self, seed: int | None = None) -> None:
        """As `make` left it, in place: initial values, no moments, no gradients, no step taken.

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

    # -- in a pass ---------------------------------------------------------------------------

    def join(self, beside: Iterable[Sequence[Tensor]]) -> None:
        """From now on these trainings' states, as `training_state` gives them, take part beside the present
        one; their gradients are added to."""
        self._beside = [self._state_of(state) for state in beside]

    @property
    def joins(self) -> bool:
        return bool(self._beside)

    def of_layer(self, layer: int, which: bool | str) -> ExpertLora | None:
        """The present LoRA (True), none (False), or what `keep` stored under a name."""
        if which is False:
            return None
        return (self.present if which is True else self.kept[which].lora).get(layer)

    def with_beside(
        self, present: ExpertLora | None, layer: int, what: str, count: int
    ) -> ExpertLora | list[ExpertLora] | None:
        """The first `count` experts of a layer's LoRA ("lora") or gradients ("grads"), which the engine
        computes, and with them those of the trainings that are joined."""
        if present is None:
            return None
        own = present.map(lambda tensor: tensor[:count])
        return [own, *(getattr(state, what)[layer] for state in self._beside)] if self._beside else own

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

    # -- copies under names ------------------------------------------------------------------

    def keep(self, name: str, *, copy: bool) -> None:
        """Keep the LoRA as it is now under a name; `copy` if it will be changed."""
        if not copy:
            self.kept[name] = KeptLora(dict(self.present), self._file)
            return
        made = self.dropped.pop() if self.dropped else self._room_for_copy()
        for layer, lora in self.present.items():
            for kept, value in zip(made.lora[layer].tensors(), lora.tensors(), strict=True):
                kept.copy_(value)
        self.kept[name] = made

    def drop(self, name: str) -> None:
        """Forget a copy that `keep` made, if it is there; its memory is the next one's."""
        if name in self.kept:
            self.dropped.append(self.kept.pop(name))

    def _room_for_copy(self) -> KeptLora:
        file = None if self._file is None else MemoryFile(f"kt_ray-kept-lora-{self.spec.rank}")
        with allocating(file):
            copy = {layer: lora.map(_alike) for layer, lora in self.present.items()}
        if self._lane is not None:
            for lora in copy.values():
                self._lane.lock(lora.tensors())
        return KeptLora(copy, file)

    # -- optimizer ---------------------------------------------------------------------------

    def gradient_norm_squared(self) -> float:
        """Sum of squares of the LoRA gradients, in float64."""
        return self._engine.squared_norm(self._optimizer.gradients()) if self._optimizer is not None else 0.0

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

    def set_step(self, step: int) -> None:
        """Number of updates taken so far, on resume."""
        if self._optimizer is not None:
            self._optimizer.set_step(step)

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
                    kept = None if which is True else self.kept[which].lora[layer]
                    stacked = parameter.data if kept is None else getattr(kept, key)
                elif what == "grad":
                    stacked = _grad(parameter)
                else:
                    assert self._optimizer is not None
                    stacked = self._optimizer.state(parameter, what)
                projection, side = key.split("_")
                for i, prefixes in enumerate(self._names[layer]):
                    yield f"{prefixes[projection]}.lora_{side.upper()}.weight", stacked[i]

    def training_state(self) -> Iterator[tuple[Tensor, bool]]:
        """All tensors that are one training's own, in one order: values, gradients, moments; and whether each
        stays where it is. Values do that others map or a lane copies from; see `find`."""
        stay = self._file is not None or self._lane is not None
        for matrices in self._parameters.values():
            for parameter in matrices.values():
                yield from ((parameter, stay), (_grad(parameter), False))
        for moment in () if self._optimizer is None else self._optimizer.states():
            yield moment, False


def _grad(parameter: torch.nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _alike(tensor: Tensor) -> Tensor:
    return allocate(tensor.shape, tensor.dtype)


def _adapter(matrices: Mapping[str, Tensor], scale: float) -> ExpertLora:
    """Experts without a gate have no matrices for it."""
    fields: dict[str, Any] = {"gate_a": None, "gate_b": None, **matrices}
    return ExpertLora(**fields, scale=scale)
