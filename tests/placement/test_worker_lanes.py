"""Experts that attention workers compute for their own tokens: who, how many, bytes, what is refused."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from kt_ray.config.schema import Config
from kt_ray.dims.config_json import dims_from_config
from kt_ray.errors import UserError
from kt_ray.hardware.describe import hardware_from_file
from kt_ray.hardware.machine import Hardware
from kt_ray.hardware.nominal import nominal_rates
from kt_ray.placement.expert_load import touched
from kt_ray.placement.lane_share import LaneRates, Tuning
from kt_ray.placement.lora_sizes import expert_lora_params
from kt_ray.placement.memory import GIB
from kt_ray.placement.plan import make_plan
from kt_ray.placement.plan_types import LanePlan, Plan
from kt_ray.placement.render import expert_row, plan_to_dict, worker_row
from kt_ray.placement.worker_lanes import AHEAD, GRADIENT_LAYERS, left_part
from kt_ray.timing.lane_rates import from_rates, lane_rates
from tests.placement.configs import DEEPSEEK_V3, make_config, make_hardware, small_dims

EVERYTHING = Tuning(32.0, True)
V3 = dims_from_config(DEEPSEEK_V3, "DeepSeek-V3")


def config_of(stages: int = 1, replicas: int = 2, **experts: Any) -> Config:
    asked = {"stream": 0.5, "stream_to": "workers", **experts}
    rule = {"stages": stages, "replicas": replicas, "experts": {"sockets": 2, **asked}}
    return make_config(rule=rule, trainer={"batch_size": 8, "micro_batch_size": 1})


def planned(gpus: int = 0, hardware: Hardware | None = None, stages: int = 1, **experts: Any) -> Plan:
    hardware = hardware or make_hardware(sockets=2, gpus=gpus)
    return make_plan(small_dims(), config_of(stages, **experts), hardware)


def v3_plan(gib: float = 48, tuning: Tuning | None = None, rates: bool = True, **experts: Any) -> Plan:
    """DeepSeek-V3 on two cards and two AMX sockets, 65,536 tokens per step."""
    hardware = make_hardware(sockets=2, cores=64, gpus=2, memory=4096 * GIB, isa="amx", gpu_gib=gib)
    config = make_config(
        rule={
            "stages": 1,
            "replicas": 2,
            "groups": 2,
            "resident_layers": 0,
            "activations": "host",
            "experts": {"stream": "auto", "stream_to": "workers", **experts},
        },
        data={"max_length": 2048},
        trainer={"batch_size": 32, "micro_batch_size": 1},
    )
    found = lane_rates(config, hardware, V3, nominal_rates(hardware)) if rates else None
    return make_plan(V3, config, hardware, None, found and found.tuned(tuning or Tuning()))


def lane_of(plan: Plan) -> LanePlan:
    (lane,) = {dataclasses.replace(w.lane, devices=()) for w in plan.workers if w.lane is not None}
    assert len({worker.lane is None for worker in plan.workers}) == 1
    return lane


def items(plan: Plan, device: str) -> dict[str, int]:
    return next(dict(b.items) for b in plan.budgets if b.device == device)


def test_every_worker_computes_on_its_own_device() -> None:
    plan = planned(gpus=2)
    assert [w.lane and w.lane.devices for w in plan.workers] == [("cuda:0",), ("cuda:1",)]
    assert all(actor.lane is None for actor in plan.experts)
    assert plan.stream_to == "workers" and plan.lane == plan.workers[0].lane
    assert lane_of(plan).shares == ((0, 0.5),) and lane_of(plan).later == ()
    stand_in = planned(lane_device="cpu")
    assert [w.lane and w.lane.devices for w in stand_in.workers] == [("cpu",), ("cpu",)]
    assert any("a stand-in" in note for note in stand_in.notes)
    for same in (planned(gpus=2, stream_to="actors"), planned(gpus=2, stream_to="auto")):
        assert all(worker.lane is None for worker in same.workers) and same.experts[0].lane
        assert same.stream_to == "actors"
    assert planned(stream="off").lane is None


def test_tables_and_values_show_it() -> None:
    plan = planned(gpus=2)
    assert worker_row(plan, plan.workers[1])[-1] == "cuda:1: 50% streamed, 4 held, 4 ahead"
    assert expert_row(plan, plan.experts[0])[-1] == "-"
    values = plan_to_dict(plan)
    assert values["stream_to"] == "workers"
    assert values["workers"][0]["lane"]["ahead"] == 4 and "visible" not in values["workers"][0]["lane"]
    assert "lane" not in plan_to_dict(planned(stream="off"))["workers"][0]


def test_as_many_places_as_there_is_room_for() -> None:
    """Up to half of them for experts that are copied ahead."""
    lane = lane_of(v3_plan())
    few = round(lane.share(16384) * 256)
    assert (lane.held, lane.ahead) == (few, few) and few < AHEAD
    every = lane_of(v3_plan(tuning=EVERYTHING))
    assert every.ahead == AHEAD and AHEAD < every.held <= 256
    tight = lane_of(v3_plan(gib=20.2, tuning=EVERYTHING))
    assert 0 < tight.ahead < AHEAD and tight.held - tight.ahead in (0, 1)
    assert v3_plan(gib=20.2, tuning=EVERYTHING).fits
    alone = planned(gpus=2, stream=0.5)
    config = config_of()
    one = make_config(rule={**vars_of(config), "groups": 1}, trainer={"batch_size": 8, "micro_batch_size": 1})
    single = lane_of(make_plan(small_dims(), one, make_hardware(sockets=2, gpus=2)))
    assert single.held == single.ahead == 4 == lane_of(alone).ahead  # one call: none are held for the next


def vars_of(config: Config) -> dict[str, Any]:
    experts = {"sockets": 2, "stream": 0.5, "stream_to": "workers"}
    return {"stages": config.rule.stages, "replicas": config.rule.replicas, "experts": experts}


def test_rates_of_a_worker() -> None:
    """A card and its link, undivided; the host's cores, divided by the replicas; memory read once for all."""
    actor = LaneRates(
        link=10.0, gpu=20.0, cpu=30.0, memory=40.0, actors=4, sharing=2, tuning=Tuning(0.5, True)
    )
    one = actor.of_worker(2)
    assert (one.link, one.gpu, one.cpu, one.memory) == (20.0, 40.0, 60.0, 160.0)
    assert one.tuning == actor.tuning
    hardware = hardware_from_file(Path(__file__).parents[2] / "conf" / "hardware" / "2x4090_2x8488c.yaml")
    found = from_rates(nominal_rates(hardware), config_of(sockets=4), hardware, V3)
    assert found is not None and (found.actors, found.sharing) == (4, 2)


