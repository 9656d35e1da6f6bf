"""Workers that share a GPU, and those that must not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kt_ray.config.checks import check
from kt_ray.config.fields import show
from kt_ray.config.schema import Config, ExpertsRule, RuleConfig
from kt_ray.errors import UserError
from kt_ray.placement.devices import with_gpus
from kt_ray.placement.memory import GPU_RUNTIME
from kt_ray.placement.plan import make_plan
from tests.placement.configs import make_config, make_hardware, small_dims

REPLICAS = [{"match": ".", "device": ["cuda:0", "cuda:0"]}]
STAGES = [{"layers": "0-1", "device": "cuda:0"}, {"layers": "2-3", "device": "cuda:0"}]


def test_two_replicas_share_a_gpu() -> None:
    plan = make_plan(
        small_dims(), make_config(rule={"layers": REPLICAS, "replicas": 2}), make_hardware(gpus=1)
    )
    assert [(w.replica, w.device, w.layers) for w in plan.workers] == [
        (0, "cuda:0", (0, 4)),
        (1, "cuda:0", (0, 4)),
    ]
    assert "2 attention workers share cuda:0" in plan.notes


def test_two_stages_share_a_gpu_and_their_bytes_add_up() -> None:
    config = make_config(rule={"layers": STAGES})
    plan = make_plan(small_dims(), config, make_hardware(gpus=1))
    assert [(w.stage, w.device) for w in plan.workers] == [(0, "cuda:0"), (1, "cuda:0")]
    apart = [dict(entry, device=f"cuda:{i}") for i, entry in enumerate(STAGES)]
    two = make_plan(small_dims(), make_config(rule={"layers": apart}), make_hardware(gpus=2))
    totals = {b.device: b.total for b in two.budgets}
    (shared,) = [b for b in plan.budgets if b.device == "cuda:0"]
    assert shared.total == pytest.approx(totals["cuda:0"] + totals["cuda:1"], abs=20)
    assert shared.items["runtime"] == 2 * GPU_RUNTIME


def test_stages_fold_back_onto_the_first_gpu() -> None:
    layers = [{"match": r"\.[03]\.", "device": "cuda:0"}, {"match": ".", "device": "cuda:1"}]
    plan = make_plan(small_dims(), make_config(rule={"layers": layers, "stages": 3}), make_hardware(gpus=2))
    assert [w.device for w in plan.workers] == ["cuda:0", "cuda:1", "cuda:0"]
    # The replica's devices are moved up by the two that are named.
    both = make_config(rule={"layers": layers, "stages": 3, "replicas": 2})
    plan = make_plan(small_dims(), both, make_hardware(gpus=4))
    assert [w.device for w in plan.workers] == ["cuda:0", "cuda:1", "cuda:0", "cuda:2", "cuda:3", "cuda:2"]


@pytest.mark.parametrize(
    ("rule", "gpus", "message"),
    [
        ({"layers": [{"match": ".", "device": ["cuda:0", "cuda:1"]}], "replicas": 2}, 1, "more GPUs"),
        ({"layers": [{"match": ".", "device": ["cuda:0", "cuda:5"]}], "replicas": 2}, 2, "not there"),
        ({"layers": STAGES, "replicas": 2}, 1, "more GPUs than there are"),
        ({"device": "cuda", "replicas": 2}, 1, "more GPUs than there are"),
    ],
)
def test_what_is_refused(rule: dict[str, Any], gpus: int, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        make_plan(small_dims(), make_config(rule=rule), make_hardware(gpus=gpus))
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("rule", "remedy"),
    [
        ({"replicas": 3}, {"replicas": 2}),
        ({"replicas": 3, "stages": 2}, {"replicas": 2, "stages": 1}),
        ({"replicas": 6, "nodes": 2}, {"replicas": 4}),
        ({"layers": [2, 2], "replicas": 2}, {"layers": None}),
        ({"layers": [1, 1, 2], "stages": 3}, {"layers": None, "stages": "auto"}),
    ],
)
def test_more_replicas_than_gpus_need_no_cpu(rule: dict[str, Any], remedy: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="more GPUs than there are") as caught:
        make_plan(small_dims(), make_config(rule={**rule, "name": "auto"}), make_hardware(gpus=2))
    text = " ".join(f"rule.{key}={show(value)}" for key, value in remedy.items())
    assert f"set {text}, let workers" in str(caught.value.remedy)
    assert make_plan(small_dims(), make_config(rule={**rule, **remedy}), make_hardware(gpus=2)).fits


def test_the_remedy_names_sharing() -> None:
    with pytest.raises(UserError) as caught:
        make_plan(small_dims(), make_config(rule={"device": "cuda", "replicas": 2}), make_hardware(gpus=1))
    assert "share a GPU" in str(caught.value.remedy)


@pytest.mark.parametrize(
    ("rule", "gpus", "remedy"),
    [("auto", 0, "rule.gpus=auto"), ("amx_4gpu", 0, "rule=auto"), ("amx_4gpu", 1, "rule.gpus=auto")],
)
def test_fewer_gpus_than_the_rule_says_have_a_way_out(rule: str, gpus: int, remedy: str) -> None:
    with pytest.raises(UserError, match="more GPUs than there are") as caught:
        with_gpus(RuleConfig(name=rule, gpus=4), make_hardware(gpus=gpus))
    assert f"set {remedy}," in str(caught.value.remedy)


def test_rule_gpus_counts_for_a_lane_beside_attention_on_the_cpu() -> None:
    rule = RuleConfig(device="cpu", gpus=1)
    assert len(with_gpus(rule, make_hardware(gpus=4)).gpus) == 4
    streamed = replace(rule, experts=ExpertsRule(stream=0.5))
    assert len(with_gpus(streamed, make_hardware(gpus=4)).gpus) == 1


def config(rule: dict[str, Any]) -> Config:
    return make_config(rule=rule, model={"build": "demo"}, data={"builtin": "demo"})


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"layers": REPLICAS}, "lists 2 devices for rule.replicas=1"),
        (
            {"layers": [{"layers": "0-1", "device": "cuda:0"}, {"layers": "3-4", "device": "cuda:0"}]},
            "layer 2",
        ),
        (
            {"layers": [{"layers": "0-1", "device": "cuda:0"}, {"match": ".", "device": "cuda:0"}]},
            "exactly the keys",
        ),
        ({"layers": [{"layers": "0-1", "device": ["cuda"]}]}, "is not a device"),
        ({"layers": STAGES, "stages": 3}, "2 entries for rule.stages=3"),
        ({"layers": STAGES, "device": "cpu"}, "clashes"),
    ],
)
def test_configuration_is_checked_before_the_plan(rule: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(config(rule))


def test_valid_lists_pass_the_checks() -> None:
    check(config({"layers": REPLICAS, "replicas": 2}))
    check(config({"layers": STAGES}))
    check(config({"layers": STAGES, "stages": 2}))
