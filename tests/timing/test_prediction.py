"""The prediction of a step: what it says it leaves out, what it proposes, what stages and replicas bring."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kt_ray.config.schema import Config
from kt_ray.dims.config_json import dims_from_config
from kt_ray.hardware.describe import hardware_from_file
from kt_ray.hardware.machine import Gpu, Hardware
from kt_ray.hardware.nominal import nominal_rates
from kt_ray.hardware.rates import Figure
from kt_ray.placement.expert_load import ExpertLoad
from kt_ray.placement.plan import make_plan
from kt_ray.placement.plan_types import Plan
from kt_ray.placement.remedies import describe
from kt_ray.timing.choose import choose_plan
from kt_ray.timing.prediction import Prediction, _candidates, neighbours, predict
from kt_ray.timing.seats import even_waves
from tests.placement.configs import DEEPSEEK_V3, make_config, make_hardware, small_dims

DIMS = small_dims()
V3 = dims_from_config(DEEPSEEK_V3, "DeepSeek-V3")
TWO_GPUS = hardware_from_file(Path(__file__).parents[2] / "conf/hardware/2x4090_2x8488c.yaml")
# Cards so slow that attention limits the step.
SLOW_GPUS = replace(
    TWO_GPUS,
    gpus=tuple(replace(g, memory_bytes=64 << 30) for g in TWO_GPUS.gpus),
    rates=(*TWO_GPUS.rates, ("gpu_bf16", Figure(30e12, "a slow card"))),
)
STEP: dict[str, Any] = {
    "model": {"name": "v3", "path": "/models/v3"},
    "data": {"max_length": 512},
    "trainer": {"batch_size": 16, "micro_batch_size": 1},
}


def predicted(config: Config, hardware: Hardware) -> Prediction:
    plan = make_plan(DIMS, config, hardware)
    return predict(plan, config, nominal_rates(plan.hardware))


def changes(
    rule: dict[str, Any], load: ExpertLoad | None = None, hardware: Hardware = TWO_GPUS, **step: Any
) -> list[str]:
    """Overrides proposed for DeepSeek-V3 on two GPUs."""
    config = make_config(rule=rule, **{**STEP, **step})
    plan = make_plan(V3, config, hardware, load)
    rates = nominal_rates(hardware)
    base = predict(plan, config, rates, even_waves(plan, config, 512))
    return [change.overrides for change in neighbours(plan, config, rates, base, 512, load)]


def test_gpus_of_several_kinds_are_taken_for_the_slowest() -> None:
    def of(*names: str) -> tuple[str, Prediction]:
        cards = tuple(Gpu(i, name, 24 << 30) for i, name in enumerate(names))
        hardware = replace(make_hardware(), gpus=cards)
        return describe(hardware), predicted(make_config(), hardware)

    (text, mixed), (_, turned) = of("RTX 5090", "RTX 3090"), of("RTX 3090", "RTX 5090")
    slow = of("RTX 3090", "RTX 3090")[1]
    assert text.startswith("1 x RTX 5090 + 1 x RTX 3090, ")
    assert mixed.simulated == turned.simulated == slow.simulated != of("RTX 5090", "RTX 5090")[1].simulated
    note = "GPUs of several kinds: predicted as if all were RTX 3090"
    assert note in mixed.notes and note in turned.notes and note not in slow.notes


def test_cards_that_hold_the_first_ones_back_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas get as many rows on every card, so a slow one may cost more than it computes."""
    monkeypatch.setattr("kt_ray.timing.prediction._candidates", lambda *_: cards_only(_candidates(*_)))

    def cards_only(every: Iterator[tuple[dict[str, Any], str]]) -> list[tuple[dict[str, Any], str]]:
        return [one for one in every if "rule.gpus" in one[0]]

    cards = (Gpu(0, "H200", 64 << 30), Gpu(1, "RTX 3090", 64 << 30))
    attention = tuple((name, Figure(1e13, "so that attention limits")) for name in ("clock", "dram"))
    uneven = replace(TWO_GPUS, gpus=cards, rates=(*TWO_GPUS.rates, *attention))
    step: dict[str, Any] = {"trainer": {"batch_size": 64, "micro_batch_size": 16}}
    assert changes({}, hardware=uneven, **step) == ["rule.gpus=1"]
    assert changes({}, hardware=replace(uneven, gpus=cards[::-1]), **step) == []
    assert changes({}, hardware=replace(uneven, gpus=(cards[0], replace(cards[0], index=1))), **step) == []


