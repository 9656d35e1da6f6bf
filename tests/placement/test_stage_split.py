"""Layers of stages on GPUs of different size, against all splits there are."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest

from kt_ray.dims.config_json import dims_from_config
from kt_ray.hardware.machine import Gpu
from kt_ray.placement.memory import GIB, worker_items
from kt_ray.placement.plan import make_plan
from kt_ray.placement.plan_types import Held, Plan, WorkerPlan
from kt_ray.placement.stage_split import LayerSizes, Ranges, even_split, layer_sizes
from kt_ray.placement.wave_tokens import load_of
from tests.placement.configs import DEEPSEEK_V3, make_config, make_hardware, small_dims

V3 = dims_from_config(DEEPSEEK_V3)


def shares(sizes: LayerSizes, ranges: Ranges, capacities: Sequence[int]) -> list[float]:
    used = [sum(sizes.sums[a:b]) + max(sizes.peaks[a:b]) for a, b in ranges]
    used[0] += sizes.first
    used[-1] += sizes.last
    return [size / capacity for size, capacity in zip(used, capacities, strict=True)]


def all_splits(n: int, stages: int) -> list[Ranges]:
    cuts = itertools.combinations(range(1, n), stages - 1)
    return [tuple(itertools.pairwise((0, *c, n))) for c in cuts]


def test_the_fullest_stage_is_as_empty_as_it_can_be() -> None:
    rng = random.Random(0)
    for _ in range(150):
        n = rng.randint(1, 8)
        few = rng.random() < 0.5  # few different values make ties
        sizes = LayerSizes(
            tuple(rng.randint(1, 3 if few else 9) for _ in range(n)),
            tuple(rng.randint(0, 4) for _ in range(n)),
            rng.randint(0, 3),
            rng.randint(0, 6),
        )
        for stages in range(1, n + 1):
            capacities = [rng.choice((12, 25, 40)) for _ in range(stages)]
            fullest, ranges = even_split(sizes, capacities)
            splits = all_splits(n, stages)
            assert ranges in splits  # every layer once, every stage one at least
            assert fullest == max(shares(sizes, ranges, capacities))
            assert fullest == min(max(shares(sizes, split, capacities)) for split in splits)


def test_shares_are_even_and_small_devices_get_less() -> None:
    sizes = LayerSizes((5,) * 6, (0,) * 6, first=0, last=10)
    assert even_split(sizes, [40, 40]) == (0.5, ((0, 4), (4, 6)))
    assert even_split(sizes, [10, 40])[1] == ((0, 1), (1, 6))
    assert even_split(dataclasses.replace(sizes, cuts=(1, 5)), [40, 40])[1] == ((0, 5), (5, 6))
    with pytest.raises(ValueError, match="4 stages"):
        even_split(dataclasses.replace(sizes, cuts=(1, 5)), [40] * 4)
    even = LayerSizes((1,) * 7, (0,) * 7)
    assert sorted(stop - start for start, stop in even_split(even, [9, 9, 9])[1]) == [2, 2, 3]
    for stages in (0, 7):
        with pytest.raises(ValueError, match="stages for 6 layers"):
            even_split(sizes, [1] * stages)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next", "gpt_oss", "deepseek_v4"])
@pytest.mark.parametrize(
    "lora", [{}, {"target_modules": "none"}, {"target_modules": [".*layers.1.*q_proj"][0]}]
)
def test_sizes_add_up_to_the_budget_of_a_worker(family: str, lora: dict[str, Any]) -> None:
    dims = small_dims(family)
    config = make_config(lora=lora, trainer={"batch_size": 8})
    load = load_of(dims, config, 4, 2)
    rng = random.Random(0)
    for stages in (1, 2, 3):
        sizes = layer_sizes(dims, config, load, stages, "bfloat16")
        edges = [0, *sorted(rng.sample(range(1, dims.num_layers), stages - 1)), dims.num_layers]
        ranges = tuple(itertools.pairwise(edges))
        for stage, size in enumerate(shares(sizes, ranges, [1] * stages)):
            worker = WorkerPlan(stage, 0, stage, ranges[stage], "cuda:0", 1)
            items = worker_items(dims, config, load, worker, stages, "bfloat16")
            start, stop = ranges[stage]
            expected = sum(size for item, size in items.items() if item != "staging")
            assert size == pytest.approx(expected, abs=stop - start + 4)


def test_tied_embeddings_count_once() -> None:
    dims = small_dims(tie_word_embeddings=True)
    config = make_config()
    load = load_of(dims, config, 1, 1)
    sizes = layer_sizes(dims, config, load, 1, "bfloat16")
    worker = WorkerPlan(0, 0, 0, (0, 4), "cuda:0", 1)
    items = worker_items(dims, config, load, worker, 1, "bfloat16")
    (total,) = shares(sizes, ((0, 4),), [1])
    assert total == pytest.approx(sum(v for k, v in items.items() if k != "staging"), abs=8)


def on_cards(*gib: float, **trainer: Any) -> Plan:
    """DeepSeek-V3 on one GPU per stage, of these sizes."""
    even = make_hardware(sockets=2, cores=48, memory=1024 * GIB)
    cards = tuple(Gpu(i, "card", int(size * GIB)) for i, size in enumerate(gib))
    config = make_config(
        rule={"device": "cuda", "stages": len(gib)},
        data={"max_length": 512},
        trainer={"batch_size": 8, "micro_batch_size": 1, **trainer},
    )
    return make_plan(V3, config, dataclasses.replace(even, gpus=cards))


@pytest.mark.parametrize("gib", [(24, 48), (14, 48), (48, 24), (32, 32, 32, 32)])
def test_cards_are_equally_full(gib: tuple[int, ...]) -> None:
    """To about a layer: DeepSeek-V3's layers are up to 0.8 GiB large at 4,096 tokens."""
    plan = on_cards(*gib)
    assert plan.fits
    used = [b.total / b.capacity for b in plan.budgets if not b.is_socket]
    assert max(used) - min(used) < 0.8 / min(gib) + 0.02
    if gib[0] == gib[-1]:  # the head counts, the embedding as well: middle stages hold more layers
        counts = [worker.layers[1] - worker.layers[0] for worker in plan.workers]
        assert max(counts[0], counts[3]) < min(counts[1:3])


