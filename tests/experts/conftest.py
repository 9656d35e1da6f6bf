"""The checkpoint that a lane is held against the engine on, and its experts' type."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.hf_reference import build_checkpoint


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, torch.dtype]:
    path = tmp_path_factory.mktemp("lane")
    return build_checkpoint(path, "qwen3_moe", expert_dtype=request.param), request.param
