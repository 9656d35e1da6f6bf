"""What an engine computes with: tensors grouped by meaning, nothing copied.

Shapes: E local experts, H hidden size, I intermediate size, r LoRA rank.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class ExpertWeights:
    """The frozen weights of one layer's local experts, contiguous, all float32 or all bfloat16.

    Attributes:
        gate: [E, I, H].
        up: [E, I, H].
        down: [E, H, I].
        layer: index of the layer in the model; part of the dropout stream and of messages.
        expert_ids: global number of each local expert, as long as E.
        activation: "silu", the only one this engine knows.
    """

    gate: Tensor
    up: Tensor
    down: Tensor
    layer: int
    expert_ids: tuple[int, ...]
    activation: str = "silu"


@dataclass(frozen=True)
class ExpertLora:
    """One adapter on gate, up and down of every local expert, float32 contiguous: W + scale B A.

    The same class holds gradients (`zeros_like`), accumulated in float32.

    Attributes:
        gate_a: [E, r, H].
        gate_b: [E, I, r].
        up_a: [E, r, H].
        up_b: [E, I, r].
        down_a: [E, r, I].
        down_b: [E, H, r].
        scale: alpha / r, or alpha / sqrt(r) with rsLoRA.
    """

    gate_a: Tensor
    gate_b: Tensor
    up_a: Tensor
    up_b: Tensor
    down_a: Tensor
    down_b: Tensor
    scale: float

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The six matrices in the order of the fields."""
        return self.gate_a, self.gate_b, self.up_a, self.up_b, self.down_a, self.down_b

    def zeros_like(self) -> ExpertLora:
        """An adapter of zeros of the same shape: where gradients are gathered."""
        gate_a, gate_b, up_a, up_b, down_a, down_b = (torch.zeros_like(t) for t in self.tensors())
        return ExpertLora(gate_a, gate_b, up_a, up_b, down_a, down_b, self.scale)


LORA_FIELDS = tuple(f.name for f in fields(ExpertLora) if f.name != "scale")


@dataclass(frozen=True)
class DropoutSpec:
    """LoRA dropout, a pure function of these and of layer, expert, projection, sample, position.

    Attributes:
        p: probability of dropping an element, 0 <= p < 1.
        seed: 64-bit seed of the run.
        step: optimizer step.
    """

    p: float
    seed: int
    step: int
