"""Layers to stages, experts to actors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kt_ray.config.schema import RuleConfig
from kt_ray.dims.config_json import dims_from_config
from kt_ray.dims.model_dims import ModelDims
from kt_ray.errors import UserError
from kt_ray.placement.plan import make_plan
from kt_ray.placement.render import expert_row, plan_to_dict
from kt_ray.placement.split import LayerSplit, split_experts
from kt_ray.placement.split import split_layers as divide
from tests.placement.configs import DEEPSEEK_V3, make_config, make_hardware, small_dims

V3 = dims_from_config(DEEPSEEK_V3)


def split_layers(dims: ModelDims, rule: RuleConfig, stages: int) -> LayerSplit:
    """By the rule alone: it is not asked for a balance of its own."""

    def balance() -> tuple[tuple[int, int], ...]:
        raise AssertionError("rule.layers says it all")

    return divide(dims, rule, stages, balance)


def rule(layers: list[Any] | None) -> RuleConfig:
    return RuleConfig(name="test", layers=layers)


@pytest.mark.parametrize("experts", [1, 7, 8, 64, 256])
@pytest.mark.parametrize("actors", [1, 2, 3, 4])
def test_experts_are_divided_evenly_and_completely(experts: int, actors: int) -> None:
    if actors > experts:
        with pytest.raises(UserError, match="more expert actors"):
            split_experts(experts, actors)
        return
    shares = split_experts(experts, actors)
    assert [e for share in shares for e in share] == list(range(experts))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(("sockets", "hosts", "remedy"), [(2, 5, "=1 or less"), (1, 9, "=auto")])
def test_more_sockets_of_several_hosts_than_experts(sockets: int, hosts: int, remedy: str) -> None:
    """The key counts those of one host."""
    with pytest.raises(UserError, match="more expert actors") as caught:
        split_experts(8, sockets * hosts, hosts)
    assert str(caught.value.remedy) == f"set rule.experts.sockets{remedy}"


def test_experts_programming_error() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        split_experts(8, 0)


def test_counts_and_ranges() -> None:
    assert split_layers(V3, rule([31, 30]), 2).ranges == ((0, 31), (31, 61))
    assert split_layers(V3, rule(["0-15", "16-60"]), 2).ranges == ((0, 16), (16, 61))
    assert split_layers(V3, rule(["0-60"]), 1).devices == (None,)


def test_patterns_first_match_wins() -> None:
    first = {"match": r"^model\.layers\.([0-9]|[12][0-9])\.", "device": "cuda:0"}
    rest = {"match": r"^model\.layers\..*$", "device": "cuda:1"}
    split = split_layers(V3, rule([first, rest]), 2)
    assert split.ranges == ((0, 30), (30, 61)) and split.devices == ("cuda:0", "cuda:1")
    # A pattern that only names modules without a place of their own (experts) changes nothing.
    experts = {"match": r"^model\.layers\..*\.mlp\.experts$", "device": "cuda:1"}
    assert split_layers(V3, rule([experts, first, rest]), 2) == split


@pytest.mark.parametrize(
    ("layers", "stages", "message"),
    [
        ([30, 30], 2, "do not add up"),
        (["0-15", "16-59"], 2, "last layer"),
        (["0-15", "16-61"], 2, "last layer"),
        (
            [{"match": r"^model\.layers\.[0-9]\.", "device": "cuda:0"}],
            1,
            "no pattern in rule.layers matches layer 10",
        ),
        (
            [
                {"match": r"[02468]\.self_attn|[02468]\.mlp", "device": "cuda:0"},
                {"match": ".", "device": "cuda:1"},
            ],
            2,
            "divide layer 0",
        ),
        (
            [{"match": r"layers\.\d*[02468]\.", "device": "cuda:0"}, {"match": ".", "device": "cuda:1"}],
            2,
            "separate runs",
        ),
        ([{"match": ".", "device": "cuda:0"}], 2, "1 devices for 2 stages"),
    ],
)
def test_faulty_layers(layers: list[Any], stages: int, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        split_layers(V3, rule(layers), stages)
    assert caught.value.where == "rule.layers" and caught.value.remedy


def test_more_stages_than_layers() -> None:
    with pytest.raises(UserError, match="more pipeline stages than layers"):
        split_layers(small_dims(), rule(None), 5)


@pytest.mark.parametrize("layers", [[1, 3], ["0-2", "3-3"]])
def test_layers_stay_with_those_whose_results_they_take(layers: list[Any]) -> None:
    """GLM-5.2: layers 1 and 3 take the choice of the index of the layer before."""
    shared = small_dims("glm_moe_dsa")
    with pytest.raises(UserError, match="parts layers from what they take") as caught:
        split_layers(shared, rule(layers), 2)
    assert str(caught.value.required).endswith("among 2")
    with pytest.raises(
        UserError, match="more pipeline stages than layers at which a stage may begin"
    ) as more:
        split_layers(shared, rule(None), 3)
    assert more.value.remedy == "set rule.stages=2 or less"
    assert split_layers(shared, rule([2, 2]), 2).ranges == ((0, 2), (2, 4))


def test_no_layers_named_asks_for_the_balance() -> None:
    assert divide(small_dims(), rule(None), 2, lambda: ((0, 1), (1, 4))) == (((0, 1), (1, 4)), (None, None))


def test_ranges_with_devices() -> None:
    split = split_layers(
        small_dims(),
        rule([{"layers": "0-1", "device": "cuda:1"}, {"layers": "2-3", "device": ["cuda:0", "cuda:0"]}]),
        2,
    )
    assert split == (((0, 2), (2, 4)), ("cuda:1", ("cuda:0", "cuda:0")))


def test_separate_runs_share_a_device_where_the_stages_say_so() -> None:
    layers = [{"match": r"layers\.[03]\.", "device": "cuda:0"}, {"match": ".", "device": "cuda:1"}]
    with pytest.raises(UserError, match="separate runs") as caught:
        split_layers(small_dims(), rule(layers), 2)
    assert "rule.stages=3" in str(caught.value.remedy)
    split = split_layers(small_dims(), rule(layers), 3)
    assert split == (((0, 1), (1, 3), (3, 4)), ("cuda:0", "cuda:1", "cuda:0"))


def test_experts_of_a_layer_by_actor() -> None:
    """One function for loader and dispatcher: `experts` where a layer is not named, else its own ids."""
    plan = make_plan(small_dims(), make_config(rule={"experts": {"sockets": 2}}), make_hardware())
    layers = plan.dims.moe_layers
    assert [plan.experts[1].experts_of(layer) for layer in layers] == [(4, 5, 6, 7)] * len(layers)
    own = ((layers[0], (0, 3, 5)), (layers[1], (1, 2, 6, 7)))
    actor = replace(plan.experts[0], by_layer=own)
    changed = replace(plan, experts=(actor, plan.experts[1]))
    ids = [changed.experts[0].experts_of(layer) for layer in layers]
    assert ids[:2] == [(0, 3, 5), (1, 2, 6, 7)]
    assert ids[-1] == (0, 1, 2, 3) and hash(actor)
    assert actor.counts(layers) == (3, 4, 4)[: len(layers)]
    assert (
        expert_row(changed, actor)[2] == "by load (3-4)" and expert_row(plan, plan.experts[0])[2] == "0-3 (4)"
    )
    first, second = plan_to_dict(changed)["experts"]
    assert first["by_layer"] == {str(layers[0]): "0,3,5", str(layers[1]): "1-2,6-7"}
    assert "by_layer" not in second and second["experts"] == [4, 5, 6, 7]
