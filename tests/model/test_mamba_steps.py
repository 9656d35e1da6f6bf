"""Mamba's steps with a cache against whole rows, in bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kt_ray.model.build import build_stage_model
from kt_ray.model.caches import new_cache
from kt_ray.model.mamba_steps import exact_steps
from kt_ray.model.stage_spec import StageSpec
from tests.helpers.families import LAYERS, save_whole, write_config


@pytest.mark.parametrize("family", ["jamba", "granitemoehybrid", "nemotron_h"])
@torch.no_grad()
def test_steps_are_as_rows(tmp_path: Path, family: str) -> None:
    path = write_config(tmp_path, family)
    save_whole(path)
    model = build_stage_model(StageSpec(str(path), (0, LAYERS), LAYERS, dtype="bfloat16"))
    assert exact_steps([model.layers[0]]) == 1
    (mixer,) = (module for module in model.layers[0].modules() if "forward" in module.__dict__)
    config: Any = model.base.config
    h = torch.randn((3, 12, model.hidden_size), generator=torch.Generator().manual_seed(0)).bfloat16()

    def stepped() -> Tensor:
        cache = new_cache(config, model.layers)
        parts = [mixer(part, cache) for part in h.split([6] + [1] * 6, dim=1)]
        return torch.cat(parts, 1).float()

    row = mixer(h)
    found = stepped()
    del mixer.__dict__["forward"]
    assert torch.equal(row, mixer(h))  # training's bits
    assert (found - row).norm() < 1e-4 * row.float().norm() < 0.1 * (stepped() - row).norm()


def test_others_stay() -> None:
    assert exact_steps([torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.SiLU())]) == 0
