"""AdamW equals torch's own on the same numbers; the schedule's landmarks."""

import dataclasses

import pytest
import torch

from kt_ray.config.schema import OptimConfig
from kt_ray.optim import LoraOptimizer, learning_rate, squared_norm, warmup_steps

BASE = OptimConfig(lr=1e-2, weight_decay=0.1, betas=(0.8, 0.95))


def test_equals_torch_adamw_with_clipping_and_resume() -> None:
    torch.manual_seed(0)
    mine = torch.nn.Parameter(torch.randn(7, 5))
    other = torch.nn.Parameter(mine.detach().clone())
    optimizer = LoraOptimizer([mine], BASE)
    reference = torch.optim.AdamW([other], lr=1e-2, betas=(0.8, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(6):
        grad = torch.randn(7, 5)
        optimizer.gradients()[0].copy_(grad)
        optimizer.apply(1e-2, 0.5)
        other.grad = grad * 0.5
        reference.step()
        assert torch.allclose(mine, other, rtol=1e-6, atol=1e-7)
        assert not optimizer.gradients()[0].any()
        if step == 2:  # carry on from saved moments
            again = torch.nn.Parameter(mine.detach().clone())
            resumed = LoraOptimizer([again], BASE)
            for to, source in zip(resumed.moments(again), optimizer.moments(mine), strict=True):
                to.copy_(source)
            resumed.set_step(3)
            mine, optimizer = again, resumed


def test_only_float32() -> None:
    with pytest.raises(ValueError, match="float32"):
        LoraOptimizer([torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))], BASE)


def test_squared_norm_is_float64() -> None:
    tensors = [torch.full((3,), 1e20), torch.full((2,), 3.0)]
    assert squared_norm(tensors) == pytest.approx(3e40, rel=1e-6)
    assert squared_norm([]) == 0.0


@pytest.mark.parametrize(
    ("schedule", "last", "middle"), [("constant", 1.0, 1.0), ("linear", 0.1, 0.55), ("cosine", 0.1, 0.55)]
)
def test_schedule(schedule: str, last: float, middle: float) -> None:
    optim = dataclasses.replace(BASE, lr=1.0, schedule=schedule, warmup=10, min_lr_ratio=0.1)
    assert learning_rate(optim, 0, 110) == pytest.approx(0.1)
    assert learning_rate(optim, 9, 110) == pytest.approx(1.0)
    assert learning_rate(optim, 60, 110) == pytest.approx(middle)
    assert learning_rate(optim, 110, 110) == pytest.approx(last)
    assert learning_rate(dataclasses.replace(optim, warmup=0), 0, 10) == 1.0


def test_warmup_as_share_and_as_count() -> None:
    assert warmup_steps(dataclasses.replace(BASE, warmup=0.03), 100) == 3
    assert warmup_steps(dataclasses.replace(BASE, warmup=0.001), 100) == 1
    assert warmup_steps(dataclasses.replace(BASE, warmup=7), 100) == 7
    assert warmup_steps(dataclasses.replace(BASE, warmup=0), 100) == 0


def test_squared_norm_does_not_depend_on_threads() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(300_001), torch.randn(7, 65_537), torch.randn(5)]
    before = torch.get_num_threads()
    seen = set()
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            seen.add(squared_norm(tensors))
    finally:
        torch.set_num_threads(before)
    assert len(seen) == 1
    assert seen.pop() == pytest.approx(sum(float((t.double() ** 2).sum()) for t in tensors), rel=1e-12)