def test_auto_shares_by_rates_and_tuning() -> None:
    less, plain, more = (lane_of(v3_plan(tuning=Tuning(speed))) for speed in (0.7, 1.0, 1.4))
    assert 0 < less.share(16384) < plain.share(16384) < more.share(16384) < 1
    every = lane_of(v3_plan(tuning=EVERYTHING))
    assert every.share(16384) == 1.0 and every.recompute
    blind = v3_plan(rates=False)
    assert blind.lane is None and any("off, as no rates" in note for note in blind.notes)


def test_what_is_left_to_the_actors() -> None:
    """Also by a smaller call, which carries less."""
    assert left_part(LanePlan(("cuda:0",), shares=((0, 0.25),)), 1000) == pytest.approx(0.75)
    steps = LanePlan(("cuda:0",), shares=((100, 0.5), (1000, 1.0)))
    assert left_part(steps, 2000) == pytest.approx(999 / 2 / 2000)
    assert left_part(steps, 100) == pytest.approx(0.99) and left_part(steps, 50) == 1.0
    assert left_part(steps, 0) == 1.0


def test_bytes_of_a_workers_lane() -> None:
    """On its card buffers and places, no further CUDA context; on its socket x, rows, gates and ups,
    gradients; actors keep what is left to them."""
    plain, lane = v3_plan(stream="off"), v3_plan(stream=0.5)
    before, card = items(plain, "cuda:0"), items(lane, "cuda:0")
    assert {item for item in card if card[item] != before.get(item)} == {"workspace"}
    one = V3.expert_bytes() / len(V3.moe_layers)
    own = lane_of(lane)
    width, group, tokens = V3.expert_width, 16384, 32768
    assert card["workspace"] - before["workspace"] > (own.held + own.ahead) * one + group * width * (10 + 4)
    before, socket = items(plain, "socket 0"), items(lane, "socket 0")
    assert socket["experts"] == before["experts"] and socket["LoRA"] == before["LoRA"]
    gates = tokens * 8 * 0.5 * 2 * V3.expert_intermediate * 2
    kept = len(V3.moe_layers) * (tokens * width * 2 + 36 * tokens * 4 + 2 * gates)
    assert any(w.lane and not w.lane.recompute for w in lane.workers)
    sent = touched(256, 128, 8)
    gradients = GRADIENT_LAYERS * 2 * 128 * 4 * expert_lora_params(V3, make_config().lora)
    answers = 2 * 65536 * width * 4
    x = 2 * tokens * width * 4
    less = (1 - sent) * (answers + x)
    assert socket["staging"] - before["staging"] == pytest.approx(gradients - less, abs=1 << 16)
    worker = lane.workers[0].staging - plain.workers[0].staging
    assert worker == pytest.approx(gradients - (1 - sent) * x, abs=1 << 16)
    engine = before["kept activations"]
    assert engine / 2 + kept < socket["kept activations"] < engine + kept
    again = v3_plan(tuning=EVERYTHING)
    assert items(again, "socket 0")["kept activations"] < before["kept activations"] / 2
    assert items(again, "socket 0")["staging"] < socket["staging"]


