"""Durations from rates: amounts counted by hand, and how they answer to sizes and rates."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from kt_ray.config.schema import Config
from kt_ray.data.batches import step_waves
from kt_ray.data.row_types import Row
from kt_ray.hardware.machine import Hardware
from kt_ray.hardware.nominal import nominal_rates
from kt_ray.hardware.rates import Rates, constant
from kt_ray.placement.plan import make_plan
from kt_ray.placement.plan_types import Plan
from kt_ray.timing.layer_work import Counts, LayerWork, head_seconds, seconds
from kt_ray.timing.seats import even_waves, machine_of, waves_of_rows
from kt_ray.timing.simulate import Micro
from kt_ray.timing.step_costs import PlanDurations
from tests.placement.configs import make_config, make_hardware, small_dims

M = Micro(1, 16, 16, 16)
ONE = {"stages": 1, "groups": 1, "experts": {"sockets": 1}}


def durations(
    family: str = "mixtral", hardware: Hardware | None = None, rates: Rates | None = None, **changes: Any
) -> PlanDurations:
    config, hardware = make_config(**changes), hardware or make_hardware()
    plan = make_plan(small_dims(family), config, hardware)
    return PlanDurations(plan, config, rates or nominal_rates(hardware), machine_of(plan))


def test_products_of_a_layer_are_its_parameters() -> None:
    """Attention and the shared expert multiply each weight once per position, the router in float32."""
    dims, config = small_dims("mixtral"), make_config()
    work = LayerWork(dims, 0, config.lora, "bfloat16")
    first, rest = work.forward(2, 16)
    attention = sum(n_in * n_out for _, n_in, n_out in dims.lora_in_out[0])
    assert first.products + rest.products == 2 * 32 * attention
    assert first.thin == 2 * 32 * dims.hidden_size * dims.num_experts
    assert first.adapted == 32 * sum(n_in + n_out for _, n_in, n_out in dims.lora_in_out[0])


def test_attention_grows_with_pairs() -> None:
    """Four times the pairs at twice the width: 2 (q k + p v) FLOP each, as `pair_widths` counts them."""
    dims = small_dims("mixtral")
    work = LayerWork(dims, 0, make_config().lora, "bfloat16")
    short, long = work.forward(1, 16)[0], work.forward(1, 32)[0]
    assert short.pairs == 2 * 16**2 * dims.pair_widths[0][0]
    assert long.pairs == 4 * short.pairs
    assert work.forward(2, 16)[0].pairs == 2 * short.pairs


def test_each_kernel_has_its_own_count() -> None:
    """Latent attention has other widths of keys than of values, grouped-query attention not."""
    lora = make_config().lora
    dims, shared = small_dims("deepseek_v3"), small_dims("mixtral")
    latent, grouped = (LayerWork(d, 1, lora, "bfloat16").forward(1, 16)[0] for d in (dims, shared))
    assert latent.held == dims.attention_flops(1, 1, 16) and latent.scores == 16 * 16 * 4
    assert latent.pairs == grouped.held == grouped.scores == 0
    assert grouped.pairs == shared.attention_flops(1, 1, 16)
    # On a GPU, and on a CPU where scores would be too large, values get zeros up to the keys' width.
    query, value = LayerWork(dims, 1, lora, "bfloat16").heads
    assert query > value
    for gpu, width in ((True, 16), (False, 2049)):
        wide = LayerWork(dims, 1, lora, "bfloat16", gpu=gpu).forward(1, width)[0]
        assert wide.pairs == pytest.approx(4.0 * width**2 * query) and wide.held == wide.scores == 0


def test_a_mask_keeps_flash_away_on_a_gpu() -> None:
    lora, window = make_config().lora, dataclasses.replace(small_dims("mixtral"), pair_widths=((64, 16),) * 4)
    short, long = (LayerWork(window, 1, lora, "bfloat16", gpu=True).forward(1, n)[0] for n in (15, 160))
    assert short.pairs > 0 == short.masked
    # Ten blocks of 16: the first sees itself, the others two.
    assert long.masked == pytest.approx(2 * 64 * 16 * 16 * 19) and long.pairs == 0
    packed = LayerWork(small_dims("mixtral"), 1, lora, "bfloat16", gpu=True, masked=True).forward(1, 15)[0]
    assert packed.masked > packed.pairs == 0
    cpu = LayerWork(window, 1, lora, "bfloat16", masked=True).forward(1, 16)[0]
    assert cpu.pairs > cpu.masked == 0


def test_nominal_rates_of_attention() -> None:
    """All pairs count; flash computes half of them, and the parts of the peak are of what is computed."""
    gpu = nominal_rates(make_hardware(gpus=1)).gpu
    assert gpu is not None and gpu.block.masked is not None and gpu.block.masked_backward is not None
    top = gpu.gemm["bfloat16"].ample / 0.7
    assert gpu.sdpa.value == pytest.approx(2 * 0.55 * top)
    assert gpu.block.sdpa_backward.value == pytest.approx(2 * 0.45 * top / 2.5)
    assert gpu.block.masked.value == pytest.approx(0.4 * top)
    # Of a file that was measured before there was such a figure.
    older = dataclasses.replace(gpu, blocks=dataclasses.replace(gpu.block, masked=None, masked_backward=None))
    assert 0 < older.block.masked.value < older.sdpa.value / 2  # type: ignore[union-attr]
    assert 0 < older.block.masked_backward.value < older.block.sdpa_backward.value / 2  # type: ignore[union-attr]


def test_the_shared_expert_comes_after_the_tokens_left() -> None:
    dims = small_dims("deepseek_v3")
    dense, moe = (LayerWork(dims, i, make_config().lora, "bfloat16") for i in (0, 1))
    assert moe.forward(1, 16)[1].products > 0
    assert dense.forward(1, 16)[1] == Counts()


def test_a_second_attention_comes_after_the_tokens_left() -> None:
    """LongCat-Flash: with a dense MLP before it and one behind it, of which the last is not repeated."""
    dims = small_dims("longcat_flash")
    work = LayerWork(dims, 1, make_config().lora, "bfloat16")
    first, rest = work.forward(1, 16)
    sizes = {name: 2 * 16 * n_in * n_out for name, n_in, n_out in dims.lora_in_out[1]}
    assert first.products == sum(size for name, size in sizes.items() if "self_attn.0" in name)
    assert first.products + rest.products == sum(sizes.values())
    assert first.held == rest.held == dims.attention_flops(1, 1, 16) / 2 and rest.scores == 16 * 16 * 4
    assert first.thin == 2 * 16 * dims.hidden_size * (dims.num_experts + 4)
    again, after = work.recompute(1, 16, retained=True)
    assert first.products - again.products == sizes["self_attn.0.o_proj"]
    assert rest.products - after.products == sizes["mlps.1.down_proj"]


def test_without_lora_nothing_is_adapted() -> None:
    lora = make_config(lora={"target_modules": "none"}).lora
    work = LayerWork(small_dims("mixtral"), 0, lora, "bfloat16")
    assert work.forward(1, 16)[0].adapted == 0 and work.backward(1, 16).adapted == 0


def test_lora_in_two_parts_is_bytes_and_products() -> None:
    """bfloat16 on a GPU: 3 and 5 bytes per element whatever the rank, and the products of both parts."""
    dims, rates = small_dims("mixtral"), nominal_rates(make_hardware(gpus=1))
    assert rates.gpu is not None
    lora = make_config(lora={"rank": 16}).lora
    bare = LayerWork(dims, 1, make_config(lora={"target_modules": "none"}).lora, "bfloat16", gpu=True)
    work = LayerWork(dims, 1, lora, "bfloat16", gpu=True)
    sizes = [(n_in, n_out) for _, n_in, n_out in dims.lora_in_out[1]]
    for back, (each, a, b) in enumerate([(3, 2, 3), (5, 5, 4)]):
        without, counts = (w.backward(1, 32) if back else w.forward(1, 32)[0] for w in (bare, work))
        assert counts.adapted == 32 * sum(map(sum, sizes))
        assert counts.products - without.products == 2 * 32 * 16 * sum(a * i + b * o for i, o in sizes)
        rate = rates.gpu.block.adapter_backward if back else rates.gpu.block.adapter
        assert rate.value == pytest.approx(rates.gpu.memory.value / each)


@pytest.mark.parametrize(
    ("lora", "dtype", "sizes"),
    [
        ({"dropout": 0.1}, "bfloat16", (20, 40)),
        ({}, "float32", (19, 26)),
        ({"dora": True, "experts": False}, "bfloat16", (20, 40)),
    ],
)
def test_other_lora_on_a_gpu_is_as_on_a_cpu(lora: dict[str, Any], dtype: str, sizes: tuple[int, int]) -> None:
    """By PEFT, or in float32: bytes per element over the device's memory."""
    dims, rates = small_dims("mixtral"), nominal_rates(make_hardware(gpus=1))
    assert rates.gpu is not None
    works = [LayerWork(dims, 1, make_config(lora=lora).lora, dtype, gpu=gpu) for gpu in (False, True)]
    blocks = rates.cpu_one.block, rates.gpu.block
    for back, each in enumerate(sizes):
        cpu, gpu = (w.backward(1, 32) if back else w.forward(1, 32)[0] for w in works)
        other = {"adapted": 0, "passes": 0, "normed": 0, "operations": 0}  # elementwise work and kernels
        assert gpu._replace(**other) == cpu._replace(**other)
        own = [block.adapter_backward if back else block.adapter for block in blocks]
        moved = [
            counts.adapted / rate.value * device.memory.value
            for counts, rate, device in zip((cpu, gpu), own, (rates.cpu_one, rates.gpu), strict=True)
        ]
        assert moved[0] == pytest.approx(moved[1])
        elements = sum(n_in + n_out for _, n_in, n_out in dims.lora_in_out[1])
        if not lora.get("dora"):
            assert moved[0] == pytest.approx(32 * elements * each)


