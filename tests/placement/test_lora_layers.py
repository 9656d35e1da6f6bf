"""lora.layers in a plan: which layers have adapters, where backward ends, what is kept and written."""

from __future__ import annotations

from typing import Any

import pytest

from kt_ray.config.schema import LoraConfig
from kt_ray.errors import UserError
from kt_ray.placement.lora_sizes import (
    adapted_names,
    backward_of,
    expert_lora_layers,
    expert_lora_params,
    trained_params,
)
from kt_ray.placement.memory import checkpoint_bytes
from kt_ray.placement.plan import make_plan
from kt_ray.placement.plan_types import Plan
from kt_ray.placement.traffic import traffic
from tests.helpers.composing import compose
from tests.placement.configs import make_config, make_hardware, small_dims

DIMS = small_dims("deepseek_v3")  # four layers, the first one dense


def plan_of(**lora: Any) -> Plan:
    config = make_config(lora=lora, rule={"stages": 2, "groups": 1, "wave": 1, "experts": {"sockets": 1}})
    return make_plan(DIMS, config, make_hardware())


@pytest.mark.parametrize(
    ("lora", "lowest", "inputs", "experts"),
    [
        ({}, 0, 0, [1, 2, 3]),
        ({"target_modules": "none"}, 1, 2, [1, 2, 3]),
        ({"layers": [2]}, 2, 2, [2]),
        ({"layers": [3, 2], "target_modules": "none"}, 2, 3, [2, 3]),
        ({"layers": [0]}, 0, 0, []),
        ({"layers": [3], "experts": False}, 3, 3, []),
        ({"layers": [3], "target_modules": r".*layers\.1\..*o_proj"}, 1, 1, [3]),
        ({"layers": [3], "target_modules": r"model\.language_model\.layers\.1\..*o_proj"}, 1, 1, [3]),
        ({"layers": [3], "target_modules": ["model.layers.2.self_attn.o_proj"]}, 2, 2, [3]),
        ({"layers": [3], "target_modules": ["o_proj"]}, 3, 3, [3]),
    ],
)
def test_where_backward_ends(lora: dict[str, Any], lowest: int, inputs: int, experts: list[int]) -> None:
    config = LoraConfig(**lora)
    assert tuple(backward_of(DIMS, config)) == (lowest, inputs)
    assert list(expert_lora_layers(DIMS, config)) == experts
    assert plan_of(**lora).backward == backward_of(DIMS, config)
    outside = {int(name.split(".")[2]) for name in adapted_names(DIMS, config)}
    assert outside <= {*(config.layers or range(4)), 1, 2}


def test_parameters_and_checkpoints_are_those_of_the_layers() -> None:
    one, whole = LoraConfig(layers=[2]), LoraConfig()
    per_layer = DIMS.num_experts * expert_lora_params(DIMS, whole)
    assert trained_params(DIMS, one) < trained_params(DIMS, whole) - 2 * per_layer
    sizes = [checkpoint_bytes(DIMS, make_config(lora=lora)) for lora in ({}, {"layers": [2]})]
    assert sizes[1] == 12 * trained_params(DIMS, one) < sizes[0] / 3


def test_budgets_and_traffic_count_what_backward_passes() -> None:
    whole, some, last = plan_of(), plan_of(layers=[1, 3]), plan_of(layers=[3])

    def items(plan: Plan, item: str) -> float:
        return sum(budget.items.get(item, 0) for budget in plan.budgets)

    for item in ("LoRA", "optimizer", "kept activations"):
        assert items(last, item) < items(some, item) < items(whole, item), item
    ways = [sum(link.backward_there for link in traffic(plan).experts) for plan in (whole, some, last)]
    assert ways[0] == ways[1] == 3 * ways[2]
    assert traffic(last).stages[0] * 2 == traffic(whole).stages[0]


@pytest.mark.parametrize(
    ("lora", "match"),
    [
        (
            {"layers": [1, 9, 4]},
            r"lora\.layers has layers that this model lacks; found \[4,9\]; required 0 to 3",
        ),
        (
            {"layers": [0], "target_modules": "none"},
            r"leaves nothing to train; found \[0\].*experts: \[1,2,3\]",
        ),
    ],
)
def test_layers_that_cannot_be_are_refused(lora: dict[str, Any], match: str) -> None:
    with pytest.raises(UserError, match=match):
        plan_of(**lora)


@pytest.mark.parametrize("layers", ["[]", "[-1]"])
def test_numbers_that_cannot_be_are_refused(layers: str) -> None:
    with pytest.raises(UserError, match=r"lora\.layers.*null for all"):
        compose([f"lora.layers={layers}", "mode=plan"])
