"""What generation needs: caches against transformers' own, and plans that count them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from kt_ray.config.schema import Config, DataConfig, EvalConfig, GenerateConfig
from kt_ray.dims.model_dims import CacheWidth
from kt_ray.errors import UserError
from kt_ray.placement.generation_memory import absorbs_keys, cache_bytes, room, step_tokens
from kt_ray.placement.memory import worker_items
from kt_ray.placement.plan import make_plan
from kt_ray.placement.plan_types import Held, Plan
from kt_ray.placement.range_memory import heads_width, range_host
from kt_ray.placement.remedies import answer_remedy
from kt_ray.placement.wave_tokens import load_of
from tests.placement.configs import SMALL, make_config, make_hardware, small_dims, text_model

ROWS = 2


def tensors(values: Any) -> Iterator[Any]:
    import torch

    for value in values:
        if isinstance(value, dict):
            yield from tensors(value.values())
        elif isinstance(value, torch.Tensor) and value.dim():
            yield value


@pytest.mark.parametrize("tokens", [10, 30])
@pytest.mark.parametrize("family", sorted(SMALL))
def test_caches_are_as_large_as_transformers_makes_them(family: str, tokens: int) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from kt_ray.model.caches import new_cache, places

    config = transformers.AutoConfig.for_model(**SMALL[family])
    torch.manual_seed(0)
    model, _ = text_model(config, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    dims = small_dims(family)
    cache = new_cache(model.config, places(model.config, range(dims.num_layers), dims.num_layers))
    with torch.no_grad():
        for ids in torch.randint(3, 50, (ROWS, tokens)).split([tokens - 1, 1], dim=1):
            model(input_ids=ids, past_key_values=cache, use_cache=True)
    for layer, width in enumerate(dims.cache_widths):
        own = [vars(cache.layers[n]).values() for n in places(model.config, [layer], dims.num_layers)]
        # DeepSeek-V4's keys and values are the same tensor.
        held = {t.data_ptr(): t.numel() * 4 for values in own for t in tensors(values) if t.numel()}
        planned = width.bytes(ROWS, ROWS * tokens, 4)
        if width.row:  # of what waits to be compressed the plan counts the most there can be
            assert sum(held.values()) <= planned
            if width.state or not width.token:
                assert sum(held.values()) == planned
        else:
            assert sum(held.values()) == planned


def test_a_sliding_window_keeps_no_more_than_its_tokens() -> None:
    width = CacheWidth(near=10, window=7)
    assert width.bytes(rows=3, tokens=12, element=2) == 240
    assert width.bytes(rows=3, tokens=1000, element=2) == 2 * 10 * 3 * 7


def config_of(mode: str = "chat", **generate: Any) -> Config:
    config = make_config(mode=mode, cluster="local", data={"max_length": 70})
    return dataclasses.replace(config, generate=GenerateConfig(**generate))


def test_a_prompt_that_is_kept_has_a_window_and_states_of_its_own() -> None:
    """Its tokens are among those of generate.cache_tokens."""
    dims = dataclasses.replace(
        small_dims(), cache_widths=(CacheWidth(near=10, window=7, row=5, state=3), CacheWidth(token=2))
    )
    config = config_of(batch_size=4, cache_tokens=1000)
    windows, tokens = 5 * (2 * (10 * 7 + 5) + 4 * 3), 2 * 2 * 1000
    assert cache_bytes(dims, config, range(2), 2) == windows + tokens + max(windows, tokens)


def plan_of(config: Config, memory: int = 64 << 30) -> Plan:
    return make_plan(small_dims("qwen3_moe"), config, make_hardware(memory=memory))


def items(plan: Plan) -> dict[str, int]:
    return {item: size for budget in plan.budgets for item, size in budget.items.items()}


def test_a_plan_of_generation_counts_caches_and_nothing_for_training() -> None:
    dims = small_dims("qwen3_moe")
    config = config_of(batch_size=4, max_new_tokens=50, prefill_tokens=60)
    assert room(dims, config) == 4 * 120 and step_tokens(dims, config) == 74  # a prompt is read in whole
    beyond = dataclasses.replace(config, data=DataConfig(max_length=10_000))
    assert step_tokens(dims, beyond) == 4 + dims.context  # longer ones are refused
    grpo = make_config(trainer={"stage": "grpo"}, reward="numeric", data={"max_length": 4096})
    grpo = dataclasses.replace(grpo, generate=GenerateConfig(batch_size=4, max_new_tokens=1000))
    assert step_tokens(dataclasses.replace(dims, context=0), grpo) == 4 + 3096  # which leave an answer room
    plan = plan_of(config)
    found = items(plan)
    # Keys and values of 2 heads of 24 in 4 layers, one of which is copied as it grows.
    assert found["caches"] == 2 * 480 * (4 + 1) * 2 * 2 * 24
    assert found["caches"] == cache_bytes(dims, config, range(4), 2)
    assert "kept activations" not in found and found["logits"] == 4 * dims.vocab_size * 10
    assert any("480 tokens per replica, in at most 4 rows" in note for note in plan.notes)
    training = items(plan_of(config_of("plan")))
    assert "caches" not in training and training["kept activations"] > 0

    wider = items(plan_of(config_of(batch_size=4, max_new_tokens=50, prefill_tokens=60, cache_tokens=4800)))
    assert wider["caches"] == 10 * found["caches"] and wider["workspace"] > found["workspace"]
    assert wider["experts"] == found["experts"] and wider["weights"] == found["weights"]


def test_every_served_adapter_but_one_is_kept_beside_the_one_that_is_in_use() -> None:
    def lora(count: int) -> int:
        served = {f"a{i}": f"/adapters/{i}" for i in range(count)}
        config = config_of("serve")
        config = dataclasses.replace(config, serve=dataclasses.replace(config.serve, adapters=served))
        return items(plan_of(config))["LoRA"]

    one, two, five = map(lora, (1, 2, 5))
    assert five - one == 4 * (two - one) > one


def test_evaluation_has_answers_beside_held_out_rows() -> None:
    few, many = (items(plan_of(config_of("eval", batch_size=n, max_new_tokens=500))) for n in (1, 64))
    assert many["answers"] > few.get("answers", 0)
    assert "kept activations" not in few, "no backward comes"
    assert few["workspace"] >= items(plan_of(config_of("plan")))["workspace"]


@pytest.mark.parametrize("family", ["qwen3_moe", "glm_moe_dsa", "deepseek_v4"])
def test_evaluation_has_a_layer_at_work_whatever_training_would_retain(family: str) -> None:
    """And what layers hand to later ones."""
    config = dataclasses.replace(config_of("eval"), data=DataConfig(max_length=5000))
    dims = small_dims(family)
    plan = make_plan(dims, config, make_hardware(memory=64 << 30))

    def of(attention: str) -> dict[str, float]:
        load = load_of(dims, config, 1, 1, Held("retain", attention))
        return worker_items(dims, config, load, plan.workers[0], 1, "float32")

    group, retained = of("group"), of("retain")
    assert retained["workspace"] == group["workspace"] > 0
    load = load_of(dims, config, 1, 1)
    assert group["kept activations"] == max(
        (h.bytes(load.replica, load.row, 4) for h in dims.handed), default=0
    )
    states = (2 * dims.hidden_streams + 1) * 4 * load.replica * dims.hidden_size
    assert states < group["workspace"]


def test_evaluation_by_ranges_has_room_for_the_heads_of_a_micro_batch() -> None:
    """Beside its hidden states, as `RangeLoop` takes it from host memory."""
    dims = small_dims("qwen3_moe")
    states, _ = range_host(dims, range(4, 4), 100, 0, 100, 4, outputs=False)
    assert states >= 4 * 100 * (dims.hidden_size + heads_width(dims, 0))


def test_the_models_context_bounds_a_row() -> None:
    dims = dataclasses.replace(small_dims("qwen3_moe"), context=100)
    assert room(dims, config_of(batch_size=4, max_new_tokens=50)) == 4 * 100
    assert room(dims, config_of(batch_size=4, max_new_tokens=50, cache_tokens=7)) == 7


def test_training_settings_do_not_stop_generation_but_a_refused_family_does() -> None:
    config = config_of()
    config = dataclasses.replace(
        config,
        rule=dataclasses.replace(config.rule, replicas=2),
        trainer=dataclasses.replace(config.trainer, batch_size=1),
    )
    assert plan_of(config).replicas == 2
    refused = dataclasses.replace(small_dims("qwen3_moe"), refusal="experts of another kind")
    with pytest.raises(UserError, match=r"cannot be used from this checkpoint.*another kind"):
        make_plan(refused, config, make_hardware())


def test_answers_after_training_use_the_room_of_activations_and_count_the_rest() -> None:
    dims = dataclasses.replace(small_dims("qwen3_moe"), context=0)  # answers as long as asked for

    def of(config: Config) -> dict[str, int]:
        return items(make_plan(dims, config, make_hardware(memory=64 << 30)))

    def training(count: int, new_tokens: int) -> dict[str, int]:
        config = config_of("train", batch_size=32, max_new_tokens=new_tokens, prefill_tokens=60)
        return of(dataclasses.replace(config, eval=EvalConfig(after_training=count)))

    assert "answers" not in training(0, 50)
    few, many = training(4, 5_000), training(8, 5_000)
    assert many["answers"] > few["answers"] > 0
    # Four rows of 70 tokens and an answer each; caches, workspace and logits less what training had there.
    config = config_of(batch_size=4, max_new_tokens=5_000, prefill_tokens=60)
    answering = of(config)
    needed = sum(answering[name] for name in ("caches", "workspace", "logits"))
    room_of_training = sum(few[name] for name in ("kept activations", "workspace", "logits"))
    # Training's widths of a layer are taken, which are the larger ones.
    assert needed - room_of_training <= few["answers"] <= 1.15 * (needed - room_of_training)
    assert {k: v for k, v in few.items() if k != "answers"} == training(0, 50)


def test_latent_keys_that_stay_as_cached_need_one_copy() -> None:
    dims = small_dims("deepseek_v3")

    def workspace(**config: Any) -> int:
        asked = dataclasses.replace(config_of(batch_size=4, cache_tokens=100_000), **config)
        return items(make_plan(dims, asked, make_hardware(memory=64 << 30)))["workspace"]

    absorbed, expanded = workspace(), workspace(generate=generating("expanded"))
    element = 2
    saved = dims.attention_width - dims.cache_widths[0].token
    assert expanded - absorbed == element * saved * 100_000
    eager = dataclasses.replace(config_of().model, attn_implementation="eager")
    assert workspace(model=eager) > absorbed
    assert workspace(lora=dataclasses.replace(config_of().lora, dora=True)) > absorbed


def test_a_prompt_has_keys_of_all_heads_while_it_is_read_in() -> None:
    dims = small_dims("deepseek_v3")

    def workspace(length: int) -> int:
        config = dataclasses.replace(
            config_of(batch_size=4, cache_tokens=10_000, prefill_tokens=10_000),
            data=make_config(data={"max_length": length}).data,
        )
        return items(make_plan(dims, config, make_hardware(memory=64 << 30)))["workspace"]

    dims = dataclasses.replace(dims, context=0)
    assert workspace(10_000) - workspace(8_000) == 2 * dims.attention_width * 2_000


def test_a_prompt_is_read_in_whole_however_long() -> None:
    """In one step, whatever generate.prefill_tokens is; by itself it has a mask only with a window. Eager
    attention has its scores at once, 12 bytes of each."""
    dims = dataclasses.replace(small_dims("qwen3_moe"), context=0)

    def of(length: int, **model: Any) -> Config:
        config = make_config(mode="serve", cluster="local", data={"max_length": length}, model=model)
        return dataclasses.replace(config, generate=GenerateConfig(batch_size=1, prefill_tokens=100))

    def workspace(config: Config) -> int:
        return items(make_plan(dims, config, make_hardware(memory=64 << 30)))["workspace"]

    once, twice, thrice = (workspace(of(n * 4_000)) for n in (1, 2, 3))
    assert twice - once == pytest.approx(thrice - twice, rel=0.01) and twice > 1.9 * once
    eager = of(4_000, attn_implementation="eager")
    assert workspace(eager) - once > 12 * dims.num_heads * 4_000**2
    remedy = answer_remedy(dims, eager, make_hardware(memory=1 << 30))
    assert remedy is not None and remedy.overrides == "data.max_length=2000"


def test_absorbed_keys_that_a_model_does_not_have() -> None:
    notes = plan_of(config_of(latent_keys="absorbed")).notes
    assert any("latent_keys=absorbed changes nothing" in note for note in notes)
    assert not any("latent_keys" in note for note in plan_of(config_of()).notes)


def generating(latent_keys: str) -> GenerateConfig:
    return GenerateConfig(batch_size=4, cache_tokens=100_000, latent_keys=latent_keys)


@pytest.mark.parametrize(
    ("mode", "stage", "absorbs"),
    [
        *(("chat", "sft", True), ("serve", "grpo", True), ("train", "sft", True)),
        *(("train", "grpo", False), ("plan", "grpo", False), ("train_server", "sft", False)),
    ],
)
def test_keys_are_expanded_where_a_model_learns_from_its_answers(
    mode: str, stage: str, absorbs: bool
) -> None:
    config = config_of(mode)
    config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, stage=stage))
    assert absorbs_keys(config) is absorbs
    for asked in ("absorbed", "expanded"):
        own = dataclasses.replace(config, generate=generating(asked))
        assert absorbs_keys(own) is (asked == "absorbed")
