"""Byte budgets against figures worked out by hand, and the remedies for what does not fit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kt_ray.config.mapping import with_keys
from kt_ray.config.schema import Config, LoraConfig, RuleConfig
from kt_ray.dims.config_json import dims_from_config
from kt_ray.errors import UserError
from kt_ray.hardware.describe import hardware_for, nominal_hardware
from kt_ray.modes.plan import model_dims
from kt_ray.placement.activation_bytes import layer_activation_bytes
from kt_ray.placement.generation_memory import within_server
from kt_ray.placement.lora_sizes import expert_lora_params, lora_params
from kt_ray.placement.memory import (
    GIB,
)
from kt_ray.placement.plan import make_plan
from kt_ray.placement.plan_types import Plan
from kt_ray.placement.remedies import describe, remedies, shortage
from kt_ray.placement.render import billions, cpu_ranges, gib, memory_table
from kt_ray.placement.wave_tokens import load_of
from tests.helpers.composing import compose
from tests.placement.configs import DEEPSEEK_V3, make_config, make_hardware, small_dims

V3 = dims_from_config(DEEPSEEK_V3, "DeepSeek-V3")
FOUR_GPUS = {
    "name": "amx_4gpu",
    "device": "cuda",
    "stages": 4,
    "experts": {"sockets": 2, "backend": "AMXBF16"},
}
TOKENS_8K = {"trainer": {"batch_size": 8}, "data": {"max_length": 1024}}
CHECKED = {"model": {"build": "demo"}}  # what a configuration needs besides that is checked


def items(plan: Plan, device: str) -> dict[str, int]:
    budget = next(b for b in plan.budgets if b.device == device)
    return dict(budget.items)


def v3_plan(**rule: Any) -> Plan:
    config = make_config(rule={**FOUR_GPUS, **rule}, **TOKENS_8K)
    return make_plan(V3, config, nominal_hardware(config.rule))


def test_deepseek_v3_on_the_sockets() -> None:
    both = [items(v3_plan(), f"socket {n}") for n in (0, 1)]
    total = {item: sum(s[item] for s in both) for item in both[1]}
    assert total["experts"] == 2 * V3.routed_params
    # r=8: 3.28 B parameters, 13 GB of weights and as much of gradients, 26 GB of moments.
    params = 58 * 256 * 3 * 8 * (7168 + 2048)
    assert params == pytest.approx(3.28e9, rel=0.01)
    assert total["LoRA"] == total["optimizer"] == 8 * params
    # x, gate and up in BF16: 38 GB with x once; each of the two sockets keeps its own x. Of each slot the
    # three LoRA projections in float32, of rank 8 padded to 16, and 16 bytes of routing.
    slots = 58 * 8192 * 8
    kept = 2 * 58 * 8192 * 7168 * 2 + slots * (2 * 2048 * 2 + 3 * 16 * 4 + 16)
    assert total["kept activations"] == kept == pytest.approx(38e9 + 6.8e9 + 0.8e9, rel=0.02)


def test_trainings_over_one_base() -> None:
    """Each put aside is value, gradient and both moments; each sampler a value."""
    params = 58 * 256 * 3 * 8 * (7168 + 2048)

    def total(adapters: int) -> dict[str, int]:
        server = {"mode": "train_server", "train_server": {"adapters": adapters}}
        config = make_config(rule=FOUR_GPUS | {"layers": [16, 15, 15, 15]}, **TOKENS_8K, **server)
        plan = make_plan(V3, config, nominal_hardware(config.rule))
        both = [items(plan, f"socket {n}") for n in (0, 1)]
        return {item: sum(s[item] for s in both) for item in ("LoRA", "optimizer")}

    one, three = total(1), total(3)
    assert one["LoRA"] == (8 + 2 * 4) * params and three["LoRA"] == (8 + 6 * 4) * params
    others = three["optimizer"] - one["optimizer"]
    assert others > 2 * 16 * params  # and what attention workers put aside on the host
    assert others < 1.1 * 2 * 16 * params


def test_a_gpu_has_the_lora_of_all_trainings_that_a_pass_joins() -> None:
    def on_first(adapters: int) -> int:
        server = {"mode": "train_server", "train_server": {"adapters": adapters}}
        config = make_config(rule=FOUR_GPUS | {"layers": [16, 15, 15, 15]}, **TOKENS_8K, **server)
        plan = make_plan(V3, config, nominal_hardware(config.rule))
        own = sum(lora_params(V3, LoraConfig(), layer) for layer in range(*plan.workers[0].layers))
        return items(plan, "cuda:0")["LoRA"] // own

    # Values and gradients; each training has two samplers more, whose parts are there as they answer.
    assert on_first(3) - on_first(1) == 2 * 8 + 4 * 4 + 4 * 6


def test_workspace_of_an_expert_actor() -> None:
    """One backward of a group on AMX: act and its gradients in BF16, 48 threads with 8 MiB of scratch."""
    tokens, rows = 4096, 4096 * 8 // 2
    shared = tokens * 7168 * 2 + rows * (3 * 2048 * 2 + 3 * 16 * 4 + 16 * 4 + 4)
    in_and_out, threads = tokens * 7168 * 16, 48 * 8 * 2**20
    # Whole huge pages: act, the gradients of gate and up, dy and the gradients of LoRA's input; kept of
    # every layer and group x, gate and up, LoRA's input (its other buffers are below 2 MiB).
    pages = (4 + 58 * 2 * 3) * 2 * 2**20
    assert items(v3_plan(), "socket 0")["workspace"] == shared + in_and_out + threads + pages


def test_recompute_keeps_only_the_input() -> None:
    rule = {"experts": {"sockets": 2, "activations": "recompute"}}
    assert items(v3_plan(**rule), "socket 0")["kept activations"] == 58 * 8192 * (7168 * 2 + 4 * 16)


def test_deepseek_v3_on_the_gpus() -> None:
    plan = v3_plan()
    on = [items(plan, f"cuda:{i}") for i in range(4)]
    outside = V3.total_params - V3.routed_params
    assert sum(d["weights"] + d.get("embedding and head", 0) for d in on) == 2 * outside
    assert (
        "embedding and head" in on[0] and "embedding and head" in on[3] and "embedding and head" not in on[1]
    )
    # Of a chunk: logits in bfloat16; log-probabilities, their gradient and that of the logits in float32.
    assert on[3]["logits"] == (2**27 // (4 * 129280)) * 129280 * 14 and "logits" not in on[0]
    everywhere = sum(lora_params(V3, LoraConfig(), layer) for layer in range(61))
    assert on[0]["optimizer"] == 8 * everywhere and "optimizer" not in on[1]
    own = sum(lora_params(V3, LoraConfig(), layer) for layer in range(*plan.workers[0].layers))
    assert on[0]["LoRA"] == 8 * (everywhere + own) + 6 * own  # and three bfloat16 numbers
    start, stop = plan.workers[1].layers
    # the hidden state before every layer, and attention's output
    assert on[1]["kept activations"] == (stop - start) * 8192 * (2 * 7168 * 2 + 8 * 12)
    assert plan.fits and all("staging" in items(plan, f"socket {n}") for n in (0, 1))


def test_one_micro_batch_at_a_time_and_hidden_states_on_the_host() -> None:
    """Eight micro-batches of 1,024 tokens on one stage per GPU, in two groups."""
    kept = {
        name: v3_plan(activations=name, layers=[16, 15, 15, 15], attention_output=output)
        for name, output in (("group", "retain"), ("micro_batch", "retain"), ("host", "recompute"))
    }
    group, micro, host = (items(plan, "cuda:1") for plan in kept.values())
    start, stop = kept["group"].workers[1].layers
    assert micro["kept activations"] == group["kept activations"]
    layer = max(
        layer_activation_bytes(V3, make_config(), layer, "bfloat16", gpu=True) for layer in range(start, stop)
    )
    # One of each of the two groups, and what the gradients of a third take meanwhile.
    assert group["workspace"] - micro["workspace"] == (8 - 3) * 1024 * layer
    assert host["workspace"] == micro["workspace"]
    # Routing of every layer; of the hidden states those between two layers, and two being copied.
    assert host["kept activations"] == (stop - start) * 8192 * 8 * 12 + 2 * 9 * 1024 * 7168 * 2
    sockets = [
        sum(items(kept[name], f"socket {n}")["kept activations"] for n in (0, 1))
        for name in ("group", "host")
    ]
    assert sockets[1] - sockets[0] == 61 * 8192 * 7168 * 2
    # With attention's outputs twice as much, and two of these are being copied as well.
    both = v3_plan(activations="host", layers=[16, 15, 15, 15], attention_output="retain")
    own = items(both, "cuda:1")["kept activations"]
    assert own - host["kept activations"] == 2 * 1024 * 7168 * 2
    assert (
        sum(items(both, f"socket {n}")["kept activations"] for n in (0, 1)) - sockets[1]
        == 61 * 8192 * 7168 * 2
    )


def test_retained_layers_are_all_kept_and_none_is_computed_again() -> None:
    """On one GPU of four, eight micro-batches of 1,024 tokens; attention's outputs are part of them."""
    layers = {"layers": [16, 15, 15, 15], "wave": 8}
    group, retain = (
        items(v3_plan(activations=kind, attention_output=output, **layers), "cuda:1")
        for kind, output in (("group", "recompute"), ("retain", "retain"))
    )
    each = [layer_activation_bytes(V3, make_config(), n, "bfloat16", gpu=True) for n in range(16, 31)]
    assert retain["kept activations"] - group["kept activations"] == 8192 * sum(each)
    assert retain["workspace"] < group["workspace"] / 4  # what a layer needs for a moment


