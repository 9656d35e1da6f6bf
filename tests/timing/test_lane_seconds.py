"""The GPU lane in the prediction: the plan's split, the lane's own seconds, and what is proposed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kt_ray.checkpoint.load_experts import side_by_side
from kt_ray.config.schema import Config
from kt_ray.dims.model_dims import ModelDims
from kt_ray.experts import lane_math
from kt_ray.experts.device_lane import DeviceLane
from kt_ray.experts.lane_device import LaneDevice
from kt_ray.experts.lane_float8 import Rounded
from kt_ray.hardware.nominal import nominal_rates
from kt_ray.native import ExpertWeights
from kt_ray.placement import lane_share
from kt_ray.placement.expert_load import touched
from kt_ray.placement.lane_plan import expert_sizes
from kt_ray.placement.lane_share import best_share, lane_parts, split_seconds, streamed_experts
from kt_ray.placement.lora_sizes import expert_lora_params
from kt_ray.placement.plan import make_plan
from kt_ray.placement.plan_types import Plan
from kt_ray.timing.lane_rates import from_rates, lane_rates
from kt_ray.timing.lane_seconds import (
    BACK,
    ENTERING,
    FLOAT8_AGAIN,
    FLOAT8_EACH,
    FLOAT8_KERNELS,
    KERNELS,
    KERNELS_AGAIN,
    KERNELS_EACH,
    computed,
)
from kt_ray.timing.prediction import Prediction, neighbours, predict
from kt_ray.timing.seats import even_waves, machine_of
from kt_ray.timing.step_costs import PlanDurations
from tests.experts.test_lane_math import run_in_lane
from tests.helpers.native import Shape, make_case
from tests.placement.configs import DEEPSEEK_V3, make_config
from tests.placement.test_layout import V3, host

HOST = host(1, 80, sockets=1, memory=4096 << 30)
RATES = nominal_rates(HOST)
LAYER = V3.moe_layers[0]


def configured(tokens: int, **experts: Any) -> Config:
    return make_config(
        rule={"experts": experts},
        model={"name": "v3", "config": DEEPSEEK_V3},
        data={"max_length": min(512, tokens)},
        trainer={"batch_size": max(1, tokens // 512), "micro_batch_size": 1},
    )


def made(tokens: int = 32768, **experts: Any) -> tuple[Plan, PlanDurations]:
    config = configured(tokens, **experts)
    plan = make_plan(V3, config, HOST, None, lane_rates(config, HOST, V3, RATES))
    return plan, PlanDurations(plan, config, RATES, machine_of(plan))


def test_the_predicted_split_is_the_one_that_the_runtime_makes() -> None:
    plan, durations = made(stream=0.3)
    lane = plan.experts[0].lane
    assert lane is not None
    for tokens in (64, 512, 16384):
        runtime = streamed_experts([tokens * 8 // 256 or 1] * 256, lane.share(tokens))
        _, carried = durations.lanes.part(0, LAYER, tokens)
        (call,) = durations.lane(0, LAYER, "forward", tokens)
        sizes = expert_sizes(plan.experts, V3, durations.config)
        busy = sizes.work(tokens).experts
        assert carried == pytest.approx(min(len(runtime), busy) / busy)
        assert RATES.link is not None
        link = RATES.link.to_device.value
        copied = call.ahead - entering(tokens) + call.copies
        assert copied == pytest.approx(min(len(runtime), busy) * sizes.bytes / link)


def test_its_seconds_are_those_that_auto_chose_by() -> None:
    """At the largest call: the plan's share is the best one, and the parts add up to its seconds."""
    plan, durations = made(stream="auto")
    lane, sizes = plan.experts[0].lane, expert_sizes(plan.experts, V3, durations.config)
    chosen_by = from_rates(RATES, durations.config, HOST, V3)
    assert lane is not None and chosen_by is not None and RATES.link is not None
    tokens = plan.tokens_per_step
    work = dataclasses.replace(
        sizes.work(tokens), kept=0.0
    )  # of gates and ups half are counted in each direction
    best = best_share(sizes.work(tokens), chosen_by, recompute=lane.recompute)
    assert best.carried == round(lane.share(tokens) * 256) > 0 and not lane.recompute
    (call,) = durations.lane(0, LAYER, "forward", tokens)
    parts = lane_parts(sizes.work(tokens), chosen_by.link, chosen_by.gpu, best.carried)
    assert call.products + call.last == pytest.approx(parts.products)
    assert call.ahead + call.copies + call.back == pytest.approx(parts.copies + parts.moved)
    assert parts.seconds == pytest.approx(split_seconds(work, chosen_by, best.carried).lane)


