"""Simulated steps decide between plans that fit; what is set is obeyed, and memory's choice stays on ties."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from typing import Any

import pytest

from kt_ray.config.mapping import with_keys
from kt_ray.config.schema import Config
from kt_ray.dims.config_json import dims_from_config
from kt_ray.dims.model_dims import ModelDims
from kt_ray.hardware.describe import hardware_for
from kt_ray.hardware.machine import GPU_FREE, Gpu, Hardware
from kt_ray.hardware.nominal import nominal_rates
from kt_ray.hardware.rates import Figure, Rates
from kt_ray.modes.plan import model_dims
from kt_ray.placement.lane_share import NOTHING
from kt_ray.placement.memory import GIB
from kt_ray.placement.plan import make_plan
from kt_ray.placement.plan_types import Choice, Plan
from kt_ray.placement.render import LAYOUT, plan_to_dict
from kt_ray.timing import choose
from kt_ray.timing.choose import GAIN, choose_plan, step_seconds
from kt_ray.timing.lane_rates import lane_rates
from tests.helpers.composing import compose
from tests.placement.configs import DEEPSEEK_V3, make_config, make_hardware, small_dims

V3 = dims_from_config(DEEPSEEK_V3)
V2_LITE = model_dims(compose(["mode=plan", "model=deepseek_v2_lite"]).model)


def host(gpus: int, gib: float, memory: int = 2048 * GIB) -> Hardware:
    """Cards with `gib` to plan with."""
    hardware = make_hardware(sockets=2, cores=48, memory=memory, isa="amx")
    size = math.ceil(gib * GIB / (1 - GPU_FREE))
    return dataclasses.replace(hardware, gpus=tuple(Gpu(i, "RTX 3090", size) for i in range(gpus)))


def v3_config(batch_size: int = 16, **rule: Any) -> Config:
    """Whole groups are recomputed at once unless the rule says otherwise: it is memory that decides here."""
    return make_config(
        rule={"activations": "group", **rule},
        data={"max_length": 512},
        trainer={"batch_size": batch_size, "micro_batch_size": 1},
    )


def v3(hardware: Hardware, batch_size: int = 16, **rule: Any) -> Plan:
    return choose_plan(V3, v3_config(batch_size, **rule), hardware)


def chosen(plan: Plan) -> tuple[int, int, int, int, str]:
    return plan.stages, plan.replicas, plan.groups, plan.wave, plan.experts[0].activations


def test_the_chosen_plan_is_compared_with_others_and_says_so() -> None:
    plan = v3(host(2, 48))
    assert chosen(plan) == (1, 2, 2, 8, "retain") == plan.compared[0][:5]
    assert {choice.groups for choice in plan.compared} == {1, 2, 4, 8}
    assert {choice[:2] for choice in plan.compared} == {(1, 2), (2, 1)}
    best, *others = plan.compared
    assert all(best.seconds < GAIN * other.seconds for other in others)
    assert [other.seconds for other in others] == sorted(other.seconds for other in others)
    (note,) = (note for note in plan.notes if note.startswith("chosen by simulated steps: "))
    assert "1 stage x 2 replicas, 2 groups, waves of 8 micro-batches, retain: 2" in note
    assert plan_to_dict(plan)["compared"][0] == {**best._asdict()}
    assert best.seconds == step_seconds(plan, v3_config(), nominal_rates(plan.hardware))
    json.dumps(plan_to_dict(plan))


def test_it_is_the_plan_of_the_values_it_chose() -> None:
    config = v3_config()
    plan = choose_plan(V3, config, host(2, 48))
    named = v3_config(stages=1, replicas=2, groups=2, wave=8, experts={"activations": "retain"})
    said = choose_plan(V3, named, host(2, 48))
    assert dataclasses.replace(said, notes=plan.notes, compared=plan.compared) == plan
    assert len(said.compared) == 1  # nothing was left to choose


def test_replicas_that_starve_the_experts_are_passed_over() -> None:
    """A replica fits, but only in waves so small that every expert gets few rows per call."""
    hardware = host(2, 36.2)
    plan = v3(hardware, 64, groups=2, resident_layers=61, experts={"activations": "retain"})
    assert (make_plan(V3, v3_config(64), hardware).stages, plan.stages) == (1, 2)
    assert plan.notes[0].startswith(f"{LAYOUT}: 2 stages x 1 replica; 1 stage x 2 replicas would take ")


@pytest.mark.parametrize(
    ("isa", "cores", "activations"), [("amx", 96, "recompute"), ("avx512_bf16", 16, "retain")]
)
def test_small_waves_that_keep_all_are_weighed_against_recomputation(
    isa: str, cores: int, activations: str
) -> None:
    """Memory takes the fewest waves. Fast cores wait for the weights' bytes, slow ones for the products."""
    sockets = make_hardware(sockets=2, cores=cores, memory=650 * GIB, isa=isa)
    hardware = dataclasses.replace(sockets, gpus=host(1, 48).gpus)
    by_memory = make_plan(V3, v3_config(128), hardware)
    assert chosen(by_memory)[3:] == (16, "recompute")
    plan = v3(hardware, 128)
    assert plan.experts[0].activations == activations
    assert {choice.activations: choice.wave for choice in plan.compared[::-1]} == {
        "retain": 9,
        "recompute": 16,
    }
    asked = v3(hardware, 128, experts={"activations": "recompute"})
    assert {choice.activations for choice in asked.compared} == {"recompute"}


