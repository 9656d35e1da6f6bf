"""Families without "sdpa" attention: what they run by themselves; the plan counts the memory of "eager"."""

import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from kt_ray.dims.layer_params import LEARNED_BIAS, SINKS, WITHOUT_SDPA
from kt_ray.model import attention
from kt_ray.model.family import build_causal, read_family
from tests.helpers.families import dispatched
from tests.helpers.hf_reference import SMALL
from tests.model.test_families import documented


@pytest.mark.parametrize(
    ("family", "asked", "used"),
    [
        ("gpt_oss", "sdpa", attention.NAME),
        ("deepseek_v4", "sdpa", "eager"),
        ("gpt_oss", "eager", "eager"),
        ("qwen3_moe", "sdpa", "sdpa"),
        ("deepseek_v3", "sdpa", attention.NAME),
        ("deepseek_v3", "eager", "eager"),
        ("deepseek_v32", "sdpa", "sdpa"),
        ("qwen3_moe", "eager", "eager"),
    ],
)
def test_kind(tmp_path: Path, family: str, asked: str, used: str) -> None:
    AutoConfig.for_model(family, **{**SMALL, "num_hidden_layers": 1}).save_pretrained(tmp_path)
    causal, _, _ = build_causal(read_family(tmp_path), torch.float32, asked)
    assert causal.config._attn_implementation == used


def test_the_plan_knows_them() -> None:
    known = {c.model_type: model for c, model in MODEL_FOR_CAUSAL_LM_MAPPING.items()}
    without = {name for name in dispatched() if name in known and not known[name]._supports_sdpa}
    assert without == WITHOUT_SDPA - {"deepseek_ref"} - LEARNED_BIAS | SINKS


def test_families_with_our_attention_ask_for_it_by_no_name() -> None:
    """Some make another mask for "sdpa" and "eager" than for all others: those must keep "sdpa"."""
    chosen = {}
    for name, (status, _) in documented().items():
        model = MODEL_FOR_CAUSAL_LM_MAPPING.get(CONFIG_MAPPING[name], None)
        if status == "trains" and model is not None:
            config = CONFIG_MAPPING[name]()
            chosen[name] = attention.implementation(config, model._supports_sdpa)
            source = Path(str(sys.modules[model.__module__].__file__)).read_text(encoding="utf-8")
            # Gemma 4 asks before layers that share keys, which its MoE model has none of.
            asks = name != "gemma4_text" and re.search(r"_attn_implementation (==|in) ", source) is not None
            assert not (asks and chosen[name] == attention.NAME), name
    ours = {name for name, kind in chosen.items() if kind == attention.NAME}
    assert ours > SINKS | {"deepseek_v3", "afmoe"} and chosen["deepseek_v32"] == "sdpa"