def entering(tokens: int) -> float:
    """Seconds of all tokens' x on the link."""
    assert RATES.link is not None
    return ENTERING["forward"] * tokens * V3.expert_width / RATES.link.to_device.value


def test_gate_and_up_go_to_the_host_and_come_back() -> None:
    """With `retain`: behind the products of forward, among the copies of backward."""
    (_, retain), (_, again) = (made(stream=0.5, activations=kind) for kind in ("retain", "recompute"))
    tokens, experts = 16384, 128
    size = tokens * 8 / 256 * experts * 2 * V3.expert_intermediate * 2
    assert RATES.link is not None
    (one,), (two,) = (d.lane(0, LAYER, "forward", tokens) for d in (retain, again))
    assert one.kept == pytest.approx(size / RATES.link.to_host.value) and two.kept == 0
    assert (one.ahead, one.copies) == (two.ahead, two.copies)
    (one,), (two,) = (d.lane(0, LAYER, "backward", tokens) for d in (retain, again))
    more = (one.ahead + one.copies) - (two.ahead + two.copies)
    assert one.kept == two.kept == 0 and more == pytest.approx(size / RATES.link.to_device.value)


def test_the_first_batch_is_waited_for_and_the_last_one_comes_after_the_copies() -> None:
    _, durations = made(stream=0.5, activations="recompute")
    (call,) = durations.lane(0, LAYER, "forward", 16384)
    weights = call.ahead - entering(16384)
    assert weights == pytest.approx((weights + call.copies) / 32)
    assert call.last == pytest.approx((call.products + call.last) / 32)  # V3's experts go by fours


def test_the_cpu_keeps_the_rest() -> None:
    """A half that is carried takes its products off the CPU, not its bytes off the socket's memory."""
    (_, without), (_, half), (_, stays) = made(), made(stream=0.5), made(gpu_resident=128)
    large, small = 16384, 32
    plain = without.expert(0, LAYER, "forward", large).beside
    kept = 2 * V3.expert_width / RATES.memory.copy_all.value  # seconds per token
    assert half.expert(0, LAYER, "forward", large).beside == pytest.approx(plain / 2 + large * kept)
    assert stays.expert(0, LAYER, "forward", large).beside == pytest.approx(plain / 2 + large * kept)
    waits = without.expert(0, LAYER, "forward", small).beside  # for memory
    assert half.expert(0, LAYER, "forward", small).beside == pytest.approx(waits + small * kept)
    assert stays.expert(0, LAYER, "forward", small).beside < 0.6 * waits


@pytest.mark.parametrize("lane", [{"stream": 0.5}, {"gpu_resident": 128}])
def test_cores_add_up_what_the_gpus_answer(lane: dict[str, Any]) -> None:
    """Answers are read and added to others; so are the adapters' gradients."""
    (_, without), (_, found) = made(), made(**lane)
    tokens, copying = 16384, RATES.memory.copy_all.value
    rows, adapter = tokens * V3.expert_width, 4 * expert_lora_params(V3, found.config.lora)
    for direction, more in (("forward", 0.0), ("backward", 3 * 128 * adapter)):
        plain, call = (d.expert(0, LAYER, direction, tokens) for d in (without, found))
        answered = rows * touched(256, 128, 8)
        assert call.after - plain.after == pytest.approx((3 * 4 * answered + more) / 2 / copying)
        (on_gpu,) = found.lane(0, LAYER, direction, tokens)
        assert RATES.link is not None
        assert on_gpu.back == pytest.approx(BACK * answered / RATES.link.to_host.value)
        assert (on_gpu.routing > 0) == (direction == "forward")


