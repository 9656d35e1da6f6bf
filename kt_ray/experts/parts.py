"""Small things that an expert host works with: what a forward leaves, views of adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from kt_ray.experts.lane import LaneSaved
from kt_ray.native import ExpertLora, ExpertWeights, Saved

Alloc = Callable[[Sequence[int], torch.dtype], torch.Tensor]  # memory for a result, any content


def new_memory(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype)


@dataclass(frozen=True)
class Kept:
    """What one forward left for its backward: the engine's part, the lane's, routed slots, shape of ids."""

    engine: Saved | None
    lane: LaneSaved | None
    slots: int
    shape: torch.Size

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in (self.engine, self.lane) if part is not None)


def shapes_of(weights: ExpertWeights) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of every projection there is."""
    named = {name: getattr(weights, name) for name in ("gate", "up", "down")}
    return {name: (int(p.shape[1]), int(p.shape[2])) for name, p in named.items() if p is not None}


def first_experts(lora: ExpertLora | None, experts: int) -> ExpertLora | None:
    """The engine's part of all experts' matrices, as views."""
    return None if lora is None else lora.map(lambda tensor: tensor[:experts])


def as_adapter(matrices: Mapping[str, torch.Tensor], scale: float) -> ExpertLora:
    """Experts without a gate have no matrices for it."""
    return ExpertLora(
        gate_a=matrices.get("gate_a"),
        gate_b=matrices.get("gate_b"),
        up_a=matrices["up_a"],
        up_b=matrices["up_b"],
        down_a=matrices["down_a"],
        down_b=matrices["down_b"],
        scale=scale,
    )