def test_stages_keep_their_own_layers() -> None:
    def kept(stages: int, **experts: Any) -> int:
        hardware = make_hardware(sockets=2, gpus=2 * stages)
        plan = planned(hardware=hardware, stages=stages, **experts)
        return sum(b.items["kept activations"] for b in plan.budgets if b.is_socket)

    one, two = (kept(stages) - kept(stages, stream="off") for stages in (1, 2))
    routing = 12 * 4 * 16 * small_dims().experts_per_token  # of one layer, which each stage has in flight
    assert two - one == pytest.approx(2 * routing, abs=64)


def test_experts_of_the_own_host() -> None:
    """Of two hosts a worker reaches its own one's experts; the others compute theirs as ever."""
    config = make_config(
        rule={
            "nodes": 2,
            "stages": 1,
            "replicas": 4,
            "attention_hosts": "all",
            "device": "cuda",
            "experts": {"stream": 0.5, "stream_to": "workers"},
        },
        trainer={"batch_size": 8, "micro_batch_size": 1},
    )
    hardware = make_hardware(sockets=2, gpus=2)
    plan = make_plan(small_dims(), config, hardware)
    assert [w.host for w in plan.workers] == [0, 0, 1, 1] and plan.lane is not None
    assert (plan.lane.held, plan.lane.ahead) == (2, 2)  # half of the four on a host
    assert any("stream experts of their own host" in note for note in plan.notes)
    alone = dataclasses.replace(config.rule, attention_hosts="driver", replicas=2)
    driver = make_plan(small_dims(), dataclasses.replace(config, rule=alone), hardware)
    assert {w.host for w in driver.workers} == {0} and driver.stream_to == "workers"
    kept = {b.device: b.items["kept activations"] for b in driver.budgets if b.is_socket}
    assert kept["host 1 socket 0"] == kept["host 1 socket 1"] != kept["host 0 socket 0"]


@pytest.mark.parametrize(
    ("gpus", "changes", "found"),
    [
        (2, {"gpu_resident": 2}, "rule.experts.gpu_resident=2"),
        (2, {"lane_device": "cuda:1"}, "attention on GPUs"),
        (2, {"lane_device": "cpu"}, "attention on GPUs"),
        (0, {}, "none"),
    ],
)
def test_refusals_name_the_remedy(gpus: int, changes: dict[str, Any], found: str) -> None:
    with pytest.raises(UserError) as caught:
        planned(gpus=gpus, **changes)
    assert found in str(caught.value) and caught.value.remedy
    assert gpus == 0 or "rule.experts.stream_to=actors" in caught.value.remedy


def test_more_refusals() -> None:
    config = config_of()
    on_cpu = dataclasses.replace(config, rule=dataclasses.replace(config.rule, device="cpu"))
    with pytest.raises(UserError, match="on its own device"):
        make_plan(small_dims(), on_cpu, make_hardware(sockets=2, gpus=2))
    ranges = dataclasses.replace(config, rule=dataclasses.replace(config.rule, activations="ranges"))
    with pytest.raises(UserError, match="by ranges"):
        make_plan(small_dims("qwen3_moe"), ranges, make_hardware(sockets=2, gpus=2))


def test_rows_that_do_not_fit_are_not_streamed() -> None:
    hardware = make_hardware(sockets=2, cores=48, gpus=1, memory=4096 * GIB, isa="amx", gpu_gib=17)
    config = make_config(
        rule={"gpus": 1, "experts": {"stream": "auto", "stream_to": "workers"}},
        data={"max_length": 1 << 17},
        trainer={"batch_size": 1},
    )
    plan = make_plan(V3, config, hardware, None, lane_rates(config, hardware, V3, nominal_rates(hardware)))
    assert plan.fits and plan.activations == "ranges" and plan.lane is None


def test_answers_are_generated_without() -> None:
    config = dataclasses.replace(config_of(), mode="predict")
    plan = make_plan(small_dims(), config, make_hardware(sockets=2, gpus=2))
    assert plan.lane is None and any("not streamed while answers" in note for note in plan.notes)


def test_memory_is_what_devices_have() -> None:
    for gib in (20, 24, 32, 48):
        plan = v3_plan(gib=gib, tuning=EVERYTHING)
        (card,) = {b.total for b in plan.budgets if b.device == "cuda:1"}
        assert plan.fits and card <= plan.budgets[1].capacity and math.isfinite(card)
