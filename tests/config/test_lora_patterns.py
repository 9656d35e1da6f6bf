"""Which modules patterns of ranks and alphas mean."""

from __future__ import annotations

import time

import pytest
from peft.utils.other import get_pattern_key

from kt_ray.config.lora_patterns import (
    check_patterns,
    expert_lora,
    means,
    module_lora,
    shortest_patterns,
)
from kt_ray.config.schema import LoraConfig
from kt_ray.errors import UserError

NAMES = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.self_attn.q_proj",
    "model.layers.11.self_attn.q_proj",
    "model.layers.1.mlp.down_proj",
    "model.layers.1.mlp.shared_experts.down_proj",
    "model.layers.1.mlp.experts.3.down_proj",
]
PATTERNS = [
    "q_proj",
    "proj",
    "1.self_attn.q_proj",
    r"layers\.1\..*",
    r".*_proj",
    "mlp.down_proj|q_proj",
    "",
    ".",
]
OF_SOME_EXPERTS = ["down_proj", r"layers\.1\.mlp\.experts", r"experts\.3\..*", r".*\.3\.up_proj"]
EXPERTS = (1, 2), 4  # MoE layers, experts of each


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_mean_what_peft_says(pattern: str) -> None:
    for name in NAMES:
        assert means(pattern, name, where="x") == (get_pattern_key([pattern], name) == pattern)


def test_the_first_pattern_counts_and_scales_follow() -> None:
    lora = LoraConfig(rank=8, alpha=16, rslora=True, rank_pattern={"0.*q_proj": 4, "q_proj": 2})
    assert [module_lora(lora, name).rank for name in NAMES] == [4, 2, 2, 8, 8, 8]
    assert module_lora(lora, NAMES[0]).scale == 16 / 4**0.5
    lora = LoraConfig(rank=8, alpha=16, alpha_pattern={"q_proj": 4})
    assert (module_lora(lora, NAMES[0]).scale, module_lora(lora, NAMES[3]).scale) == (0.5, 2.0)


@pytest.mark.parametrize(
    ("patterns", "rank"),
    [
        ({"experts": 4, "down_proj": 2}, 4),
        ({".*experts.*": 4}, 4),
        ({".*mlp.*": 4}, 4),
        ({"q_proj": 4, "shared_experts.down_proj": 2}, 8),
        ({r"layers\.[12]\.mlp\.experts": 4}, 4),
    ],
)
def test_routed_experts_have_one_rank(patterns: dict[str, int], rank: int) -> None:
    assert expert_lora(LoraConfig(rank_pattern=patterns), *EXPERTS).rank == rank


@pytest.mark.parametrize("pattern", OF_SOME_EXPERTS)
def test_routed_experts_of_several_ranks_are_refused(pattern: str) -> None:
    match = r"gives routed experts different values.*mlp\.experts.*begin lora\.rank_pattern with experts: "
    with pytest.raises(UserError, match=match):
        expert_lora(LoraConfig(rank_pattern={pattern: 4}), *EXPERTS)
    with pytest.raises(UserError, match=r"lora\.alpha_pattern gives"):
        expert_lora(LoraConfig(alpha_pattern={pattern: 4.0}), *EXPERTS)
    assert expert_lora(LoraConfig(rank_pattern={"experts": 8, pattern: 4}), *EXPERTS).rank == 8


def test_patterns_that_mean_nothing_are_named() -> None:
    used = LoraConfig(rank_pattern={"q_proj": 4, "experts": 2}, alpha_pattern={"mlp.down_proj": 2})
    check_patterns(used, NAMES, *EXPERTS)
    with pytest.raises(UserError, match=r"lora\.rank_pattern has .*found k_proj; .*down_proj, q_proj"):
        check_patterns(LoraConfig(rank_pattern={"q_proj": 4, "k_proj": 2}), NAMES, *EXPERTS)
    with pytest.raises(UserError, match=r"found experts; "):
        check_patterns(LoraConfig(experts=False, rank_pattern={"experts": 2}), NAMES[:4], *EXPERTS)


def test_a_pattern_that_never_ends_is_refused() -> None:
    slow = LoraConfig(rank_pattern={r"((.{1,99}){1,99}){1,99}(?!.)\w": 2})
    with pytest.raises(UserError, match=r"takes too long; at lora\.rank_pattern"):
        module_lora(slow, NAMES[0])


def test_shortest_patterns_mean_these_modules_alone() -> None:
    values = dict(zip(NAMES[:5], (4, 4, 4, 2, 3), strict=True))
    patterns = shortest_patterns(values, 4, {"down_proj"})
    assert patterns == {"mlp.down_proj": 2, "shared_experts.down_proj": 3}
    values = dict(zip(NAMES[:5], (1, 2, 3, 9, 9), strict=True))
    patterns = shortest_patterns(values, 9, {"down_proj"})
    lora = LoraConfig(rank=9, rank_pattern=patterns)
    assert [module_lora(lora, name).rank for name in NAMES] == [1, 2, 3, 9, 9, 9]
    shared = {"model.layers.1.mlp.shared_experts.0.down_proj": 2}
    assert not means(next(iter(shortest_patterns(shared, 4, {"down_proj"}))), NAMES[5], where="x")


def test_many_patterns_of_a_large_model_take_seconds() -> None:
    """An adapter may name every module of DeepSeek-V3, whose routed experts are then none of them."""
    ranks = {
        f"{layer}.self_attn.{name}": 4 for layer in range(61) for name in ("q_a_proj", "q_b_proj", "o_proj")
    }
    begin = time.thread_time()
    assert expert_lora(LoraConfig(rank_pattern=ranks), tuple(range(3, 61)), 256).rank == 8
    assert time.thread_time() - begin < 5
