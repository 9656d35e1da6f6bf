"""Preference losses as pure functions of log-probabilities, differentiable, equal to trl's (version 1.16).

`preference_loss` applies them at the head. Both rows of a pair lie in one micro-batch (kt_ray.data.batches),
so the loss of a pair and its derivative are known where the logits are, in one walk through the head: the
head differentiates each token's loss once, with factor 1, and the tokens' gradients are then weighted by what
the preference loss says (decisions/013).

A row's log-probability is the sum of its answer's token log-probabilities; "reference" is the model without
adapters. N rows, P pairs; float64 or float32.

    DPO   Rafailov et al. 2023 (arXiv:2305.18290); hinge: Zhao et al. 2023; ipo: Azar et al. 2023
          (arXiv:2310.12036), length-normalised as trl has it; robust: Chowdhury et al. 2024
          (arXiv:2403.00409); label smoothing of sigmoid: Mitchell's conservative DPO
    SimPO Meng et al. 2024 (arXiv:2405.14734), equation 6
    ORPO  Hong et al. 2024 (arXiv:2403.07691)
    KTO   Ethayarajh et al. 2024 (arXiv:2402.01306)
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from kt_ray.batch import IGNORE, MicroBatch, Objective
from kt_ray.model.token_loss import Head, shifted_targets, uniform


def dpo_losses(ratio: Tensor, tokens: Tensor, objective: Objective) -> Tensor:
    """Loss of every pair, [P].

    Args:
        ratio: [N] log-probabilities, the reference's subtracted: chosen and rejected rows by turns.
        tokens: [N] answers' lengths (ipo).
        objective: `beta` is the strength of the reference, for ipo the paper's tau; `label_smoothing` the
            share of pairs that are taken to be the wrong way round (sigmoid and robust).
    """
    won, lost = ratio[0::2], ratio[1::2]
    beta, smoothing, kind = objective.beta, objective.label_smoothing, objective.kind
    margin = beta * (won - lost)
    if kind == "sigmoid":
        losses = -logsigmoid(margin) * (1 - smoothing)
        return losses - logsigmoid(-margin) * smoothing if smoothing else losses
    if kind == "robust":
        clean, flipped = -logsigmoid(margin), -logsigmoid(-margin)
        return ((1 - smoothing) * clean - smoothing * flipped) / (1 - 2 * smoothing)
    if kind == "hinge":
        return torch.relu(1 - margin)
    if kind == "ipo":
        mean = won / tokens[0::2].clamp(min=1) - lost / tokens[1::2].clamp(min=1)
        return (mean - 1 / (2 * beta)) ** 2
    raise ValueError(f"{kind!r} is no kind of DPO")


def simpo_losses(mean: Tensor, objective: Objective) -> Tensor:
    """Loss of every pair, [P].

    Args:
        mean: [N] *mean* log-probabilities per answer token: chosen and rejected rows by turns.
        objective: `beta` times the mean is a row's reward, `gamma` the margin that the rewards should have.
    """
    return -logsigmoid(objective.beta * (mean[0::2] - mean[1::2]) - objective.gamma)


def orpo_losses(mean: Tensor, objective: Objective) -> Tensor:
    """ORPO's odds-ratio term of every pair, [P]; the chosen rows' mean token loss is added to its mean.

    Args:
        mean: [N] *mean* log-probabilities per answer token: chosen and rejected rows by turns.
    """
    mean = mean.clamp(max=-1e-8)  # a probability that rounds to 1 has no odds
    chosen, rejected = mean[0::2], mean[1::2]
    odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
    return -objective.beta * logsigmoid(odds)


def kto_losses(ratio: Tensor, wanted: Tensor, objective: Objective) -> Tensor:
    """Loss of every row, [N].

    Args:
        ratio: [N] log-probabilities, the reference's subtracted. wanted: bool [N].
        objective: `kl` is the step's mean log-ratio of answers to other rows' prompts, at least 0.
    """
    beta, kl = objective.beta, objective.kl
    gained = objective.desirable_weight * (1 - torch.sigmoid(beta * (ratio - kl)))
    avoided = objective.undesirable_weight * (1 - torch.sigmoid(beta * (kl - ratio)))
    return torch.where(wanted, gained, avoided)


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 − exp(x)) for x < 0 without cancellation (Mächler 2012)."""
    near = x > -math.log(2)
    # each branch sees only arguments that are good for it: the other's gradient would be NaN times zero
    small = torch.where(near, x, torch.full_like(x, -0.5))
    large = torch.where(near, torch.full_like(x, -1.0), x)
    return torch.where(near, torch.log(-torch.expm1(small)), torch.log1p(-torch.exp(large)))


