"""The engine rounds where docs/numerics.md says, and nowhere else: bfloat16 experts against float64 with
the same roundings.

Both compute the same numbers up to float32 sums, but for a value close to the middle between two bfloat16
numbers, which may fall to either side. With relative errors of 2^-24 in the sums, and of 2^-17 in adapters
where they are pairs of bfloat16, that happens to few values, each by 2^-8 of itself: usually none or one of
those behind a result. The limit is a third of the effect of one rounding of all values, 2^-8 / sqrt(3).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import pytest
import torch

from kt_ray.native import Engine
from tests.helpers.matrices import quantised_case
from tests.helpers.native import ACTIVATIONS, ISAS, Case, Shape, make_case
from tests.helpers.roundings import BF16_PRODUCTS, with_roundings

pytestmark = pytest.mark.accept("engine")

SHAPE = Shape(tokens=150, slots=2, experts=3, hidden=96, inter=160, rank=7, adapters=2)


LIMIT = 2**-8 / math.sqrt(3) / 3


@pytest.fixture(scope="module", params=ISAS)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(request.param, threads=2) as made:
        yield made


@functools.cache
def expected(name: str, bias: bool, products: bool) -> tuple[Case, dict[str, torch.Tensor]]:
    """A case by its activation or format, and what the roundings make of it."""
    if name in ACTIVATIONS:
        case = make_case(SHAPE, torch.bfloat16, activation=name, bias=bias, dropout=0.2)
    else:
        case = quantised_case(SHAPE, name, x_dtype=torch.float32)
    return case, with_roundings(case, products)


def check(engine: Engine, name: str, bias: bool = False) -> None:
    case, wanted = expected(name, bias, engine.isa in BF16_PRODUCTS)
    got = case.run(engine)
    assert got.keys() == wanted.keys()
    errors = {n: float((got[n].double() - want).norm() / want.norm()) for n, want in wanted.items()}
    assert max(errors.values()) <= LIMIT, errors


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(engine: Engine, activation: str) -> None:
    check(engine, activation)


@pytest.mark.parametrize("activation", ["silu", "swiglu_oai", "relu2"])
def test_biases(engine: Engine, activation: str) -> None:
    check(engine, activation, bias=True)


@pytest.mark.parametrize("name", ["fp8-128x128", "fp8-channel", "mxfp4", "int8-channel", "int4-32", "q5_1"])
def test_formats(engine: Engine, name: str) -> None:
    """Decoded to the format's float32 values; to bfloat16 where that is what multiplies."""
    check(engine, name)


def test_a_rounding_less_would_show() -> None:
    case, rounded = expected("silu", False, False)
    for name, want in case.expect().expected.items():
        assert float((rounded[name] - want).norm() / want.norm()) >= 2 * LIMIT, name
