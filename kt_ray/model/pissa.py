"""PiSSA (Meng et al. 2024, arXiv:2404.02948): adapters begin as the principal part of their weight.

W = U S Vᵀ; with s the adapter's scale, B0 = U_r √(S_r / s) and A0 = √(S_r / s) V_rᵀ, and the frozen weight
becomes W − s B0 A0, rounded to its type. What was trained is relative to that weight; an adapter of rank 2r
says the same relative to W: s (B A − B0 A0).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kt_ray.config.schema import LoraConfig


@torch.no_grad()
def take_principal(linear: Any, a: Tensor, b: Tensor, lora: LoraConfig, key: str) -> None:
    """Move the r largest singular values of a linear module's weight [out, in] into its adapter, in place.

    Args:
        a: [r, in]. b: [out, r].
        lora: its init says how: "pissa" = a full SVD, "pissa_niter_16" = 16 rounds of subspace iteration.
        key: names the random start of the iteration.
    """
    weight = linear.weight.data
    whole = weight.to(a.device, torch.float32)  # a streamed layer's is in host memory
    rank = min(a.shape[0], *whole.shape)
    if lora.init == "pissa":
        u, s, vh = torch.linalg.svd(whole, full_matrices=False)
    else:
        u, s, vh = _low_rank(whole, rank, int(lora.init.rpartition("_")[2]), key)
    root = (s[:rank] / lora.scale).sqrt()
    a.zero_()[:rank] = root[:, None] * vh[:rank]  # a rank beyond the weight's adds nothing
    b.zero_()[:, :rank] = u[:, :rank] * root
    weight.copy_(whole - lora.scale * (b @ a))


def _low_rank(whole: Tensor, rank: int, rounds: int, key: str) -> tuple[Tensor, Tensor, Tensor]:
    """torch.svd_lowrank's U, S and Vᵀ, from a start that is drawn on the CPU.

    After few rounds the result depends on the start, and a run may go on on another kind of device.
    """
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "little")
    tall = whole if whole.shape[0] >= whole.shape[1] else whole.T
    start = torch.randn(tall.shape[1], rank, generator=torch.Generator().manual_seed(seed))
    q = torch.linalg.qr(tall @ start.to(tall)).Q
    for _ in range(rounds):
        q = torch.linalg.qr(tall.T @ q).Q
        q = torch.linalg.qr(tall @ q).Q
    u, s, vh = torch.linalg.svd(q.T @ tall, full_matrices=False)
    u = q @ u
    return (u, s, vh) if tall is whole else (vh.T, s, u.T)


def doubled_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of a parameter in the adapter of rank 2r."""
    return (2 * shape[0], shape[1]) if name.endswith(".lora_A.weight") else (shape[0], 2 * shape[1])


def relative_to_weights(now: Mapping[str, Tensor], initial: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The adapter of rank 2r for the unchanged weights: A over A0, B beside −B0; its alpha is doubled too."""
    return {
        name: torch.cat([value, initial[name].to(value)])
        if name.endswith(".lora_A.weight")
        else torch.cat([value, -initial[name].to(value)], dim=1)
        for name, value in now.items()
    }
