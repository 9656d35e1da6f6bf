"""Float32 masters and optimizer of the LoRA outside the routed experts (see decisions/004)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from kt_ray.config.schema import OptimConfig
from kt_ray.optim.flat_parameters import flat_size, views
from kt_ray.optim.optimizers import LoraOptimizer, elementwise


class Masters:
    """Float32 masters of the non-expert LoRA of all stages: one flat vector per stage, laid out as its own.

    Where the optimizer treats all elements alike a stage is one parameter to it; else every matrix is one,
    as a view of the same vector.
    """

    def __init__(self, shapes: list[dict[str, tuple[int, ...]]], optim: OptimConfig, device: str) -> None:
        self._shapes = shapes
        if optim.name == "deepspeed_cpu_adam":  # the experts' alone: these may lie on a GPU
            optim = replace(optim, name="adamw")
        self._flat = [torch.zeros(flat_size(stage), device=device, dtype=torch.float32) for stage in shapes]
        self._grad = [torch.zeros_like(flat) for flat in self._flat]
        # per stage: the optimizer's parameters, one for all names or one for each
        self._parameters: list[list[torch.nn.Parameter]] = []
        sides: list[str] = []
        self._whole = elementwise(optim)
        for stage, flat, grad in zip(shapes, self._flat, self._grad, strict=True):
            parameters = [torch.nn.Parameter(value) for value in self._parts(flat, stage)]
            for parameter, of_it in zip(parameters, self._parts(grad, stage), strict=True):
                parameter.grad = of_it
            self._parameters.append(parameters)
            sides += (
                [""] if self._whole else ["B" if name.endswith(".lora_B.weight") else "A" for name in stage]
            )
        self.optimizer = LoraOptimizer([p for stage in self._parameters for p in stage], optim, sides)

    def _parts(self, flat: torch.Tensor, stage: dict[str, tuple[int, ...]]) -> list[torch.Tensor]:
        return [flat] if self._whole else views(flat, stage)

    def training_state(self) -> list[torch.Tensor]:
        """All tensors that are one training's own, in one order: values and moments, without names."""
        return [*self._flat, *self.optimizer.states()]

    def find_values(self) -> None:
        """The tensors that `training_state` gave point elsewhere now: so do the parameters."""
        for shapes, flat, parameters in zip(self._shapes, self._flat, self._parameters, strict=True):
            for parameter, value in zip(parameters, self._parts(flat, shapes), strict=True):
                parameter.data = value

    def set(self, stage: int, flat: torch.Tensor) -> None:
        self._flat[stage].copy_(flat)

    def get(self, stage: int) -> torch.Tensor:
        return self._flat[stage]

    def set_grad(self, stage: int, flat: torch.Tensor) -> None:
        self._grad[stage].copy_(flat)

    def add_grad(self, stage: int, flat: torch.Tensor) -> None:
        self._grad[stage].add_(flat.to(self._grad[stage].device))

    def named(self, what: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, live view) for "param", "grad", or one of the optimizer's `state_kinds`."""
        for i, (shapes, parameters) in enumerate(zip(self._shapes, self._parameters, strict=True)):
            if what in ("param", "grad"):
                yield from zip(
                    shapes, views((self._flat if what == "param" else self._grad)[i], shapes), strict=True
                )
            elif self._whole:
                yield from zip(shapes, views(self.optimizer.state(parameters[0], what), shapes), strict=True)
            else:
                yield from zip(shapes, (self.optimizer.state(p, what) for p in parameters), strict=True)
