"""Memory beside the weights: the plan's formulas are what the engine takes, and nothing grows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kt_ray.native import Engine
from kt_ray.placement.engine_memory import EngineShape, rounded
from tests.helpers.matrices import quantised_case
from tests.helpers.native import EVERY, ISAS, Case, Shape, make_case

KIB = 1 << 10


def shape_of(case: Case, isa: str, *, int8_products: bool = False) -> EngineShape:
    weights = case.weights
    return EngineShape(
        hidden=weights.H,
        inter=weights.I,
        rank=max((adapter.up_a.shape[1] for adapter in case.lora), default=0),
        isa=isa,
        float32=weights.formats[-1] == "f32",
        gated=weights.gate is not None,
        dropout=case.dropout is not None,
        integers=weights.formats[-1] if int8_products else None,
    )


def rows_of(case: Case) -> int:
    return int((case.ids < case.weights.E).sum())


def compare(case: Case, isa: str, *, save: bool | str, threads: int = 1, int8_products: bool = False) -> None:
    """Forward and backward on a new engine against the plan's figures."""
    plan = shape_of(case, isa, int8_products=int8_products)
    tokens, rows = case.x.shape[0], rows_of(case)
    with Engine(isa, threads=threads, int8_products=int8_products) as engine:
        _, saved = engine.forward(
            case.weights,
            case.x,
            case.ids,
            case.weights_TK,
            lora=case.lora or None,
            adapter_of_token=case.adapter_of_token,
            dropout=case.dropout,
            keys=case.keys,
            save=save,
        )
        assert saved is not None
        kept = plan.saved(tokens, rows, "retain" if save is True else str(save))
        assert saved.bytes == sum(kept.values()), kept
        for _ in range(2):
            engine.backward(case.weights, saved, case.dy, lora=case.lora or None)
            buffers = plan.call(tokens, rows, "retain" if save is True else str(save))
            shared = sum(rounded(size) for size in buffers.values())
            # A block has 32 rows on amx, fewer elsewhere: all that the formula of a thread rounds up.
            scratch = engine.scratch_bytes - shared
            assert 0 <= threads * rounded(plan.thread()) - scratch <= threads * 8 * KIB, buffers


@pytest.mark.parametrize(("isa", "dtype"), EVERY)
@pytest.mark.parametrize("save", [True, "int8", "recompute"])
@pytest.mark.parametrize(
    "shape",
    [
        Shape(),
        Shape(tokens=300, slots=4, experts=3, hidden=150, inter=260, rank=17),
        Shape(tokens=70, hidden=33, inter=31, rank=0),
        Shape(tokens=40, hidden=2000, inter=64, rank=40, adapters=2),
    ],
    ids=str,
)
def test_the_plan_is_what_the_engine_takes(
    isa: str, dtype: torch.dtype, shape: Shape, save: bool | str
) -> None:
    compare(make_case(shape, dtype), isa, save=save)


@pytest.mark.parametrize("isa", ISAS)
def test_with_dropout_without_a_gate_and_quantised(isa: str) -> None:
    shape = Shape(tokens=50, hidden=96, inter=160, rank=5)
    compare(make_case(shape, torch.bfloat16, dropout=0.1), isa, save=True)
    compare(make_case(shape, torch.bfloat16, dropout=0.1), isa, save="recompute")
    compare(make_case(shape, torch.bfloat16, activation="relu2"), isa, save="recompute")
    compare(quantised_case(shape, "q8_0"), isa, save=True)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("save", [True, "int8", "recompute"])
@pytest.mark.parametrize("variant", ["int8-channel", "int4-32"])
def test_int8_products(monkeypatch: pytest.MonkeyPatch, isa: str, save: bool | str, variant: str) -> None:
    """Their compute type is another, and gradients are there once more as integers."""
    monkeypatch.setenv("KT_RAY_TEST_NO_VNNI", "1" if isa == "avx512" else "")  # the plan cannot know of it
    for shape in (
        Shape(tokens=300, slots=3, experts=3, hidden=160, inter=416, rank=17),
        Shape(tokens=500, slots=4, experts=2, hidden=2080, inter=96, rank=0),
    ):
        compare(quantised_case(shape, variant), isa, save=save, int8_products=True)


def test_large_buffers_are_whole_huge_pages() -> None:
    """Activations of 7 MiB and more: rounded up to 2 MiB each."""
    shape = Shape(tokens=2500, slots=2, experts=2, hidden=500, inter=700, rank=8)
    compare(make_case(shape, torch.float32), ISAS[-1], save=True)


def test_each_thread_has_the_same_scratch() -> None:
    case = make_case(Shape(tokens=400, hidden=200, inter=2000), torch.bfloat16)
    compare(case, ISAS[-1], save=True, threads=2)


def test_layers_of_a_model_share_the_buffers() -> None:
    """Backward in the reverse order of forward, as training does: what is kept moves between layers."""
    cases = [
        replace(case, weights=replace(case.weights, layer=layer))
        for layer, case in enumerate(
            make_case(Shape(tokens=200, hidden=128, inter=160), torch.bfloat16, seed=seed)
            for seed in range(3)
        )
    ]
    with Engine(ISAS[-1], threads=1) as engine:
        held = []
        for _ in range(20):
            saved = [engine.forward(c.weights, c.x, c.ids, c.weights_TK, lora=c.lora)[1] for c in cases]
            for case in reversed(cases):
                engine.backward(case.weights, saved.pop(), case.dy, lora=case.lora)
            held.append(engine.scratch_bytes)
        assert len(set(held[3:])) == 1, held