def test_a_plan_knows_where_its_layers_run() -> None:
    gpu = durations(rule={**ONE, "device": "cuda"}, hardware=make_hardware(gpus=1))
    assert all(work.in_parts for work in gpu.layers)
    assert not any(work.in_parts for work in durations(rule=ONE).layers)


def test_the_first_layer_needs_no_gradient_of_its_input() -> None:
    dims, lora = small_dims("mixtral"), make_config().lora
    first, second = (LayerWork(dims, i, lora, "bfloat16").backward(1, 16) for i in (0, 1))
    skipped = sum(
        n_in * n_out
        for name, n_in, n_out in dims.lora_in_out[0]
        if name.endswith(("q_proj", "k_proj", "v_proj"))
    )
    assert second.products - first.products == 2 * 16 * skipped


def test_seconds_are_amounts_over_rates() -> None:
    rate = nominal_rates(make_hardware()).cpu_one
    rate = dataclasses.replace(rate, gemm={"bfloat16": constant(1e9, "x"), "float32": constant(5e8, "x")})
    assert seconds(Counts(products=2e9, thin=5e8), rate, rate, "bfloat16", 64) == pytest.approx(3.0)
    kernels = seconds(Counts(operations=1000), rate, rate, "bfloat16", 64)
    assert 1000 * rate.operation.value < kernels < 1000 * 10 * rate.operation.value


