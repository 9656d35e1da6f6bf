"""Results in memory of the caller: the same bits, and nothing else is accepted."""

from __future__ import annotations

import pytest
import torch

from kt_ray.measure.expert_rates import ExpertShape, random_lora, random_weights
from kt_ray.native import Engine, available_isas

T, E, K = 5, 4, 2
SHAPE = ExpertShape(64, 32)


@pytest.mark.parametrize("isa", available_isas())
def test_results_lie_where_the_caller_says(isa: str) -> None:
    weights, lora = random_weights("bf16", SHAPE, E), random_lora(SHAPE, E, 8)
    x, dy = torch.randn(T, 64).to(torch.bfloat16), torch.randn(T, 64)
    ids, router = torch.arange(T * K).view(T, K) % E, torch.full((T, K), 0.5)
    with Engine(isa, 1) as engine:
        y, saved = engine.forward(weights, x, ids, router, lora=lora)
        dx, dw = engine.backward(weights, saved, dy, lora=lora)
        out, grads = torch.full((T, 64), 9.0), (torch.full((T, 64), 9.0), torch.full((T, K), 9.0))
        y2, saved2 = engine.forward(weights, x, ids, router, lora=lora, out=out)
        dx2, dw2 = engine.backward(weights, saved2, dy, lora=lora, out=grads)
    assert y2 is out and dx2 is grads[0] and dw2 is grads[1]
    assert torch.equal(y, y2) and torch.equal(dx, dx2) and torch.equal(dw, dw2)


@pytest.mark.parametrize(
    "out",
    [torch.empty(T, 63), torch.empty(T, 64, dtype=torch.bfloat16), torch.empty(64, T).t()],
    ids=["shape", "type", "strides"],
)
def test_other_memory_is_refused(out: torch.Tensor) -> None:
    weights = random_weights("bf16", SHAPE, E)
    ids, router = torch.zeros(T, K, dtype=torch.int64), torch.full((T, K), 0.5)
    with Engine(available_isas()[-1], 1) as engine, pytest.raises(ValueError, match="out: "):
        engine.forward(weights, torch.randn(T, 64).to(torch.bfloat16), ids, router, out=out)