@pytest.mark.parametrize(("rule", "count"), [({"groups": 3}, 2), ({"groups": 3, "stages": 1}, 1)])
def test_what_is_set_is_obeyed(rule: dict[str, Any], count: int) -> None:
    plan = v3(host(2, 48), **rule, attention_output="recompute")
    assert plan.groups == 3 and len(plan.compared) == count


def test_attentions_outputs_are_kept_where_that_costs_no_wave() -> None:
    """Else both are simulated, as where they have to cross a link."""
    plenty = v3(host(1, 80), stages=1)
    assert plenty.attention_output == "retain" and plenty.wave == 16
    assert {choice.output for choice in plenty.compared} == {"retain"}
    for hardware, rule in ((host(1, 48), {}), (host(1, 48), {"activations": "host"})):
        short = v3(hardware, stages=1, **rule)
        seconds = {choice.output: choice.seconds for choice in short.compared[::-1]}
        assert seconds.keys() == {"retain", "recompute"}
        assert seconds[short.attention_output] <= 1.05 * min(seconds.values())
    recomputed = v3(host(1, 80), stages=1, attention_output="recompute")
    assert recomputed.attention_output == "recompute"
    assert recomputed.compared[0].seconds > plenty.compared[0].seconds


def test_ties_go_to_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(factor: float) -> Any:
        return lambda plan, config, rates: 1.0 if plan.groups == 2 else factor

    for factor, groups in ((0.96, 2), (0.94, 1)):
        monkeypatch.setattr(choose, "step_seconds", seconds(factor))
        plan = choose_plan(small_dims(), make_config(trainer={"batch_size": 8}), make_hardware())
        assert plan.groups == groups == plan.compared[0].groups


def test_the_cluster_changes_nothing() -> None:
    """Ray and local runs of one configuration get one plan, or their losses would differ."""
    slow = nominal_rates(make_hardware())
    slow = dataclasses.replace(
        slow, transport=dataclasses.replace(slow.transport, arena=Figure(0.5, "assumed: very slow"))
    )
    plans = [
        choose_plan(
            small_dims(),
            make_config(trainer={"batch_size": 8}, cluster=cluster),
            make_hardware(),
            rates=slow,
        )
        for cluster in ("local", "ray")
    ]
    assert plans[0].compared == plans[1].compared
    assert plans[0].compared[0].seconds > 5  # messages count in both


@pytest.mark.parametrize("fault", ["refused", "memory", "generates", "one"])
def test_nothing_is_simulated_where_nothing_is_open(fault: str) -> None:
    dims: ModelDims = small_dims()
    config, hardware = make_config(trainer={"batch_size": 8}), make_hardware()
    if fault == "refused":
        dims, config = dataclasses.replace(dims, refusal="no"), dataclasses.replace(config, mode="plan")
    elif fault == "memory":
        hardware = make_hardware(memory=1000)
    elif fault == "generates":
        config = dataclasses.replace(config, mode="chat")
    else:
        config = make_config(trainer={"batch_size": 1})
    plan = choose_plan(dims, config, hardware)
    assert len(plan.compared) <= 1 and not any("simulated" in note for note in plan.notes)


