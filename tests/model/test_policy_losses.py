"""Losses of single tokens at the head: values, gradients, their bits, and the most probable tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kt_ray.batch import IGNORE, MicroBatch, TokenLoss
from kt_ray.config.schema import LoraConfig
from kt_ray.model.policy_losses import token_loss, token_losses
from kt_ray.model.token_loss import Head
from tests.helpers.policy_losses import LOSSES, by_the_formula, row_inputs
from tests.helpers.stages import make_stages

Checkpoint = Callable[..., Path]
LENGTHS = (7, 4, 6)  # of ids: a label for each but the first
WIDTH = max(LENGTHS)


@pytest.fixture(params=["norm and head", "own forward"])
def head(checkpoint: Checkpoint, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Head:
    found = make_stages(checkpoint("deepseek_v3"), (0, 2, 3), LoraConfig(rank=2))[1].head
    assert found is not None and found.norm is not None
    if request.param == "own forward":
        monkeypatch.setattr(found, "norm", None)
    return found


@pytest.fixture
def h() -> Tensor:
    return torch.randn(len(LENGTHS), WIDTH, 48, generator=torch.Generator().manual_seed(0))


def batch() -> MicroBatch:
    """Rows whose labels are not their next inputs; the middle of the last one has none."""
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 96, (len(LENGTHS), WIDTH))
    labels[np.arange(WIDTH)[None] >= np.array(LENGTHS)[:, None]] = IGNORE
    labels[:, 0] = IGNORE
    labels[2, 3] = IGNORE
    ids = rng.integers(0, 96, labels.shape)
    return MicroBatch(ids, labels, np.array(LENGTHS), np.arange(len(LENGTHS)))


def labelled(rows: MicroBatch, row: int) -> np.ndarray:
    return np.flatnonzero(rows.labels[row, 1:] != IGNORE)


def expected_logps(head: Head, h: Tensor, rows: MicroBatch) -> list[Tensor]:
    """By row, float64 [n]; differentiable in h."""
    logps = head.logits(h).double().log_softmax(dim=-1)
    found = []
    for row in range(len(LENGTHS)):
        at = torch.from_numpy(labelled(rows, row))
        found.append(logps[row, at, torch.from_numpy(rows.labels[row, 1:])[at]])
    return found


def with_inputs(rows: MicroBatch, logps: list[Tensor], loss: TokenLoss) -> MicroBatch:
    """Beside labels only: NaN is what nothing may read."""
    inputs: dict[str, np.ndarray] = {}
    for row, values in enumerate(logps):
        for name, given in row_inputs(loss, values, seed=row).items():
            whole = inputs.setdefault(name, np.full(rows.labels.shape, np.nan, dtype=np.float32))
            whole[row, labelled(rows, row)] = given
    return dataclasses.replace(rows, loss_inputs=inputs)


@pytest.mark.parametrize("chunk", [0, 3])
@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient(
    head: Head, h: Tensor, name: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "loss_chunk", chunk)
    loss, leaf = LOSSES[name], h.clone().requires_grad_()
    logps = expected_logps(head, leaf, batch())
    rows = with_inputs(batch(), logps, loss)
    expected = torch.zeros((), dtype=torch.float64)
    for row, values in enumerate(logps):
        given = {n: v[row, labelled(rows, row)] for n, v in rows.loss_inputs.items()}
        expected = expected + by_the_formula(loss, values, given)
    (expected / 3).backward()
    before = h.clone()
    value, grad, found, tops = token_loss(head, h, rows, loss, 1 / 3)
    assert value == pytest.approx(float(expected.detach()), rel=1e-5, abs=1e-6)
    assert leaf.grad is not None and leaf.grad.any()
    torch.testing.assert_close(grad, leaf.grad, rtol=1e-4, atol=1e-6)
    assert torch.equal(h, before) and tops is None
    assert found.dtype == np.float32 and found.shape == (len(LENGTHS), WIDTH - 1)
    for row, values in enumerate(logps):
        np.testing.assert_allclose(found[row, labelled(rows, row)], values.detach().numpy(), rtol=1e-5)
        assert not np.delete(found[row], labelled(rows, row)).any()
    again = token_loss(head, h, rows, loss, None)  # an evaluation
    assert again[0] == value and again[1] is None and np.array_equal(again[2], found)


@pytest.mark.parametrize("chunk", [0, 1, 3, "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weighted_cross_entropy_has_the_bits_of_the_mean_token_loss(
    checkpoint: Checkpoint, h: Tensor, dtype: torch.dtype, chunk: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = str(dtype).removeprefix("torch.")
    head = make_stages(checkpoint("deepseek_v3"), (0, 2, 3), LoraConfig(rank=2), dtype=kind)[1].head
    assert head is not None
    monkeypatch.setattr(head, "loss_chunk", chunk)
    rows, h = batch(), h.to(dtype)
    trained = np.random.default_rng(2).random(rows.labels.shape) < 0.6
    answers = np.where(trained, rows.labels, IGNORE)
    count, total = int((answers[:, 1:] != IGNORE).sum()), int((rows.labels[:, 1:] != IGNORE).sum())
    assert 3 < count < total - 3
    expected_sum, expected = head.loss(h, torch.from_numpy(answers), 1 / count)
    sizes: list[int] = []
    project = head.lm_head.forward
    monkeypatch.setattr(head.lm_head, "forward", lambda x: (sizes.append(len(x)), project(x))[1])
    ones, share = (np.zeros(rows.labels.shape, dtype=np.float32) for _ in range(2))
    ones[:, :-1], share[:, :-1] = trained[:, 1:], trained[:, 1:] * np.float32(1 / count)
    for weights, scale in ((share, 1.0), (ones, 1 / count)):
        weighted = dataclasses.replace(rows, loss_inputs={"weights": weights})
        value, grad, _, _ = token_loss(head, h, weighted, LOSSES["cross_entropy"], scale)
        assert grad is not None and expected is not None and torch.equal(grad, expected)
        assert value * count * scale == pytest.approx(expected_sum, rel=1e-6)
    assert sizes[: len(sizes) // 2] == {
        1: [1] * total,
        3: [*sizes_of(count, 3), *sizes_of(total - count, 3)],
    }.get(chunk, [count, total - count])


def sizes_of(count: int, chunk: int) -> list[int]:
    return [min(chunk, count - i) for i in range(0, count, chunk)]


def test_without_weights_every_label_counts(head: Head, h: Tensor) -> None:
    rows = batch()
    expected_sum, expected = head.loss(h, torch.from_numpy(rows.labels), 1.0)
    value, grad, _, _ = token_loss(head, h, rows, LOSSES["cross_entropy"], 1.0)
    assert value == pytest.approx(expected_sum, rel=1e-9)
    assert grad is not None and expected is not None and torch.equal(grad, expected)


def test_weights_of_0_leave_the_log_probabilities(head: Head, h: Tensor) -> None:
    rows = dataclasses.replace(batch(), loss_inputs={"weights": np.zeros((3, 7), dtype=np.float32)})
    value, grad, found, _ = token_loss(head, h, rows, LOSSES["cross_entropy"], 1.0)
    assert value == 0.0 and grad is not None and not grad.any()
    assert np.array_equal(found, token_loss(head, h, batch(), LOSSES["cross_entropy"], None)[2])


@pytest.mark.parametrize("name", ["ppo", "cispo", "gspo"])
def test_bounds_of_single_tokens(head: Head, h: Tensor, name: str) -> None:
    """They are in place of the loss's."""
    logps = expected_logps(head, h, batch())
    wanted = TokenLoss(name, clip_low=0.9, clip_high=1.05)
    rows = with_inputs(batch(), logps, wanted)
    bounds = {
        f"clip_{side}_threshold": np.full(rows.labels.shape, value, dtype=np.float64)
        for side, value in (("low", 0.9), ("high", 1.05))
    }
    single = dataclasses.replace(rows, loss_inputs={**rows.loss_inputs, **bounds})
    expected, own = (token_loss(head, h, rows, loss, 1.0) for loss in (wanted, TokenLoss(name)))
    found = token_loss(head, h, single, TokenLoss(name), 1.0)
    assert found[0] == expected[0] != own[0]
    assert found[1] is not None and expected[1] is not None and torch.equal(found[1], expected[1])


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo"])
def test_a_token_without_advantage_counts_nothing_whatever_it_was(name: str) -> None:
    """Clients fill masked tokens with large negative numbers."""
    logps = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    inputs = {"logprobs": [-99999.0, -2.5], "advantages": [0.0, 1.5]}
    inputs |= {"clip_low_threshold": [0.8] * 2, "clip_high_threshold": [1.2] * 2}
    given = {key: torch.tensor(values, dtype=torch.float64) for key, values in inputs.items()}
    losses = token_losses(logps, given, TokenLoss(name))
    losses.sum().backward()
    assert losses[0] == 0 and losses[1] != 0 and logps.grad is not None and logps.grad[0] == 0


