"""FP8 products of the lane: rounding by rows, the stand-in's products, and results beside float64.

Tolerance. A value in E4M3 has a relative error of at most u = 2^-4 (three bits of mantissa), spread over
[-u, u]: u / sqrt(3) in root mean square at most. Rounding errors of the elements of a dot product are
independent for random data, so a product of two rounded matrices has sqrt(2 / 3) u of its norm, and p such
products one after another sqrt(2 p / 3) u. Longest paths: two products in forward (gate or up, then down),
three in backward (those, dact, dx). The limit is twice that, and what bfloat16 storings add
(tests/helpers/native.py): one more for every product, whose result is rounded.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kt_ray.errors import UserError
from kt_ray.experts.lane_device import LaneDevice
from kt_ray.experts.lane_float8 import LARGEST, Rounded, multiplies, product8, rounded
from kt_ray.gpu import Driver
from tests.experts.test_lane_math import alike, run_in_lane, uneven
from tests.helpers.matrices import VARIANTS, quantised_case
from tests.helpers.native import ACTIVATIONS, Case, Shape, make_case, tolerance

EPSILON = 2.0**-4
SHAPE = Shape(tokens=40, slots=2, experts=3, hidden=96, inter=64, rank=4)


def back(matrix: Rounded) -> Tensor:
    return matrix.values.float() * matrix.scale.unsqueeze(-1)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30])
def test_rows_have_their_own_scale(transposed: bool, size: float) -> None:
    g = torch.Generator().manual_seed(0)
    matrix = torch.randn(3, 32, 64, generator=g) * size * torch.logspace(-3, 3, 32).view(1, 32, 1)
    matrix = matrix.bfloat16()
    if transposed:
        matrix = matrix.mT.contiguous().mT
    made = rounded(matrix)
    assert made.values.is_contiguous() and made.values.shape == matrix.shape
    largest = matrix.float().abs().amax(-1)
    torch.testing.assert_close(made.scale, largest / LARGEST)
    assert bool((made.values.float().abs().amax(-1) == LARGEST).all())
    error = (back(made) - matrix.float()).abs()
    # relative to a normal value, else to half of the least subnormal one, 2^-10
    limit = torch.maximum(EPSILON * matrix.float().abs(), 2.0**-10 * made.scale.unsqueeze(-1))
    assert bool((error <= limit * (1 + 1e-5)).all())


def test_zeros_stay_and_what_is_not_finite_surfaces() -> None:
    matrix = torch.ones(1, 4, 16, dtype=torch.bfloat16)
    matrix[0, 0], matrix[0, 1, 3], matrix[0, 2, 5] = 0, math.inf, math.nan
    made = rounded(matrix)
    assert not made.values[0, 0].float().any() and bool(made.scale[0, 0] > 0)
    out = product8(made, rounded(torch.ones(1, 16, 16, dtype=torch.bfloat16)))
    assert bool((out[0, 0] == 0).all() and (out[0, 3] == 16).all())
    assert not bool(out[0, 1:3].isfinite().any())
    out = product8(rounded(torch.ones(1, 2, 16, dtype=torch.bfloat16)), made)
    assert out.isfinite().tolist() == [[[True, False, False, True]] * 2]


def test_the_stand_in_rounds_sums_to_bfloat16_once() -> None:
    g = torch.Generator().manual_seed(1)
    a, b = (rounded(torch.randn(2, rows, 48, generator=g).bfloat16()) for rows in (5, 32))
    found = Driver().product8(a.values, a.scale, b.values, b.scale)
    assert found.dtype == torch.float32 and torch.equal(found, found.bfloat16().float())
    exact = back(a).double() @ back(b).double().mT
    # a half of bfloat16's spacing, and float32 sums
    assert bool(((found - exact).abs() <= 2.0**-8 * exact.abs() + 1e-5).all())


class _OneCall(Driver):
    """Counts what is multiplied in which type."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, tuple[int, ...]]] = []

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        self.made.append(("bfloat16", tuple(b.shape[-2:])))
        return super().product(a, b)

    def product8(self, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
        self.made.append(("float8", (b.shape[-1], b.shape[-2])))
        return super().product8(a, a_scale, b, b_scale)


def run8(case: Case, **more: Any) -> dict[str, Tensor]:
    return run_in_lane(case, float8=True, **more)


@pytest.mark.parametrize(("hidden", "inter", "kind"), [(96, 64, "float8"), (96, 40, "bfloat16")])
def test_only_shapes_that_cards_multiply(
    hidden: int, inter: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule is the device's no more than the stand-in's: other shapes have bfloat16's very bits."""
    assert multiplies(hidden, inter) == (kind == "float8")
    case = make_case(replace(SHAPE, hidden=hidden, inter=inter), torch.bfloat16)
    counted = _OneCall()
    monkeypatch.setattr("kt_ray.gpu._driver", counted)
    found = run8(case)
    products = 6 if kind == "float8" else 4  # bfloat16 multiplies gate and up as one matrix
    assert {made for made, _ in counted.made} == {kind} and len(counted.made) % products == 0
    if kind == "bfloat16":
        assert all(torch.equal(found[name], value) for name, value in run_in_lane(case).items())


def check(case: Case, found: dict[str, Tensor]) -> None:
    """Within the module's tolerance of float64; and not as near as bfloat16 products come."""
    case.expect()
    assert found.keys() == case.expected.keys()
    squares = 2 if case.weights.gate is None else 1  # relu² doubles a relative error
    for name, want in case.expected.items():
        products = (1 + squares**2) if name == "y" else (2 + squares**2)
        limit = 2 * math.sqrt(2 * products / 3) * EPSILON
        limit += tolerance(torch.bfloat16, case.depth, 10 + products)
        error = float((found[name].double() - want).norm()) / float(want.norm())
        assert error <= limit, f"{name}: relative error {error:.2e} > {limit:.2e}"
    bfloat16 = run_in_lane(case)
    for name in ("y", "dx"):
        errors = [float((r[name].double() - case.expected[name]).norm()) for r in (found, bfloat16)]
        assert errors[0] > 3 * errors[1], f"{name}: no FP8 product had a part in it"


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_near_float64(activation: str, dropout: float, bias: bool, recompute: bool) -> None:
    case = make_case(SHAPE, torch.bfloat16, activation=activation, bias=bias, dropout=dropout)
    if case.weights.limit is not None:  # far from the clamp's kink, where rounding changes a whole gradient
        case.weights = replace(case.weights, limit=100.0)
    check(case, run8(case, recompute=recompute))


@pytest.mark.parametrize("name", ["fp8-128x128", "mxfp4"])
def test_formats(name: str) -> None:
    assert name in VARIANTS
    shape = Shape(tokens=40, slots=2, experts=3, hidden=256, inter=128, rank=5)
    case = quantised_case(shape, name, dropout=0.2)
    check(case, run8(case))


def test_a_batch_is_what_its_experts_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places without a row change nothing, and rows have the same scale alone."""
    case = uneven(make_case(Shape(tokens=720, hidden=48, inter=32), torch.bfloat16, bias=True))
    found = run8(case)
    with monkeypatch.context() as patched:
        patched.setattr("kt_ray.placement.lane_share.LANE_BATCH", 1)
        alike(found, run8(case), torch.bfloat16)


def test_weights_are_rounded_once_per_batch_and_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []

    def counted(matrix: Tensor) -> Rounded:
        shapes.append(tuple(matrix.shape))
        return rounded(matrix)

    monkeypatch.setattr("kt_ray.experts.lane_math.rounded", counted)
    monkeypatch.setattr("kt_ray.experts.lane_routing.LANE_ROWS", 16)
    case = make_case(replace(SHAPE, experts=1), torch.bfloat16, routing="one")
    run8(case)
    weights = Counter({(1, 64, 96): 3, (1, 96, 64): 3})  # gate and up both ways round, down likewise
    parts = 80 // 16  # of the rows: x and act; dy, dg and du
    rows = Counter({(1, 16, 96): 2 * parts, (1, 16, 64): 3 * parts})
    assert Counter(shapes) == weights + rows


def test_old_cards_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "RTX 3090")
    with pytest.raises(UserError) as refused:
        LaneDevice("cuda:0", float8=True)
    text = str(refused.value)
    assert "RTX 3090" in text and "8.6" in text and "set rule.experts.gpu_products=bfloat16" in text
