"""Measured layers against counted ones: who is recognised, and what the prediction becomes."""

from __future__ import annotations

import dataclasses

import pytest

from kt_ray.hardware.nominal import nominal_rates
from kt_ray.hardware.rates import LayerRate
from kt_ray.placement.plan import make_plan
from kt_ray.timing.layer_rates import (
    Corrections,
    ends_signature,
    layer_signature,
    merged,
    nearest,
    rate_of,
)
from kt_ray.timing.layer_work import LayerWork, layer_works
from kt_ray.timing.seats import machine_of
from kt_ray.timing.simulate import Micro
from kt_ray.timing.step_costs import PlanDurations
from tests.placement.configs import make_config, make_hardware, small_dims

KINDS = ("forward", "recompute", "backward")


def durations(layers: tuple[LayerRate, ...]) -> PlanDurations:
    config, hardware = (
        make_config(rule={"activations": "group"}, stages=1, groups=1, experts={"sockets": 1}),
        make_hardware(),
    )
    plan = make_plan(small_dims("deepseek_v3"), config, hardware)
    rates = dataclasses.replace(nominal_rates(hardware), layers=layers)
    return PlanDurations(plan, config, rates, machine_of(plan))


def threads_of(made: PlanDurations) -> int:
    return 0 if made.on_gpu else made.plan.workers[0].threads


def measured(made: PlanDurations, layer: int, times: float) -> LayerRate:
    """As if the layer had taken `times` what is counted, at 16 and 64 positions."""
    seconds = {
        kind: {n: times * sum(made.attention(kind, layer, (Micro(1, n, n, n),))) for n in (16, 64)}
        for kind in KINDS
    }
    work = layer_works(made.plan, made.config)[layer]
    return rate_of(layer_signature(work), "a layer", threads_of(made), seconds)


def test_layers_that_cost_the_same_have_one_signature() -> None:
    """DeepSeek-V3: the first layer (no gradient at its input) and those with experts differ."""
    made = durations(())
    works = layer_works(made.plan, made.config)
    moe = [layer_signature(w) for w in works if w.moe]
    assert len(set(moe)) == 1 and layer_signature(works[0]) not in moe
    other = dataclasses.replace(works[-1], lora=dataclasses.replace(works[-1].lora, rank=64))
    assert layer_signature(other) != moe[-1]
    assert ends_signature(works[0]) == ends_signature(works[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_prediction_becomes_what_was_measured(kind: str) -> None:
    """Three times the counted seconds where a layer took three times as long; other layers as counted."""
    counted = durations(())
    last = counted.plan.dims.num_layers - 1
    corrected = durations((measured(counted, last, 3.0),))
    for width in (16, 30, 64):
        group = (Micro(1, width, width, width),)
        want = 3 * sum(counted.attention(kind, last, group))
        # What hands tokens over is measured and counted: it is not multiplied, so the rest is by more.
        assert sum(corrected.attention(kind, last, group)) == pytest.approx(want, rel=0.05)
        assert corrected.attention(kind, 0, group) == counted.attention(kind, 0, group)
    assert corrected.corrected and not counted.corrected


def test_sizes_that_were_not_measured_keep_the_shape_of_the_count() -> None:
    counted = durations(())
    last = counted.plan.dims.num_layers - 1
    corrected = durations((measured(counted, last, 2.0),))
    group = (Micro(4, 256, 1024, 1024),)
    ratio = sum(corrected.attention("backward", last, group)) / sum(
        counted.attention("backward", last, group)
    )
    assert ratio == pytest.approx(2.0, rel=0.05)


def test_threads_nearest_in_ratio_are_taken_and_a_gpu_only_by_itself() -> None:
    one, eight, gpu = (LayerRate("s", "n", threads, {}) for threads in (1, 8, 0))
    assert nearest((one, eight, gpu), "s", 2) is one
    assert nearest((one, eight, gpu), "s", 6) is eight
    assert nearest((one, eight, gpu), "s", 0) is gpu
    assert nearest((one, eight), "s", 0) is None
    assert nearest((one,), "other", 1) is None


def test_no_measurement_changes_nothing() -> None:
    corrections = Corrections((), 1, lambda layer, kind, positions, threads: 1.0)
    assert corrections("s", 0, "forward", 10) == 1.0


def test_new_measurements_replace_old_ones_of_the_same_threads() -> None:
    old = (LayerRate("a", "old", 1, {}), LayerRate("a", "old", 2, {}), LayerRate("b", "old", 1, {}))
    found = merged((LayerRate("a", "new", 1, {}),), old)
    assert [(r.signature, r.name, r.threads) for r in found] == [
        ("a", "new", 1),
        ("a", "old", 2),
        ("b", "old", 1),
    ]


def test_a_rate_is_positions_per_second() -> None:
    rate = rate_of("s", "n", 1, {"forward": {64: 2.0, 16: 1.0}, "loss": {}})
    assert rate.kinds["forward"].at == (16.0, 64.0)
    assert rate.kinds["forward"].values == (16.0, 32.0)
    assert "loss" not in rate.kinds


def test_layer_work_of_a_layer_is_its_own() -> None:
    made = durations(())
    works = layer_works(made.plan, made.config)
    assert [w.layer for w in works] == list(range(made.plan.dims.num_layers))
    assert all(isinstance(w, LayerWork) for w in works)


def test_what_mixes_streams_is_counted_without_an_adapter() -> None:
    dims = small_dims("qwen4_exp_text")
    work = LayerWork(dims, 0, make_config().lora, "bfloat16")
    plain = LayerWork(dataclasses.replace(dims, mixers=()), 0, work.lora, "bfloat16")
    wide, rank, streams = 3 * 64, 6, 3
    more = work.forward(1, 8)[0].products - plain.forward(1, 8)[0].products
    assert more == 2 * 8 * 2 * wide * (2 * rank + streams)
