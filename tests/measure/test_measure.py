"""Measurements of mode=doctor at tiny sizes: every figure is there and above 0, and no trace is left."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kt_ray.hardware.rates import DeviceRate
from kt_ray.measure import (
    ExpertShape,
    measure_arena,
    measure_cpu,
    measure_disk,
    measure_experts,
    measure_gpu,
    measure_local_message,
    measure_memory,
    measure_optimizer,
)
from kt_ray.measure.blocks import measure_blocks
from kt_ray.measure.expert_rates import SLOTS, random_weights
from kt_ray.measure.timing import median_seconds, torch_threads
from kt_ray.native import FORMATS, Engine, available_isas
from tests.helpers.descriptors import descriptors, left_open

TINY = ExpertShape(256, 256, weight_bytes=4 << 20)
SHORT = 0.001


def positive(rate: DeviceRate) -> None:
    curves = list(rate.gemm.values())
    assert curves and all(min(curve.values) > 0 for curve in curves)
    assert min(rate.memory.value, rate.sdpa.value, rate.softmax.value, rate.operation.value) > 0
    assert rate.blocks is not None and rate.blocks.norm.value > 0
    assert (rate.blocks.masked is None) == (rate.threads > 0)  # a GPU has a kernel of its own for masks


def test_a_median_is_of_repeats_after_a_warm_up() -> None:
    calls: list[int] = []
    took = median_seconds(lambda: calls.append(1), seconds=0, repeats=3)
    assert took > 0 and len(calls) >= 5


def test_torch_threads_are_put_back() -> None:
    before = torch.get_num_threads()
    with pytest.raises(RuntimeError), torch_threads(1):
        assert torch.get_num_threads() == 1
        raise RuntimeError
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("fmt", ["bf16", "f32", *FORMATS])
def test_every_format_is_measured_both_ways(fmt: str) -> None:
    if fmt in ("q8_0", "q4_0", "q5_0", "q5_1"):
        pytest.importorskip("gguf")
    with Engine(threads=2) as engine:
        rate = measure_experts(engine, fmt, TINY, rows=(1, 4), seconds=SHORT)
        assert rate.products == ("f32" if fmt == "f32" else engine.compute)
    assert (rate.format, rate.hidden, rate.inter, rate.threads) == (fmt, 256, 256, 2)
    for curve in (rate.forward, rate.backward, rate.forward_all, rate.backward_all):
        assert curve.at == (1, 4) and min(curve.values) > 0 and curve.source == "measured"
    assert 0 < rate.plain_forward.value <= 1 and 0 < rate.plain_backward.value <= 1


@pytest.mark.parametrize("isa", available_isas())
def test_every_instruction_set_is_measured(isa: str) -> None:
    with Engine(isa, 1) as engine:
        rate = measure_experts(engine, "bf16", TINY, rows=(4,), seconds=SHORT)
    assert rate.isa == isa and rate.forward_all == rate.forward


def test_w8a8_is_measured_as_such() -> None:
    with Engine(threads=1, int8_products=True) as engine:
        assert measure_experts(engine, "int8", TINY, rows=(4,), seconds=SHORT).products == "int8"


def test_a_shape_that_a_format_cannot_hold_is_refused() -> None:
    with Engine(threads=1) as engine, pytest.raises(ValueError, match="multiple of 32"):
        measure_experts(engine, "mxfp4", ExpertShape(256, 40), rows=(1,), seconds=SHORT)


def test_few_rows_pass_over_more_weights_than_many() -> None:
    shape = ExpertShape()
    counts = [shape.experts(rows) for rows in (1, 16, 64, 256)]
    assert counts == sorted(counts, reverse=True) and all(n % SLOTS == 0 for n in counts)
    assert 6 * shape.hidden * shape.inter * counts[0] > 300 << 20
    for fmt, group in (("int4", 32), ("uint4", 128)):  # as the nominal rates have it
        weights = random_weights(fmt, TINY, 8)
        assert weights.E == 8 and weights.up.shape == (8, 256, 256) and weights.up.scale_block == (1, group)
    assert random_weights("uint4", ExpertShape(256, 192), 4).down.scale_block == (1, 64)


def test_memory_torch_and_optimizer() -> None:
    memory = measure_memory(2, size=1 << 20, seconds=SHORT)
    figures = (memory.read_one, memory.read_all, memory.copy_one, memory.copy_all, memory.fresh)
    assert min(figure.value for figure in figures) > 0
    rate = measure_cpu(2, hidden=64, vocabulary=128, tokens=16, seconds=SHORT)
    assert rate.threads == 2 and rate.name == "cpu, 2 threads"
    positive(rate)
    assert measure_optimizer(1, parameters=1 << 12, seconds=SHORT).value > 0


def test_the_gpu_measurement_runs_on_a_stand_in() -> None:
    rate, link = measure_gpu(torch.device("cpu"), size=1 << 16, hidden=64, seconds=SHORT)
    positive(rate)
    figures = (link.to_device, link.to_host, link.to_device_pageable, link.to_host_pageable)
    assert rate.name == "cpu stand-in" and min(figure.value for figure in figures) > 0


def test_a_gpu_is_measured_with_its_own_lora(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, and both ways together, with a free base layer."""
    inputs: list[torch.Size] = []

    def takes(x: torch.Tensor) -> bool:
        inputs.append(x.shape)
        return True

    monkeypatch.setattr("kt_ray.model.lora_linear.multiplies_in_parts", takes)
    rate = measure_blocks(torch.device("cpu"), lambda call: (call(), 1.0)[1], 16, 64)
    assert inputs == [(16, 64), (16, 64)] and rate.adapter.value == 2 * 16 * 64


def test_disk_reads_the_largest_shard(tmp_path: Path) -> None:
    (tmp_path / "small.safetensors").write_bytes(b"1" * 1000)
    (tmp_path / "large.safetensors").write_bytes(b"1" * 100_000)
    figure = measure_disk(tmp_path, size=1 << 16)
    assert figure is not None and figure.value > 0 and "large.safetensors" in figure.source
    figure = measure_disk(tmp_path / "small.safetensors", size=4096)
    assert figure is not None and "small" in figure.source


def test_disk_without_a_model_writes_a_file_and_removes_it(tmp_path: Path) -> None:
    figure = measure_disk(tmp_path, size=1 << 16)
    assert figure is not None and str(tmp_path) in figure.source
    assert list(tmp_path.iterdir()) == []
    assert measure_disk(tmp_path / "none" / "deeper", size=1 << 16) is None


def test_messages() -> None:
    before = descriptors()
    assert 0 < measure_local_message(rounds=20).value < 1
    assert measure_arena(size=1 << 16, seconds=SHORT).value > 0
    assert len(left_open(before, 1)) <= 1  # the arena's, until it is collected
