"""What goes to a GPU's lane: which experts, how many, when it pays; the plan's notes, refusals and bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kt_ray.config.checks import check
from kt_ray.config.schema import Config
from kt_ray.dims.config_json import dims_from_config
from kt_ray.dims.model_dims import ModelDims
from kt_ray.errors import UserError
from kt_ray.hardware.describe import hardware_from_file
from kt_ray.hardware.nominal import nominal_rates
from kt_ray.placement import lane_share
from kt_ray.placement.balance import residents_of
from kt_ray.placement.expert_load import ExpertLoad
from kt_ray.placement.lane_plan import LaneMemory, expert_sizes, lane_buffers
from kt_ray.placement.lane_share import (
    LANE_ROWS,
    ExpertSizes,
    LaneRates,
    LaneWork,
    Tuning,
    batches,
    best_share,
    choose_shares,
    dealt,
    lane_parts,
    places,
    resident_experts,
    split_seconds,
    streamed_experts,
)
from kt_ray.placement.lora_sizes import expert_lora_params
from kt_ray.placement.memory import GIB, GPU_RUNTIME
from kt_ray.placement.plan import make_plan
from kt_ray.placement.plan_types import LanePlan, Plan
from kt_ray.placement.render import expert_row, plan_to_dict
from kt_ray.timing.lane_rates import from_rates, lane_rates
from tests.placement.configs import DEEPSEEK_V3, make_config, make_hardware, small_dims

RATES = LaneRates(link=25e9, gpu=80e12, cpu=20e12, memory=200e9)
V3 = dims_from_config(DEEPSEEK_V3, "DeepSeek-V3")


def test_the_experts_with_most_rows_are_carried() -> None:
    counts = [3, 0, 9, 9, 1, 0, 7, 2]
    assert streamed_experts(counts, 0.25) == (2, 3)
    assert streamed_experts(counts, 0.5) == (0, 2, 3, 6)
    assert streamed_experts(counts, 1.0) == (0, 2, 3, 4, 6, 7)  # never one without rows
    assert streamed_experts([5, 5, 5], 0.4) == (0,) and streamed_experts(counts, 0.0) == ()
    assert streamed_experts([], 0.5) == ()


def test_batches_of_experts_that_are_about_as_long() -> None:
    counts = [900, 20, 9000, 900, 4096, 30, 4097, 700, 1]
    order = batches(range(9), counts, 1_000_000)
    assert order == ((2,), (6,), (4, 0), (3, 7, 5, 1, 8))
    assert batches(reversed(range(9)), counts, 1_000_000) == order
    assert batches([1, 5], counts, 1_000_000) == ((5, 1),) and batches([], counts, 1) == ()
    assert all(len(batch) * counts[batch[0]] <= LANE_ROWS for batch in order[1:])
    equal = [batches(range(20), [10] * 20, params) for params in (1, 30 << 20, 44 << 20, 200 << 20)]
    assert [[len(batch) for batch in made] for made in equal] == [[16, 4], [5] * 4, [3] * 6 + [2], [1] * 20]


def test_places_are_few_numbers_and_little_more_than_the_rows() -> None:
    """A GPU's library looks for a kernel for every new shape of a product."""
    made = [places(rows) for rows in range(1, LANE_ROWS + 1)]
    assert made[-1] == LANE_ROWS and made == sorted(made) and len(set(made)) <= 64
    assert all(rows <= n <= max(rows + 7, 1.125 * rows) for rows, n in enumerate(made, 1))


def test_resident_experts_are_the_most_used_of_a_layer() -> None:
    held = [(0, 2, 5), (1, 3, 4)]
    assert resident_experts(held, 3, [9, 1, 8, 2, 7, 0]) == ((0, 2), (4,))
    assert resident_experts(held, 2, [4, 4, 4, 4, 4, 4]) == ((0,), (1,))
    assert resident_experts(held, 3, None) == ((0, 2), (1,))
    assert resident_experts(held, 6, None) == ((0, 2, 5), (1, 3, 4))
    assert resident_experts([(0,), (1, 2, 3)], 3, None) == ((0,), (1, 2))


