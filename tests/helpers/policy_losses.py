"""Losses of single tokens straight from their formulas: float64, token by token, differentiable."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from kt_ray.batch import TokenLoss

LOSSES = {
    "cross_entropy": TokenLoss("cross_entropy"),
    "importance_sampling": TokenLoss("importance_sampling"),
    "ppo": TokenLoss("ppo"),
    "ppo narrow": TokenLoss("ppo", clip_low=0.95, clip_high=1.02),
    "cispo": TokenLoss("cispo"),
    "cispo narrow": TokenLoss("cispo", clip_low=0.9, clip_high=1.1),
    "dro": TokenLoss("dro", beta=0.3),
    "gspo": TokenLoss("gspo"),
    "gspo wide": TokenLoss("gspo", clip_low=0.5, clip_high=2.0),
}
OWN = {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0), "gspo": (0.9997, 1.0004)}


def row_inputs(loss: TokenLoss, logps: Tensor, seed: int) -> dict[str, np.ndarray]:
    """float32 [n] each, for a row's n labels, which had about these log-probabilities."""
    rng = np.random.default_rng(seed)
    n = len(logps)
    if loss.name == "cross_entropy":
        return {"weights": rng.choice([0.0, 0.25, 1.0], n).astype(np.float32)}
    moved = logps.detach().numpy() + rng.normal(0, 0.2, n)
    given = {"logprobs": moved.astype(np.float32), "advantages": rng.normal(0, 1, n).astype(np.float32)}
    given["advantages"][n // 2] = 0
    if loss.name == "gspo":
        given["sequence_ratio_mask"] = (np.arange(n) % 3 > 0).astype(np.float32)
    return given


def by_the_formula(loss: TokenLoss, logps: Tensor, given: Mapping[str, np.ndarray]) -> Tensor:
    """Summed loss of a row's labels [n]."""
    logps = logps.double()
    inputs = {name: values.astype(float).tolist() for name, values in given.items()}
    if loss.name == "cross_entropy":
        return -sum((w * p for w, p in zip(inputs["weights"], logps, strict=True)), torch.zeros(()))
    low, high = OWN.get(loss.name, (0.0, 0.0))
    low = low if loss.clip_low is None else loss.clip_low
    high = high if loss.clip_high is None else loss.clip_high
    sequence = 0.0
    if loss.name == "gspo":
        marked = [i for i, m in enumerate(inputs["sequence_ratio_mask"]) if m]
        sequence = sum(float(logps[i].detach()) - inputs["logprobs"][i] for i in marked) / len(marked)
    total = torch.zeros((), dtype=torch.float64)
    for logp, old, advantage in zip(logps, inputs["logprobs"], inputs["advantages"], strict=True):
        ratio = torch.exp(logp - old)
        if loss.name == "gspo":
            ratio = math.exp(sequence) * torch.exp(logp - logp.detach())
        size = float(ratio.detach())
        bounded = min(max(size, low), high)
        if loss.name == "dro":
            total = total - (logp * advantage - loss.beta / 2 * (logp - old) ** 2)
        elif loss.name == "cispo":
            total = total - bounded * logp * advantage
        elif loss.name == "importance_sampling" or size * advantage <= bounded * advantage:
            total = total - ratio * advantage
        else:  # ppo and gspo where the bound is the lesser
            total = total - bounded * advantage
    return total
