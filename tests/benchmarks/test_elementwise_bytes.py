"""Bytes are counted as operations move them, and a plan's are near those of transformers' layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.elementwise_bytes import Counted, counted, predicted, shortened
from tests.placement.configs import SMALL

# Wide enough that the router does not decide.
WIDE: dict[str, dict[str, Any]] = {
    "mixtral": {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2},
    "qwen3_moe": {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64},
    "gpt_oss": {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64},
    "deepseek_v3": {
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "q_lora_rank": 128,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "moe_intermediate_size": 128,
    },
}


def test_operations_count_what_they_read_and_write() -> None:
    x, row = torch.ones(64, 32), torch.ones(1, 32)
    with Counted() as found:
        y = x + row.expand(64, 32)  # an expanded row is read once
        y.view(32, 64).transpose(0, 1)  # views move nothing, products are counted elsewhere
        x @ x.T
    assert found.bytes == 4 * (64 * 32 + 32 + 64 * 32)
    assert found.kernels == 2


@pytest.mark.parametrize("family", WIDE)
def test_a_plans_bytes_are_near(family: str) -> None:
    config = shortened({**SMALL[family], **WIDE[family]})
    for observed, (size, kernels) in zip(counted(config, 64), predicted(config, 64), strict=True):
        assert 0.7 <= size / observed.bytes <= 1.7
        assert 0.7 <= kernels / observed.kernels <= 2.2
