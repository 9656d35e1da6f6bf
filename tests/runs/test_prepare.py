"""Checks of mode=train that need no actor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kt_ray.checkpoint import CheckpointIndex, ExpertLayout
from kt_ray.errors import UserError
from kt_ray.native import ExpertFormula
from kt_ray.runs.prepare import _as_stored, _check_formulas
from tests.checkpoint.conftest import expert_tensors, write_checkpoint
from tests.placement.configs import small_dims


def test_experts_of_the_files_are_those_of_the_model(tmp_path: Path) -> None:
    layout = ExpertLayout.detect(CheckpointIndex.open(write_checkpoint(tmp_path, expert_tensors())))
    plain = ExpertFormula()
    _check_formulas(layout, {1: plain, 2: plain})
    with pytest.raises(UserError, match=r"without: \[3\]"):
        _check_formulas(layout, {1: plain, 2: plain, 3: plain})
    with pytest.raises(UserError, match="no gate for relu2"):
        _check_formulas(layout, {1: plain, 2: ExpertFormula("relu2")})


def test_a_file_of_the_experts_counts_by_its_bytes(tmp_path: Path) -> None:
    """Also in the format that config.json says: llamafile without a known size is planned at Q8_0's."""
    path = write_checkpoint(tmp_path, expert_tensors(torch.bfloat16))
    layout, dims = ExpertLayout.detect(CheckpointIndex.open(path)), small_dims()
    assert dims.expert_format == "bf16" and _as_stored(dims, layout) == dims
    stored = _as_stored(dims, layout, own_file=True)
    assert stored.experts_file_bytes == 2 * 4 * 3 * (8 * 6) * 2 and stored.notes == dims.notes
