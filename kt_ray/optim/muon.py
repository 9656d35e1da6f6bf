"""Muon for LoRA's matrices, all experts of a layer at once.

Keller Jordan's Muon (2024) with the update's size after Moonshot's "Muon is Scalable for LLM Training"
(arXiv:2502.16982): 0.2 sqrt(max(rows, columns)) per unit of learning rate, the size of AdamW's steps, so that
its rates and weight decay carry over. torch.optim.Muon takes one matrix at a time and multiplies in bfloat16;
here stacks of matrices go through one batched product in float32 (their smaller side is the rank).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

# Keller Jordan's quintic: singular values of all sizes come near 1 in five rounds.
_QUINTIC = (3.4445, -4.7750, 2.0315)
_ROUNDS = 5
_EPS = 1e-7
_BATCH = 1 << 24  # elements orthogonalised at a time: scratch stays small beside the parameters


def orthogonalised(matrices: Tensor) -> Tensor:
    """Every matrix U S Vᵀ of [.., a, b] as about U Vᵀ, by Newton and Schulz's iteration; zeros stay zeros."""
    x = matrices.mT if matrices.shape[-2] > matrices.shape[-1] else matrices
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=_EPS)
    a, b, c = _QUINTIC
    for _ in range(_ROUNDS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if matrices.shape[-2] > matrices.shape[-1] else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; decoupled weight decay. State: "momentum", set by the owner.

    A matrix whose gradient is zero (an expert without tokens in a step) is decayed, and its momentum fades,
    but takes no step: an orthogonalised update has its full size however old and small the momentum is, so
    an expert that no token reaches any more would go on in its last direction for ever. AdamW's steps fade
    with its moments, and are torch's.

    Args:
        params: parameters [.., rows, columns], or groups of them.
        momentum: share of the old momentum that is kept.
    """

    def __init__(self, params: Any, lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of every parameter that has a gradient; returns None."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        rows, columns = parameter.shape[-2:]
        size = group["lr"] * 0.2 * math.sqrt(max(rows, columns))
        matrices = max(1, _BATCH // (rows * columns))
        assert parameter.grad is not None
        momentum: Tensor = self.state[parameter]["momentum"]
        stacks = (t.view(-1, rows, columns).split(matrices) for t in (parameter, parameter.grad, momentum))
        for values, grad, average in zip(*stacks, strict=True):
            average.lerp_(grad, 1 - group["momentum"])
            update = orthogonalised(grad.lerp(average, group["momentum"]))
            update *= grad.flatten(1).any(dim=1)[:, None, None]
            values.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-size)