def test_dispatch_runs_beside_a_gpu() -> None:
    rates = nominal_rates(make_hardware(gpus=1))
    assert rates.gpu is not None
    few = seconds(Counts(products=1e12), rates.gpu, rates.cpu_one, "bfloat16", 512)
    assert seconds(Counts(products=1e12, operations=1), rates.gpu, rates.cpu_one, "bfloat16", 512) == few
    many = seconds(Counts(products=1e6, operations=1e6), rates.gpu, rates.cpu_one, "bfloat16", 512)
    assert many == seconds(Counts(operations=1e6), rates.gpu, rates.cpu_one, "bfloat16", 512)


def test_the_head_costs_its_trained_positions() -> None:
    dims, rate = small_dims("mixtral"), nominal_rates(make_hardware()).cpu_one
    assert head_seconds(dims, rate, rate, "bfloat16", 0, 16) == 0
    one, two = (head_seconds(dims, rate, rate, "bfloat16", n, n) for n in (1000, 2000))
    assert one < two < 2.01 * one


@pytest.mark.parametrize("kind", ["begin", "forward", "join", "recompute", "backward", "loss"])
def test_every_operation_takes_longer_with_more_tokens(kind: str) -> None:
    found = durations(rule=ONE)
    one, two = sum(found.attention(kind, 1, (M,))), sum(found.attention(kind, 1, (M, M)))
    assert 0 < one < two


def test_experts_by_hand() -> None:
    """Products over the rate at the rows an expert gets, scaled from the shape that the rate is of."""
    found = durations(rule=ONE, lora={"experts": False}, trainer={"batch_size": 8})
    dims, rate = found.plan.dims, found.expert_rate
    tokens, threads = 4096, found.plan.experts[0].threads
    slots = tokens * dims.experts_per_token
    flop = 6 * dims.expert_width * dims.expert_intermediate * slots
    expected = flop / rate.flops("forward", slots / dims.num_experts, threads, 0)
    assert found.expert(0, 1, "forward", tokens).beside == pytest.approx(expected, rel=1e-6)


