"""rule.stages=auto with rule.replicas=auto: replicas where they fit and have work, else stages."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from kt_ray.config.checks import check
from kt_ray.dims.config_json import dims_from_config
from kt_ray.errors import UserError
from kt_ray.hardware.describe import gpus_wanted, nominal_hardware
from kt_ray.hardware.machine import Hardware
from kt_ray.placement.layout import layouts
from kt_ray.placement.memory import GIB
from kt_ray.placement.plan import make_plan
from kt_ray.placement.plan_types import Plan
from kt_ray.placement.render import LAYOUT
from tests.helpers.composing import compose
from tests.placement.configs import DEEPSEEK_V3, make_config, make_hardware, small_dims

V3 = dims_from_config(DEEPSEEK_V3)
SIZES: dict[str, Any] = {
    "data": {"max_length": 512},
    "trainer": {"batch_size": 16, "micro_batch_size": 1},
}


def host(gpus: int, gib: float, sockets: int = 2, memory: int = 2048 * GIB) -> Hardware:
    """GPUs of `gib` GiB each beside roomy sockets."""
    return make_hardware(sockets, 48, gpus, memory, isa="amx", gpu_gib=gib)


def v3(gpus: int, gib: float, rule: dict[str, Any] | None = None, **trainer: Any) -> Plan:
    config = make_config(rule=rule, data=SIZES["data"], trainer={**SIZES["trainer"], **trainer})
    return make_plan(V3, config, host(gpus, gib))


def note(plan: Plan) -> str:
    """The one note about the layout; "" where there is none."""
    found = [text for text in plan.notes if text.startswith(LAYOUT)]
    assert len(found) <= 1
    return found[0] if found else ""


def test_a_replica_on_each_gpu_where_it_fits() -> None:
    plan = v3(2, 48)
    assert (plan.stages, plan.replicas) == (1, 2) and plan.fits
    assert [w.device for w in plan.workers] == ["cuda:0", "cuda:1"]
    assert "1 stage x 2 replicas; a whole replica fits each GPU" in note(plan)


@pytest.mark.parametrize("mode", ["predict", "chat", "serve"])
def test_replicas_of_answers_do_not_depend_on_the_rows_of_a_training_step(mode: str) -> None:
    config = make_config(mode=mode, trainer={"batch_size": 1, "micro_batch_size": 1})
    plan = make_plan(small_dims(), config, make_hardware(gpus=4))
    assert (plan.stages, plan.replicas) == (1, 4) and "a whole replica fits each GPU" in note(plan)


def test_the_fewest_stages_that_fit_times_replicas() -> None:
    plan = v3(4, 24)
    assert (plan.stages, plan.replicas) == (2, 2) and plan.fits
    assert "1 stage x 4 replicas would lack" in note(plan) and "on cuda:0" in note(plan)
    alone = v3(4, 24, {"stages": 1, "replicas": 4})  # which is why: here only with streamed layers
    assert alone.fits and all(worker.streamed for worker in alone.workers)
    two = v3(2, 24)
    assert (two.stages, two.replicas) == (2, 1) and two.fits
    odd = v3(5, 24)  # stages of equal number: one GPU stays free
    assert (odd.stages, odd.replicas) == (2, 2) and odd.fits


def test_all_gpus_hold_layers_where_nothing_fits() -> None:
    plan = v3(4, 2)
    assert (plan.stages, plan.replicas) == (4, 1) and not plan.fits
    assert "nothing fits" in note(plan)


@pytest.mark.parametrize(
    ("gpus", "batch", "micro", "layout"),
    [
        (2, 1, 1, (2, 1)),
        (2, 8, 8, (2, 1)),  # one micro-batch for two replicas
        (4, 8, 4, (2, 2)),
        (4, 5, 1, (1, 3)),  # a fourth replica would not shorten two micro-batches in a row
        (8, 8, 1, (1, 8)),
        (6, 8, 1, (1, 4)),
        (3, 2, 1, (1, 2)),
    ],
)
def test_replicas_have_micro_batches_of_their_own(
    gpus: int, batch: int, micro: int, layout: tuple[int, int]
) -> None:
    config = make_config(trainer={"batch_size": batch, "micro_batch_size": micro})
    plan = make_plan(small_dims(), config, make_hardware(gpus=gpus))
    assert (plan.stages, plan.replicas) == layout
    if layout[1] < gpus:
        assert "more replicas would not shorten a step of" in note(plan)


def test_no_layout_is_slower_for_its_replicas() -> None:
    """The first choice has the fewest micro-batches in a row of all replica counts, with the fewest GPUs."""
    for gpus in range(2, 9):
        for micro in range(1, 20):
            config = make_config(trainer={"batch_size": micro, "micro_batch_size": 1})
            found = layouts(small_dims(), config, make_hardware(gpus=gpus))
            assert all(s * r <= gpus and 1 <= s <= 4 for s, r, _ in found)
            first = found[0][1]
            fewest = min(math.ceil(micro / r) for r in range(1, gpus + 1))
            assert math.ceil(micro / first) == fewest
            assert first == 1 or math.ceil(micro / (first - 1)) > fewest
            assert [s for s, _, _ in found] == sorted({s for s, _, _ in found})


@pytest.mark.parametrize(
    ("rule", "layout"),
    [
        ({"stages": 2}, (2, 1)),
        ({"stages": 1}, (1, 1)),
        ({"replicas": 1}, (4, 1)),
        ({"replicas": 2}, (2, 2)),
        ({"stages": 2, "replicas": 2}, (2, 2)),
        ({"layers": [2, 2]}, (2, 1)),
        ({"device": "cpu"}, (1, 1)),
        ({"device": "cpu", "stages": 2}, (2, 1)),
    ],
)
def test_what_is_set_is_obeyed(rule: dict[str, Any], layout: tuple[int, int]) -> None:
    plan = make_plan(small_dims(), make_config(rule=rule), make_hardware(gpus=4))
    assert (plan.stages, plan.replicas) == layout and not note(plan)


@pytest.mark.parametrize("gpus", [0, 1])
def test_one_worker_has_nothing_to_choose(gpus: int) -> None:
    plan = make_plan(small_dims(), make_config(), make_hardware(gpus=gpus, sockets=1 + gpus))
    assert len(plan.workers) == 1 and not note(plan)


def test_a_replica_on_each_socket_of_a_host_without_gpus() -> None:
    """A worker on the CPU computes on one socket."""
    dims, hardware = small_dims(), make_hardware(sockets=2)
    plan = make_plan(dims, make_config(), hardware)
    assert (plan.stages, plan.replicas) == (1, 2) and "a replica for each socket" in note(plan)
    assert [worker.cpus for worker in plan.workers] == [socket.cpus for socket in hardware.sockets]
    one_row = make_plan(dims, make_config(trainer={"batch_size": 1}), hardware)
    assert one_row.replicas == 1 and "more replicas would not shorten" in note(one_row)
    # The weights of a second replica take memory on its socket.
    need = make_plan(dims, make_config(rule={"replicas": 1, "wave": 1}), hardware)
    little = make_hardware(sockets=2, memory=max(b.total for b in need.budgets))
    assert make_plan(dims, make_config(rule={"wave": 1}), little).fits
    assert make_plan(dims, make_config(mode="predict"), hardware).replicas == 1
    for rule in ({"stages": 1}, {"replicas": 1}, {"layers": [2, 2]}):
        assert make_plan(dims, make_config(rule=rule), hardware).replicas == 1


def test_auto_counts_as_one_where_no_plan_is_made() -> None:
    rule = make_config(rule={"device": "cuda"}).rule
    assert rule.replicas == "auto" and rule.replica_count == 1
    assert gpus_wanted(rule) == 1 and len(nominal_hardware(rule).gpus) == 1
    with pytest.raises(UserError, match=r"rule\.replicas"):
        check(make_config(rule={"replicas": "two"}, model={"build": "demo"}, data={"builtin": "demo"}))


def test_a_rule_says_how_many_gpus_and_the_plan_lays_them_out() -> None:
    """rule=amx_4gpu and its kin: the same plan as rule=auto on as many GPUs, on their own hardware too."""
    auto = v3(4, 24)
    some = make_plan(V3, make_config(rule={"gpus": 4}, **SIZES), host(8, 24))
    assert (some.workers, some.budgets) == (auto.workers, auto.budgets)
    rule = compose(["model=deepseek_v3", "mode=plan", "rule=amx_4gpu"]).rule
    nominal = make_plan(V3, make_config(rule=vars(rule) | {"experts": {}, "ray": {}}), nominal_hardware(rule))
    assert (len(nominal.hardware.gpus), nominal.stages, nominal.replicas) == (4, 2, 2) and nominal.fits


def test_a_rule_for_more_gpus_than_there_are_is_refused() -> None:
    config = make_config(rule={"name": "amx_4gpu", "gpus": 4})
    with pytest.raises(UserError, match=r"rule\.gpus=4 of rule amx_4gpu.*2 GPUs.*set rule\.gpus=auto"):
        make_plan(V3, config, host(2, 24))
    assert not make_plan(V3, make_config(rule={"gpus": 4, "device": "cpu"}), host(0, 24)).hardware.gpus


def test_it_is_the_plan_of_the_numbers_it_chose() -> None:
    """Auto is a choice between plans, not a plan of its own."""
    auto = v3(4, 24)
    said = v3(4, 24, {"stages": auto.stages, "replicas": auto.replicas})
    assert dataclasses.replace(auto, notes=auto.notes[1:]) == said