def test_retained_layers_need_their_weights_until_backward() -> None:
    """A slot would get the next layer's before autograd reads it."""
    with pytest.raises(UserError, match=r"rule\.resident_layers=3") as error:
        v3_plan(activations="retain", resident_layers=3)
    assert "set rule.resident_layers=auto" in str(error.value)
    plan = make_plan(V3, make_config(rule={**FOUR_GPUS, "activations": "retain"}), make_hardware(gpus=4))
    assert not plan.fits and plan.resident is None and plan.activations == "retain"


def test_replicas_divide_the_tokens() -> None:
    config = make_config(rule={"replicas": 2}, trainer={"batch_size": 5, "micro_batch_size": 2})
    load = load_of(small_dims(), config, wave=2, groups=2)
    # 5 rows of 16 tokens; the larger replica has 3 rows, in groups of 2 and 1.
    assert (load.total, load.replica, load.micro, load.row) == (80, 48, 32, 16)
    assert load.group == 2 * 2 * 16
    # 10 rows in micro-batches of 4, 4 and 2: the first replica has 6.
    config = make_config(rule={"replicas": 2}, trainer={"batch_size": 10, "micro_batch_size": 4})
    assert load_of(small_dims(), config, wave=2, groups=1).replica == 6 * 16


def test_a_plan_refuses_rows_whose_index_does_not_fit() -> None:
    """One row of 16,384 tokens: 2 x 64 scores of each pair in float32 are 128 GiB."""
    dims = small_dims("deepseek_v3", index_n_heads=64, index_head_dim=16, index_topk=4)
    config = make_config(data={"max_length": 16384}, trainer={"batch_size": 1}, rule={"device": "cuda"})
    plan = make_plan(dims, config, make_hardware(gpus=1))
    assert not plan.fits and items(plan, "cuda:0")["workspace"] > 128 * GIB