def test_few_tokens_are_bound_by_memory() -> None:
    """A call takes at least the time to read the weights of the experts that it visits."""
    hardware = make_hardware()
    rates = nominal_rates(hardware)
    slow = dataclasses.replace(rates.memory.read_all, value=1e3)
    rates = dataclasses.replace(rates, memory=dataclasses.replace(rates.memory, read_all=slow))
    found = durations(rule=ONE, hardware=hardware, rates=rates)
    dims = found.plan.dims
    expected = dims.num_experts * found.expert_weight_bytes / 1e3
    assert found.expert(0, 1, "forward", 64).beside == pytest.approx(expected, rel=0.01)


def test_retained_layers_are_computed_once() -> None:
    group = (Micro(4, 16, 64, 64),) * 2
    again, once = (durations(rule={**ONE, "activations": kind}) for kind in ("group", "retain"))
    submitted = once._submit("recompute", 128)
    assert sum(once.attention("recompute", 1, group)) == submitted
    assert sum(again.attention("recompute", 1, group)) > 2 * submitted
    assert once.attention("backward", 1, group) == again.attention("backward", 1, group)
    assert sum(once.attention("forward", 1, group)) >= sum(again.attention("forward", 1, group))


def test_recomputing_experts_costs_gate_and_up_again() -> None:
    keep, again = (
        durations(rule={**ONE, "experts": {"sockets": 1, "activations": kind}})
        .expert(0, 1, "backward", 1024)
        .beside
        for kind in ("retain", "recompute")
    )
    forward = durations(rule=ONE)._kernel("forward", 2048, 256, 4, 8)
    assert again - keep == pytest.approx(forward * 2 / 3, rel=0.2)


def test_no_gradient_at_the_experts_inputs_saves_gate_and_up() -> None:
    """Where only the experts of a layer train, and nothing below."""
    lora = {"layers": [1, 3], "target_modules": "none"}
    found = durations(rule={**ONE, "activations": "group"}, lora=lora)
    full, least = (found.expert(0, layer, "backward", 4096).beside for layer in (3, 1))
    products = found._kernel("backward", 8192, 2048, 4, 8) - found._kernel(
        "backward", 8192, 2048, 4, 8, products=0
    )
    assert products > 0 and least < full - products / 2  # two thirds of the products, none of the rest
    bare = found.expert(0, 2, "backward", 4096).beside
    assert bare < full
    group = (Micro(4, 16, 64, 64),)
    assert found.attention("backward", 1, group) == (0.0, 0.0)
    assert sum(found.attention("recompute", 1, group)) < sum(found.attention("recompute", 2, group))


def test_experts_of_two_actors_halve() -> None:
    one = sum(durations(rule=ONE).expert(0, 1, "forward", 4096))
    two = sum(durations(rule={**ONE, "experts": {"sockets": 2, "threads": 4}}).expert(0, 1, "forward", 4096))
    assert two < 0.75 * one


def test_gpus_have_links_and_cpus_do_not() -> None:
    gpu = durations(rule={**ONE, "device": "cuda"}, hardware=make_hardware(gpus=1))
    cpu = durations(rule=ONE)
    near = gpu.machine.experts[0]
    size = 16 * gpu.plan.dims.expert_width * 4
    assert gpu.rates.link is not None
    legs = {leg.resource: leg.seconds for leg in gpu.reply(0, near, "forward", 16).legs}
    assert legs["pcie cuda:0 in"] == pytest.approx(size / gpu.rates.link.to_device.value)
    assert all(
        leg.resource.startswith("socket") for leg in cpu.reply(0, cpu.machine.experts[0], "forward", 16).legs
    )


def test_a_message_is_that_of_its_arguments_whatever_was_asked_before() -> None:
    def fresh() -> PlanDurations:
        return durations(rule={**ONE, "device": "cuda"}, hardware=make_hardware(gpus=1))

    asked = fresh()
    for way, direction, tokens in itertools.product(("request", "reply"), ("forward", "backward"), (16, 64)):
        about = (0, asked.machine.experts[0], direction, tokens)
        assert getattr(asked, way)(*about) == getattr(fresh(), way)(*about)


