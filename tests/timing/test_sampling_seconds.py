"""The prediction of sampling: what sharing a prompt saves, what rows, contexts and stages cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kt_ray.config.mapping import with_keys
from kt_ray.dims.config_json import dims_from_config
from kt_ray.hardware.describe import hardware_from_file
from kt_ray.hardware.nominal import nominal_rates
from kt_ray.placement.plan import make_plan
from kt_ray.timing.sampling_seconds import SamplingTime, joins_calls, predict_sampling
from tests.placement.configs import DEEPSEEK_V3, make_config, make_hardware, small_dims

V3 = dims_from_config(DEEPSEEK_V3, "DeepSeek-V3")
TWO_GPUS = hardware_from_file(Path(__file__).parents[2] / "conf/hardware/2x4090_2x8488c.yaml")


def sampled(rule: dict[str, Any] | None = None, *, small: bool = False, **asked: Any) -> SamplingTime:
    config = make_config(model={"name": "v3", "path": "/models/v3"}, rule=rule or {"stages": 2})
    config = with_keys(config, {"generate.batch_size": asked.pop("rows", 64)})
    hardware = make_hardware() if small else TWO_GPUS
    plan = make_plan(small_dims() if small else V3, config, hardware)
    shape = {"prompts": 8, "group": 8, "prompt_tokens": 256, "answer_tokens": 64, **asked}
    return predict_sampling(plan, config, nominal_rates(plan.hardware), **shape)


@pytest.mark.parametrize("small", [True, False])
def test_a_shared_prompt_is_computed_once(small: bool) -> None:
    shared, apart = sampled(small=small), sampled(small=small, shared=False)
    assert (shared.prompt_tokens, apart.prompt_tokens) == (8 * 256, 64 * 256)
    assert apart.prefill == pytest.approx(8 * shared.prefill) and apart.decode == shared.decode
    assert shared.answer_tokens == 64 * 64
    assert shared.tokens_per_s == pytest.approx(64 * 64 / (shared.prefill + shared.decode))


def test_answers_cost_by_their_length_and_context() -> None:
    usual = sampled()
    assert sampled(answer_tokens=1).decode == 0
    assert sampled(answer_tokens=127).decode > 2 * usual.decode  # 126 tokens instead of 63, contexts longer
    assert sampled(prompt_tokens=2048).decode > usual.decode
    # Half the rows: twice the steps, each of which reads nearly the same experts.
    assert usual.decode < sampled(rows=32).decode < 2 * usual.decode


def test_replicas_divide_prompts_and_share_the_experts() -> None:
    one, two = sampled({"stages": 1}, small=True), sampled({"replicas": 2}, small=True)
    assert 0.5 * one.seconds < two.seconds
    assert two.prompt_tokens == one.prompt_tokens and two.answer_tokens == one.answer_tokens


@pytest.mark.parametrize(
    ("rows", "keys", "expected"),
    [
        (64, "absorbed", True),  # the experts take most of a step, and one call reads each once
        (64, "expanded", False),  # attention takes most, and the other replica's experts hide behind it
        (16, "absorbed", False),  # by rows of the weights alone, by panels together
    ],
)
def test_replicas_join_their_calls_where_the_experts_limit_them(rows: int, keys: str, expected: bool) -> None:
    config = make_config(model={"name": "v3", "path": "/models/v3"}, rule={"replicas": 2})
    config = with_keys(config, {"generate.batch_size": 64, "generate.latent_keys": keys})
    plan = make_plan(V3, config, TWO_GPUS)
    rates = nominal_rates(plan.hardware)
    assert joins_calls(plan, config, rates, rows=rows, context=1920) == expected
    alone = make_plan(V3, with_keys(config, {"rule.replicas": 1}), TWO_GPUS)
    assert not joins_calls(alone, config, rates, rows=rows, context=1920)


def test_a_joined_step_reads_each_expert_once() -> None:
    """Two replicas of 64 answers beside one: far less than twice a step, as experts are nearly the same."""
    one, two = (
        sampled({"stages": 1, "replicas": n}, prompts=8 * n, prompt_tokens=256, answer_tokens=64).decode
        for n in (1, 2)
    )
    assert one < two < 1.3 * one
