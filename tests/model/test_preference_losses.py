"""Preference losses against trl's and against the papers' formulas, through the objective that stages use."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from kt_ray.batch import IGNORE, MicroBatch, Objective
from kt_ray.model.preference_losses import orpo_losses, preference_loss
from kt_ray.model.token_loss import Head, Slopes
from tests.helpers.trl_losses import CASES, GOLDEN, PAIRS, Batch, batch, trl_loss


class LogitsHead:
    """A head whose hidden state is the logits."""

    device = torch.device("cpu")

    def token_losses(self, h: Tensor, targets: Tensor, slopes: Slopes | None) -> tuple[Tensor, Tensor | None]:
        with_grad = slopes is not None
        leaf = h.detach().clone().requires_grad_(with_grad)
        with torch.set_grad_enabled(with_grad):
            losses = torch.nn.functional.cross_entropy(
                leaf.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORE
            )
            grad = torch.autograd.grad(losses.sum(), leaf)[0] if with_grad else None
        return losses.detach().double().view(targets.shape), grad


HEAD = cast(Head, LogitsHead())


def summed(logits: Tensor, data: Batch) -> Tensor:
    """float64 [2B] log-probabilities of the answers."""
    logps = logits[:, :-1].double().log_softmax(dim=-1).gather(2, data.ids[:, 1:, None])[..., 0]
    return (logps * data.mask[:, 1:]).sum(dim=1)


def micro_batch(data: Batch, order: list[int]) -> MicroBatch:
    """The rows in this order, with reference log-probabilities."""
    labels = data.ids.masked_fill(data.mask == 0, IGNORE)
    signs = np.array([1] * PAIRS + [-1] * PAIRS)
    return MicroBatch(
        data.ids[order].numpy(),
        labels[order].numpy(),
        data.lengths[order].numpy(),
        np.array(order),
        signs[order],
        summed(data.reference, data)[order].numpy(),
    )


def objective(case: dict[str, Any], data: Batch) -> Objective:
    kl = 0.0
    if case["stage"] == "kto":
        # trl gives each row the answer of the row before it; here both are whole rows moved by one
        moved = Batch(
            data.logits,
            data.reference,
            data.kl_policy,
            data.kl_reference,
            data.ids.roll(1, 0),
            data.mask.roll(1, 0),
            data.lengths.roll(1, 0),
        )
        kl = max(0.0, float((summed(data.kl_policy, moved) - summed(data.kl_reference, moved)).mean()))
    options = {k: v for k, v in case.items() if k != "stage"}
    return Objective(
        stage=case["stage"],
        units=2 * PAIRS if case["stage"] == "kto" else PAIRS,
        nll_tokens=int((data.lengths[:PAIRS] - 1).sum()),
        kl=kl,
        **options,
    )


def whole(case: dict[str, Any], data: Batch, parts: int = 1) -> tuple[float, Tensor]:
    """(the step's loss, its gradient at the logits), computed in `parts` micro-batches of whole pairs."""
    goal = objective(case, data)
    order = [row for pair in range(PAIRS) for row in (pair, PAIRS + pair)]
    size = len(order) // parts
    loss, grad = 0.0, torch.zeros_like(data.logits)
    for begin in range(0, len(order), size):
        rows = order[begin : begin + size]
        value, part, logps = preference_loss(HEAD, data.logits[rows], micro_batch(data, rows), goal, True)
        assert part is not None
        np.testing.assert_allclose(logps, summed(data.logits, data)[rows].numpy(), rtol=1e-6)
        loss += value / goal.units
        grad[rows] += part
    return loss, grad


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_equals_trls_recorded_values(name: str, parts: int) -> None:
    recorded = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert recorded["trl"] == "1.16.0"
    loss, grad = whole(CASES[name], batch(list(CASES).index(name)), parts)
    assert loss == pytest.approx(recorded[name]["loss"], rel=1e-5)
    assert grad.norm(dim=(1, 2)).tolist() == pytest.approx(recorded[name]["gradient"], rel=1e-4, abs=1e-7)


def test_simpo_needs_no_reference() -> None:
    data = batch(40)
    rows = micro_batch(data, [0, PAIRS])
    goal = objective(CASES["simpo"], data)
    with_one, _, _ = preference_loss(HEAD, data.logits[[0, PAIRS]], rows, goal, False)
    without, _, _ = preference_loss(
        HEAD, data.logits[[0, PAIRS]], dataclasses.replace(rows, reference=None), goal, False
    )
    assert with_one == without


@pytest.mark.parametrize("name", CASES)
def test_equals_the_installed_trl(name: str) -> None:
    pytest.importorskip("trl")
    data = batch(list(CASES).index(name))
    loss, grad = whole(CASES[name], data)
    data.logits.requires_grad_()
    theirs = trl_loss(CASES[name], data)
    (expected,) = torch.autograd.grad(theirs, data.logits)
    assert loss == pytest.approx(float(theirs.detach()), rel=1e-5)
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-7)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def by_the_papers(case: dict[str, Any], data: Batch) -> float:
    """The loss in scalar float64 arithmetic, straight from the formulas."""
    policy, reference = (summed(x, data).tolist() for x in (data.logits, data.reference))
    lengths = data.mask.sum(dim=1).tolist()
    beta, smooth = case["beta"], case.get("label_smoothing", 0.0)
    total = 0.0
    if case["stage"] == "kto":
        kl = objective(case, data).kl
        for i in range(2 * PAIRS):
            ratio = policy[i] - reference[i]
            if i < PAIRS:
                total += case.get("desirable_weight", 1.0) * (1 - sigmoid(beta * (ratio - kl)))
            else:
                total += case.get("undesirable_weight", 1.0) * (1 - sigmoid(beta * (kl - ratio)))
        return total / (2 * PAIRS)
    for won in range(PAIRS):
        lost = won + PAIRS
        margin = beta * ((policy[won] - reference[won]) - (policy[lost] - reference[lost]))
        if case["stage"] == "orpo":
            p, q = (math.exp(policy[i] / lengths[i]) for i in (won, lost))
            total -= beta * math.log(sigmoid(math.log(p / (1 - p)) - math.log(q / (1 - q))))
        elif case["kind"] == "simpo":
            mean = [policy[i] / lengths[i] for i in (won, lost)]
            total -= math.log(sigmoid(beta * mean[0] - beta * mean[1] - case["gamma"]))
        elif case["kind"] == "hinge":
            total += max(0.0, 1 - margin)
        elif case["kind"] == "ipo":
            gain = [(policy[i] - reference[i]) / lengths[i] for i in (won, lost)]
            total += (gain[0] - gain[1] - 1 / (2 * beta)) ** 2
        elif case["kind"] == "robust":
            clean, flipped = -math.log(sigmoid(margin)), -math.log(sigmoid(-margin))
            total += ((1 - smooth) * clean - smooth * flipped) / (1 - 2 * smooth)
        else:
            total -= (1 - smooth) * math.log(sigmoid(margin)) + smooth * math.log(sigmoid(-margin))
    total /= PAIRS
    if case["stage"] == "orpo":
        logps = data.logits[:PAIRS, :-1].double().log_softmax(dim=-1).gather(2, data.ids[:PAIRS, 1:, None])
        valid = torch.arange(1, data.ids.shape[1])[None, :] < data.lengths[:PAIRS, None]
        total -= float(logps[..., 0][valid].mean())
    return total