def test_copies_around_a_call() -> None:
    """One replica's rows are read where they lie, and the answer is computed where it is read; several
    replicas' rows are joined, and answers rounded, by as many threads as the actor has."""

    def around(answers: str = "float32", replicas: int = 1) -> PlanDurations:
        return durations(rule={**ONE, "replicas": replicas, "experts": {"sockets": 1, "answers": answers}})

    tokens, calm = 4096, around()
    width, speed = calm.plan.dims.expert_width, calm.rates.memory.copy_all.value
    assert calm.plan.experts[0].threads == calm.rates.cpu_all.threads
    for direction, sent in (("forward", 2), ("backward", 4)):
        alone = calm.expert(0, 1, direction, tokens)
        assert alone.after == calm.expert(0, 1, direction, 1).after
        joined = around(replicas=2).expert(0, 1, direction, tokens)
        assert joined.beside - alone.beside == pytest.approx(tokens * width * sent / speed)
        assert joined.after == alone.after
        rounded = around("bfloat16").expert(0, 1, direction, tokens)
        assert rounded.after - alone.after == pytest.approx(tokens * width * 3 / speed)
        assert rounded.beside == alone.beside


def test_rounded_answers_are_half_the_bytes() -> None:
    def pcie(answers: str, direction: str) -> float:
        rule = {**ONE, "device": "cuda", "experts": {"sockets": 1, "answers": answers}}
        found = durations(rule=rule, hardware=make_hardware(gpus=1))
        (leg,) = (
            leg for leg in found.reply(0, found.machine.experts[0], direction, 64).legs if "pcie" in leg[0]
        )
        return leg.seconds

    assert pcie("bfloat16", "forward") == pytest.approx(pcie("float32", "forward") / 2)
    assert 0.5 < pcie("bfloat16", "backward") / pcie("float32", "backward") < 0.6


def test_far_actors_get_the_tokens_routed_there() -> None:
    """Half the experts on another host: 1 - (1/2)^2 of the tokens for two experts per token."""
    found = durations(rule={**ONE, "experts": {"sockets": 2}})
    far = found.machine.experts[0]._replace(far=True)
    carriage = found.reply(0, far, "forward", 1000)
    expected = 1000 * 0.75 * found.plan.dims.expert_width * 4 / found.rates.transport.network_bytes.value
    assert [leg.resource for leg in carriage.legs] == ["network in"]
    assert carriage.legs[0].seconds == pytest.approx(expected)
    assert carriage.latency > 0


def test_shared_sockets_are_one_resource() -> None:
    found = durations(rule={**ONE, "worker_threads": 3, "experts": {"sockets": 1, "threads": 2}})
    (worker,), (experts,) = found.machine.workers, found.machine.experts
    assert worker.resource == experts.seat.resource and (worker.width, experts.seat.width) == (3, 2)
    assert found.machine.capacity[worker.resource] == 4


def test_waves_are_those_of_the_data() -> None:
    """`waves_of_rows` cuts as kt_ray.data.batches does, whatever the numbers."""
    import numpy as np

    for count, micro, replicas, groups, largest in [
        (8, 1, 1, 2, 8),
        (7, 2, 2, 2, 1),
        (16, 3, 1, 4, 2),
        (5, 1, 2, 3, 9),
    ]:
        lengths = [3 + i % 5 for i in range(count)]
        rows = [Row(input_ids=np.arange(n), labels=np.arange(n), sample_id=i) for i, n in enumerate(lengths)]
        cut = step_waves(rows, micro, replicas, groups, largest)
        expected = [
            [[[(*mb.input_ids.shape, mb.tokens) for mb in group] for group in part] for part in wave]
            for wave in cut
        ]
        got = waves_of_rows([(n, n - 1) for n in lengths], micro, replicas, groups, largest)
        assert [[[[m[:3] for m in group] for group in part] for part in wave] for wave in got] == expected


def test_a_step_of_even_rows_holds_all_tokens() -> None:
    config: Config = make_config(rule=ONE, trainer={"batch_size": 6, "micro_batch_size": 4})
    plan: Plan = make_plan(small_dims("mixtral"), config, make_hardware())
    waves = even_waves(plan, config, 16)
    micro = [m for wave in waves for part in wave for group in part for m in group]
    assert sum(m.tokens for m in micro) == plan.tokens_per_step == 96
    assert sorted(m.rows for m in micro) == [2, 4]
