"""Dropout whose mask is a pure function of (seed, step, module, sample, position, element).

A mask does not depend on how rows are laid out in micro-batches, on which worker computes them, or
on how often they are computed; so recomputation, resume and every placement see the same one. The
C++ experts implement the same definition (docs/numerics).

All arithmetic is on 32-bit unsigned integers, with fmix the finaliser of MurmurHash3:

    combine(h, v) = fmix(31 h + v + 0x9E3779B9)
    row           = combine folded from 0 over
                    [seed low, seed high, step, stream, sample low, sample high, position]
    u_j           = fmix(row + (j + 1) 0x9E3779B9)
    element j is kept iff u_j >= floor(p 2^32), and a kept value is scaled by 1 / (1 - p)
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9
_EXPERT_TAG = 0x45585054  # "EXPT"
PROJECTIONS = {"gate": 0, "up": 1, "down": 2}


def fmix(h: int) -> int:
    """MurmurHash3's 32-bit finaliser."""
    h &= _MASK
    h ^= h >> 16
    h = (h * 0x85EBCA6B) & _MASK
    h ^= h >> 13
    h = (h * 0xC2B2AE35) & _MASK
    return h ^ (h >> 16)


def combine(h: int, v: int) -> int:
    """Fold one 32-bit value into a hash."""
    return fmix((h * 31 + (v & _MASK) + _GOLDEN) & _MASK)


def module_stream(name: str) -> int:
    """Stream of a module outside the routed experts, from its Hugging Face name."""
    return zlib.crc32(name.encode("utf-8"))


def expert_stream(layer: int, expert: int, projection: str) -> int:
    """Stream of one projection ("gate", "up" or "down") of one routed expert (global id)."""
    return combine(combine(combine(_EXPERT_TAG, layer), expert), PROJECTIONS[projection])


def _signed(value: int) -> int:
    """The int32 with the bits of this 32-bit unsigned value."""
    value &= _MASK
    return value - (1 << 32) if value >= 1 << 31 else value


def _fmix_(h: Tensor) -> Tensor:
    """`fmix` on int32 tensors, in place. Products wrap; shifts are made logical by a mask."""
    h ^= (h >> 16) & 0xFFFF
    h *= _signed(0x85EBCA6B)
    h ^= (h >> 13) & 0x7FFFF
    h *= _signed(0xC2B2AE35)
    h ^= (h >> 16) & 0xFFFF
    return h


def row_hash(seed: int, step: int, stream: int, samples_N: Tensor, positions_N: Tensor) -> Tensor:
    """Hash of every row.

    Args:
        samples_N: int64 [N] sample ids.
        positions_N: int64 [N] positions within the sample.

    Returns:
        int32 [N]: the bits of the unsigned 32-bit hashes.
    """
    h = 0
    for value in (seed & _MASK, (seed >> 32) & _MASK, step, stream):
        h = combine(h, value)
    low = (samples_N & _MASK).to(torch.int64)
    high = (samples_N >> 32) & _MASK
    # int64 -> int32 keeps the low 32 bits
    h_N = torch.full_like(samples_N, _signed(h), dtype=torch.int32)
    for v_N in (low, high, positions_N):
        h_N = _fmix_(h_N * 31 + (v_N & _MASK).to(torch.int32) + _signed(_GOLDEN))
    return h_N


def keep_mask(row_N: Tensor, features: int, p: float) -> Tensor:
    """Which elements of each row survive.

    Args:
        row_N: int32 [N] from `row_hash`.
        features: elements per row.
        p: drop probability.

    Returns:
        bool [N, features].
    """
    j_F = torch.arange(1, features + 1, dtype=torch.int64, device=row_N.device)
    offset_F = (j_F * _GOLDEN & _MASK).to(torch.int32)
    u_NF = _fmix_(row_N[:, None] + offset_F[None, :])
    threshold = int(p * 2**32)
    # unsigned comparison by moving both sides into the signed range
    u_NF ^= _signed(1 << 31)
    return u_NF >= _signed(threshold ^ (1 << 31))


@dataclass
class DropoutContext:
    """What a stage's dropout modules read: which rows the next layer call holds.

    Attributes:
        seed: the run's seed.
        step: optimizer step.
        enabled: False in evaluation.
        samples_N: int64 [N] sample id of each row of the layer's input (b·s rows, padding included).
        positions_N: int64 [N] position of each row.
    """

    seed: int = 0
    step: int = 0
    enabled: bool = False
    samples_N: Tensor | None = None
    positions_N: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> DropoutContext:
        return self  # a copied layer keeps reading its stage's context


class CounterDropout(nn.Module):
    """Replaces a LoRA layer's `lora_dropout`. Stateless: the rows come from the context.

    Args:
        p: drop probability, 0 < p < 1.
        name: Hugging Face name of the adapted module; selects the stream.
        context: shared by all modules of a stage.
    """

    def __init__(self, p: float, name: str, context: DropoutContext) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise ValueError(f"dropout probability must be in [0, 1), got {p}")
        self.p = p
        self.name = name
        self.stream = module_stream(name)
        self.context = context

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements of x [..., features], whose leading axes flatten to the context's N rows."""
        context = self.context
        if self.p == 0.0 or not context.enabled:
            return x
        if context.samples_N is None or context.positions_N is None:
            raise RuntimeError(f"dropout of {self.name} ran outside a layer call of its stage")
        rows, features = x.numel() // x.shape[-1], x.shape[-1]
        if rows != context.samples_N.numel():
            raise RuntimeError(
                f"dropout of {self.name} saw {rows} rows instead of {context.samples_N.numel()}: "
                "this module does not act on one row per token, so it cannot be a LoRA target with dropout"
            )
        row_N = row_hash(context.seed, context.step, self.stream, context.samples_N, context.positions_N)
        keep = keep_mask(row_N, features, self.p).view(x.shape)
        # `where` saves only the bool mask for backward
        return torch.where(keep, x * (1.0 / (1.0 - self.p)), torch.zeros((), dtype=x.dtype, device=x.device))

    def extra_repr(self) -> str:
        return f"p={self.p}, stream=0x{self.stream:08x}"