def test_the_split_in_which_both_end_together() -> None:
    work = LaneWork(experts=10, bytes=1e9, flops=100e12, tokens=0, per_token=8, layer=20)
    split = split_seconds(work, RATES, 4)
    assert split.cpu == pytest.approx(0.6 * 100 / 20)  # what is left, at 20 TFLOP/s
    assert split.lane == pytest.approx(0.4 * 100 / 80 + 1 / 25)  # 40 TFLOP at 80; the first expert's copy
    best = best_share(work, RATES)
    assert best.carried == 8  # the first number at which the CPU is not the later one: 1.0 s against 1.04
    assert best.seconds == min(split_seconds(work, RATES, n).seconds for n in range(11))
    assert best.plain == 5.0 and best.gain == pytest.approx(1 - 1.04 / 5)


def test_the_gpu_that_gets_most_counts() -> None:
    work = LaneWork(experts=10, bytes=1e9, flops=100e12, tokens=0, per_token=8, layer=20)
    copies = [lane_parts(work, 1e9, 1e12, n, devices=8).copies for n in (1, 4, 8, 9, 10)]
    assert copies == [1.0, 1.0, 1.0, 2.0, 2.0]


def test_carrying_relieves_no_memory() -> None:
    """Weights that go to the device are read from the same memory: a socket that waits for it gains none."""
    work = LaneWork(experts=10, bytes=1e9, flops=1e9, tokens=0, per_token=8, layer=20)
    assert best_share(work, RATES).carried == 0
    assert split_seconds(work, RATES, 5).cpu == work.experts * work.bytes / RATES.memory


