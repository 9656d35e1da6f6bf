"""Families that cannot train packed rows, by their config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kt_ray.dims.packable import OBSTACLES, check_packing_family, packing_obstacle
from kt_ray.errors import UserError

LAYERS = {"num_hidden_layers": 4, "hidden_size": 64}


@pytest.mark.parametrize("family", OBSTACLES)
def test_refused_by_name(family: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **LAYERS}))
    with pytest.raises(UserError, match=rf"data\.packing.*{family} has .*data\.packing=false"):
        check_packing_family(str(tmp_path))


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        ({"model_type": "deepseek_v3", **LAYERS}, False),
        ({"model_type": "deepseek_v32", **LAYERS}, False),
        ({"model_type": "qwen3_5_moe_text", **LAYERS}, True),
        ({"model_type": "new", "layer_types": ["full_attention", "linear_attention"], **LAYERS}, True),
        ({"model_type": "new", "layer_types": ["full_attention"] * 4, **LAYERS}, False),
        ({"model_type": "glm4v_moe", "text_config": {"model_type": "new", **LAYERS}}, True),
        ({"model_type": "wrapper", "text_config": {"model_type": "jamba", **LAYERS}}, True),
        # Qwen3-Omni's is two levels down.
        ({"model_type": "new", "thinker_config": {"text_config": {"model_type": "new", **LAYERS}}}, False),
    ],
)
def test_others_by_their_layers(config: dict[str, Any], refused: bool) -> None:
    assert (packing_obstacle(config) is not None) == refused


def test_without_a_config_it_is_not_this_ones_to_say(tmp_path: Path) -> None:
    check_packing_family(str(tmp_path))