def test_a_resumed_run_keeps_its_choice() -> None:
    config, hardware = make_config(trainer={"batch_size": 8}), make_hardware()
    before = Choice(1, 1, 4, 8, "recompute", 0.0)
    plan = choose_plan(small_dims(), config, hardware, before=before)
    assert chosen(plan) == before[:5]
    assert "are those of the run that is resumed" in plan.notes[-1]
    asked = make_config(trainer={"batch_size": 8}, rule={"groups": 2})
    plan = choose_plan(small_dims(), asked, hardware, before=before)
    assert chosen(plan) == (1, 1, 2, 8, "recompute")
    assert "had 1 stage x 1 replica, 4 groups" in plan.notes[-1] and "not bit for bit" in plan.notes[-1]


def test_a_resumed_run_keeps_its_layout_although_another_is_faster() -> None:
    hardware, config = host(2, 38), v3_config(64, resident_layers=61)
    assert choose_plan(V3, config, hardware).stages == 2
    before = Choice(1, 2, 2, 4, "retain", 0.0)
    plan = choose_plan(V3, config, hardware, before=before)
    assert chosen(plan)[:3] == (1, 2, 2) and plan.experts[0].activations == "retain"


def test_fewer_layers_stay_where_that_makes_larger_waves() -> None:
    """A resumed run keeps them, since waves follow from them."""
    hardware = host(2, 42)
    config = v3_config(64, stages=1, replicas=2)
    plan = choose_plan(V3, config, hardware)
    by_resident = {choice.resident: choice for choice in plan.compared[::-1]}
    assert plan.resident == 0 and plan.wave == by_resident[0].wave == 32 > by_resident[None].wave
    assert by_resident[0].seconds < by_resident[None].seconds / 1.05
    again = choose_plan(V3, config, hardware, before=plan.compared[0])
    assert again.workers == plan.workers and again.wave == plan.wave
    assert "are those of the run that is resumed" in again.notes[-1]
    asked = choose_plan(V3, v3_config(64, stages=1, replicas=2, resident_layers=30), hardware)
    assert {choice.resident for choice in asked.compared} == {30}


def test_more_replicas_with_streamed_layers_are_weighed() -> None:
    """A whole replica fits no card. Its layers are divided, or streamed."""
    plan = choose_plan(V3, v3_config(64), host(8, 32))
    found = {(choice.replicas, choice.resident is None) for choice in plan.compared}
    assert {(8, False), (4, True), (2, True), (1, True)} <= found
    asked = choose_plan(V3, v3_config(64, resident_layers=61), host(8, 32))
    assert all(choice.resident is None for choice in asked.compared)


def test_larger_cards_are_no_slower() -> None:
    """Where a plan barely fits without streamed layers, its waves are small."""

    def seconds(gpus: int, sizes: tuple[int, ...]) -> list[float]:
        config = v3_config(32, activations="auto", experts={"activations": "retain"})
        return [choose_plan(V3, config, host(gpus, gib)).compared[0].seconds for gib in sizes]

    for found in (seconds(1, (34, 36, 38, 40, 48)), seconds(4, (12, 16, 24))):
        assert all(larger <= 1.06 * smaller for smaller, larger in itertools.pairwise(found)), found


@pytest.mark.parametrize(("model", "sizes"), [("gpt_oss_20b", (8, 9)), ("qwen3_30b_a3b", (6, 7))])
def test_larger_cards_are_no_slower_where_experts_are_streamed(model: str, sizes: tuple[int, int]) -> None:
    """The larger one has just room for all layers. That they pass through it all the same pays only with what
    is chosen after it: larger micro-batches, hidden states that stay, more experts on the card."""
    rows = ("data.max_length=512", "trainer.batch_size=16")
    config = compose(["mode=plan", f"model={model}", *rows])
    machine = make_hardware(sockets=2, cores=32, memory=256 * GIB, isa="avx512_bf16")
    smaller, larger = (
        choose_plan(
            model_dims(config.model),
            config,
            dataclasses.replace(machine, gpus=(Gpu(0, "RTX 4090", size * GIB),)),
        )
        for size in sizes
    )
    assert smaller.streams and larger.streams
    assert larger.compared[0].seconds < GAIN * smaller.compared[0].seconds