def test_formats_and_dtype() -> None:
    base = items(make_plan(small_dims(), make_config(), make_hardware()), "socket 0")
    single = items(make_plan(small_dims(torch_dtype="float32"), make_config(), make_hardware()), "socket 0")
    assert single["experts"] == 2 * base["experts"] and single["weights"] == 2 * base["weights"]
    quantised = small_dims(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    fp8 = items(make_plan(quantised, make_config(), make_hardware()), "socket 0")
    # Of each of the 3 x 8 experts' three matrices one block, with a float32 scale.
    assert fp8["experts"] == base["experts"] / 2 + 3 * 8 * 3 * 4
    assert fp8["weights"] == base["weights"]
    forced = make_config(model={"dtype": "float32"})
    assert items(make_plan(small_dims(), forced, make_hardware()), "socket 0")["weights"] == single["weights"]


def test_quantised_weights_may_stay_quantised() -> None:
    quantised = small_dims(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    plain, kept = (
        make_plan(
            quantised,
            make_config(model={"keep_quantized": keep}, rule={"activations": "group"}),
            make_hardware(),
        )
        for keep in (False, True)
    )
    saved = sum(2 * q.params - q.bytes for q in quantised.quantised)
    assert items(plain, "socket 0")["weights"] - items(kept, "socket 0")["weights"] == saved > 0
    largest = max(q.largest for q in quantised.quantised)
    assert items(kept, "socket 0")["workspace"] == items(plain, "socket 0")["workspace"] + 2 * largest
    assert any("dequantised to bfloat16 when they are loaded" in note for note in plain.notes)
    assert any("stay as they are stored" in note for note in kept.notes)
    idle = make_plan(small_dims(), make_config(model={"keep_quantized": True}), make_hardware())
    assert any("keep_quantized=true changes nothing" in note for note in idle.notes)


@pytest.mark.parametrize(
    ("backend", "each"),
    [("AMXINT8", 3 * 40 * 64 + 2 * 144), ("AMXINT4", 3 * 20 * 64 + 2 * (40 + 40 + 64 * 5))],
)
def test_backends_that_quantise(backend: str, each: int) -> None:
    plan = make_plan(small_dims(), make_config(rule={"experts": {"backend": backend}}), make_hardware())
    assert items(plan, "socket 0")["experts"] == 3 * 8 * each
    assert any(backend in note and "while they stream in" in note for note in plan.notes)
    assert f"experts ({backend.removeprefix('AMX').lower()})" in {row[0] for row in memory_table(plan)[1]}
    # Also where the files hold another format than config.json says.
    other = dataclasses.replace(small_dims(), experts_file_bytes=1000)
    requantised = make_plan(other, make_config(rule={"experts": {"backend": backend}}), make_hardware())
    assert items(requantised, "socket 0")["experts"] == 3 * 8 * each
    # Float32 experts then compute as quantised ones do: 2 bytes are kept of an element.
    single = make_plan(
        small_dims(torch_dtype="float32"),
        make_config(rule={"experts": {"backend": backend}}),
        make_hardware(),
    )
    assert items(single, "socket 0")["kept activations"] != 0
    assert items(single, "socket 0")["experts"] == 3 * 8 * each


def test_experts_from_a_file_of_their_own() -> None:
    config = make_config(
        rule={"experts": {"backend": "llamafile", "sockets": 2}}, model={"experts_path": "/some/experts.gguf"}
    )
    known = dataclasses.replace(small_dims(), experts_file_bytes=160_000)
    hardware = make_hardware(sockets=2)
    assert [items(make_plan(known, config, hardware), f"socket {n}")["experts"] for n in (0, 1)] == [
        80_000,
        80_000,
    ]
    unknown = items(make_plan(small_dims(), config, hardware), "socket 0")["experts"]
    assert unknown == small_dims().routed_params * 34 / 32 / 2


def test_tied_embeddings_count_once_on_one_stage() -> None:
    def ends(stages: int, tie: bool) -> int:
        config = make_config(rule={"stages": stages})
        return items(make_plan(small_dims(tie_word_embeddings=tie), config, make_hardware()), "socket 0")[
            "embedding and head"
        ]

    assert ends(1, False) == 2 * ends(1, True) == ends(2, True) == ends(2, False)


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("none", 0),
        (["q_proj"], 8 * (64 + 96)),
        (["self_attn.q_proj", "o_proj"], 8 * (64 + 96 + 96 + 64)),
        (r"model\.layers\.1\.self_attn\.q_proj", 0),
        (r"model\.layers\.0\.self_attn\.[qo]_proj", 8 * (64 + 96 + 96 + 64)),
        ("auto", 8 * (2 * (64 + 96) + 2 * (64 + 48))),
    ],
)
def test_lora_targets(targets: str | list[str], expected: int) -> None:
    dims = small_dims("qwen3_moe")  # heads 4 x 24 = 96, kv 2 x 24 = 48
    assert lora_params(dims, LoraConfig(rank=8, target_modules=targets), 0) == expected