@pytest.mark.parametrize(
    "case",
    [*CASES.values(), {"stage": "dpo", "kind": "sigmoid", "beta": 0.3, "label_smoothing": 0.1}],
    ids=[*CASES, "dpo conservative"],
)
def test_equals_the_papers_formulas(case: dict[str, Any]) -> None:
    for number in (20, 21):
        data = batch(number)
        loss, _ = whole(case, data)
        assert loss == pytest.approx(by_the_papers(case, data), rel=1e-6)


@pytest.mark.parametrize("name", ["dpo sigmoid", "orpo", "kto weights", "simpo"])
def test_gradient_is_that_of_the_loss(name: str) -> None:
    """Against finite differences in the direction of the gradient."""
    data = batch(30)
    _, grad = whole(CASES[name], data)
    step = 1e-2 / float(grad.norm())
    moved = [
        Batch(data.logits + sign * step * grad, *(getattr(data, f) for f in list(vars(data))[1:]))
        for sign in (1, -1)
    ]
    up, down = (by_the_papers(CASES[name], m) for m in moved)
    assert (up - down) / (2 * step) == pytest.approx(float(grad.norm()) ** 2, rel=1e-3)


def test_orpo_near_certainty_stays_finite() -> None:
    chosen = torch.tensor([-1e-7, -1e-3, -30.0, 0.0, -3.0], requires_grad=True)
    pairs = torch.stack([chosen, torch.tensor([-2.0, -1e-6, -0.5, -3.0, 0.0])], dim=1).flatten()
    losses = orpo_losses(pairs, Objective("orpo", 3))
    losses.sum().backward()
    assert torch.isfinite(losses).all() and chosen.grad is not None and torch.isfinite(chosen.grad).all()


def test_a_parted_pair_is_refused() -> None:
    data = batch(0)
    with pytest.raises(ValueError, match="pair must follow each other"):
        preference_loss(
            HEAD, data.logits, micro_batch(data, list(range(6))), objective(CASES["orpo"], data), True
        )