def test_more_host_memory_is_no_slower_where_workers_stream_experts() -> None:
    """Two stages fit the larger host without streamed experts, as one replica: two that stream are faster."""
    kept = ("rule.groups=2", "rule.activations=group", "rule.attention_output=retain")
    rows = ("data.max_length=4096", "trainer.batch_size=16", "trainer.micro_batch_size=4")
    options = ("lora.experts=false", "rule.resident_layers=48", *kept, *rows)
    config = compose(["mode=plan", "model=qwen3_30b_a3b", *options])
    smaller, larger = (
        choose_plan(
            model_dims(config.model),
            config,
            make_hardware(sockets=4, cores=16, memory=size * GIB, gpus=2, gpu_gib=78, isa="avx512_bf16"),
        )
        for size in (32, 36)
    )
    assert smaller.stream_to == larger.stream_to == "workers"
    assert larger.compared[0].seconds < GAIN * smaller.compared[0].seconds


def test_a_resumed_run_whose_choice_is_not_possible_says_so() -> None:
    config, hardware = make_config(trainer={"batch_size": 8}), make_hardware()
    fresh = choose_plan(small_dims(), config, hardware)
    plan = choose_plan(small_dims(), config, hardware, before=Choice(2, 1, 2, 8, "retain", 0.0))
    assert dataclasses.replace(plan, notes=fresh.notes) == fresh
    assert "had 2 stages x 1 replica" in plan.notes[-1] and "not bit for bit" in plan.notes[-1]


def test_a_resumed_run_keeps_its_waves_where_more_memory_is_counted_now() -> None:
    """What decides no bit gives way: hidden states on the host, say."""
    hardware, config = host(2, 47), v3_config(64, stages=1, replicas=2, activations="auto")
    before = Choice(1, 2, 2, 32, "retain", 0.0, "group")
    pinned = choose_plan(V3, with_keys(config, {"rule.activations": "group"}), hardware)
    assert pinned.wave < 32, "or the test says nothing"
    plan = choose_plan(V3, config, hardware, before=before)
    assert chosen(plan) == before[:5] and plan.activations != "group"
    assert "are those of the run that is resumed" in plan.notes[-1]


@pytest.mark.parametrize("rule", [{"overlap": False}, {"transport": "ray"}, {"transport": "gloo"}])
def test_what_changes_no_bit_changes_no_choice(rule: dict[str, Any]) -> None:
    """Where messages are slow, groups would differ if their way counted."""
    slow = nominal_rates(make_hardware())
    transport = dataclasses.replace(slow.transport, call=Figure(0.5, "assumed: very slow"))
    slow = dataclasses.replace(slow, transport=transport)
    usual, other = (
        choose_plan(small_dims(), make_config(trainer={"batch_size": 8}, rule=r), make_hardware(), rates=slow)
        for r in ({}, rule)
    )
    assert chosen(usual) == chosen(other) and usual.compared == other.compared


def test_smaller_waves_are_compared_where_attention_would_hold_less() -> None:
    """A GPU that is short: one micro-batch at a time makes the waves larger, and the simulation decides."""
    hardware = host(2, 38)
    plan = choose_plan(V3, v3_config(64, stages=2, replicas=1, activations="auto"), hardware)
    assert plan.activations != "group" and plan.fits
    held = {choice.attention: choice for choice in plan.compared[::-1]}
    assert held["group"].wave < plan.wave
    assert held["group"].seconds >= plan.compared[0].seconds / 1.05
    assert any("rule.activations=auto: " in note for note in plan.notes)
    fixed = choose_plan(V3, v3_config(64, stages=2, replicas=1, activations="group"), hardware)
    assert fixed.activations == "group" and fixed.wave == held["group"].wave


def test_layers_are_retained_where_a_card_has_the_room_and_is_the_limit() -> None:
    """Long rows of a small model: attention takes longer than the experts."""
    config = make_config(
        rule={"activations": "auto", "stages": 1, "replicas": 1},
        data={"max_length": 8192},
        trainer={"batch_size": 4, "micro_batch_size": 1},
    )
    plan = choose_plan(V2_LITE, config, host(1, 140))
    held = {choice.attention: choice.seconds for choice in plan.compared[::-1]}
    assert plan.activations == "retain" and held["retain"] * GAIN < held["group"]
    assert ", layers retained" in next(note for note in plan.notes if note.startswith("chosen by"))
    again = choose_plan(V2_LITE, config, host(1, 140), before=plan.compared[0])
    assert (again.activations, again.wave) == ("retain", plan.wave)
    smaller = choose_plan(V2_LITE, config, host(1, 48))
    assert smaller.activations == "group" and smaller.wave == plan.wave
    uncounted = choose_plan(dataclasses.replace(V2_LITE, affine=False), config, host(1, 140))
    assert all(choice.attention != "retain" for choice in uncounted.compared)