def test_ranks_of_single_modules() -> None:
    dims = small_dims("qwen3_moe")
    lora = LoraConfig(rank=8, rank_pattern={r"layers\.0\..*q_proj": 4, "o_proj": 2, "experts": 3})
    shared = 8 * 2 * (64 + 48)
    assert lora_params(dims, lora, 0) == shared + 4 * (64 + 96) + 2 * (64 + 96)
    assert lora_params(dims, lora, 1) == shared + 8 * (64 + 96) + 2 * (64 + 96)
    assert expert_lora_params(dims, lora) == expert_lora_params(dims, LoraConfig(rank=3))
    plan, uniform = (
        make_plan(dims, make_config(lora=changed), make_hardware())
        for changed in ({"rank_pattern": {"experts": 40}}, {})
    )
    for item in ("LoRA", "optimizer", "kept activations"):
        assert items(plan, "socket 0")[item] > items(uniform, "socket 0")[item]


def test_expert_lora() -> None:
    assert expert_lora_params(small_dims(), LoraConfig(rank=4)) == 4 * 3 * (64 + 40)
    assert expert_lora_params(small_dims(), LoraConfig(experts=False)) == 0
    off = make_plan(
        small_dims(), make_config(lora={"experts": False, "target_modules": ["q_a_proj"]}), make_hardware()
    )
    on = make_plan(small_dims(), make_config(lora={"target_modules": ["q_a_proj"]}), make_hardware())
    assert items(off, "socket 0")["LoRA"] < items(on, "socket 0")["LoRA"]


