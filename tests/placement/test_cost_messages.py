"""Durations of a plan: who pays for which message, on which host, and in which format experts are held."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kt_ray.config.schema import Config
from kt_ray.hardware.machine import Hardware, with_hosts
from kt_ray.hardware.nominal import nominal_rates
from kt_ray.placement.memory import held_format
from kt_ray.placement.plan import make_plan
from kt_ray.placement.plan_types import Plan
from kt_ray.timing.event_loop import Carriage
from kt_ray.timing.lane_rates import from_rates
from kt_ray.timing.seats import machine_of
from kt_ray.timing.step_costs import PlanDurations
from tests.placement.configs import make_config, make_hardware, small_dims

DIMS = small_dims()
TOKENS = 1000


def durations_of(config: Config, hardware: Hardware, plan: Plan | None = None) -> PlanDurations:
    plan = plan or make_plan(DIMS, config, hardware)
    return PlanDurations(plan, config, nominal_rates(plan.hardware), machine_of(plan))


def seconds_on(carriage: Carriage, resource: str) -> float:
    return sum(leg.seconds for leg in carriage.legs if leg.resource == resource)


def test_actors_and_doorbells_are_on_their_own_host() -> None:
    hardware = make_hardware(sockets=1, cores=4, gpus=2)
    found = durations_of(make_config(rule={"nodes": 3, "stages": 2}), hardware)
    assert dict(found.machine.capacity) == {f"host {n} socket 0": 4.0 for n in range(3)}
    assert [(c.actors, c.seat.resource, c.far) for c in found.machine.experts[:1]] == [
        ((0,), "host 0 socket 0", False)
    ]
    assert all(c.far and not c.seat.resource.startswith("host 0") for c in found.machine.experts[1:])
    for worker in (0, 1):  # attention is on host 0, however many hosts there are
        legs = found.request(worker, found.machine.experts[0], "forward", TOKENS).legs
        assert [leg.resource for leg in legs] == [f"pcie cuda:{worker} out", "host 0 socket 0"]


def test_a_cpu_worker_of_several_hosts_sits_on_the_first() -> None:
    hardware = make_hardware(sockets=2, cores=4)
    found = durations_of(make_config(rule={"nodes": 2, "replicas": 3}), hardware)
    assert [seat.resource for seat in found.machine.workers] == [f"host 0 socket {n}" for n in (0, 1, 0)]


def test_tokens_cross_to_the_host_once_and_every_answer_back() -> None:
    found = durations_of(make_config(), make_hardware(sockets=2, gpus=1))
    experts = found.machine.experts
    assert len(experts) == 2 and found.rates.link is not None
    row = DIMS.expert_width * 2 + DIMS.experts_per_token * 8 + 8
    out = sum(seconds_on(found.request(0, c, "forward", TOKENS), "pcie cuda:0 out") for c in experts)
    assert out == pytest.approx(TOKENS * row / found.rates.link.to_host.value)
    back = sum(seconds_on(found.reply(0, c, "forward", TOKENS), "pcie cuda:0 in") for c in experts)
    assert back == pytest.approx(2 * TOKENS * DIMS.expert_width * 4 / found.rates.link.to_device.value)


def test_experts_placed_by_load_cost_as_much_to_reach() -> None:
    config = make_config(rule={"nodes": 2})
    found = durations_of(config, make_hardware())
    placed = tuple(
        replace(a, experts=(), by_layer=tuple((layer, a.experts) for layer in DIMS.moe_layers))
        for a in found.plan.experts
    )
    other = durations_of(config, make_hardware(), replace(found.plan, experts=placed))
    far = found.machine.experts[1]
    assert 0 < found.routed(1, TOKENS) < TOKENS
    assert other.request(0, far, "forward", TOKENS) == found.request(0, far, "forward", TOKENS)


@pytest.mark.parametrize("transport", ["auto", "ray", "gloo"])
def test_tensors_outside_shared_memory_take_their_bytes(transport: str) -> None:
    found = durations_of(make_config(rule={"transport": transport}), make_hardware(sockets=2))
    row = DIMS.expert_width * 4
    carriage = found.request(0, found.machine.experts[0], "backward", TOKENS)
    rates = found.rates.transport
    taken = sum(leg.seconds for leg in carriage.legs) + carriage.latency
    routed = found.routed(0, TOKENS) * row / rates.ray_bytes.value
    assert taken == pytest.approx(rates.arena.value if transport == "auto" else rates.call.value + routed)
    local = durations_of(
        make_config(cluster="local", rule={"transport": transport}), make_hardware(sockets=2)
    )
    handed = local.request(0, local.machine.experts[0], "backward", TOKENS)
    assert sum(leg.seconds for leg in handed.legs) == pytest.approx(rates.local.value)


def test_the_format_that_experts_are_held_in() -> None:
    assert held_format(DIMS, "auto") == DIMS.expert_format == "bf16"
    assert held_format(DIMS, "AMXINT4") == "int4"
    assert held_format(DIMS, "llamafile") == "q8_0"  # of a file that is not there
    small = replace(DIMS, experts_file_bytes=int(DIMS.routed_params * 0.6))
    assert held_format(small, "llamafile") == held_format(small, "auto") == "q4_k"


def test_a_lane_is_as_fast_on_each_of_several_hosts() -> None:
    hardware = make_hardware(sockets=2, gpus=1)
    config = make_config(rule={"experts": {"stream": "auto"}})
    rates = nominal_rates(hardware)
    assert from_rates(rates, config, with_hosts(hardware, 4), DIMS) == from_rates(
        rates, config, hardware, DIMS
    )
