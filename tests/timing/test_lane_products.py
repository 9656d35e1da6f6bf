"""The rate of a lane's products: FP8's own, what rounding costs beside it, and from how many rows it pays."""

from __future__ import annotations

import dataclasses

import pytest

from kt_ray.hardware.describe import hardware_for
from kt_ray.hardware.nominal import nominal_rates
from kt_ray.hardware.rates import DeviceRate
from kt_ray.timing.lane_products import lane_flops, lane_gemm
from tests.placement.configs import make_config
from tests.placement.test_layout import V3

BFLOAT16, FLOAT8 = (
    make_config(rule={"experts": {"gpu_products": products}}) for products in ("bfloat16", "float8")
)


def gpu(card: str) -> DeviceRate:
    found = nominal_rates(hardware_for(make_config(plan={"hardware": f"1x{card}_2x8488c_512gb"}))).gpu
    assert found is not None
    return found


@pytest.mark.parametrize(("card", "flops"), [("4090", 330.3e12), ("5090", 419e12), ("H100", 1979e12)])
def test_data_sheets_and_a_part_of_them(card: str, flops: float) -> None:
    rate = gpu(card)
    assert lane_gemm(rate, V3, FLOAT8)(1024) == pytest.approx(0.7 * flops)
    assert "data sheet" in rate.gemm["float8"].source
    assert lane_gemm(rate, V3, BFLOAT16) == rate.gemm["bfloat16"]
    f32 = dataclasses.replace(V3, expert_storage=dataclasses.replace(V3.expert_storage, format="f32"))
    assert lane_gemm(rate, f32, BFLOAT16) == rate.gemm["float32"]


def test_a_measured_card_is_assumed_to_be_twice_as_fast() -> None:
    rate = gpu("4090")
    measured = dataclasses.replace(rate, gemm={k: v for k, v in rate.gemm.items() if k != "float8"})
    found = lane_gemm(measured, V3, FLOAT8)
    assert found(512) == 2 * rate.gemm["bfloat16"](512) and "assumed" in found.source
    assert "float8" not in gpu("3090").gemm


def test_rounding_costs_passes_over_memory() -> None:
    rate, rows = gpu("4090"), 512.0
    assert lane_flops(rate, V3, BFLOAT16, rows) == rate.gemm["bfloat16"](rows)
    flops = 2 * V3.expert_params * rows
    took = flops / lane_flops(rate, V3, FLOAT8, rows) - flops / rate.gemm["float8"](rows)
    h, i = 7168, 2048
    rounded = 3 * h * i + rows * (h + i + h + 2 * i) / 2
    results = rows * (2 * i + h + i + 2 * h) / 2
    assert took * rate.memory.value == pytest.approx(5 * rounded + 4 * results)


def test_it_pays_from_hundreds_of_rows_on() -> None:
    """DeepSeek-V3's experts on an RTX 4090: the table of docs/numerics.md."""
    rate = gpu("4090")
    gains = {
        rows: lane_flops(rate, V3, FLOAT8, rows) / lane_flops(rate, V3, BFLOAT16, rows)
        for rows in (256, 1024, 2048, 8192)
    }
    assert gains[256] < 1 and list(gains.values()) == sorted(gains.values()) and gains[8192] > 1.1
