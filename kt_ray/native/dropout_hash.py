"""The LoRA dropout mask in torch: a pure function of (seed, step, stream, sample, position, element).

A stream is a module outside the experts, or one projection of one expert. A mask does not depend on how rows
are laid out in micro-batches, on which worker computes them, or on how often they are computed; so
recomputation, resume and every placement see the same one. The C++ engine implements the same definition
(docs/numerics).

All arithmetic is on 32-bit unsigned integers, with fmix the finaliser of MurmurHash3:

    combine(h, v) = fmix(31 h + v + 0x9E3779B9)
    row           = combine folded from 0 over
                    [seed low, seed high, step, stream, sample low, sample high, position]
    u_j           = fmix(row + (j + 1) 0x9E3779B9)
    element j is kept iff u_j >= floor(p 2^32), and a kept value is scaled by 1 / (1 - p)

Shapes: N rows, F features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kt_ray.native.tensors import DropoutSpec

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9
_EXPERT_TAG = 0x45585054  # "EXPT"
GATE, UP, DOWN = 0, 1, 2


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


def expert_stream(layer: int, expert: int, projection: int) -> int:
    """Stream of one projection (GATE, UP or DOWN) of one routed expert (global id)."""
    return combine(combine(combine(_EXPERT_TAG, layer), expert), projection)


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


def row_hash(
    seed: int, step: int, stream: int | Sequence[int], samples_N: Tensor, positions_N: Tensor
) -> Tensor:
    """Hash of every row.

    Args:
        stream: of all rows; or B of them, one for each line of rows [B, N].
        samples_N: int64 [N] sample ids.
        positions_N: int64 [N] positions within the sample.

    Returns:
        int32 [N]: the bits of the unsigned 32-bit hashes.
    """
    h = 0
    for value in (seed & _MASK, (seed >> 32) & _MASK, step):
        h = combine(h, value)
    if isinstance(stream, int):
        h_N = torch.full_like(samples_N, _signed(combine(h, stream)), dtype=torch.int32)
    else:
        lines = torch.tensor([[_signed(combine(h, own))] for own in stream], dtype=torch.int32)
        h_N = lines.to(samples_N.device, non_blocking=True)
    # int64 -> int32 keeps the low 32 bits
    for v_N in (samples_N, samples_N >> 32, positions_N):
        h_N = _fmix_(h_N * 31 + (v_N & _MASK).to(torch.int32) + _signed(_GOLDEN))
    return h_N


def element_hash(row_N: Tensor, features: int) -> Tensor:
    """int32 [N, F]: the bits of u_j for every row from `row_hash` and feature."""
    j_F = torch.arange(1, features + 1, dtype=torch.int64, device=row_N.device)
    offset_F = (j_F * _GOLDEN & _MASK).to(torch.int32)
    return _fmix_(row_N.unsqueeze(-1) + offset_F)


def keep_mask(row_N: Tensor, features: int, p: float) -> Tensor:
    """Which elements of each row are kept: bool [N, F]; row_N int32 from `row_hash`, p = drop probability."""
    u_NF = element_hash(row_N, features)
    # unsigned comparison by moving both sides into the signed range
    u_NF ^= _signed(1 << 31)
    return u_NF >= _signed(int(p * 2**32) ^ (1 << 31))


def dropout_hash(
    spec: DropoutSpec,
    layer: int,
    expert: int | Sequence[int],
    projection: int,
    keys_N: Tensor,
    features: int,
) -> Tensor:
    """The 32-bit hash of every element of an expert projection's input.

    Args:
        layer, expert, projection: see `expert_stream`; B experts, one for each line of keys [B, N].
        keys_N: int64, sample * 2**32 + position.
        features: F.

    Returns:
        int64 [N, F] in [0, 2**32); an element is kept iff its hash is >= floor(p * 2**32).
    """
    stream: int | list[int]
    if isinstance(expert, int):
        stream = expert_stream(layer, expert, projection)
    else:
        stream = [expert_stream(layer, own, projection) for own in expert]
    # The engine's keys have 32 bits for the sample.
    row_N = row_hash(spec.seed, spec.step, stream, (keys_N >> 32) & _MASK, keys_N & _MASK)
    return element_hash(row_N, features).to(torch.int64) & _MASK
