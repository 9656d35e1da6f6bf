"""A pass's preference loss at the head: per-row log-probabilities, losses, and the gradient at h.

Both rows of a pair lie in one micro-batch (kt_ray.data.batches), so the loss of a pair and its derivative are
known where the logits are, in one walk through the head: the head differentiates each token's loss once, with
factor 1, and the tokens' gradients are then weighted by what the preference loss says (decisions/013).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kt_ray.batch import IGNORE, MicroBatch, Objective
from kt_ray.model.preference_losses import dpo_losses, kto_losses, orpo_losses
from kt_ray.model.token_loss import Head, shifted_targets


def preference_loss(
    head: Head, h: Tensor, batch: MicroBatch, objective: Objective | None, with_grad: bool
) -> tuple[float, Tensor | None, np.ndarray]:
    """A micro-batch's share of the step's loss.

    Args:
        h: [b, s, *state_shape] output of the last layer.
        batch: with `signs`, and `reference` for DPO and KTO.
        objective: None = log-probabilities alone.
        with_grad: also the gradient.

    Returns:
        (its summed loss: over all micro-batches, divided by objective.units, the step's loss; or its summed
        token losses without an objective; dH of the step's loss like h, or None; float64 [b] the rows'
        log-probabilities)
    """
    labels = torch.from_numpy(batch.labels).to(h.device)
    trained = shifted_targets(labels)
    targets = trained
    everywhere: Tensor | None = None
    if objective is not None and objective.stage == "orpo":
        everywhere = _chosen_tokens(batch).to(h.device)
        targets = torch.where(everywhere != IGNORE, everywhere, trained)
    with_grad = with_grad and objective is not None
    nll_BS, unit = head.token_losses(h, targets, with_grad)
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
    weight = (weight_BS / objective.units).float()
    shaped = weight.reshape(*weight.shape, *[1] * (unit.dim() - 2))
    return value, (unit.float() * shaped).to(h.dtype), logps.cpu().numpy()


def _losses(logps: Tensor, tokens: Tensor, batch: MicroBatch, objective: Objective) -> Tensor:
    if objective.stage == "kto":
        return kto_losses(
            logps,
            _reference(batch, logps),
            torch.from_numpy(batch.signs > 0).to(logps.device),
            objective.kl,
            beta=objective.beta,
            desirable_weight=objective.desirable_weight,
            undesirable_weight=objective.undesirable_weight,
        )
    if (batch.signs[0::2] <= 0).any() or (batch.signs[1::2] >= 0).any() or len(batch.signs) % 2:
        raise ValueError(f"rows of a pair must follow each other, chosen first; signs {batch.signs.tolist()}")
    if objective.stage == "orpo":
        mean = logps / tokens
        return orpo_losses(mean[0::2], mean[1::2], beta=objective.beta)
    reference = _reference(batch, logps)
    return dpo_losses(
        logps[0::2],
        logps[1::2],
        reference[0::2],
        reference[1::2],
        beta=objective.beta,
        kind=objective.kind,
        label_smoothing=objective.label_smoothing,
        chosen_tokens=tokens[0::2],
        rejected_tokens=tokens[1::2],
    )


def _reference(batch: MicroBatch, like: Tensor) -> Tensor:
    assert batch.reference is not None, "the reference pass comes first"
    return torch.from_numpy(batch.reference).to(like)


def _chosen_tokens(batch: MicroBatch) -> Tensor:
    """Targets of every valid position of the chosen rows, prompts included; IGNORE elsewhere."""
    ids = torch.from_numpy(batch.input_ids)
    valid = torch.arange(ids.shape[1])[None, :] < torch.from_numpy(batch.lengths)[:, None]
    chosen = torch.from_numpy(batch.signs > 0)[:, None]
    return shifted_targets(torch.where(valid & chosen, ids, torch.full_like(ids, IGNORE)))
