"""Where a NaN or infinity of the loss comes from, as far as a stage kept what went through it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kt_ray.errors import BadStep
from kt_ray.model.state import GroupState


def not_finite(total: float, values: Sequence[float], state: GroupState, group: int, step: int) -> BadStep:
    """The error of a group whose loss is not finite.

    Args:
        total: the group's loss. values: of its micro-batches. state: what the last stage kept of the group.
        step: of the optimizer, counted from 0.
    """
    origin = "the head or the last layer"
    for layer in sorted(state.kept):
        if not all(bool(torch.isfinite(h).all()) for h in state.kept[layer]):
            origin = f"layer {layer - 1} or before" if layer > 0 else "the embedding"
            break
    bad = next((i for i, value in enumerate(values) if not math.isfinite(value)), 0)
    samples = [int(s) for s in state.micro[bad].batch.sample_ids]
    rows = f"rows {samples[:8]}" + (", ..." if len(samples) > 8 else "")
    return BadStep(
        f"the loss of step {step + 1} is {total}; the step was not applied",
        where=f"{origin}, group {group}, micro-batch {bad}, {rows}",
        required="a finite number",
        remedy="lower optim.lr or optim.max_grad_norm and continue from the last checkpoint with "
        "trainer.resume=latest; if it is the first step, look at these rows with mode=preview",
    )