def test_residents_are_not_carried() -> None:
    (_, half), (_, stays) = made(stream=0.5), made(gpu_resident=128)
    (carried,), (resident,) = (d.lane(0, LAYER, "forward", 16384) for d in (half, stays))
    assert resident.copies < 0.1 * carried.copies
    assert resident.products == pytest.approx(carried.products)
    assert stays.lanes.part(0, LAYER, 16384) == (0.5, 0.0)
    _, every = made(gpu_resident=256)
    assert every.lanes.part(0, LAYER, 16384) == (1.0, 0.0)


def test_recomputation_is_the_lanes_as_well() -> None:
    (_, retain), (_, again) = (made(stream=0.5, activations=kind) for kind in ("retain", "recompute"))
    (one,), (two,) = (d.lane(0, LAYER, "backward", 16384) for d in (retain, again))
    assert two.products == pytest.approx(5 / 3 * one.products)
    assert two.dispatch == one.dispatch  # what brings gate and up back are as many kernels as compute them
    (one,), (two,) = (d.lane(0, LAYER, "forward", 16384) for d in (retain, again))
    assert two.products == one.products
    assert two.dispatch < one.dispatch  # nor goes there


def test_experts_of_a_batch_share_their_dispatch() -> None:
    """As many batches as the runtime makes of even routing."""
    (_, large), (plan, small) = made(stream=0.5), made(stream=0.5)
    dims = dataclasses.replace(V3, expert_intermediate=32)
    small = dataclasses.replace(small, plan=dataclasses.replace(plan, dims=dims))
    per_batch, each = KERNELS["forward"], KERNELS_EACH
    for tokens in (4096, 16384):
        rows = tokens * 8 // 256
        fours, sixteens = (
            len(lane_share.batches(range(128), [rows] * 256, d.expert_params)) for d in (V3, dims)
        )
        assert fours > sixteens
        (of_large,), (of_small,) = (d.lane(0, LAYER, "forward", tokens) for d in (large, small))
        expected = (sixteens * per_batch + 128 * each) / (fours * per_batch + 128 * each)
        assert of_small.dispatch == pytest.approx(expected * of_large.dispatch)


def test_an_expert_of_a_gguf_file_is_three_copies() -> None:
    def dispatch(dims: ModelDims) -> float:
        how: dict[str, Any] = {"carried": 16, "recompute": False, "float8": False}
        return computed(dims, RATES, "forward", 16, 1, 8.0, **how).dispatch

    ratio = (KERNELS["forward"] + 3 * 16) / (KERNELS["forward"] + 16)
    assert dispatch(dataclasses.replace(V3, experts_file_bytes=1)) == pytest.approx(ratio * dispatch(V3))


def as_loaded(weights: ExpertWeights) -> ExpertWeights:
    """In memory as load_experts places them."""
    matrices = {name: getattr(weights, name) for name in ("gate", "up", "down")}
    placed = side_by_side(weights.E, [(tuple(t.shape[1:]), t.dtype) for t in matrices.values()])
    for to, value in zip(placed, matrices.values(), strict=True):
        to.copy_(value)
    return dataclasses.replace(weights, **dict(zip(matrices, placed, strict=True)))


# What torch calls that starts nothing on a device.
FREE = {"empty", "set_", "slice", "select", "view", "detach", "unbind", "transpose", "expand", "_unsafe_view"}
FREE |= {"unsqueeze", "squeeze", "lift_fresh", "split", "empty_like", "as_strided"}


