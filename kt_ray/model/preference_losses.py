"""Preference losses as pure functions of log-probabilities, differentiable, equal to trl's (version 1.16).

A row's log-probability is the sum of its answer's token log-probabilities; "reference" is the model without
adapters. N rows, P pairs; float64 or float32.

    DPO   Rafailov et al. 2023 (arXiv:2305.18290); hinge: Zhao et al. 2023; ipo: Azar et al. 2023
          (arXiv:2310.12036), length-normalised as trl has it; robust: Chowdhury et al. 2024
          (arXiv:2403.00409); label smoothing of sigmoid: Mitchell's conservative DPO
    ORPO  Hong et al. 2024 (arXiv:2403.07691)
    KTO   Ethayarajh et al. 2024 (arXiv:2402.01306)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

DPO_KINDS = ("sigmoid", "hinge", "ipo", "robust")


def dpo_losses(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float,
    kind: str = "sigmoid",
    label_smoothing: float = 0.0,
    chosen_tokens: Tensor | None = None,
    rejected_tokens: Tensor | None = None,
) -> Tensor:
    """Loss of every pair, [P].

    Args:
        chosen, rejected: [P] the policy's log-probabilities. reference_chosen, reference_rejected: likewise.
        beta: strength of the reference; for ipo the paper's tau.
        kind: one of DPO_KINDS.
        label_smoothing: share of pairs that are taken to be the wrong way round (sigmoid and robust).
        chosen_tokens, rejected_tokens: [P] answers' lengths (ipo).
    """
    won, lost = chosen - reference_chosen, rejected - reference_rejected
    margin = beta * (won - lost)
    if kind == "sigmoid":
        losses = -logsigmoid(margin) * (1 - label_smoothing)
        return losses - logsigmoid(-margin) * label_smoothing if label_smoothing else losses
    if kind == "robust":
        clean, flipped = -logsigmoid(margin), -logsigmoid(-margin)
        return ((1 - label_smoothing) * clean - label_smoothing * flipped) / (1 - 2 * label_smoothing)
    if kind == "hinge":
        return torch.relu(1 - margin)
    if kind == "ipo":
        assert chosen_tokens is not None and rejected_tokens is not None
        mean = won / chosen_tokens.clamp(min=1) - lost / rejected_tokens.clamp(min=1)
        return (mean - 1 / (2 * beta)) ** 2
    raise ValueError(f"{kind!r} is not one of {DPO_KINDS}")


def orpo_losses(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """ORPO's odds-ratio term of every pair, [P]; the chosen rows' mean token loss is added to its mean.

    Args:
        chosen, rejected: [P] *mean* log-probabilities per answer token.
    """
    odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
    return -beta * logsigmoid(odds)


def kto_losses(
    logps: Tensor,
    reference: Tensor,
    wanted: Tensor,
    kl: float,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Loss of every row, [N].

    Args:
        logps, reference: [N]. wanted: bool [N].
        kl: `kto_kl` of the step.
    """
    ratio = logps - reference
    gained = desirable_weight * (1 - torch.sigmoid(beta * (ratio - kl)))
    avoided = undesirable_weight * (1 - torch.sigmoid(beta * (kl - ratio)))
    return torch.where(wanted, gained, avoided)


def kto_kl(policy: Tensor, reference: Tensor) -> float:
    """KTO's reference point: the mean of log-ratios of answers to other rows' prompts, at least 0."""
    return max(0.0, float((policy - reference).mean())) if policy.numel() else 0.0


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 − exp(x)) for x < 0 without cancellation (Mächler 2012)."""
    near = x > -math.log(2)
    # each branch sees only arguments that are good for it: the other's gradient would be NaN times zero
    small = torch.where(near, x, torch.full_like(x, -0.5))
    large = torch.where(near, torch.full_like(x, -1.0), x)
    return torch.where(near, torch.log(-torch.expm1(small)), torch.log1p(-torch.exp(large)))