def test_a_row_without_marked_tokens_has_ratio_1(head: Head, h: Tensor) -> None:
    rows = with_inputs(batch(), expected_logps(head, h, batch()), LOSSES["gspo"])
    rows.loss_inputs["sequence_ratio_mask"][1] = 0
    rows.loss_inputs["advantages"][[0, 2]] = 0
    value, _, _, _ = token_loss(head, h, rows, LOSSES["gspo"], None)
    assert value == pytest.approx(-float(np.nansum(rows.loss_inputs["advantages"][1])), rel=1e-6)


@pytest.mark.parametrize("chunk", [0, 3])
@pytest.mark.parametrize("name", ["cross_entropy", "gspo"])
def test_most_probable_tokens(
    head: Head, h: Tensor, name: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "loss_chunk", chunk)
    rows = with_inputs(batch(), expected_logps(head, h, batch()), LOSSES[name])
    _, _, found, tops = token_loss(head, h, rows, LOSSES[name], None, top=96)
    assert tops is not None
    ids, logps = tops
    assert ids.dtype == np.int64 and logps.dtype == np.float32 and ids.shape == (len(LENGTHS), WIDTH - 1, 96)
    expected = head.logits(h).double().log_softmax(dim=-1).topk(96)
    for row in range(len(LENGTHS)):
        at = labelled(rows, row)
        assert np.array_equal(ids[row, at], expected.indices[row, at].numpy())
        np.testing.assert_allclose(logps[row, at], expected.values[row, at].numpy(), rtol=1e-5)
        of_label = ids[row, at] == rows.labels[row, 1:][at, None]
        assert np.array_equal(logps[row, at][of_label], found[row, at])
        assert (np.delete(ids[row], at, 0) == -1).all() and not np.delete(logps[row], at, 0).any()


