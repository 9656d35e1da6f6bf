"""Rows of one call of the engine: several senders' as one tensor, and memory for what goes back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kt_ray.native import Engine

Alloc = Callable[[Sequence[int], torch.dtype], Tensor]  # memory for a result, any content


def new_memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="cpu")


class Scratch:
    """One tensor's memory, used again by the next: fresh pages would be touched in every call."""

    def __init__(self) -> None:
        self._memory = new_memory((0,), torch.uint8)

    def __call__(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Any content; what was returned before is overwritten."""
        size = math.prod(shape) * dtype.itemsize
        if self._memory.numel() < size:
            self._memory = new_memory((0,), torch.uint8)  # gives the old one back first
            self._memory = new_memory((size,), torch.uint8)
        return self._memory[:size].view(dtype).view(tuple(shape))


class CallRows:
    """
    Args:
        answers: type in which y and dx are sent.
    """

    def __init__(self, engine: Engine, answers: str) -> None:
        self._engine = engine
        self._answers = answers
        self._exact = Scratch()  # y or dx before it is rounded
        self._joined: dict[str, Scratch] = {}  # name of a tensor -> all replicas' rows of it

    def joined(self, name: str, parts: Sequence[Tensor], kept: Tensor | None = None) -> Tensor:
        """Parts [T_i, ...] of one of a call's tensors, one after another.

        A single one is read where it lies: its sender leaves the memory alone until it has the answer.

        Args:
            kept: memory that is to have them as well, maybe rounded; None = nothing keeps them.
        """
        if kept is not None and kept.dtype == parts[0].dtype:
            return self._engine.join(parts, kept)
        whole = parts[0]
        if len(parts) > 1:
            shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
            whole = self._engine.join(parts, self._joined.setdefault(name, Scratch())(shape, whole.dtype))
        if kept is not None and kept.dtype == torch.bfloat16:
            self._engine.join([whole], kept)
        elif kept is not None:
            kept.copy_(whole)
        return whole

    def result(self, shape: Sequence[int], alloc: Alloc) -> Tensor:
        """Float32 memory for y or dx: where the answer lies, unless it is rounded on its way there."""
        return (alloc if self._answers == "float32" else self._exact)(shape, torch.float32)

    def answer(self, exact_TH: Tensor, alloc: Alloc) -> Tensor:
        """y or dx as it is sent."""
        if self._answers == "float32":
            return exact_TH
        return self._engine.join([exact_TH], alloc(exact_TH.shape, torch.bfloat16))