def test_loading_reads_what_is_released_and_once() -> None:
    def seconds(**rule: Any) -> float:
        return predicted(make_config(rule=rule), make_hardware(sockets=2)).load_seconds

    whole = seconds(replicas=1)
    assert whole * nominal_rates(make_hardware()).disk.value == pytest.approx(2 * DIMS.total_params, rel=0.05)
    assert seconds(replicas=1, experts={"backend": "AMXINT4"}) == whole  # quantised while they are read
    assert seconds(replicas=2) == pytest.approx(whole)


def test_an_instruction_set_that_the_environment_forces() -> None:
    """KT_RAY_ISA is planned for as rule.experts.isa is."""

    def planned(hardware: Hardware, **experts: Any) -> tuple[Plan, Prediction]:
        config = make_config(rule={"experts": experts})
        plan = make_plan(DIMS, config, hardware)
        return plan, predict(plan, config, nominal_rates(plan.hardware))

    host = make_hardware(gpus=1)
    assert host.best_isa != "avx2"
    by_variable, by_rule, neither = (
        planned(replace(host, forced_isa="avx2")),
        planned(host, isa="avx2"),
        planned(host),
    )
    assert by_variable[0].budgets == by_rule[0].budgets != neither[0].budgets
    assert by_variable[1].simulated == by_rule[1].simulated != neither[1].simulated


def test_a_pair_is_two_rows() -> None:
    """Of memory and of time; an answer with a verdict is one."""
    rule = {"groups": 2, "wave": 4, "experts": {"stream": 0.25, "stream_to": "workers"}}

    def planned(stage: str, size: int, micro: int) -> tuple[Plan, Prediction]:
        trainer = {"stage": stage, "batch_size": size, "micro_batch_size": micro}
        config = make_config(rule=rule, data={"max_length": 64}, trainer=trainer)
        plan = make_plan(DIMS, config, make_hardware(gpus=1))
        return plan, predict(plan, config, nominal_rates(plan.hardware))

    rows, of_rows = planned("sft", 16, 2)
    for stage in ("dpo", "orpo"):
        pairs, of_pairs = planned(stage, 8, 1)
        assert pairs.budgets == rows.budgets and pairs.workers == rows.workers
        assert pairs.tokens_per_step == of_pairs.tokens == 16 * 64
        assert of_pairs.simulated.seconds == of_rows.simulated.seconds
    assert planned("kto", 16, 2)[1].tokens == 16 * 64


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"experts": {"gpu_resident": 2, "lane_device": "cpu"}}, ["without the lane"]),
        ({"experts": {"gpu_resident": 2}}, []),
        ({"nodes": 2}, ["packing them is not counted"]),
        ({"transport": "gloo"}, ["rule.transport=gloo is predicted"]),
        ({}, []),
    ],
)
def test_it_says_what_it_leaves_out(rule: dict[str, Any], words: list[str]) -> None:
    notes = predicted(make_config(rule=rule), make_hardware(gpus=1)).notes
    assert len(notes) == len(words) and all(word in note for word, note in zip(words, notes, strict=True))


@pytest.mark.parametrize(
    ("keys", "passes"),
    [
        ({"trainer": {"stage": "dpo"}}, "1 forward pass of"),
        ({"trainer": {"stage": "kto"}}, "3 forward passes"),
        ({"trainer": {"stage": "grpo"}}, ""),
        ({"trainer": {"stage": "dpo", "aux_loss": 0.1}}, "2 forward passes"),
    ],
)
def test_it_says_which_forward_passes_it_leaves_out(keys: dict[str, Any], passes: str) -> None:
    notes = predicted(make_config(**keys), make_hardware()).notes
    assert len(notes) == bool(passes) and all(passes in note for note in notes)


