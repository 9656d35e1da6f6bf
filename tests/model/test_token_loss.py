"""Losses and dH: chunked or not, through norm and head or the family's own forward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kt_ray.batch import IGNORE
from kt_ray.config.schema import LoraConfig
from kt_ray.model.stage import Stage
from kt_ray.model.token_loss import chunked_cross_entropy, plain_cross_entropy, shifted_targets
from kt_ray.placement.memory import GPU_LOGITS_BYTES, LOGITS_BYTES, logit_rows
from tests.helpers.stages import make_stages

Checkpoint = Callable[..., Path]


def test_shift() -> None:
    labels = torch.tensor([[1, 2, IGNORE, 4]])
    assert shifted_targets(labels).tolist() == [[2, IGNORE, 4, IGNORE]]


@pytest.mark.parametrize(
    ("setting", "rows", "vocab", "expected"),
    [
        (0, 8192, 129280, 8192),
        ("auto", 512, 1000, 512),
        ("auto", 8192, 129280, LOGITS_BYTES // (129280 * 4)),
        (100, 8192, 1000, 100),
        (100, 7, 1000, 7),
        ("auto", 0, 1000, 1),
    ],
)
def test_logit_rows(setting: int | str, rows: int, vocab: int, expected: int) -> None:
    assert logit_rows(setting, rows, vocab, gpu=False) == expected
    larger = GPU_LOGITS_BYTES // LOGITS_BYTES
    if setting == "auto" and expected < rows:
        assert expected < logit_rows(setting, larger * rows, vocab, gpu=True) <= larger * (expected + 1)
    else:
        assert logit_rows(setting, rows, vocab, gpu=True) == expected


def test_deepspeeds_loss_is_used_and_exact() -> None:
    pytest.importorskip("deepspeed")
    loss = chunked_cross_entropy()
    assert loss is not plain_cross_entropy
    logits = torch.randn(5, 11, requires_grad=True)
    targets = torch.tensor([1, IGNORE, 3, 4, 10])
    torch.testing.assert_close(loss(logits, targets), plain_cross_entropy(logits, targets))


@pytest.fixture(scope="module")
def stage(checkpoint: Checkpoint) -> Stage:
    return make_stages(checkpoint("deepseek_v3"), (0, 2, 3), LoraConfig(rank=2))[1]


@pytest.mark.parametrize("chunk", [0, 1, 3, "auto"])
@pytest.mark.parametrize("whole", [False, True])
def test_loss_and_gradient(
    stage: Stage, chunk: int | str, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = stage.head
    assert head is not None and head.norm is not None
    norm, lm_head = head.norm, head.lm_head
    monkeypatch.setattr(head, "loss_chunk", chunk)
    sizes: list[int] = []
    if whole:  # as in a family that scales its logits or has several streams
        monkeypatch.setattr(head, "norm", None)
    project = lm_head.forward
    monkeypatch.setattr(lm_head, "forward", lambda x: (sizes.append(x.shape[-2]), project(x))[1])
    torch.manual_seed(0)
    h = torch.randn(2, 6, 48)
    labels = torch.randint(0, 96, (2, 6))
    labels[0, :3] = labels[1, 4:] = IGNORE
    leaf = h.clone().requires_grad_()
    logits = lm_head(norm(leaf))
    expected = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).double(), labels[:, 1:].flatten(), ignore_index=IGNORE, reduction="sum"
    )
    (expected / 17).backward()
    before = h.clone()
    total, grad = head.loss(h, labels, 1 / 17)
    # Either way has the logits of one chunk at a time, and of trained tokens alone.
    assert sizes[1:] == {1: [1] * 6, 3: [3, 3]}.get(chunk, [6])
    assert torch.equal(h, before)
    assert total == pytest.approx(float(expected.detach()), rel=1e-6)
    torch.testing.assert_close(grad, leaf.grad, rtol=1e-5, atol=1e-7)
    assert head.loss(h, labels, None) == (pytest.approx(total, rel=1e-6), None)
    torch.testing.assert_close(head.logits(h), logits.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("whole", [False, True])
def test_no_trained_token(stage: Stage, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stage.head is not None
    if whole:
        monkeypatch.setattr(stage.head, "norm", None)
    total, grad = stage.head.loss(torch.randn(1, 4, 48), torch.full((1, 4), IGNORE), 1.0)
    assert total == 0.0 and grad is not None and not grad.any()
