"""Layers of stages on GPUs of different size and speed."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest

from kt_ray.dims.config_json import dims_from_config
from kt_ray.hardware.machine import Gpu
from kt_ray.placement.memory import GIB, load_of, worker_items
from kt_ray.placement.plan import make_plan
from kt_ray.placement.plan_types import WorkerPlan
from kt_ray.placement.stage_split import balanced_stages, layer_sizes
from tests.placement.configs import DEEPSEEK_V3, SMALL, make_config, make_hardware, small_dims

V3 = dims_from_config(DEEPSEEK_V3)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next", "gpt_oss", "deepseek_v4"])
@pytest.mark.parametrize(
    "lora", [{}, {"target_modules": "none"}, {"target_modules": [".*layers.1.*q_proj"][0]}]
)
def test_sizes_add_up_to_the_budget_of_a_worker(family: str, lora: dict[str, Any]) -> None:
    dims = small_dims(family)
    config = make_config(lora=lora, trainer={"batch_size": 8})
    load = load_of(config, 4, 2)
    rng = random.Random(0)
    for stages in (1, 2, 3):
        sizes = layer_sizes(dims, config, load, stages, "bfloat16")
        edges = [0, *sorted(rng.sample(range(1, dims.num_layers), stages - 1)), dims.num_layers]
        for stage, (start, stop) in enumerate(itertools.pairwise(edges)):
            worker = WorkerPlan(stage, 0, stage, (start, stop), "cuda:0", 1)
            items = worker_items(dims, config, load, worker, stages, "bfloat16")
            found = sum(sizes.held[start:stop]) + max(sizes.peak[start:stop])
            found += sizes.first if stage == 0 else 0
            found += sizes.last if stage == stages - 1 else 0
            wanted = sum(size for item, size in items.items() if item != "staging")
            assert found == pytest.approx(wanted, abs=stop - start + 4)


def test_tied_embeddings_count_once() -> None:
    dims = small_dims(tie_word_embeddings=True)
    config = make_config()
    load = load_of(config, 1, 1)
    sizes = layer_sizes(dims, config, load, 1, "bfloat16")
    worker = WorkerPlan(0, 0, 0, (0, 4), "cuda:0", 1)
    items = worker_items(dims, config, load, worker, 1, "bfloat16")
    total = sum(sizes.held) + max(sizes.peak) + sizes.first + sizes.last
    assert total == pytest.approx(sum(v for k, v in items.items() if k != "staging"), abs=8)


def test_a_small_and_a_large_card() -> None:
    """A 24 GB and a 48 GB card in one host: layers move to the large one only when the small one is full."""
    even = make_hardware(sockets=2, cores=48, gpus=2, memory=1024 * GIB)
    config = make_config(
        rule={"device": "cuda"},
        model={"name": "v3"},
        data={"max_length": 512},
        trainer={"batch_size": 8},
    )
    plans = {}
    for small in (24, 14):
        cards = (Gpu(0, "small", small * GIB), Gpu(1, "large", 48 * GIB))
        plans[small] = make_plan(V3, config, dataclasses.replace(even, gpus=cards))
        gpu = {b.device: b for b in plans[small].budgets}["cuda:0"]
        assert gpu.fits, (gpu.total / GIB, gpu.capacity / GIB)
    layers = {small: plan.workers[0].layers[1] for small, plan in plans.items()}
    assert layers[14] < layers[24]
    # One layer more would be too much for the small card: it is as full as it can be.
    worker = plans[14].workers[0]
    load = load_of(config, 1, 1)
    items = worker_items(
        V3, config, load, dataclasses.replace(worker, layers=(0, layers[14] + 1)), 2, "bfloat16"
    )
    assert sum(v for k, v in items.items() if k != "staging") > 14 * GIB - 0.8 * GIB


def test_a_fast_card_takes_more_layers() -> None:
    hardware = make_hardware(sockets=2, cores=48, gpus=2, memory=1024 * GIB)
    config = make_config(rule={"device": "cuda"}, data={"max_length": 64})
    devices = (("cuda:0", "cuda:1"),)
    equal = balanced_stages(small_dims(num_hidden_layers=30), config, hardware, devices, "bfloat16")
    fast = balanced_stages(
        small_dims(num_hidden_layers=30), config, hardware, devices, "bfloat16", (3.0, 1.0)
    )
    assert fast[0][1] > equal[0][1]
    # Replicas hold the same layers: the slower of their devices counts.
    both = (("cuda:0", "cuda:1"), ("cuda:1", "cuda:0"))
    assert (
        balanced_stages(small_dims(num_hidden_layers=30), config, hardware, both, "bfloat16", (3.0, 1.0))
        == equal
    )


def test_long_rows_even_out_what_the_head_costs() -> None:
    """The head is one layer's worth of work or several: less so the longer the rows are."""
    dims = dims_from_config({**SMALL["mixtral"], "num_hidden_layers": 24, "vocab_size": 8000})

    def first(length: int) -> int:
        return (
            make_plan(dims, make_config(rule={"stages": 2}, data={"max_length": length}), make_hardware())
            .workers[0]
            .layers[1]
        )

    assert first(16) > first(4096) >= 12