def test_every_term_has_a_source_and_the_step_is_not_shorter_than_the_busiest_side() -> None:
    found = predicted(make_config(rule={"experts": {"sockets": 2}}), make_hardware(sockets=2, gpus=1))
    assert all(term.source and term.seconds >= 0 for term in found.terms)
    assert max(found.simulated.work.values()) <= found.simulated.seconds * (1 + 1e-9)
    assert {"pcie, busiest link", "experts, forward", "attention, recomputed"} <= {
        t.name for t in found.terms
    }


def test_a_balanced_placement_is_kept_in_what_it_proposes() -> None:
    load = ExpertLoad(3, {layer: tuple(range(1, 257)) for layer in V3.moe_layers}, "a checkpoint")
    rule = {"groups": 8, "experts": {"placement": "balanced", "load": "/checkpoint"}}
    assert any(overrides.startswith("rule.groups=") for overrides in changes(rule, load))


def test_int8_products_are_not_proposed_beside_a_lane() -> None:
    rule: dict[str, Any] = {"stages": 1, "replicas": 2}
    assert any("AMXINT8" in overrides for overrides in changes(rule))
    assert not any("AMXINT8" in overrides for overrides in changes({**rule, "experts": {"gpu_resident": 1}}))


def test_other_threads_round_otherwise() -> None:
    """torch adds up in another order on another number of threads."""
    config = make_config(rule={"worker_threads": 8}, **STEP)
    effects = {
        keys["rule.worker_threads"]: effect
        for keys, effect in _candidates(config, make_plan(DIMS, config, make_hardware(cores=8)))
        if "rule.worker_threads" in keys
    }
    assert effects == dict.fromkeys((1, 4), "same results to rounding")


def test_other_stages_come_with_other_layers() -> None:
    found = changes({"stages": 2, "layers": [30, 31]}, hardware=SLOW_GPUS)
    assert "rule.stages=1 rule.replicas=2 rule.layers=null" in found


def test_stages_take_turns_and_replicas_do_not() -> None:
    """docs/prediction.md: in a pass that is layer-major, stages divide memory, not time."""

    def of(**rule: int) -> Prediction:
        config = make_config(rule=rule, **STEP)
        plan = make_plan(V3, config, SLOW_GPUS)
        assert plan.fits and plan.wave * plan.replicas == 16
        return predict(plan, config, nominal_rates(SLOW_GPUS))

    one, stages, replicas = of(stages=1), of(stages=2), of(stages=1, replicas=2)
    assert stages.tokens_per_s == pytest.approx(one.tokens_per_s, rel=0.05)
    assert replicas.tokens_per_s > 1.1 * stages.tokens_per_s
    assert of(stages=2, groups=8).tokens_per_s < stages.tokens_per_s  # more groups do not catch up
    assert stages.bottleneck.startswith("attention: its 2 stages take turns")
    assert "turns" not in one.bottleneck + replicas.bottleneck


def test_a_larger_batch_gains_what_a_run_of_it_would() -> None:
    """All that is at auto is chosen anew for it: here how many rows share a micro-batch."""
    rates = nominal_rates(TWO_GPUS)

    def planned(size: int) -> tuple[Config, Plan, Prediction]:
        trainer = {"batch_size": size, "micro_batch_size": "auto"}
        config = make_config(model=STEP["model"], data=STEP["data"], trainer=trainer)
        plan = choose_plan(DIMS, config, TWO_GPUS, rates=rates)
        return config, plan, predict(plan, config, rates)

    (config, plan, base), (_, larger, faster) = planned(8), planned(32)
    assert plan.micro_batch_rows < larger.micro_batch_rows
    found = {c.overrides: c.gain for c in neighbours(plan, config, rates, base, 512)}
    assert found["trainer.batch_size=32"] == faster.tokens_per_s / base.tokens_per_s