def test_half_a_wave_is_compared_where_a_larger_one_gives_something_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Room for what is else copied to the host and back; what is set makes none."""
    monkeypatch.setattr(choose, "TUNED_GAIN", 0.0)  # whatever it takes, it is taken
    hardware = host(2, 38)
    plan = choose_plan(V3, v3_config(64, stages=1, replicas=2, activations="auto"), hardware)
    assert plan.wave == 16 and {choice.wave for choice in plan.compared} >= {16, 32}
    given = {"activations": "host", "attention_output": "recompute", "resident_layers": 0}
    fixed = choose_plan(
        V3, v3_config(64, stages=1, replicas=2, experts={"activations": "retain"}, **given), hardware
    )
    assert {choice.wave for choice in fixed.compared} == {32}


def test_hosts_get_a_copy_of_the_experts_each() -> None:
    """auto: tokens would have to pass 10 Gbit/s; with too little memory for a copy they do."""
    given = ["mode=plan", "model=deepseek_v3", "plan.hardware=2x4090_2x8488c", "rule.nodes=2"]
    fixed = ["rule.groups=2", "rule.experts.stream=off"]  # fewer plans to look at
    config = compose([*given, "data.max_length=2048", "trainer.batch_size=16", *fixed])
    hardware, dims = hardware_for(config), model_dims(config.model)
    plan = choose_plan(dims, config, hardware)
    assert (plan.copies, plan.attention_hosts, plan.stages, plan.replicas) == (2, 2, 1, 4)
    assert {choice.copies for choice in plan.compared} == {1, 2}
    small = dataclasses.replace(
        hardware,
        sockets=tuple(dataclasses.replace(s, memory_bytes=s.memory_bytes // 4) for s in hardware.sockets),
    )
    assert choose_plan(dims, config, small).copies == 1


def described(model: str, hardware: str, batch_size: int, *keys: str) -> Config:
    size = f"trainer.batch_size={batch_size}"
    return compose(
        [
            "mode=plan",
            "rule=auto",
            f"model={model}",
            f"plan.hardware={hardware}",
            size,
            "data.max_length=2048",
            *keys,
        ]
    )


def plan_for(config: Config, before: Choice | None = None) -> Plan:
    return choose_plan(model_dims(config.model), config, hardware_for(config), before=before)


def test_experts_are_streamed_where_that_is_faster() -> None:
    """Nobody has to ask; a step without is simulated, too, and a resumed run that had none keeps that."""
    config = described("qwen3_30b_a3b", "1x4090_1x7950x", 16)
    plan = plan_for(config)
    assert config.rule.experts.stream == "auto" and plan.streams
    without = min((c for c in plan.compared if c.tuning == NOTHING), key=lambda c: c.seconds)
    assert without.seconds > 2 * plan.compared[0].seconds
    off = plan_for(with_keys(config, {"rule.experts.stream": "off"}))
    assert off.compared[0].seconds == pytest.approx(without.seconds, rel=0.05) and not off.streams
    again = plan_for(config, before=without)
    assert not again.streams and again.tuning == NOTHING
    assert "are those of the run that is resumed" in again.notes[-1]


def test_nothing_is_streamed_where_that_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gain of less than 5 % is none."""
    config = described("qwen3_30b_a3b", "1x4090_1x7950x", 16)
    simulated = choose.step_seconds

    def slow(plan: Plan, config: Config, rates: Rates) -> float:
        return simulated(plan, config, rates) * (1.0 if not plan.streams else 10.0)

    monkeypatch.setattr(choose, "step_seconds", slow)
    plan = plan_for(config)
    assert not plan.streams and plan.tuning == NOTHING
    assert any("nothing streamed" in note for note in plan.notes)


def test_a_lane_that_leaves_no_room_is_left_out() -> None:
    """Memory for a batch of experts would be what is lacking."""
    config = described("olmoe", "1x4090_1x7950x", 16, "rule.gpu_memory=2")
    hardware, dims = hardware_for(config), model_dims(config.model)
    lane = lane_rates(config, hardware, dims)
    assert not make_plan(dims, config, hardware, None, lane).fits, "or the test says nothing"
    plan = plan_for(config)
    assert plan.fits and plan.tuning == NOTHING and not plan.streams


