"""Backward without dx: the same bits for everything else; and x is kept for adapters alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kt_ray.measure.expert_rates import ExpertShape, random_lora, random_weights
from kt_ray.native import DropoutSpec, Engine, available_isas

T, E, K = 70, 4, 2
SHAPE = ExpertShape(64, 96)


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, ids, router weights, dy."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(T, SHAPE.hidden, generator=generator).to(torch.bfloat16)
    ids = torch.randint(0, E + 1, (T, K), generator=generator)
    return x, ids, torch.rand(T, K, generator=generator), torch.randn(T, SHAPE.hidden, generator=generator)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize(
    ("fmt", "int8", "save", "p"),
    [
        ("bf16", False, True, 0.0),
        ("bf16", False, "recompute", 0.1),
        ("f32", False, True, 0.1),
        ("int8", True, True, 0.0),
    ],
)
def test_all_else_has_the_same_bits(isa: str, fmt: str, int8: bool, save: bool | str, p: float) -> None:
    weights, lora = random_weights(fmt, SHAPE, E), random_lora(SHAPE, E, 5)
    x, ids, router, dy = inputs()
    dropout, keys = DropoutSpec(p=p, seed=1, step=2) if p else None, torch.arange(T)
    found = []
    with Engine(isa, 2, int8_products=int8) as engine:
        for wanted in (True, False):
            grads = lora.zeros_like()
            how = {"lora": lora, "dropout": dropout, "keys": keys, "save": save}
            _, saved = engine.forward(weights, x, ids, router, **how)
            dx, dw = engine.backward(
                weights, saved, dy, lora=lora, lora_grads=grads, input_grad=wanted, check_finite=True
            )
            assert dx.shape == (T, SHAPE.hidden if wanted else 0)
            found.append([dw, *grads.tensors()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)) and all(t.any() for t in found[0])


@pytest.mark.parametrize("isa", available_isas())
def test_x_is_kept_for_adapters_and_recomputing_alone(isa: str) -> None:
    weights, lora = random_weights("bf16", SHAPE, E), random_lora(SHAPE, E, 5)
    x, ids, router, dy = inputs()
    kept, gradients = {}, []
    with Engine(isa, 2) as engine:
        for save in (True, "recompute"):
            for adapter in (None, lora):
                _, saved = engine.forward(weights, x, ids, router, lora=adapter, save=save)
                assert saved is not None
                kept[save, adapter is not None] = saved.bytes
                if adapter is None:
                    gradients.append(engine.backward(weights, saved, dy))
    rows = int((ids < E).sum())
    assert kept[True, False] == rows * (2 * SHAPE.inter * 2 + 16)
    assert kept[True, True] == kept[True, False] + T * SHAPE.hidden * 2 + rows * 3 * 16 * 4
    assert kept["recompute", False] == T * SHAPE.hidden * 2 + rows * 16
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
