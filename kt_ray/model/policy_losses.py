"""Losses of single tokens' log-probabilities, for reinforcement learning, as the Tinker API defines them.

`token_losses` has them as pure functions of log-probabilities. `token_loss` applies them at the head: a
token's slope is known as soon as its log-probability is, so autograd gets it in the walk that finds both.

docs/training.md#losses-of-single-tokens has the formulas, their inputs (`MicroBatch.loss_inputs`), the bounds
of clip and the papers: ppo Schulman et al. 2017, cispo MiniMax 2025, dro Richemond et al. 2024 (by tokens),
gspo Zheng et al. 2025 (GSPO-token).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from kt_ray.batch import IGNORE, MicroBatch, TokenLoss, Tops
from kt_ray.model.token_loss import Head, Slopes, shifted_targets

_NEEDED = {
    "cross_entropy": (),
    "importance_sampling": ("logprobs", "advantages"),
    "ppo": ("logprobs", "advantages"),
    "cispo": ("logprobs", "advantages"),
    "dro": ("logprobs", "advantages"),
    "gspo": ("logprobs", "advantages", "sequence_ratio_mask"),
}


def token_losses(logps: Tensor, inputs: Mapping[str, Tensor], loss: TokenLoss) -> Tensor:
    """Loss of every token, like logps and differentiable in it.

    With "reference_logprobs" and "kl_weights" the weighted divergence from the reference is added, by
    Schulman's estimate k3 (joschu.net/blog/kl-approx.html).

    Args:
        logps: [N] labels' log-probabilities.
        inputs: [N] each, complete (the bounds of clip included); for gspo "logprobs" is `sequence_old`.
    """
    if "kl_weights" in inputs:
        distance = inputs["reference_logprobs"] - logps
        divergence = torch.exp(distance) - distance - 1
        rest = {name: values for name, values in inputs.items() if name != "kl_weights"}
        return token_losses(logps, rest, loss) + inputs["kl_weights"] * divergence
    if loss.name == "cross_entropy":
        return -inputs["weights"] * logps
    old, advantages = inputs["logprobs"], inputs["advantages"]
    if loss.name == "dro":
        return 0.5 * loss.beta * (logps - old) ** 2 - logps * advantages
    # Where nothing is learned, whatever the old value: inf * 0 would be NaN.
    ratio = torch.exp(torch.where(advantages == 0, 0.0, logps - old))
    if loss.name == "importance_sampling":
        return -ratio * advantages
    clipped = ratio.clamp(inputs["clip_low_threshold"], inputs["clip_high_threshold"])
    if loss.name == "cispo":
        return -clipped.detach() * logps * advantages
    return -torch.minimum(ratio * advantages, clipped * advantages)


def sequence_old(logps: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """Log-probabilities against which every token of a row has the row's ratio, [b, s]: gspo's `old` for ppo.

    Args:
        logps, old: [b, s]. mask: bool [b, s], the tokens that the ratio is of; a row with none has ratio 1.
    """
    differences = torch.where(mask, logps - old, 0.0)
    mean = differences.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return logps - mean


def token_loss(
    head: Head, h: Tensor, batch: MicroBatch, loss: TokenLoss, scale: float | None, top: int = 0
) -> tuple[float, Tensor | None, np.ndarray, Tops | None]:
    """A micro-batch's summed loss.

    Tokens of weight 0 go through the head in chunks of their own, so `cross_entropy` with weights of 0 and w
    gives the gradient that `Head.loss` gives with scale w and labels where the weight is w, to the bit.

    Args:
        h: [b, s, *state_shape] output of the last layer (not changed).
        batch: with `loss_inputs`.
        scale: factor of the gradient; None = no gradient.
        top: how many of the most probable tokens are wanted; at most the vocabulary.

    Returns:
        (the sum; the gradient of scale · sum, like h, or None; float32 [b, s - 1] log-probability of every
        label, 0 where there is none; the most probable tokens, or None)

    Raises:
        ValueError: an input is missing or has another shape.
    """
    targets = shifted_targets(torch.from_numpy(batch.labels).to(head.device))
    inputs = _inputs(batch, loss, head.device)
    labelled = targets != IGNORE
    idle = labelled & (inputs["weights"] == 0).view(targets.shape)
    tops = _Tops(targets, top) if top else None

    def walk(slopes: Slopes | None) -> tuple[Tensor, Tensor | None]:
        """float64 [b, s] log-probabilities; dH."""
        look = None if tops is None else tops.look
        nll, grad = head.token_losses(h, targets.masked_fill(idle, IGNORE), slopes, look)
        rest, _ = head.token_losses(h, targets.masked_fill(~idle, IGNORE), None, look)
        return -(nll + rest), grad

    def slopes(rows: Tensor, losses: Tensor) -> Tensor:
        leaf = (-losses.double()).requires_grad_()
        total = token_losses(leaf, {name: values[rows] for name, values in inputs.items()}, loss).sum()
        (slope,) = torch.autograd.grad(total, leaf)
        return (slope * -(scale or 0.0)).to(losses.dtype)

    wanted = None if scale is None else slopes
    if loss.name == "gspo":  # which needs a row's tokens before it knows the slope of any
        logps, grad = walk(None)
        mask = labelled & (inputs["sequence_ratio_mask"] != 0).view(targets.shape)
        inputs["logprobs"] = sequence_old(logps, inputs["logprobs"].view(targets.shape), mask).flatten()
    if loss.name != "gspo" or wanted is not None:
        logps, grad = walk(wanted)
    at = labelled.flatten()
    values = token_losses(logps.flatten()[at], {name: v[at] for name, v in inputs.items()}, loss)
    found = None if tops is None else tops.found()
    return float(values.sum()), grad, logps[:, :-1].float().cpu().numpy(), found


def _inputs(batch: MicroBatch, loss: TokenLoss, device: torch.device) -> dict[str, Tensor]:
    """What the loss reads, float64 [b·s] each; weights 1 and the bounds of clip where there are none."""
    if loss.name not in _NEEDED:
        raise ValueError(f"{loss.name!r} is no loss of single tokens; there are {', '.join(_NEEDED)}")
    if loss.name == "gspo" and batch.positions_BS is not None:
        raise ValueError("gspo's ratio is that of a row, and packed rows are several documents")
    shape, given = batch.input_ids.shape, batch.loss_inputs
    for name in _NEEDED[loss.name]:
        if name not in given:
            raise ValueError(f"the loss {loss.name} needs loss_inputs[{name!r}], {list(shape)}")
    low, high = loss.bounds
    # only cross_entropy has weights: elsewhere an advantage is one
    defaults = {
        "weights": 1.0,
        "clip_low_threshold": low,
        "clip_high_threshold": high,
    }
    inputs = {}
    divergence = ("reference_logprobs", "kl_weights") if "kl_weights" in given else ()
    for name in (*_NEEDED[loss.name], *divergence, *defaults):
        if name not in given or (name == "weights" and loss.name != "cross_entropy"):
            values = np.full(shape, defaults[name])
        else:
            values = given[name]
        if values.shape != shape:
            raise ValueError(f"loss_inputs[{name!r}] is {list(values.shape)}; required {list(shape)}")
        inputs[name] = torch.from_numpy(values).to(device).double().flatten()
    return inputs


class _Tops:
    """The most probable tokens, gathered chunk by chunk.

    Args:
        targets: [b, s]. count: of tokens at each position.
    """

    def __init__(self, targets: Tensor, count: int) -> None:
        b, s = targets.shape
        self._targets, self._shape = targets.flatten(), (b, s, count)
        self._ids = torch.full((b * s, count), -1, device=targets.device)
        self._logps = torch.zeros(b * s, count, device=targets.device)

    def look(self, rows: Tensor, logits: Tensor, losses: Tensor) -> None:
        """A chunk: its loss is the normaliser less the target's logit."""
        highest, self._ids[rows] = logits.topk(self._shape[2])
        target = logits.gather(1, self._targets[rows, None])
        self._logps[rows] = highest.float() - target.float() - losses[:, None]

    def found(self) -> Tops:
        ids, logps = (t.view(self._shape)[:, :-1].cpu().numpy() for t in (self._ids, self._logps))
        return ids, logps