@pytest.mark.parametrize(
    "changed",
    [
        {"rule.device": "cpu"},
        {"rule.device": "cpu", "rule.experts.gpu_resident": 8},
        {"rule.layers": [{"layers": "0-47", "device": "cpu"}]},
        {"rule.experts.lane_device": "cpu"},
        {"rule.experts.backend": "AMXINT8"},
        {"mode": "predict"},
    ],
    ids=str,
)
def test_stream_auto_is_off_where_it_cannot_help(changed: dict[str, Any]) -> None:
    config = with_keys(described("qwen3_30b_a3b", "1x4090_1x8488c_512gb", 16), changed)
    plan = plan_for(config)
    assert not plan.streams and not any("rule.experts.stream" in note for note in plan.notes)


def test_a_run_that_streamed_nothing_says_so_where_it_now_does() -> None:
    config = described("qwen3_30b_a3b", "1x4090_1x7950x", 16)
    before = plan_for(with_keys(config, {"rule.experts.stream": "off"})).compared[0]
    plan = plan_for(with_keys(config, {"rule.experts.stream": 0.5}), before._replace(tuning=NOTHING))
    assert plan.streams and "to rounding, not bit for bit" in plan.notes[-1]


def packing(batch_size: int = 64, **trainer: int | str) -> Config:
    keys = {"batch_size": batch_size, **trainer}
    return compose(
        [
            "mode=plan",
            "model=deepseek_v2_lite",
            "data.max_length=512",
            *(f"trainer.{k}={v}" for k, v in keys.items()),
        ]
    )


def test_rows_share_a_gpus_micro_batches_where_that_is_faster() -> None:
    """The host tells the GPU about every kernel; what is chosen is asked for alike, and stays on resume."""
    hardware = host(1, 48)
    plan = choose_plan(V2_LITE, packing(), hardware)
    small = choose_plan(V2_LITE, packing(micro_batch_tokens=512), hardware)
    alone = choose_plan(V2_LITE, packing(micro_batch_size=1), hardware)
    assert (small.micro_batch_rows, small.micro_batch_tokens) == (1, 512)
    assert (alone.micro_batch_rows, alone.micro_batch_tokens) == (1, None)
    rows, tokens = plan.micro_batch_rows, plan.micro_batch_tokens
    assert rows > 1 and tokens == 512 * rows
    assert {choice.micro_batch_tokens for choice in plan.compared} >= {512, tokens}
    assert plan.compared[0].seconds * GAIN < small.compared[0].seconds
    assert f" of {tokens} tokens, " in next(note for note in plan.notes if note.startswith("chosen by"))
    asked = choose_plan(V2_LITE, packing(micro_batch_tokens=tokens), hardware)
    assert (asked.micro_batch_rows, asked.wave) == (rows, plan.wave)
    again = choose_plan(V2_LITE, packing(), hardware, before=plan.compared[0])
    assert (again.micro_batch_rows, again.wave) == (rows, plan.wave)
    assert "are those of the run that is resumed" in again.notes[-1]
    other = choose_plan(V2_LITE, packing(micro_batch_tokens=512), hardware, before=plan.compared[0])
    assert other.micro_batch_rows == 1 and "not bit for bit" in other.notes[-1]


def test_other_rows_of_a_micro_batch_add_up_otherwise() -> None:
    config = make_config(trainer={"batch_size": 8, "micro_batch_size": 2}, rule={"wave": 2})
    before = choose_plan(small_dims(), config, make_hardware()).compared[0]
    other = with_keys(config, {"trainer.micro_batch_size": 4})
    plan = choose_plan(small_dims(), other, make_hardware(), before=before)
    assert "not bit for bit" in plan.notes[-1]
    unknown = before._replace(micro_batch_rows=0)  # a plan of an earlier version
    plan = choose_plan(small_dims(), config, make_hardware(), before=unknown)
    assert "are those of the run that is resumed" in plan.notes[-1]


def test_every_replica_has_two_micro_batches_or_more() -> None:
    plan = choose_plan(V2_LITE, packing(8), host(1, 48))
    assert plan.micro_batch_rows <= 8 // (2 * plan.replicas)


def test_a_cpus_micro_batches_stay() -> None:
    config = with_keys(make_config(trainer={"batch_size": 64}), {"trainer.micro_batch_size": "auto"})
    plan = choose_plan(small_dims(), config, make_hardware())
    assert {choice.micro_batch_tokens for choice in plan.compared} == {plan.micro_batch_tokens}
    assert plan.micro_batch_tokens == config.micro_batch_tokens(plan.replicas)
