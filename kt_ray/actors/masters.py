"""Float32 masters and optimizer of the LoRA outside the routed experts (see decisions/004)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from kt_ray.config.schema import OptimConfig
from kt_ray.optim import LoraOptimizer


class Masters:
    """Float32 masters of the non-expert LoRA of all stages: one flat parameter per stage, with names."""

    def __init__(self, shapes: list[dict[str, tuple[int, ...]]], optim: OptimConfig, device: str) -> None:
        self._shapes = shapes
        sizes = [sum(torch.Size(shape).numel() for shape in stage.values()) for stage in shapes]
        self._flat = [torch.nn.Parameter(torch.zeros(size, device=device)) for size in sizes]
        self.optimizer = LoraOptimizer(self._flat, optim)

    def set(self, stage: int, flat: torch.Tensor) -> None:
        self._flat[stage].data.copy_(flat)

    def get(self, stage: int) -> torch.Tensor:
        return self._flat[stage].data

    def set_grad(self, stage: int, flat: torch.Tensor) -> None:
        grad = self._flat[stage].grad
        assert grad is not None
        grad.copy_(flat)

    def named(self, what: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, live view) for "param", "exp_avg" or "exp_avg_sq"."""
        for shapes, flat in zip(self._shapes, self._flat, strict=True):
            source = flat.data if what == "param" else self.optimizer.moments(flat)[what == "exp_avg_sq"]
            begin = 0
            for name, shape in shapes.items():
                count = torch.Size(shape).numel()
                yield name, source[begin : begin + count].view(shape)
                begin += count

    def state(self) -> dict[str, torch.Tensor]:
        """Live views of all masters and moments under "param/NAME", "exp_avg/NAME" and "exp_avg_sq/NAME"."""
        return {
            f"{what}/{name}": tensor
            for what in ("param", "exp_avg", "exp_avg_sq")
            for name, tensor in self.named(what)
        }


def flat_of(parameters: Iterable[torch.Tensor], *, grad: bool) -> torch.Tensor:
    """Parameters or their gradients (0 where there is none), one after the other: float32 on the CPU."""
    parts = []
    for parameter in parameters:
        value = parameter.grad if grad else parameter.data
        parts.append(torch.zeros_like(parameter).flatten() if value is None else value.detach().flatten())
    flat = torch.cat(parts) if parts else torch.zeros(0)
    return flat.to("cpu", torch.float32)


def set_flat(parameters: Iterable[torch.Tensor], flat: torch.Tensor) -> None:
    """Overwrite parameters with what `flat_of` made."""
    begin = 0
    for parameter in parameters:
        count = parameter.numel()
        parameter.data.copy_(flat[begin : begin + count].view_as(parameter))
        begin += count
