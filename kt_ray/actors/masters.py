"""Float32 masters and optimizer of the LoRA outside the routed experts (see decisions/004)."""

from __future__ import annotations

from collections.abc import Iterator

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
