"""Results in memory of the caller: the same bits, and nothing else is accepted."""

from __future__ import annotations

from dataclasses import replace

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


def test_memory_that_is_read_or_holds_another_result_is_refused() -> None:
    gate_up, size = torch.randn(E, 64, 64), T * 64
    weights = replace(random_weights("f32", SHAPE, E), gate=gate_up[:, :32], up=gate_up[:, 32:])
    ids, router, memory = torch.zeros(T, K).long(), torch.full((T, K), 0.5), torch.randn(3 * size)
    x, out, dw = memory[:size].view(T, 64), memory[size : 2 * size].view(T, 64), memory[2 * size :][: T * K]
    with Engine(available_isas()[-1], 1) as engine:
        _, saved = engine.forward(weights, x, ids, router, out=out)  # side by side
        engine.backward(weights, saved, x, out=(out, dw.view(T, K)))
        for name, taken in (
            ("x", x),
            ("x", memory[size - 1 : 2 * size - 1]),
            ("up", gate_up[-1, -T:]),
        ):
            with pytest.raises(
                ValueError, match=f"^out: shares memory with {name}, required memory of its own"
            ):
                engine.forward(weights, x, ids, router, out=taken.view(T, 64))
        for text, grads in (
            (r"out\[0\]: shares memory with dy", (x, dw)),
            (r"out\[1\]: shares memory with dy", (out, memory[size - 1 :][: T * K])),
            (r"out\[1\]: shares memory with out\[0\]", (out, out.view(-1)[-T * K :])),
        ):
            with pytest.raises(ValueError, match=f"^{text}"):
                engine.backward(weights, saved, x, out=(grads[0], grads[1].view(T, K)))
