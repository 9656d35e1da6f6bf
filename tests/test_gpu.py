"""How torch uses a GPU: settings that a CPU build of torch has as well, and events on a stand-in."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import kt_ray
from kt_ray.gpu import host_event
from tests.helpers.hf_reference import build_checkpoint
from tests.helpers.runs import config_for, local_cluster


def test_the_host_sleeps_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.cuda, "Event", lambda **how: made.append(how))
    host_event()
    host_event(timing=True)
    assert made == [{"enable_timing": timing, "blocking": True} for timing in (False, True)]


def test_nobody_makes_another_event_to_wait_for() -> None:
    """Other events spin; those of `record_event()` are for streams."""
    for path in Path(kt_ray.__path__[0]).rglob("*.py"):
        found = re.findall(r"cuda\.Event\(|record_event\(\)\.synchronize", path.read_text())
        assert not found or path.name == "gpu.py", path


def test_a_worker_computes_attention_without_cudnn_and_products_in_full(tmp_path: Path) -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    path = build_checkpoint(tmp_path, "deepseek_v3")
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        torch.set_float32_matmul_precision("high")  # as TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 does
        with local_cluster(path, config_for(path, "rule=cpu_1worker_1socket")):
            assert not torch.backends.cuda.cudnn_sdp_enabled()
            assert torch.get_float32_matmul_precision() == "highest"
            assert torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.mem_efficient_sdp_enabled()
            assert torch.backends.cuda.math_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