def test_cluster_local_has_one_process() -> None:
    ray = items(make_plan(small_dims(), make_config(), make_hardware()), "socket 0")
    local = items(make_plan(small_dims(), make_config(cluster="local"), make_hardware()), "socket 0")
    assert local["runtime"] < ray["runtime"]


def test_memory_table_adds_up() -> None:
    plan = v3_plan()
    header, rows = memory_table(plan)
    assert header[1:] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3", "socket 0", "socket 1"]
    table = {row[0]: row[1:] for row in rows}
    assert table["layers"][0].startswith("0-") and table["layers"][4] == "-"
    assert table["experts per layer"][3:] == ["-", "128", "128"]
    assert table["sum"][4] == gib(plan.budgets[4].total) and table[""] == ["fits"] * 6
    on_cpu = make_plan(small_dims(), make_config(), make_hardware())
    assert {row[0]: row[1:] for row in memory_table(on_cpu)[1]}["layers"] == ["0-3"]


def test_remedies_start_with_the_smallest_change() -> None:
    rule = {**FOUR_GPUS, "wave": 8, "experts": {"sockets": 2, "activations": "retain"}}
    config = make_config(rule=rule, **TOKENS_8K, **CHECKED)
    roomy = nominal_hardware(config.rule)
    need = max(b.total for b in make_plan(V3, config, roomy).budgets if b.device.startswith("socket"))
    tight = dataclasses.replace(
        roomy, sockets=tuple(dataclasses.replace(s, memory_bytes=need - GIB) for s in roomy.sockets)
    )
    plan = make_plan(V3, config, tight)
    assert not plan.fits and "socket 0 lacks 1.0 GiB" in shortage(plan)
    found = remedies(V3, config, tight, {})
    assert [r.overrides for r in found[:2]] == ["rule.experts.activations=recompute", "rule.wave=auto"]
    assert "trainer.batch_size=4" in [r.overrides for r in found]


def test_sockets_that_differ_are_each_described() -> None:
    two = make_hardware(sockets=2, cores=8, memory=64 * GIB)

    def of(cores: int, memory: float) -> str:
        other = dataclasses.replace(two.sockets[1], cores=cores, memory_bytes=int(memory * GIB))
        return describe(dataclasses.replace(two, sockets=(two.sockets[0], other)))

    assert of(8, 64) == of(8, 63) == "2 sockets x 8 cores, 64 GiB each"
    assert of(8, 32) == "1 socket x 8 cores, 64 GiB + 1 socket x 8 cores, 32 GiB"
    assert of(4, 64) == "1 socket x 8 cores, 64 GiB + 1 socket x 4 cores, 64 GiB"


def test_remedies_leave_out_a_card_that_is_too_small() -> None:
    config = make_config(**TOKENS_8K, **CHECKED)
    roomy = make_hardware(gpus=2, memory=2048 * GIB, gpu_gib=64)
    small = dataclasses.replace(roomy.gpus[1], name="small", memory_bytes=1 << 20)
    found = remedies(small_dims(), config, dataclasses.replace(roomy, gpus=(roomy.gpus[0], small)), {})
    assert "rule.gpus=1" in [remedy.overrides for remedy in found]


