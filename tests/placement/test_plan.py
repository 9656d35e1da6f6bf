"""Plans: every "auto" resolved, and every impossible layout refused by name."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from kt_ray.errors import UserError
from kt_ray.hardware.machine import Socket
from kt_ray.placement.devices import resolve_device
from kt_ray.placement.memory import GIB
from kt_ray.placement.plan import divide_cpus, make_plan
from kt_ray.placement.render import plan_to_dict
from tests.placement.configs import make_config, make_hardware, small_dims


def test_cpu_laptop() -> None:
    plan = make_plan(small_dims(), make_config(), make_hardware(cores=4))
    assert (plan.stages, plan.replicas, plan.groups) == (1, 1, 2)
    worker = plan.worker(0, 0)
    assert (worker.device, worker.layers, worker.threads, worker.cpus) == ("cpu", (0, 4), 4, ())
    (actor,) = plan.experts
    assert (actor.threads, actor.cpus, actor.experts) == (4, (0, 1, 2, 3), tuple(range(8)))
    assert (actor.isa, actor.backend, actor.activations) == ("auto", "auto", "retain")
    assert plan.fits and plan.tokens_per_step == 8 * 16 and plan.dtype == "bfloat16"


def test_two_expert_actors_on_one_socket_divide_its_cores() -> None:
    rule = {"device": "cpu", "stages": 2, "experts": {"sockets": 2}}
    plan = make_plan(small_dims(), make_config(rule=rule), make_hardware(cores=4, smt=True))
    assert [(a.node, a.cpus, a.threads) for a in plan.experts] == [(0, (0, 1, 4, 5), 2), (0, (2, 3, 6, 7), 2)]
    assert [a.experts for a in plan.experts] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert any("1 NUMA node" in note for note in plan.notes)
    assert [w.threads for w in plan.workers] == [4, 4]  # stages take turns


def test_more_actors_than_cores_share_them() -> None:
    plan = make_plan(small_dims(), make_config(rule={"experts": {"sockets": 3}}), make_hardware(cores=2))
    assert [a.cpus for a in plan.experts] == [(0,), (1,), (0,)]
    assert any("share the 2 cores" in note for note in plan.notes)


@pytest.mark.parametrize(("cores", "told"), [((28, 4), True), ((4, 28), True), ((8, 6), False)])
def test_nodes_of_uneven_sizes_are_told(cores: tuple[int, int], told: bool) -> None:
    """As a CPU set across NUMA nodes gives them."""
    even = make_hardware(sockets=2, cores=28)
    sockets = tuple(
        dataclasses.replace(socket, cpus=socket.cpus[:count], cores=count)
        for socket, count in zip(even.sockets, cores, strict=True)
    )
    plan = make_plan(small_dims(), make_config(), dataclasses.replace(even, sockets=sockets))
    assert any("4 cores, node" in note for note in plan.notes) == told


def test_two_sockets() -> None:
    plan = make_plan(small_dims(), make_config(rule={"replicas": 2}), make_hardware(sockets=2, cores=3))
    assert [(a.node, a.cpus) for a in plan.experts] == [(0, (0, 1, 2)), (1, (3, 4, 5))]
    assert [(w.replica, w.cpus, w.threads) for w in plan.workers] == [(0, (0, 1, 2), 3), (1, (3, 4, 5), 3)]
    of_two = make_config(rule={"device": "cpu", "replicas": 2, "stages": 2})
    staged = make_plan(small_dims(), of_two, make_hardware(sockets=2, cores=3))
    assert [(w.replica, w.stage, w.cpus[0], w.threads) for w in staged.workers] == [
        (0, 0, 0, 3), (0, 1, 3, 3), (1, 0, 3, 3), (1, 1, 0, 3)
    ]  # fmt: skip
    three = make_plan(
        small_dims(), make_config(rule={"experts": {"sockets": 3}}), make_hardware(sockets=2, cores=3)
    )
    assert [a.node for a in three.experts] == [0, 0, 1]


def test_replicas_on_one_socket_share_its_cores() -> None:
    plan = make_plan(small_dims(), make_config(rule={"replicas": 2}), make_hardware(cores=4))
    assert [w.threads for w in plan.workers] == [2, 2]


def test_forced_numbers_are_taken() -> None:
    rule = {
        "worker_threads": 3,
        "groups": 4,
        "experts": {"threads": 9, "activations": "recompute", "isa": "avx2"},
    }
    plan = make_plan(small_dims(), make_config(rule=rule), make_hardware(cores=4))
    assert (plan.groups, plan.workers[0].threads) == (4, 3)
    actor = plan.experts[0]
    assert (actor.threads, actor.activations, actor.isa) == (9, "recompute", "avx2")
    assert any("9 threads on 4 CPUs" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("trainer", "replicas", "asked", "groups"),
    [
        ({"batch_size": 8, "micro_batch_size": 8}, 1, "auto", 1),
        ({"batch_size": 8, "micro_batch_size": 4}, 1, "auto", 2),
        ({"batch_size": 8, "micro_batch_size": 1}, 1, "auto", 2),
        ({"batch_size": 2, "micro_batch_size": 1}, 2, "auto", 1),
        ({"batch_size": 8, "micro_batch_size": 2}, 1, 8, 4),
        ({"batch_size": 8, "micro_batch_size": 2}, 1, 3, 3),
    ],
)
def test_groups(trainer: dict[str, int], replicas: int, asked: int | str, groups: int) -> None:
    config = make_config(rule={"replicas": replicas, "groups": asked}, trainer=trainer)
    plan = make_plan(small_dims(), config, make_hardware())
    assert plan.groups == groups
    assert any("lowered" in note for note in plan.notes) == (isinstance(asked, int) and asked > groups)


def test_gpus_become_stages() -> None:
    one = make_config(rule={"replicas": 1})
    plan = make_plan(small_dims(), one, make_hardware(gpus=3, cores=16))
    assert [(w.rank, w.stage, w.device) for w in plan.workers] == [
        (0, 0, "cuda:0"),
        (1, 1, "cuda:1"),
        (2, 2, "cuda:2"),
    ]
    assert [w.layers[0] for w in plan.workers[1:]] == [w.layers[1] for w in plan.workers[:-1]]
    assert {w.threads for w in plan.workers} == {4} and not any(w.cpus for w in plan.workers)
    many = make_plan(small_dims(), one, make_hardware(gpus=6))
    assert many.stages == 4  # never more stages than layers


def test_a_gpu_is_planned_with_a_twentieth_less_than_cuda_gives() -> None:
    config = make_config(rule={"stages": 2})
    hardware = make_hardware(gpus=3)
    plan = make_plan(small_dims(), config, hardware)
    cards = [budget for budget in plan.budgets if not budget.is_socket]
    assert [card.capacity for card in cards] == [int(24 * GIB * 0.95)] * 2
    said = "cuda:0, cuda:1: CUDA gives 24.00 GiB each, of which 5% stay free: 22.80 GiB to plan with"
    assert said in plan.notes
    assert not any("CUDA gives" in note for note in make_plan(small_dims(), config, make_hardware()).notes)
    full = {card.device: card.total for card in cards}
    tight = tuple(dataclasses.replace(gpu, memory_bytes=max(full.values())) for gpu in hardware.gpus)
    assert not make_plan(small_dims(), config, dataclasses.replace(hardware, gpus=tight)).fits


def test_replicas_on_gpus() -> None:
    plan = make_plan(small_dims(), make_config(rule={"replicas": 2}), make_hardware(gpus=4))
    assert [[plan.worker(r, s).device for s in (0, 1)] for r in (0, 1)] == [
        ["cuda:0", "cuda:1"],
        ["cuda:2", "cuda:3"],
    ]
    assert [w.rank for w in plan.workers] == [0, 1, 2, 3]


def test_patterns_name_their_devices() -> None:
    layers = [{"match": r"layers\.[01]\.", "device": "cuda:1"}, {"match": ".", "device": "cuda:0"}]
    plan = make_plan(small_dims(), make_config(rule={"layers": layers}), make_hardware(gpus=2))
    assert [(w.layers, w.device) for w in plan.workers] == [((0, 2), "cuda:1"), ((2, 4), "cuda:0")]


def test_device_auto() -> None:
    config = make_config(rule={"layers": [{"match": ".", "device": "cpu"}]})
    assert resolve_device(config.rule, make_hardware(gpus=1)) == "cpu"
    assert resolve_device(make_config().rule, make_hardware(gpus=1)) == "cuda"
    assert resolve_device(make_config().rule, make_hardware()) == "cpu"


@pytest.mark.parametrize(
    ("rule", "gpus", "trainer", "message"),
    [
        ({"device": "cuda", "stages": 2}, 1, {}, "more GPUs than there are"),
        ({"device": "cuda"}, 0, {}, "more GPUs than there are"),
        ({"replicas": 3}, 2, {}, "more GPUs than there are"),
        ({"stages": 9}, 0, {}, "more pipeline stages than layers"),
        ({"experts": {"sockets": 9}}, 0, {}, "more expert actors than experts"),
        ({"experts": {"isa": "amx"}}, 0, {}, "instruction set is not available"),
        ({"layers": [{"match": ".", "device": "cuda:7"}]}, 2, {}, "not there"),
        ({"layers": [{"match": ".", "device": "tpu:0"}], "device": "cuda"}, 2, {}, "not there"),
        (
            {
                "layers": [{"match": r"\.[01]\.", "device": "cuda:0"}, {"match": ".", "device": "cuda:2"}],
                "replicas": 2,
            },
            5,
            {},
            "share a GPU",
        ),
    ],
)
def test_impossible_layouts(rule: dict[str, Any], gpus: int, trainer: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        make_plan(small_dims(), make_config(rule=rule, trainer=trainer), make_hardware(gpus=gpus))
    assert caught.value.remedy and caught.value.where


def test_float16_is_computed_in_bfloat16() -> None:
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 32}  # as such releases are
    dims = small_dims("mixtral", torch_dtype="float16", quantization_config=quantization)
    plan = make_plan(dims, make_config(mode="train"), make_hardware())
    assert plan.dtype == "bfloat16"
    assert "the checkpoint's float16 becomes bfloat16: gradients would leave its range" in plan.notes


def test_refused_models_are_planned_but_not_trained() -> None:
    dims = small_dims(quantization_config={"quant_method": "awq", "version": "gemv"})
    assert make_plan(dims, make_config(mode="plan"), make_hardware()).budgets
    with pytest.raises(UserError, match="cannot be trained") as caught:
        make_plan(dims, make_config(mode="train"), make_hardware())
    assert "awq" in caught.value.line()


def test_rows_longer_than_transformers_computes_as_trained() -> None:
    dims = dataclasses.replace(small_dims("phimoe"), longest_row=16)
    assert make_plan(dims, make_config(mode="train", data={"max_length": 16}), make_hardware()).fits
    for data, remedy in (
        ({"max_length": 17}, "set data.max_length=16"),
        ({"max_length": 15, "pad_to_multiple_of": 12}, "data.max_length=16 and data.pad_to_multiple_of=1"),
    ):
        with pytest.raises(UserError, match="LongRoPE") as caught:
            make_plan(dims, make_config(mode="train", data=data), make_hardware())
        assert remedy in str(caught.value.remedy)
    dims = dataclasses.replace(small_dims(), longest_row=16)
    with pytest.raises(UserError, match="by the rows beside and before it"):
        make_plan(dims, make_config(mode="train", data={"max_length": 17}), make_hardware())


def test_backend_without_amx_says_so() -> None:
    config = make_config(rule={"experts": {"backend": "AMXBF16"}})
    assert any(
        "same mathematics on avx512" in n for n in make_plan(small_dims(), config, make_hardware()).notes
    )
    with_amx = make_plan(small_dims(), config, make_hardware(isa="amx")).notes
    assert not any("same mathematics" in note for note in with_amx)


def test_described_hardware_says_so() -> None:
    hardware = dataclasses.replace(make_hardware(), present=False, source="rule x (nominal)")
    assert any("rule x (nominal)" in note for note in make_plan(small_dims(), make_config(), hardware).notes)


def test_divide_cpus_covers_a_socket_once() -> None:
    for cores, smt in [(1, False), (5, False), (5, True), (8, True)]:
        first = tuple(range(10, 10 + cores))
        socket = Socket(0, first + (tuple(range(50, 50 + cores)) if smt else ()), cores, 1)
        for parts in range(1, cores + 1):
            pieces = [divide_cpus(socket, parts, part) for part in range(parts)]
            assert sorted(c for cpus, _ in pieces for c in cpus) == sorted(socket.cpus)
            for cpus, n in pieces:
                assert set(cpus[:n]) <= set(first)  # the first n are different cores
    assert divide_cpus(Socket(0, (), 8, 1), 2, 1) == ((), 4)  # described hardware without CPU numbers


def test_plan_json() -> None:
    plan = make_plan(small_dims(), make_config(rule={"stages": 2}), make_hardware())
    data = json.loads(json.dumps(plan_to_dict(plan)))
    assert [w["layers"] for w in data["workers"]] == [list(w.layers) for w in plan.workers]
    assert data["experts"][0]["experts"] == list(range(8)) and data["fits"] is True
    assert [m["total"] for m in data["memory"]] == [sum(m["items"].values()) for m in data["memory"]]
    assert data["model"]["total_params"] == plan.dims.total_params


def test_plan_is_pure() -> None:
    config, hardware = make_config(rule={"stages": 2, "replicas": 2}), make_hardware(sockets=2)
    assert make_plan(small_dims(), config, hardware) == make_plan(small_dims(), config, hardware)
