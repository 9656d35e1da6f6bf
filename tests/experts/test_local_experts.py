"""What a socket's host promises apart from numbers (tests/train compares those with Hugging Face)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kt_ray.config.schema import LoraConfig, OptimConfig
from kt_ray.experts import LocalExperts, LocalExpertsSpec
from tests.helpers.hf_reference import build_checkpoint


def host(path: Path, experts: tuple[int, ...], activations: str = "retain") -> LocalExperts:
    lora, optim = LoraConfig(rank=4), OptimConfig()
    spec = LocalExpertsSpec(
        0, -1, (), 1, experts, "auto", "auto", activations,
        model_dir=str(path), lora=lora, optim=optim, seed=0,
    )  # fmt: skip
    made = LocalExperts(spec)
    made.load()
    return made


def test_lora_is_float32_whatever_torch_defaults_to(tmp_path: Path) -> None:
    """In one process an attention worker's thread sets the default type while it builds its model."""
    path = build_checkpoint(tmp_path, "qwen3_moe")
    expected = dict(host(path, (0, 1)).lora.named("param"))
    torch.set_default_dtype(torch.bfloat16)
    try:
        observed = dict(host(path, (0, 1)).lora.named("param"))
    finally:
        torch.set_default_dtype(torch.float32)
    assert set(observed) == set(expected)
    assert all(torch.equal(observed[name], expected[name]) for name in expected)


@pytest.mark.parametrize("activations", ["retain", "recompute"])
def test_counters_count_the_slots_of_own_experts(tmp_path: Path, activations: str) -> None:
    made = host(build_checkpoint(tmp_path, "qwen3_moe"), (2, 5), activations)
    ids = made.local_ids(0, torch.tensor([[2, 5], [2, 1], [7, 0], [5, 2], [8, 2]]), 8)  # 8 = no expert
    x, weights, keys = torch.randn(5, 48), torch.full((5, 2), 0.5), torch.arange(5)
    made.begin_pass(0, True)
    for group in range(2):
        made.forward(0, group, [x], ids, weights, keys, keep=True)
    for group in range(2):
        made.backward(0, group, [torch.randn(5, 48)])
    counters = made.take_counters()
    assert counters.tokens_per_expert == {0: [8, 4]}
    assert counters.forward_slots == counters.backward_slots == 12
    assert counters.recomputed_slots == (12 if activations == "recompute" else 0)
    assert counters.kept_bytes_peak > 0 and counters.forward_seconds > 0 and counters.backward_seconds > 0
    assert made.take_counters().backward_slots == 0
    made.close()
