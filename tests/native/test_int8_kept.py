"""Gate and up kept in blocks of int8: what forward and backward compute from is what the blocks hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kt_ray.measure.expert_rates import ExpertShape, random_lora, random_weights
from kt_ray.native import Engine, ExpertWeights, available_isas

ISAS = available_isas()
SIZE = 72  # two blocks of 32 and a part of a third


def shrunk(values: Tensor) -> Tensor:
    """float32 [rows, SIZE] as the blocks hold them: round(v / s) s, s = bfloat16(max |v| / 127) per 32."""
    padded = torch.nn.functional.pad(values.float(), (0, -SIZE % 32)).unflatten(1, (-1, 32))
    scale = (padded.abs().amax(-1, keepdim=True) / 127).to(torch.bfloat16).float()
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    levels = (padded * inverse).clamp(-127, 127).round()
    return (levels * scale).flatten(1)[:, :SIZE]


def identity(dtype: torch.dtype, activation: str) -> ExpertWeights:
    """One expert whose gate and up are x."""
    eye = torch.eye(SIZE, dtype=dtype).unsqueeze(0)
    return ExpertWeights(None if activation == "relu2" else eye, eye, eye, activation=activation)


def rows() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(50, SIZE, generator=generator) * torch.logspace(-3, 2, 50).unsqueeze(1)
    x[7] = 0.0
    x[8, 40:] = 0.0
    return x.to(torch.bfloat16)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("activation", "function"),
    [
        ("relu2", lambda v: v.clamp(min=0) ** 2),
        ("silu", lambda v: torch.nn.functional.silu(v) * v),
    ],
)
def test_both_ways_compute_from_the_blocks(
    isa: str, dtype: torch.dtype, activation: str, function: Callable[[Tensor], Tensor]
) -> None:
    weights, x = identity(dtype, activation), rows()
    dy = torch.randn(50, SIZE, generator=torch.Generator().manual_seed(4))
    ids, router = torch.zeros(50, 1, dtype=torch.int64), torch.ones(50, 1)
    with Engine(isa, 2) as engine:
        y, saved = engine.forward(weights, x, ids, router, save="int8")
        dx, dw = engine.backward(weights, saved, dy)
        exact, _ = engine.forward(weights, x, ids, router, save=True)
    held = shrunk(x)
    if dtype == torch.bfloat16:
        held = held.to(torch.bfloat16).float()
    leaf = held.double().requires_grad_()
    act = function(leaf)
    want = (act * dy.double()).sum()
    (slope,) = torch.autograd.grad(want, leaf)
    limit = 1e-6 if dtype == torch.float32 else 6e-3  # act and dy are stored in bfloat16
    torch.testing.assert_close(y.double(), act.detach(), rtol=limit, atol=1e-12)
    if dtype == torch.float32:
        torch.testing.assert_close(dx.double(), slope, rtol=1e-5, atol=1e-7)
        # What rounding moves does not shrink where the sum cancels.
        size = (act * dy.double()).norm().item()
        assert abs(dw.double().sum().item() - want.item()) < 1e-6 * size
    assert not torch.equal(y, exact)
    error = (y - exact).norm(dim=1) / exact.norm(dim=1).clamp_min(1e-30)
    assert error.max() < 0.03 and not y[7].any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_block_that_is_not_finite_is_nan(isa: str, bad: float) -> None:
    weights, x = identity(torch.float32, "relu2"), rows().float()
    x[3, 5] = bad
    with Engine(isa, 1) as engine:
        y, _ = engine.forward(
            weights, x, torch.zeros(50, 1, dtype=torch.int64), torch.ones(50, 1), save="int8"
        )
    assert y[3].isnan().any() and not y[torch.arange(50) != 3].isnan().any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("int8_products", [False, True])
def test_bits_do_not_depend_on_threads_and_errors_are_small(isa: str, int8_products: bool) -> None:
    shape = ExpertShape(96, SIZE)
    weights, lora = random_weights("int8" if int8_products else "bf16", shape, 4), random_lora(shape, 4, 8)
    x, dy = torch.randn(90, 96).to(torch.bfloat16), torch.randn(90, 96)
    ids, router = torch.randint(0, 5, (90, 2)), torch.rand(90, 2)

    def run(threads: int, save: bool | str) -> list[Tensor]:
        grads = lora.zeros_like()
        with Engine(isa, threads, int8_products=int8_products) as engine:
            y, saved = engine.forward(weights, x, ids, router, lora=lora, save=save)
            dx, dw = engine.backward(weights, saved, dy, lora=lora, lora_grads=grads)
        return [y, dx, dw, *grads.tensors()]

    one, three, exact = run(1, "int8"), run(3, "int8"), run(1, True)
    assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))
    for got, want in zip(one, exact, strict=True):
        assert 0 < (got - want).norm() < 0.03 * want.norm()