class Kernels(TorchDispatchMode):
    """Counts what is started."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name.split("::")[1] not in FREE
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_kernels_are_those_of_the_lane(
    recompute: bool, float8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted on the stand-in, where a product of bfloat16 is three, one of FP8 others than a card's two for
    each expert, and transfers are none: here they are clones. Uneven rows, as with any routing."""
    calls: list[int] = []
    timed = DeviceLane._timed

    def counting(self: DeviceLane, *args: Any) -> Any:
        with Kernels() as kernels:
            counted.append(kernels)
            made = timed(self, *args)
            kernels.count -= widened.pop() if widened else 0
        calls.append(kernels.count)
        return made

    def multiplied8(a: Rounded, b: Rounded) -> torch.Tensor:
        before = counted[-1].count
        made = product8(a, b)
        counted[-1].count = before + 2 * len(a.values)
        return made

    counted: list[Kernels] = []
    widened: list[int] = []
    product, product8 = lane_math.product, lane_math.product8

    def multiplied(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        widened.append((widened.pop() if widened else 0) + 2)
        return product(a, b)

    monkeypatch.setattr(DeviceLane, "_timed", counting)
    monkeypatch.setattr(lane_math, "product", multiplied)
    monkeypatch.setattr(lane_math, "product8", multiplied8)
    for transfer in ("upload", "download"):
        monkeypatch.setattr(LaneDevice, transfer, lambda _, tensor: tensor.clone())

    def count(experts: int, batch: int) -> tuple[int, ...]:
        """Forward and backward, the e-th of the experts with e rows."""
        monkeypatch.setattr(lane_share, "LANE_BATCH", batch)
        rows = torch.arange(1, experts + 1)
        case = make_case(Shape(int(rows.sum()), 1, experts, 48, 32), torch.bfloat16)
        case.ids = torch.arange(experts).repeat_interleave(rows).unsqueeze(1)
        case.weights = as_loaded(case.weights)
        calls.clear()
        run_in_lane(case, recompute=recompute, float8=float8)
        return tuple(calls)

    once, twice, in_four = count(8, 8), count(16, 8), count(16, 4)
    for way, (direction, wanted) in enumerate(KERNELS.items()):
        per_batch = (in_four[way] - twice[way]) / 2
        each = (twice[way] - once[way] - per_batch) / 8
        more = FLOAT8_KERNELS[direction] if float8 else 0
        if recompute:
            more += KERNELS_AGAIN[direction] + (FLOAT8_AGAIN[direction] if float8 else 0)
        assert per_batch == wanted + more
        products = 5 if recompute and direction == "backward" else 3
        assert each == KERNELS_EACH + (FLOAT8_EACH * products if float8 else 0)


def test_no_lane_no_call() -> None:
    for _, durations in (made(), made(stream=0.5, lane_device="cpu")):
        assert durations.lane(0, LAYER, "forward", 16384) == ()
        assert durations.lanes.part(0, LAYER, 16384) == (0.0, 0.0)
    _, half = made(stream=0.5)
    assert half.lane(0, LAYER, "forward", 0) == ()
    blind = dataclasses.replace(half, rates=dataclasses.replace(RATES, link=None))
    assert blind.lane(0, LAYER, "forward", 16384) == ()


@pytest.mark.parametrize(
    ("cores", "isa", "tokens", "pays"), [(16, "avx512_bf16", 65536, True), (48, "amx", 512, False)]
)
def test_streaming_is_proposed_where_it_pays(cores: int, isa: str, tokens: int, pays: bool) -> None:
    """Large calls gain beside 16 cores; small ones on AMX wait for memory, which carrying does not save."""
    other = dataclasses.replace(
        HOST,
        sockets=(dataclasses.replace(HOST.sockets[0], cpus=tuple(range(cores)), cores=cores),),
        isas=HOST.isas[: HOST.isas.index(isa) + 1],
    )
    rates, row = nominal_rates(other), min(512, tokens)

    def at(stream: str) -> tuple[Config, Plan, Prediction]:
        config = configured(tokens, stream=stream)
        plan = make_plan(V3, config, other, None, lane_rates(config, other, V3, rates))
        return config, plan, predict(plan, config, rates, even_waves(plan, config, row))

    (config, plan, off), (_, _, auto) = at("off"), at("auto")
    found = {c.overrides: c.gain for c in neighbours(plan, config, rates, off, row)}
    assert ("rule.experts.stream=auto" in found) == pays
    assert any(term.name == "experts on the GPU" for term in auto.terms) == pays
    gain = auto.tokens_per_s / off.tokens_per_s
    assert gain == pytest.approx(found["rule.experts.stream=auto"] if pays else 1.0)
