"""Attention workers' lanes in the prediction: who computes what, how long, and what rule=auto makes of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kt_ray.config.mapping import with_keys
from kt_ray.config.schema import Config
from kt_ray.hardware.describe import hardware_for
from kt_ray.hardware.nominal import nominal_rates
from kt_ray.modes.plan import model_dims
from kt_ray.placement.expert_load import touched
from kt_ray.placement.lane_share import NOTHING, batch_size
from kt_ray.placement.lora_sizes import expert_lora_params
from kt_ray.placement.plan import make_plan
from kt_ray.placement.plan_types import Choice, Plan
from kt_ray.placement.render import choice_text
from kt_ray.timing.choose import EVERYTHING, choose_plan
from kt_ray.timing.lane_rates import lane_rates
from kt_ray.timing.lane_seconds import KERNELS, KERNELS_AGAIN, KERNELS_EACH, ROUTED_SECONDS
from kt_ray.timing.layer_work import dispatch_seconds
from kt_ray.timing.prediction import predict
from kt_ray.timing.seats import machine_of
from kt_ray.timing.simulate import AT_CALL, COPIED_AHEAD, WorkerLaneCall
from kt_ray.timing.step_costs import PlanDurations
from tests.helpers.composing import compose
from tests.placement.configs import make_config, make_hardware
from tests.placement.test_layout import V3

HOST = make_hardware(sockets=2, cores=48, gpus=2, memory=4096 << 30, isa="amx", gpu_gib=80)
RATES = nominal_rates(HOST)
LAYER = V3.moe_layers[0]
TOKENS = 16384  # of a group of one replica


def made(stream: float | str = 0.5, **experts: Any) -> tuple[Plan, PlanDurations]:
    config = make_config(
        rule={
            "stages": 1,
            "replicas": 2,
            "groups": 2,
            "resident_layers": 0,
            "activations": "host",
            "experts": {"stream": stream, "stream_to": "workers", **experts},
        },
        data={"max_length": 2048},
        trainer={"batch_size": 32, "micro_batch_size": 1},
    )
    lane = lane_rates(config, HOST, V3, RATES)
    plan = make_plan(V3, config, HOST, None, lane and lane.tuned(EVERYTHING))
    return plan, PlanDurations(plan, config, RATES, machine_of(plan))


def call(durations: PlanDurations, direction: str, number: int = 0) -> WorkerLaneCall:
    found = durations.worker_lane(1, LAYER, direction, TOKENS, call=number)
    assert found is not None
    return found


def test_one_copy_serves_all_groups() -> None:
    plan, durations = made()
    assert plan.lane is not None and RATES.link is not None and RATES.gpu is not None
    assert (plan.lane.held, plan.lane.ahead) == (128, 96)
    one = V3.held_bytes("auto") / RATES.link.to_device.value
    first, second = (call(durations, "forward", n) for n in (0, 1))
    assert (first.copies_ahead, first.copies) == (pytest.approx(96 * one), pytest.approx(32 * one))
    assert second.copies_ahead == second.copies == 0 == first.products_there
    rows = TOKENS * 8 / 256
    products = 128 * rows * 2 * V3.expert_params / RATES.gpu.gemm["bfloat16"](rows)
    assert second.products_there == pytest.approx(products)
    assert first.products_ahead + first.products == pytest.approx(products)
    assert first.products_ahead == pytest.approx(0.75 * products)
    assert (first.device, first.home) == ("cuda:1", "socket 1")


def test_what_leaves_the_card_and_comes_back() -> None:
    """Ids, x, gates and ups out; x, gates and ups back; adapters in, their gradients out."""
    assert RATES.link is not None and RATES.gpu is not None
    into, out = RATES.link.to_device.value, RATES.link.to_host.value
    adapters = 128 * 4 * expert_lora_params(V3, make_config().lora)
    x, gates = TOKENS * V3.expert_width * 2, TOKENS * 4 * 2 * V3.expert_intermediate * 2
    batches = 128 / batch_size(512, V3.expert_params)
    for activations, kept in (("retain", gates), ("recompute", 0)):
        _, durations = made(activations=activations)
        if activations == "recompute":
            durations = with_lane(durations, recompute=True)
        forward, backward = (call(durations, way) for way in ("forward", "backward"))
        assert forward.asked == pytest.approx(TOKENS * 8 * 8 / out) and backward.asked == 0
        assert forward.routing == ROUTED_SECONDS * TOKENS * 8 and backward.routing == 0
        assert forward.entering == pytest.approx(adapters / into)
        assert backward.entering == pytest.approx((adapters + x + kept) / into)
        assert (forward.leaving, backward.leaving) == (pytest.approx((x + kept) / out), 0)
        assert (forward.gradients, backward.gradients) == (0, pytest.approx(adapters / out))
        again = 0 if kept else KERNELS_AGAIN["backward"]
        kernels = (KERNELS["backward"] + again) * batches + KERNELS_EACH * 128
        assert backward.dispatch == pytest.approx(dispatch_seconds(kernels, RATES.gpu, RATES.cpu_one))
        more = (backward.products + backward.products_ahead) / (forward.products + forward.products_ahead)
        assert more == pytest.approx(1 if kept else 5 / 3)
        assert forward.sent == touched(256, 128, 8)


def with_lane(durations: PlanDurations, **changes: Any) -> PlanDurations:
    plan = durations.plan
    workers = tuple(
        dataclasses.replace(w, lane=dataclasses.replace(w.lane, **changes) if w.lane else None)
        for w in plan.workers
    )
    return dataclasses.replace(durations, plan=dataclasses.replace(plan, workers=workers))


def test_actors_compute_the_rest() -> None:
    """Half of the rows; tokens without an expert there are not joined; gradients are added
    up once the answers have left."""
    (_, without), (_, half) = made("off"), made()
    together = 2 * TOKENS
    copying = half.copied_per_second(48)
    joined = together * V3.expert_width * 2 / copying
    plain, found = (d.expert(0, LAYER, "forward", together) for d in (without, half))
    sent = touched(256, 128, 8)
    assert found.beside == pytest.approx((plain.beside - joined) / 2 + sent * joined)
    assert plain.late == found.late == 0
    adapters = 2 * 64 * 4 * expert_lora_params(V3, half.config.lora)  # two replicas', of half of the actor's
    assert half.expert(0, LAYER, "backward", together).late == pytest.approx(3 / 2 * adapters / copying)
    _, every = made("auto")
    nothing = every.expert(0, LAYER, "forward", together, call=1)
    assert nothing.beside == pytest.approx(0, abs=1e-9)
    # What workers copy is read from the same memory: of each replica.
    first = every.expert(0, LAYER, "forward", together, call=0)
    read = 256 * V3.held_bytes("auto") / RATES.memory.read_all.value
    assert first.beside == pytest.approx(read, rel=0.01)


def test_no_lane_no_call() -> None:
    _, durations = made()
    assert durations.worker_lane(0, LAYER, "forward", 0) is None
    assert durations.worker_lane(0, 0, "forward", TOKENS) is None  # a dense layer
    blind = dataclasses.replace(durations, rates=dataclasses.replace(RATES, link=None))
    assert blind.worker_lane(0, LAYER, "forward", TOKENS) is None
    _, off = made("off")
    assert off.worker_lane(0, LAYER, "forward", TOKENS) is None and not off.worker_lanes.run


def test_parts_are_whole() -> None:
    assert sum(AT_CALL) == pytest.approx(1) == sum(COPIED_AHEAD)


def desktop(**keys: Any) -> tuple[Config, Plan]:
    config = compose(
        [
            *("mode=plan", "rule=auto", "model=qwen3_30b_a3b", "plan.hardware=1x4090_1x7950x"),
            *("trainer.batch_size=16", "data.max_length=2048", "rule.experts.stream=auto"),
        ]
    )
    config = with_keys(config, keys)
    return config, choose_plan(model_dims(config.model), config, hardware_for(config))


def test_who_computes_is_found_out() -> None:
    """On a desktop the cores that expert actors need for a card's tokens are too few."""
    config, plan = desktop()
    best, *others = plan.compared
    assert best.stream_to == "workers" == plan.stream_to
    actors = min(other.seconds for other in others if other.stream_to == "actors")
    assert actors > 1.2 * best.seconds
    assert "streamed to attention workers" in choice_text(best)
    found = predict(plan, config, nominal_rates(plan.hardware))
    assert found.simulated.work["lane of worker 0"] > 0 and found.simulated.work["copies of worker 0"] > 0
    assert any(term.name == "experts on the GPU" and term.seconds > 1 for term in found.terms)


def test_what_is_named_is_obeyed() -> None:
    for named in ("actors", "workers"):
        _, plan = desktop(**{"rule.experts.stream_to": named})
        assert plan.stream_to == named == plan.compared[0].stream_to
        assert {choice.stream_to for choice in plan.compared if choice.tuning != NOTHING} == {named}
    _, off = desktop(**{"rule.experts.stream": "off"})
    assert off.lane is None and {choice.stream_to for choice in off.compared} == {"actors"}


@pytest.mark.parametrize("stream_to", ["actors", "workers"])
def test_a_resumed_run_goes_on_as_before(stream_to: str) -> None:
    """Who computes decides in which order a run adds up."""
    config, plan = desktop(**{"rule.experts.stream_to": stream_to})
    before: Choice = plan.compared[0]
    again = with_keys(config, {"rule.experts.stream_to": "auto"})
    resumed = choose_plan(model_dims(config.model), again, hardware_for(again), before=before)
    assert resumed.stream_to == stream_to
    assert (resumed.workers, resumed.experts) == (plan.workers, plan.experts)
    assert any("are those of the run that is resumed" in note for note in resumed.notes)