def preference_loss(
    head: Head, h: Tensor, batch: MicroBatch, objective: Objective | None, with_grad: bool
) -> tuple[float, Tensor | None, np.ndarray]:
    """A micro-batch's share of the step's loss.

    Args:
        h: [b, s, *state_shape] output of the last layer.
        batch: with `signs`, and `reference` where the objective has one.
        objective: None = log-probabilities alone.
        with_grad: also the gradient.

    Returns:
        (its summed loss: over all micro-batches, divided by objective.units, the step's loss; or its summed
        token losses without an objective; dH of the step's loss like h, or None; float64 [b] the rows'
        log-probabilities)
    """
    targets = trained = shifted_targets(torch.from_numpy(batch.labels).to(head.device))
    everywhere: Tensor | None = None
    if objective is not None and objective.stage == "orpo":
        everywhere = _chosen_tokens(batch).to(head.device)
        targets = torch.where(everywhere != IGNORE, everywhere, trained)
    with_grad = with_grad and objective is not None
    nll_BS, unit = head.token_losses(h, targets, uniform(1.0) if with_grad else None)
    answer_BS = (trained != IGNORE).double()
    logps = -(nll_BS * answer_BS).sum(dim=1)
    if objective is None:
        return float(-logps.sum()), None, logps.cpu().numpy()
    leaf = logps.detach().requires_grad_()
    with torch.enable_grad():
        total = _losses(leaf, answer_BS.sum(dim=1), batch, objective).sum()
    (slope,) = torch.autograd.grad(total, leaf)
    value = float(total.detach())
    weight_BS = -slope[:, None] * answer_BS
    if everywhere is not None:
        # The mean over the chosen rows' tokens, as a share of `units` like the rest.
        share = objective.units / max(1, objective.nll_tokens)
        chosen_BS = (everywhere != IGNORE).double()
        value += float((nll_BS * chosen_BS).sum()) * share
        weight_BS = weight_BS + chosen_BS * share
    if not with_grad:
        return value, None, logps.cpu().numpy()
    assert unit is not None
    weight = (weight_BS / objective.units).float().to(h.device)
    shaped = weight.reshape(*weight.shape, *[1] * (unit.dim() - 2))
    return value, (unit.float() * shaped).to(h.dtype), logps.cpu().numpy()


def _losses(logps: Tensor, tokens: Tensor, batch: MicroBatch, objective: Objective) -> Tensor:
    if objective.stage == "kto":
        wanted = torch.from_numpy(batch.signs > 0).to(logps.device)
        return kto_losses(logps - _reference(batch, logps), wanted, objective)
    if (batch.signs[0::2] <= 0).any() or (batch.signs[1::2] >= 0).any() or len(batch.signs) % 2:
        raise ValueError(f"rows of a pair must follow each other, chosen first; signs {batch.signs.tolist()}")
    if objective.stage == "orpo":
        return orpo_losses(logps / tokens, objective)
    if objective.kind == "simpo":
        return simpo_losses(logps / tokens, objective)
    return dpo_losses(logps - _reference(batch, logps), tokens, objective)


def _reference(batch: MicroBatch, like: Tensor) -> Tensor:
    assert batch.reference is not None, "the reference pass comes first"
    return torch.from_numpy(batch.reference).to(like)


def _chosen_tokens(batch: MicroBatch) -> Tensor:
    """Targets of every valid position of the chosen rows, prompts included; IGNORE elsewhere."""
    ids = torch.from_numpy(batch.input_ids)
    valid = torch.arange(ids.shape[1])[None, :] < torch.from_numpy(batch.lengths)[:, None]
    chosen = torch.from_numpy(batch.signs > 0)[:, None]
    return shifted_targets(torch.where(valid & chosen, ids, torch.full_like(ids, IGNORE)))