def test_where_the_largest_wave_fits_no_split_the_smallest_decides() -> None:
    """A small card that is full at one micro-batch per wave still gets a split that fits."""
    plan = on_cards(12, 28, batch_size=64)
    assert plan.fits and plan.wave < 64


def test_stages_on_the_cpu_get_equal_numbers_of_layers() -> None:
    plan = make_plan(small_dims(num_hidden_layers=30), make_config(rule={"stages": 4}), make_hardware())
    assert sorted(worker.layers[1] - worker.layers[0] for worker in plan.workers) == [7, 7, 8, 8]


def test_what_layers_hand_on_is_counted_where_hidden_states_wait() -> None:
    """Choices of 8 keys of layers 0 and 2, four bytes each; on the host one of them is at work here."""
    dims = small_dims("glm_moe_dsa")
    apart = dataclasses.replace(dims, handed=())
    worker = WorkerPlan(0, 0, 0, (0, 4), "cuda:0", 1)
    config = make_config(data={"max_length": 16}, trainer={"micro_batch_size": 1, "batch_size": 4})
    for activations, item, count in (("group", "kept activations", 2), ("host", "hidden states", 2)):
        load = load_of(dims, config, 4, 1, Held("retain", activations))
        found, without = (worker_items(d, config, load, worker, 1, "bfloat16")[item] for d in (dims, apart))
        assert found - without == count * 8 * 4 * load.replica
    here = [worker_items(d, config, load, worker, 1, "bfloat16")["kept activations"] for d in (dims, apart)]
    assert here[0] - here[1] == 8 * 4 * load.replica