@pytest.mark.parametrize(
    ("key", "asked", "fitting", "remedy"),
    [
        ("sockets", 1, 2, "auto"),
        ("gpu_resident", 8, 4, "4"),
        ("gpu_resident", 1, 0, "0"),
        ("stream", 0.9, "off", "auto"),
    ],
)
def test_a_key_that_asks_for_too_much_is_named(key: str, asked: Any, fitting: Any, remedy: str) -> None:
    """And not only experts that are rounded."""
    dims, roomy = small_dims(moe_intermediate_size=200_000), make_hardware(sockets=2, gpus=1, memory=1 << 40)
    step = {"trainer": {"batch_size": 1, "micro_batch_size": 1}, **CHECKED}
    config, smaller = (make_config(rule={"experts": {key: value}}, **step) for value in (asked, fitting))
    on_gpu, *on_sockets = make_plan(dims, smaller, roomy).budgets
    memory = max(budget.total for budget in on_sockets)
    tight = dataclasses.replace(
        roomy,
        sockets=tuple(dataclasses.replace(socket, memory_bytes=memory) for socket in roomy.sockets),
        gpus=tuple(dataclasses.replace(gpu, cap=int(on_gpu.total / 0.95) + 2) for gpu in roomy.gpus),
    )
    assert not make_plan(dims, config, tight).fits
    found = remedies(dims, config, tight, {})
    assert f"rule.experts.{key}={remedy}" in [remedy.overrides for remedy in found]


def test_remedies_name_rules_that_fit_elsewhere() -> None:
    rules = {
        "one": RuleConfig("one", device="cuda", stages=1),
        "four": make_config(rule=FOUR_GPUS).rule,
    }
    config = make_config(**TOKENS_8K, **CHECKED)
    found = remedies(V3, config, make_hardware(memory=16 * GIB), rules)
    assert [r.overrides for r in found] == ["rule=one", "rule=four"]  # on one card with streamed layers
    assert "1 x 24 GB GPU" in found[0].effect and "4 x 24 GB GPU" in found[1].effect


def test_a_plan_says_that_host_memory_has_no_room_for_streamed_layers() -> None:
    keys = ("model=qwen3_30b_a3b", "plan.hardware=1x4090_1x7950x_64gb", "rule.experts.stream=off")
    config = compose(["mode=plan", *keys, "rule.gpu_memory=3"])
    plan = make_plan(model_dims(config.model), config, hardware_for(config))
    assert "cuda:0 lacks" in shortage(plan)
    assert any("wait in host memory: socket 0 would lack" in note for note in plan.notes)


def test_another_rule_is_tried_with_the_keys_that_are_set() -> None:
    """Its override leaves them in force."""
    dims, step = small_dims(), {"trainer": {"batch_size": 64, "micro_batch_size": 1}, **CHECKED}

    def config(**rule: Any) -> Config:
        return make_config(rule=rule, data={"max_length": 512}, **step)

    whole, small = config(wave=64), config(name="small", wave=1)
    need = make_plan(dims, small, make_hardware()).budgets[0].total
    room = make_hardware(memory=need + (1 << 20))
    assert not make_plan(dims, whole, room).fits

    def offered(auto: Config) -> bool:
        rules = {auto.rule.name: auto.rule, "small": small.rule}
        found = remedies(dims, whole, room, rules)
        return any(r.overrides == "rule=small" and "other hardware" not in r.effect for r in found)

    assert offered(auto=whole)  # the option itself has such waves
    assert not offered(auto=config())  # there rule.wave=64 is set, and stays so


