"""LoRA's dropout outside the experts, with the counter-based mask of kt_ray.native.dropout_hash."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kt_ray.checkpoint.names import layer_of
from kt_ray.native.dropout_hash import keep_mask, row_hash


def module_stream(name: str) -> int:
    """Stream of a module outside the routed experts, from its Hugging Face name."""
    return zlib.crc32(name.encode("utf-8"))


@dataclass
class DropoutContext:
    """What a stage's dropout modules read: which rows the next layer call holds.

    Hashes of the rows are made for all modules of a layer at once, which takes no more kernels than for one.
    """

    seed: int = 0  # the run's seed
    step: int = 0  # optimizer step
    enabled: bool = False  # False in evaluation
    # int64 [N] sample id of each row of the layer's input (b·s rows, padding included)
    samples_N: Tensor | None = None
    positions_N: Tensor | None = None  # int64 [N] position of each row
    # by layer: streams of its M modules; hashes [M, N] of the rows
    _streams: dict[int | None, list[int]] = field(default_factory=dict, init=False)
    _hashes: dict[int | None, Tensor] = field(default_factory=dict, init=False)

    @contextmanager
    def rows(
        self, seed: int, step: int, samples_N: Tensor, positions_N: Tensor, *, enabled: bool = True
    ) -> Iterator[None]:
        """Inside, these are the rows of what is computed."""
        self.seed, self.step, self.enabled = seed, step, enabled
        self.samples_N, self.positions_N = samples_N, positions_N
        try:
            yield
        finally:
            self.enabled, self.samples_N, self.positions_N = False, None, None
            self._hashes.clear()

    def add(self, layer: int | None, stream: int) -> int:
        """A module of that layer (None = of none); returns its number there."""
        streams = self._streams.setdefault(layer, [])
        streams.append(stream)
        return len(streams) - 1

    def row_hash(self, layer: int | None, number: int) -> Tensor:
        """int32 [N], of the module that `add` gave this number."""
        if layer not in self._hashes:
            assert self.samples_N is not None and self.positions_N is not None, "inside `rows`"
            self._hashes[layer] = row_hash(
                self.seed, self.step, self._streams[layer], self.samples_N, self.positions_N
            )
        return self._hashes[layer][number]

    def __deepcopy__(self, memo: dict[int, Any]) -> DropoutContext:
        return self  # a copied layer keeps reading its stage's context


class CounterDropout(nn.Module):
    """Replaces a LoRA layer's `lora_dropout`. Rows, and their hashes, are the stage's context's.

    Args:
        p: drop probability, 0 < p < 1.
        name: Hugging Face name of the adapted module; selects the stream.
    """

    def __init__(self, p: float, name: str, context: DropoutContext) -> None:
        super().__init__()
        self.p = p
        self.name = name
        self.context = context
        self._layer = layer_of(name)
        self._number = context.add(self._layer, module_stream(name))

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements of x [..., features], whose leading axes flatten to the context's N rows."""
        context = self.context
        if not context.enabled:
            return x
        if context.samples_N is None or context.positions_N is None:
            raise RuntimeError(f"dropout of {self.name} ran outside a layer call of its stage")
        rows, features = x.numel() // x.shape[-1], x.shape[-1]
        if rows != context.samples_N.numel():
            raise RuntimeError(
                f"dropout of {self.name} saw {rows} rows instead of {context.samples_N.numel()}: "
                "this module does not act on one row per token, so it cannot be a LoRA target with dropout"
            )
        row_N = context.row_hash(self._layer, self._number)
        keep = keep_mask(row_N, features, self.p).view(x.shape)
        # `where` saves only the bool mask for backward
        return torch.where(keep, x * (1.0 / (1.0 - self.p)), torch.zeros((), dtype=x.dtype, device=x.device))