def test_shares_begin_where_they_pay_and_grow() -> None:
    sizes = ExpertSizes(held=256, experts=256, per_token=8, params=44_040_192, bytes=44.7e6, hidden=7168)
    shares, later, split, recompute = choose_shares(sizes, RATES, 32_768, recompute=False)
    tokens, parts = zip(*shares, strict=True)
    assert list(tokens) == sorted(tokens) and list(parts) == sorted(parts) and parts[-1] <= 1
    before = best_share(sizes.work(tokens[0] // 2), RATES)
    assert before.gain < 0.05 <= best_share(sizes.work(tokens[0]), RATES).gain
    assert split.gain > 0.2 and parts[-1] == pytest.approx(split.carried / 256, abs=1e-4)
    assert later[0][0] == tokens[0] and all(
        more >= first for (_, first), (_, more) in zip(shares, later, strict=False)
    ), "later calls carry others on top of those that are there"
    slow = LaneRates(link=1e9, gpu=80e12, cpu=20e12, memory=200e9)
    assert choose_shares(sizes, slow, 4096, recompute=False).steps == () and not recompute
    more = choose_shares(sizes, RATES.tuned(Tuning(1.5)), 32_768, recompute=False)
    assert more.steps[-1][1] > parts[-1]
    assert RATES.tuned(Tuning(1.5)).tuned(Tuning(0.5)).link == pytest.approx(0.5 * RATES.link)
    plan = LanePlan(("cuda:0",), (), shares)
    assert plan.share(tokens[0] - 1) == 0 and plan.share(tokens[0]) == parts[0]
    assert plan.share(10**9) == parts[-1] and not LanePlan(("cpu",)).streams


def planned(
    load: ExpertLoad | None = None,
    gpus: int = 0,
    rates: LaneRates | None = None,
    device: str = "cpu",
    **rule: Any,
) -> Plan:
    config = make_config(rule={"device": device, "experts": {"sockets": 2, **rule}})
    return make_plan(small_dims(), config, make_hardware(gpus=gpus), load, rates)


def test_plans() -> None:
    layers = small_dims().moe_layers
    plan = planned(gpu_resident=3, lane_device="cpu")
    first, second = (actor.lane for actor in plan.experts)
    assert first is not None and second is not None
    assert first.resident == tuple((layer, (0, 1)) for layer in layers)
    assert second.resident == tuple((layer, (4,)) for layer in layers)
    assert any("3 experts of each MoE layer stay on cpu: the first ids" in note for note in plan.notes)
    assert expert_row(plan, plan.experts[0])[-1] == "cpu: 2 stay"
    slots = dict.fromkeys(layers, (0, 9, 0, 0, 0, 8, 7, 0))
    plan = planned(
        load=ExpertLoad(5, slots, "run/x"),
        gpu_resident=3,
        stream=0.25,
        lane_device="cpu",
        placement="contiguous",
    )
    assert [actor.lane.resident[0][1] for actor in plan.experts if actor.lane] == [(1,), (5, 6)]
    assert all(actor.lane is not None and actor.lane.shares == ((0, 0.25),) for actor in plan.experts)
    assert any("the most used ones of run/x" in note for note in plan.notes)
    before = ExpertLoad(5, slots, "run/x", residents=dict.fromkeys(layers, (0, 1, 4)))
    kept = planned(before, gpu_resident=3, lane_device="cpu", placement="kept")
    assert [actor.lane.resident[0][1] for actor in kept.experts if actor.lane] == [(0, 1), (4,)]
    assert residents_of(kept.experts) == before.residents
    more = planned(before, gpu_resident=4, lane_device="cpu", placement="kept")
    assert set(residents_of(more.experts)[layers[0]]) == {0, 1, 5, 6}, "another number: the most used again"
    values = plan_to_dict(plan)["experts"][1]
    assert values["lane"] == {
        "devices": ["cpu"],
        "resident": {str(n): "5-6" for n in layers},
        "shares": [[0, 0.25]],
        "held": 1,
        "later": [],
        "ahead": 0,
        "recompute": False,
        "float8": False,
    }
    assert "lane" not in plan_to_dict(planned())["experts"][0]


def test_actors_divide_the_gpus() -> None:
    def devices(gpus: int, **rule: Any) -> list[tuple[str, ...]]:
        made = planned(gpus=gpus, gpu_resident=8, **rule)
        return [actor.lane.devices for actor in made.experts if actor.lane is not None]

    assert devices(1) == [("cuda:0",), ("cuda:0",)]
    assert devices(2) == [("cuda:0",), ("cuda:1",)]
    assert devices(3) == [("cuda:0",), ("cuda:1", "cuda:2")]
    assert devices(4) == [("cuda:0", "cuda:1"), ("cuda:2", "cuda:3")]
    assert devices(3, sockets=8, lane_device=["cuda:0", "cuda:2"]) == [("cuda:0",)] * 4 + [("cuda:2",)] * 4
    assert devices(2, lane_device="cuda:1") == [("cuda:1",), ("cuda:1",)]
    assert devices(2, lane_device=["cpu", "cpu"]) == [("cpu", "cpu")] * 2


def test_carried_experts_are_dealt_by_number_and_rows() -> None:
    counts = [9, 1, 8, 2, 7, 3, 6, 4]
    assert dealt(range(8), counts, 1) == (tuple(range(8)),)
    assert dealt(range(8), counts, 2) == ((0, 1, 6, 7), (2, 3, 4, 5))  # 9 + 6 + 4 + 1, 8 + 7 + 3 + 2
    assert dealt((3, 5), counts, 3) == ((5,), (3,), ())
    # what the call before left on a device stays there, and others even the numbers out
    assert dealt((0, 2, 3, 5, 7), counts, 2, [(0, 2, 4), (1,)]) == ((0, 2), (3, 5, 7))


def test_experts_of_the_call_before_come_first() -> None:
    counts = [3, 0, 9, 9, 1, 0, 7, 2]
    assert streamed_experts(counts, 0.5, (1, 4, 7)) == (2, 3, 4, 7)  # the first has no rows now
    assert streamed_experts(counts, 0.25, (0, 4, 7)) == (0, 7)


def test_gates_and_ups_are_computed_again_where_their_way_costs_more() -> None:
    """Rows of small experts keep many bytes for few products."""
    sizes = ExpertSizes(128, 128, 8, 3 * 2048 * 768, 9.5e6, 2048, kept=2 * 2 * 768)
    desktop = LaneRates(link=25e9, gpu=80e12, cpu=3e12, memory=60e9)
    assert choose_shares(sizes, desktop, 32_768, recompute=False).recompute
    asked = desktop.tuned(Tuning(recompute=False))
    assert not choose_shares(sizes, asked, 32_768, recompute=False).recompute
    assert choose_shares(sizes, asked, 32_768, recompute=True).recompute, "as the engine does"
    work = sizes.work(32_768)
    kept, again = (split_seconds(work, desktop, 100, recompute=kind).lane for kind in (False, True))
    assert kept - again == pytest.approx(100 / 128 * work.kept / 25e9 / 2)


def test_a_lane_holds_what_there_is_room_for() -> None:
    """One copy of an expert's weights serves all groups."""

    def held(gib: float, **rule: Any) -> list[int]:
        experts = {"stream": 0.5, "sockets": 2}
        config = make_config(rule={"device": "cpu", "experts": experts, **rule}, trainer={"batch_size": 8})
        plan = make_plan(V3, config, make_hardware(gpus=2, gpu_gib=gib, memory=4096 * GIB))
        lanes = [actor.lane for actor in plan.experts if actor.lane]
        (size,) = {b.items["workspace"] for b in plan.budgets if b.device == "cuda:0"}
        assert plan.fits
        sizes.append(size)
        return [lane.held for lane in lanes]

    sizes: list[int] = []
    assert held(24) == [64, 64] and held(24, groups=1) == [0, 0]
    stored = V3.expert_bytes() / len(V3.moe_layers)
    assert sizes[0] - sizes[1] >= 63 * stored  # a group of all tokens holds more of them
    some = held(4)
    assert 0 < some[0] < 64 and some[0] == some[1]


def test_later_calls_carry_only_what_is_not_there() -> None:
    sizes = ExpertSizes(128, 256, 8, 44_040_192, 44.7e6, 7168)
    work = sizes.work(4096)
    first = best_share(work, RATES)
    again = best_share(work, RATES, held=first.carried)
    assert 0 < first.carried < again.carried and again.seconds < first.seconds
    all_there = split_seconds(work, RATES, first.carried, held=first.carried)
    assert all_there.lane == pytest.approx(
        first.carried / 128 * work.flops / RATES.gpu + (work.moved(first.carried) / RATES.link)
    )
    plan = LanePlan(("cuda:0",), (), ((1024, 0.25),), held=40, later=((1024, 0.5),))
    assert (plan.share(4096), plan.share(4096, again=True), plan.share(512, again=True)) == (0.25, 0.5, 0)
    assert LanePlan(("cuda:0",), (), ((1024, 0.25),)).share(4096, again=True) == 0.25


def test_a_gpu_serves_the_actors_of_its_host() -> None:
    rule = {"nodes": 2, "device": "cpu", "experts": {"sockets": 1, "gpu_resident": 5, "stream": 0.5}}
    made = make_plan(small_dims(), make_config(rule=rule), make_hardware(gpus=1))
    (lane, none), layers = (actor.lane for actor in made.experts), small_dims().moe_layers
    assert [actor.host for actor in made.experts] == [0, 1] and none is None
    assert lane is not None and lane.streams
    assert lane.resident == tuple((layer, (0, 1, 2, 3)) for layer in layers)  # all that the actor holds
    assert any("4 experts of each MoE layer stay on cuda:0" in note for note in made.notes)
    assert any("other hosts compute all their experts on the CPU" in note for note in made.notes)
    assert all("cuda" not in b.device for b in made.budgets if b.host == 1)
    stand_in = {**rule, "experts": {**rule["experts"], "lane_device": "cpu"}}
    made = make_plan(small_dims(), make_config(rule=stand_in), make_hardware())
    assert all(actor.lane is not None and actor.lane.resident for actor in made.experts)


def test_stream_auto_asks_the_rates() -> None:
    plan = planned(gpus=1, stream="auto", device="cuda")
    assert plan.experts[0].lane is None and any("off, as no rates" in note for note in plan.notes)
    plan = planned(gpus=1, stream="auto", device="cuda", rates=RATES)  # a tiny model's experts never pay
    assert plan.experts[0].lane is None and any("it would save" in note for note in plan.notes)
    experts = {"sockets": 2, "stream": "auto"}
    config = make_config(
        rule={"device": "cuda", "stages": 1, "experts": experts},
        trainer={"batch_size": 16, "micro_batch_size": 1},
        data={"max_length": 1024},
    )
    plan = make_plan(V3, config, make_hardware(gpus=1), None, RATES)
    assert plan.experts[0].lane is not None and plan.experts[0].lane.streams
    assert any("rule.experts.stream=auto: from" in note for note in plan.notes)


def test_bytes_move_from_the_socket_to_the_gpu() -> None:
    """Eight resident DeepSeek-V3 experts per layer, in FP8: 58 layers of 44 MB each."""

    def plan(**experts: Any) -> dict[str, dict[str, int]]:
        config = make_config(
            rule={
                "device": "cuda",
                "stages": 1,
                "experts": {"sockets": 1, "activations": "retain", **experts},
            }
        )
        made = make_plan(V3, config, make_hardware(gpus=1))
        return {b.device: dict(b.items) for b in made.budgets}

    plain, lane = plan(), plan(gpu_resident=8)
    moved = 8 * V3.expert_bytes()
    assert plain["socket 0"]["experts"] - lane["socket 0"]["experts"] == pytest.approx(moved, abs=2)
    assert lane["cuda:0"]["experts"] == pytest.approx(moved, abs=2) and "experts" not in plain["cuda:0"]
    assert lane["cuda:0"]["runtime"] - plain["cuda:0"]["runtime"] == GPU_RUNTIME
    assert lane["cuda:0"]["workspace"] > plain["cuda:0"]["workspace"]
    assert lane["socket 0"]["kept activations"] > plain["socket 0"]["kept activations"]
    stand_in = plan(gpu_resident=8, lane_device="cpu")
    assert stand_in["socket 0"]["experts"] == plain["socket 0"]["experts"]
    assert stand_in["cuda:0"] == plain["cuda:0"]
    assert stand_in["socket 0"]["workspace"] > plain["socket 0"]["workspace"]


def test_a_batch_of_experts_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four float32 experts of an actor: two buffers and the matrices of all four instead of one."""

    def workspace() -> int:
        made = planned(stream=0.5, lane_device="cpu")
        return min(dict(b.items)["workspace"] for b in made.budgets if b.device.startswith("socket"))

    dims, four = small_dims(), workspace()
    monkeypatch.setattr(lane_share, "LANE_BATCH", 1)
    one, params = workspace(), dims.expert_params
    expert = dims.expert_bytes() / len(dims.moe_layers)
    adapter = 4 * expert_lora_params(dims, make_config().lora)
    assert four - one >= 3 * (2 * (expert + adapter) + 2 * params)


def test_float8_takes_memory_of_the_device() -> None:
    """Matrices of both directions of four experts, and rows."""
    expert = V3.held_bytes("auto")
    size = LaneMemory(expert, expert, 0.0, LANE_ROWS, LANE_ROWS, 8.0, GPU_RUNTIME, False, False)

    def buffers(float8: bool) -> float:
        lane = LanePlan(("cuda:0",), (), ((0, 0.5),), float8=float8)
        return lane_buffers(V3, make_config(), lane, size, 256)

    rows = 3 * (V3.expert_width + V3.expert_intermediate) * LANE_ROWS
    assert buffers(True) - buffers(False) == 2 * 4 * V3.expert_params + rows


def v3_lane(dims: ModelDims, gib: float, wanted: float = 0.5) -> tuple[Plan, LanePlan]:
    """A plan of a model of DeepSeek-V3's shapes with a streaming actor, and its lane."""
    asked = {"sockets": 1, "stream": wanted}
    rule = {"device": "cuda", "stages": 1, "groups": 2, "resident_layers": 0, "experts": asked}
    config = make_config(rule=rule, data={"max_length": 512}, trainer={"batch_size": 4})
    plan = make_plan(dims, config, make_hardware(gpus=1, gpu_gib=gib, memory=4096 * GIB))
    lane = plan.experts[0].lane
    assert lane is not None
    return plan, lane


def test_experts_of_a_gguf_file_take_its_bytes() -> None:
    """Of a file larger than the checkpoint's own experts as many are held as fit; and a quantised one is
    decoded on the GPU, whatever the checkpoint holds."""
    own = V3.held_bytes("auto")
    double = replace(V3, experts_file_bytes=round(2 * V3.num_experts * V3.expert_bytes()))
    assert double.held_bytes("llamafile") == double.held_bytes("auto") == pytest.approx(2 * own)
    assert double.held_bytes("AMXINT4") == V3.held_bytes("AMXINT4")
    (plan, lane), (larger, other) = v3_lane(V3, 24), v3_lane(double, 24)
    assert larger.fits and 0 < other.held < lane.held < 128
    counted = [expert_sizes(plan.experts, dims, make_config()).bytes for dims in (V3, double)]
    assert counted[1] - counted[0] == pytest.approx(own)

    def workspace(dims: ModelDims) -> int:
        plan, _ = v3_lane(dims, 80, wanted=0.001)  # of no expert
        return next(b.items["workspace"] for b in plan.budgets if b.device == "cuda:0")

    assert V3.expert_format == "bf16"
    quantised = replace(V3, experts_file_bytes=round(V3.routed_params * 0.5625))
    decoded = 4 * 16 * V3.expert_width * V3.expert_intermediate
    less = 2 * 4 * (own - quantised.held_bytes("auto"))
    assert workspace(quantised) - workspace(V3) == pytest.approx(decoded - less, abs=8)


def test_places_take_the_experts_of_any_layer() -> None:
    """Where some layers are not quantised, places and buffers are as large as their experts."""

    def partly(*plain: str) -> ModelDims:
        fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": [*plain]}
        return dims_from_config({**DEEPSEEK_V3, "quantization_config": fp8}, "DeepSeek-V3 in FP8")

    every, mixed = partly(), partly("model.layers.5.mlp.experts")
    assert mixed.plain_expert_layers == (5,)
    most = 2.0 * mixed.expert_params
    assert mixed.most_held_bytes("auto") == most > 1.9 * mixed.held_bytes("auto")
    assert mixed.most_held_bytes("AMXINT4") == mixed.held_bytes("AMXINT4")
    assert every.most_held_bytes("auto") == every.held_bytes("auto")
    free = []
    for dims in (every, mixed):
        plan, lane = v3_lane(dims, 22)
        (card,) = (b for b in plan.budgets if b.device == "cuda:0")
        each = dims.most_held_bytes("auto")
        free.append(card.capacity - card.total + lane.held * each)
        assert 0 < lane.held == int(0.9 * free[-1] // each) < 128
    assert free[0] - free[1] == pytest.approx(2 * 4 * (most - every.held_bytes("auto")), abs=8)


def test_refusals_name_the_remedy() -> None:
    for rule, seen in (({"gpu_resident": 2}, "none"), ({"stream": 0.5, "lane_device": "cuda:3"}, "cuda:0")):
        with pytest.raises(UserError) as caught:
            planned(gpus=0 if seen == "none" else 1, **rule)
        text = str(caught.value)
        assert "not there" in text and seen in text and "rule.experts.lane_device=cpu" in text
        assert all(f"rule.experts.{key}={value}" in text for key, value in rule.items())
    with pytest.raises(UserError, match=r"name one of cuda:0, or set rule\.experts\.lane_device=cpu"):
        planned(gpus=1, gpu_resident=2, lane_device="cuda:3")
    with pytest.raises(UserError, match=r"found 9.*at most 8"):
        planned(gpu_resident=9, lane_device="cpu")
    model = {"config": {}}
    with pytest.raises(UserError, match="is not a device"):
        check(make_config(rule={"experts": {"gpu_resident": 1, "lane_device": "gpu"}}, model=model))
    for asked in ({"stream": 0.5}, {"gpu_resident": 1}):
        for backend in ("AMXINT8", "W4A8"):
            with pytest.raises(UserError, match=backend):
                check(make_config(rule={"experts": {**asked, "backend": backend}}, model=model))
    check(
        make_config(rule={"experts": {"stream": 0.3, "gpu_resident": 2, "backend": "AMXINT4"}}, model=model)
    )
    for key, value in (("lane_device", "cpu"), ("gpu_products", "float8")):
        note = f"rule.experts.{key}={value} changes nothing"
        assert any(note in line for line in planned(**{key: value}).notes)


@pytest.mark.parametrize("stream_to", ["actors", "workers"])
def test_float8_needs_cards_and_weights_for_it(stream_to: str) -> None:
    """Cards of data sheets are known; of others the lane finds out when it starts."""

    def plan(card: str, dims: ModelDims = V3) -> Plan:
        experts = {"stream": 0.5, "stream_to": stream_to, "gpu_products": "float8"}
        config = make_config(rule={"experts": experts})
        hardware = make_hardware(gpus=2, memory=4096 * GIB)
        cards = tuple(replace(gpu, name=card) for gpu in hardware.gpus)
        return make_plan(dims, config, replace(hardware, gpus=cards))

    for card in ("NVIDIA GeForce RTX 3090", "A100"):
        with pytest.raises(UserError, match=rf"no FP8 products.*{card}.*8\.9.*gpu_products=bfloat16"):
            plan(card)
    with pytest.raises(UserError, match=r"float32 experts.*gpu_products=bfloat16"):
        plan("H100", replace(V3, expert_storage=replace(V3.expert_storage, format="f32")))
    for card in ("NVIDIA L40S", "RTX 5090", "another"):
        made = plan(card)
        lanes = [part.lane for part in (made.workers if stream_to == "workers" else made.experts)]
        assert all(lane is not None and lane.float8 for lane in lanes)


def test_rates_of_a_described_machine_decide() -> None:
    """stream=auto with the figures of conf/hardware: actors share the link and the GPU."""
    hardware = hardware_from_file(Path(__file__).parents[2] / "conf" / "hardware" / "2x4090_2x8488c.yaml")
    nominal = nominal_rates(hardware)
    assert nominal.link is not None

    def config(**experts: Any) -> Config:
        return make_config(
            rule={"device": "cuda", "stages": 2, "experts": {"stream": "auto", **experts}},
            trainer={"batch_size": 16, "micro_batch_size": 1},
            data={"max_length": 1024},
        )

    four, two, one = (from_rates(nominal, config(sockets=n), hardware, V3) for n in (4, 2, 1))
    assert four is not None and two is not None and one is not None and two.source == nominal.source
    assert two.link == nominal.link.to_device.value == one.link == 2 * four.link
    assert two.gpu == one.gpu == 2 * four.gpu and [r.devices for r in (four, two, one)] == [1, 1, 2]
    assert two.cpu == one.cpu and two.memory == one.memory
    alone = from_rates(nominal, config(sockets=2, lane_device="cuda:1"), hardware, V3)
    assert alone is not None and alone.link == two.link / 2
    plan = make_plan(V3, config(), hardware, None, lane_rates(config(), hardware, V3))
    assert any(f"rates: {nominal.source}" in note for note in plan.notes)
    assert lane_rates(config(lane_device="cpu"), hardware, V3) is None
    assert lane_rates(config(stream=0.5), hardware, V3) is None
    assert lane_rates(config(), make_hardware(), V3) is None