def test_remedies_name_the_format_that_fits() -> None:
    """Kimi-K2 as released on 1 TiB: not in FP8, but quantised to four bits while it loads."""
    config = compose(["mode=plan", "model=kimi_k2", "plan.hardware=2x4090_2x8480_1024gb"])
    found = remedies(model_dims(config.model), config, hardware_for(config), {})
    assert "rule.experts.backend=AMXINT4" in [remedy.overrides for remedy in found]
    assert "INT4 while they load" in str(found)


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"eval.after_training": 64, "generate.batch_size": 64}, "generate.batch_size"),
        ({"plan.mode": "train_server", "train_server.adapters": 1, "serve.max_batch": 64}, "serve.max_batch"),
    ],
)
def test_remedies_name_the_key_that_frees_memory_of_answers(keys: dict[str, Any], key: str) -> None:
    def planned(keys: dict[str, Any]) -> Config:
        small = {"trainer": {"batch_size": 1}, "data": {"max_length": 4096}, "rule": {"activations": "group"}}
        config = with_keys(make_config(**small, **CHECKED), keys)
        return within_server(config) if config.trainings else config

    dims = dataclasses.replace(small_dims(), context=0)
    room = make_hardware(memory=make_plan(dims, planned({**keys, key: 8}), make_hardware()).budgets[0].total)
    assert not make_plan(dims, planned(keys), room).fits
    found = next(r.overrides for r in remedies(dims, planned(keys), room, {}) if r.overrides.startswith(key))
    assert make_plan(dims, planned({**keys, key: int(found.partition("=")[2])}), room).fits


def test_remedies_combine_when_one_change_is_not_enough() -> None:
    config = make_config(
        rule={"experts": {"activations": "retain"}},
        trainer={"batch_size": 64, "micro_batch_size": 64},
        data={"max_length": 4096},
        **CHECKED,
    )
    smallest = make_config(
        rule={"experts": {"activations": "recompute"}, "activations": "group"},
        trainer={"batch_size": 1, "micro_batch_size": 1},
        data={"max_length": 64},
    )
    dims = small_dims()
    room = make_plan(dims, smallest, make_hardware()).budgets[0].total
    found = remedies(dims, config, make_hardware(memory=room), {})
    assert len(found) == 1 and "activations=recompute" in found[0].overrides
    assert "trainer.batch_size=1" in found[0].overrides and "data.max_length=64" in found[0].overrides
    assert remedies(dims, config, make_hardware(memory=1 << 20), {}) == ()
    auto = dataclasses.replace(config, rule=make_config().rule)  # recomputes by itself
    (found_auto,) = remedies(dims, auto, make_hardware(memory=room), {})
    assert found_auto.overrides == found[0].overrides.removeprefix("rule.experts.activations=recompute ")
    coarse = with_keys(smallest, {"rule.experts.backend": "AMXINT4", "lora.experts": False})
    room = make_plan(dims, coarse, make_hardware()).budgets[0].total
    (found_coarse,) = remedies(dims, auto, make_hardware(memory=room), {})
    assert found_coarse.overrides.startswith("rule.experts.backend=AMXINT4 trainer.batch_size=1 ")
    assert found_coarse.overrides.endswith(" data.max_length=64 lora.experts=false")
    assert found_coarse.effect.startswith("all of these together; experts are quantised to INT4")
    keys = {"trainer.stage": "grpo", "generate.batch_size": 64, "generate.max_new_tokens": 16}
    rounds = with_keys(auto, {**keys, "reward": "numeric"})
    few = {"trainer.batch_size": 8, "trainer.micro_batch_size": 1, "generate.batch_size": 1}
    small = make_plan(dims, with_keys(rounds, {**few, "data.max_length": 128}), make_hardware())
    (together,) = remedies(dims, rounds, make_hardware(memory=small.budgets[0].total), {})
    assert "trainer.batch_size=8 " in together.overrides  # a whole group


@pytest.mark.parametrize("share", [0.5, 2.0])
def test_experts_beyond_memory_are_in_no_combination(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """Those of all layers, not of one."""
    dims = small_dims()
    tried: list[Config] = []
    monkeypatch.setattr("kt_ray.placement.remedies._fits", lambda dims, config, _: tried.append(config))
    experts = dims.num_experts * len(dims.moe_layers) * dims.held_bytes("AMXINT4")
    config = make_config(data={"max_length": 4096})
    remedies(dims, config, make_hardware(memory=int(share * experts)), {})
    several = [c for c in tried if c.rule.experts.backend == "AMXINT4" and c.data.max_length == 64]
    assert bool(several) == (share > 1)


def test_figures_as_text() -> None:
    assert gib(150 * GIB) == "150 GiB" and gib(1.5 * GIB) == "1.50 GiB" and gib(3 << 20) == "3.0 MiB"
    assert cpu_ranges((4, 0, 1, 2, 9, 8)) == "0-2,4,8-9" and cpu_ranges(()) == "any"
    assert billions(671_026_404_352) == "671.03 B" and billions(2_630_000) == "2.63 M"
