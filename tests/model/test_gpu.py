"""The same stage on CUDA: parity with the reference on the CPU, and what crosses the host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kt_ray.config.schema import LoraConfig
from tests.helpers.hf_reference import random_rows
from tests.helpers.stages import pass_spec, run
from tests.model.test_stage_parity import assert_close, assert_logits, ready

pytestmark = [
    pytest.mark.accept("parity"),
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
ROWS = random_rows(5)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe", "mixtral", "qwen2_moe"])
@pytest.mark.parametrize("cuts", [(0, 3), (0, 1, 3)])
def test_parity(checkpoint: Callable[..., Path], family: str, cuts: tuple[int, ...]) -> None:
    """Padding, groups, an odd number of rows, dropout; experts stay on the CPU. Not bit-equal: other sums."""
    torch.set_float32_matmul_precision("highest")
    reference, stages = ready(checkpoint(family), LoraConfig(rank=4, dropout=0.1), cuts, device="cuda:0")
    for stage in stages:
        assert all(p.is_cuda for p in stage.model.causal.parameters())
        assert all(p.is_cuda and p.grad.is_cuda for p in stage.parameters.values())
    got = run(stages, pass_spec(ROWS, groups=2, micro=2, step=3), reference)
    got.grads = {name: grad.cpu() for name, grad in got.grads.items()}
    assert_close(got, reference.run(ROWS, step=3, forced_ids=got.exchange.expert_ids), 1e-4)
    seconds = got.loops[-1].seconds()
    assert seconds["attention"] > 0 and seconds["loss"] > 0
    want = reference.run(ROWS, train=False)
    assert_logits(run(stages, pass_spec(ROWS, kind="eval"), reference), ROWS, want, 1e-4)