@pytest.mark.parametrize(
    ("loss", "gone", "message"),
    [
        ("ppo", "logprobs", r"the loss ppo needs loss_inputs\['logprobs'\], \[3, 7\]"),
        ("dro", "advantages", r"the loss dro needs loss_inputs\['advantages'\]"),
        ("gspo", "sequence_ratio_mask", r"the loss gspo needs loss_inputs\['sequence_ratio_mask'\]"),
        ("reinforce", "", "'reinforce' is no loss of single tokens; there are cross_entropy, "),
    ],
)
def test_what_is_missing_is_named(head: Head, h: Tensor, loss: str, gone: str, message: str) -> None:
    names = {"logprobs", "advantages", "sequence_ratio_mask"} - {gone}
    inputs = {name: np.ones((3, 7), dtype=np.float32) for name in names}
    with pytest.raises(ValueError, match=message):
        token_loss(head, h, dataclasses.replace(batch(), loss_inputs=inputs), TokenLoss(loss), None)


def test_inputs_that_do_not_fit_are_refused(head: Head, h: Tensor) -> None:
    short = dataclasses.replace(batch(), loss_inputs={"weights": np.ones((3, 6), dtype=np.float32)})
    with pytest.raises(ValueError, match=r"loss_inputs\['weights'\] is \[3, 6\]; required \[3, 7\]"):
        token_loss(head, h, short, LOSSES["cross_entropy"], None)
    packed = dataclasses.replace(batch(), positions_BS=np.zeros((3, 7), dtype=np.int64))
    with pytest.raises(ValueError, match="packed rows are several documents"):
        token_loss(head, h, packed, LOSSES["gspo"], None)
