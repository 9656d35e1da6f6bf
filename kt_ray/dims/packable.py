"""Which families cannot train packed rows, by config.json alone.

A layer that carries a state along the tokens, or groups neighbouring ones, mixes documents of one row
whatever the mask says; and some families' masks of transformers 5 overlook that positions restart. What this
table does not know is found numerically at the first packed pass (kt_ray.model.layer_checks). Indexed
attention (DeepSeek-V3.2, GLM-5) is none of these: its index is masked before it chooses.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kt_ray.dims.attention_params import is_linear
from kt_ray.dims.config_json import text_part
from kt_ray.dims.config_keys import Keys
from kt_ray.dims.layer_params import num_layers
from kt_ray.errors import UserError
from kt_ray.parse import read_json

_STATE = "layers that carry a state from token to token"
_GROUPS = "attention over groups of neighbouring tokens"
_CHUNKS = "attention over chunks, and queries scaled by positions, that count from the row's start"
_MASKS = "attention masks that transformers makes without looking at positions"
OBSTACLES: dict[str, str] = {
    "afmoe": _MASKS,
    "bailing_hybrid": f"linear attention: {_STATE}",
    "bamba": f"Mamba: {_STATE}",
    "deepseek_v4": f"compressed keys: {_GROUPS}",
    "glm4v_moe": _MASKS,
    "glm4v_moe_text": _MASKS,
    "glm5_next": f"linear attention: {_STATE}",
    "glm5_next_text": f"linear attention: {_STATE}",
    "gpt_oss": _MASKS,
    "granitemoehybrid": f"Mamba: {_STATE}",
    "inkling_mm_model": f"short convolutions: {_STATE}",
    "inkling_text": f"short convolutions: {_STATE}",
    "jamba": f"Mamba: {_STATE}",
    "kimi_linear": f"delta attention: {_STATE}",
    "lfm2_moe": f"short convolutions: {_STATE}",
    "llama4": _CHUNKS,
    "llama4_text": _CHUNKS,
    "minimax": f"lightning attention: {_STATE}",
    "minimax_m3_vl_text": f"sparse attention by key blocks: {_GROUPS}",
    "nemotron_h": f"Mamba: {_STATE}",
    "qwen3_5_moe": f"gated delta attention: {_STATE}",
    "qwen3_next": f"gated delta attention: {_STATE}",
    "qwen4_exp": f"gated delta attention, and n-grams: {_STATE}",
}


def packing_obstacle(config: Mapping[str, Any]) -> str | None:
    """Why a model of this config.json cannot train packed rows; None = nothing known against it."""
    keys = Keys(text_part(config)[0], "config.json")
    for name in (keys.family, str(config.get("model_type"))):
        if name in OBSTACLES:
            return OBSTACLES[name]
    if any(is_linear(keys, layer) for layer in range(num_layers(keys))):
        return f"linear attention: {_STATE}"
    return None


def check_packing_family(model_dir: str) -> None:
    """Refuse data.packing=true for a checkpoint whose layers would mix documents.

    Raises:
        UserError: by name of the family. A directory without config.json is somebody else's to name.
    """
    file = Path(model_dir) / "config.json"
    if not file.is_file():
        return
    config = read_json(file, "the model's config.json", "download config.json again")
    obstacle = packing_obstacle(config)
    if obstacle is not None:
        raise UserError(
            "data.packing=true does not work with this family",
            where=str(file),
            observed=f"{config.get('model_type')} has {obstacle}",
            required="layers that keep the documents of a packed row apart",
            remedy="set data.packing=false (data.group_by_length=true saves padding too)",
        )
