"""Bytes of shared memory in which an actor's messages lie at once, worst case. Pure functions.

    attention worker  x, or dy in float32, of all tokens of its replica; between stages also hidden states and
                      their gradients; adapters and their gradients on their way to and from worker 0
    expert actor      y, then dx, of all replicas' tokens, in the type of rule.experts.answers

Twice that of messages of a pass: blocks of several sizes come and go, and first fit leaves gaps between them.
"""

from __future__ import annotations

from kt_ray.dims.model_dims import ModelDims
from kt_ray.dims.weight_formats import ELEMENT_BYTES


def worker_staging(
    dims: ModelDims, tokens: int, *, sent: int, stages: int, workers: int, adapters: int, dtype: str
) -> int:
    """Args: tokens: of a wave of one replica. sent: those of them that go to expert actors. adapters: LoRA
    parameters that the worker sends at once."""
    neighbours = dims.hidden_streams * (2 if stages > 1 else 0)
    passing = 2 * dims.hidden_size * (4 * sent + tokens * neighbours * ELEMENT_BYTES[dtype])
    return passing + (4 * adapters if workers > 1 else 0)


def expert_staging(dims: ModelDims, tokens: int, answers: str) -> int:
    """Args: tokens: of a wave of all replicas."""
    return 2 * tokens * dims.expert_width * ELEMENT_BYTES[answers]
