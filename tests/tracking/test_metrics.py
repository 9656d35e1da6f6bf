"""Figures: the flat record, the formulas on examples worked by hand, the table and what follows from it."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch

from kt_ray.tracking.metrics import (
    METRICS,
    StepMetrics,
    expert_flops,
    expert_flops_reference,
    expert_load_imbalance,
    samples,
    tflops,
)

ROOT = Path(__file__).resolve().parents[2]

FULL = StepMetrics(
    step=3,
    epoch=0.5,
    loss=2.5,
    grad_norm=0.3,
    lr=1e-4,
    tokens=100,
    tokens_per_s=50.0,
    seconds=2.0,
    loss_tokens=60,
    seconds_attention=1.0,
    seconds_experts=0.75,
    seconds_transport=0.25,
    seconds_optimizer=0.125,
    expert_tflops_forward=0.5,
    expert_tflops_backward=0.25,
    expert_tflops_forward_reference=0.375,
    expert_tflops_backward_reference=0.625,
    host_rss_bytes={"driver": 1, "worker": 2, "expert": 3},
    gpu_memory_bytes={"cuda:0": 4},
    expert_load_imbalance=1.5,
    busy={"worker-0": 0.5, "experts-0": 0.75},
    queue_depth={"experts-0": 1.5},
    actor_load_imbalance=1.25,
    recoveries=1,
    seconds_lost=12.5,
    skipped=1,
    eval_loss=2.25,
    policy={"reward": 0.5},
    eval_reward=0.75,
)


def test_record_is_flat_and_leaves_out_what_was_not_measured():
    record = FULL.to_dict()
    assert record["host_rss_bytes_worker"] == 2 and record["gpu_memory_bytes_cuda0"] == 4
    assert all(isinstance(v, int | float) for v in record.values())
    short = StepMetrics(
        step=1, epoch=0, loss=1, grad_norm=1, lr=1, tokens=1, tokens_per_s=1, seconds=1
    ).to_dict()
    assert set(short) == {"step", "epoch", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "seconds"}


def test_flops_by_hand():
    # H = 10, I = 3, r = 2, 5 slots. Base: 6 * 5 * 30 = 900 either way.
    assert expert_flops(5, 10, 3, "forward") == 900
    assert expert_flops(5, 10, 3, "backward") == 900
    # LoRA forward per slot: gate A 2*2*10, B 2*2*3; the same for up and down: 3 * 52 = 156; times 5 = 780.
    assert expert_flops(5, 10, 3, "forward", rank=2) == 900 + 780
    # Backward: each of those six products has an input and a weight gradient: twice as many.
    assert expert_flops(5, 10, 3, "backward", rank=2) == 900 + 1560
    # Recomputing gate and up: base 2 * 2*30*5 = 600, LoRA 2 * 52 * 5 = 520.
    assert expert_flops(5, 10, 3, "backward", rank=2, recompute=True) == 900 + 1560 + 600 + 520
    assert expert_flops_reference(5, 10, 3, "forward") == 900
    assert expert_flops_reference(5, 10, 3, "backward") == 1500


def test_flops_match_what_torch_counts_for_one_expert():
    from torch.utils.flop_counter import FlopCounterMode

    slots, h, i, r = 7, 12, 5, 2
    base = {n: torch.randn(*s) for n, s in {"g": (i, h), "u": (i, h), "d": (h, i)}.items()}
    lora = {
        n: (torch.randn(r, w.shape[1], requires_grad=True), torch.randn(w.shape[0], r, requires_grad=True))
        for n, w in base.items()
    }

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        a, b = lora[name]
        return x @ base[name].T + (x @ a.T) @ b.T

    x = torch.randn(slots, h, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        y = linear("d", torch.nn.functional.silu(linear("g", x)) * linear("u", x))
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    assert forward.get_total_flops() == expert_flops(slots, h, i, "forward", rank=r)
    assert backward.get_total_flops() == expert_flops(slots, h, i, "backward", rank=r)


def test_rates_and_imbalance():
    assert tflops(3 * 10**12, [1.0, 1.5]) == 2.0
    assert tflops(10**12, []) == 0.0 and tflops(10**12, [0.0]) == 0.0
    # Layer 1: max 6, mean 3; layer 2: even; layer 3 got nothing.
    assert expert_load_imbalance([[6, 0, 3], [4, 4, 4], [0, 0, 0]]) == pytest.approx(1.5)
    assert expert_load_imbalance([[0, 8, 0, 0]]) == 4.0
    assert expert_load_imbalance([]) is None


def test_every_figure_of_a_record_is_exported_once():
    found = [(spec.name, value, tags) for spec, value, tags in samples(FULL.to_dict())]
    assert ("kt_ray_seconds", 0.25, {"term": "transport"}) in found
    assert ("kt_ray_expert_tflops", 0.625, {"direction": "backward_reference"}) in found
    assert ("kt_ray_host_rss_bytes", 3.0, {"actor": "expert"}) in found
    assert ("kt_ray_gpu_memory_bytes", 4.0, {"device": "cuda0"}) in found
    assert ("kt_ray_busy", 0.75, {"actor": "experts-0"}) in found
    assert ("kt_ray_queue_depth", 1.5, {"actor": "experts-0"}) in found
    assert ("kt_ray_eval_loss", 2.25, {}) in found
    assert ("kt_ray_policy", 0.5, {"figure": "reward"}) in found
    assert {name for name, _, _ in found} == {spec.name for spec in METRICS}
    assert len(found) == len(FULL.to_dict()) - 1  # all but loss_tokens


def test_table_names_are_unique_and_its_fields_exist():
    assert len({spec.name for spec in METRICS}) == len(METRICS)
    fields = {f.name for f in dataclasses.fields(StepMetrics)}
    for spec in METRICS:
        assert spec.name.startswith("kt_ray_") and spec.description.endswith(".")
        assert (spec.kind == "counter") == spec.name.endswith("_total")
        for key in spec.fields:
            assert key.removesuffix("_*") in fields, key


def test_dashboard_queries_exactly_the_metrics_of_the_table():
    dashboard = json.loads((ROOT / "docs/grafana/kt_ray.json").read_text())
    tags = {f"ray_{spec.name}": set(spec.tags) for spec in METRICS}
    seen = set()
    for panel in dashboard["panels"]:
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            (name, selector) = re.fullmatch(r"(\w+)\{(.*)\}", target["expr"]).groups()
            assert name in tags, f"{panel['title']}: {name} is not in the table"
            used = set(re.findall(r"(\w+)=~", selector)) | set(
                re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
            )
            assert used <= tags[name], (panel["title"], used)
            seen.add(name)
    assert seen == set(tags)
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    query = next(v for v in dashboard["templating"]["list"] if v["name"] == "run")["query"]["query"]
    assert query == "label_values(ray_kt_ray_step, run)"


def test_documentation_names_every_field_and_metric():
    text = (ROOT / "docs/metrics.md").read_text()
    for name in [f.name for f in dataclasses.fields(StepMetrics)] + [spec.name for spec in METRICS]:
        assert f"`{name}" in text, name
