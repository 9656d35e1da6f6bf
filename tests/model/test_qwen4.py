"""Qwen4-Exp's index over blocks of keys, against transformers' own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.models.qwen4_exp.modeling_qwen4_exp import (
    Qwen4ExpTextQSAIndexer,
    Qwen4ExpTextRotaryEmbedding,
)

from kt_ray.model.family import build_causal, read_family
from kt_ray.model.qwen4 import index_at_once
from tests.helpers.families import randomise, tiny_config, write_config

ROWS, TOKENS = 3, 29


@pytest.mark.parametrize("own", [(0, 29), (0, 11), (7, 29), (20, 29), (12, 12)])
@pytest.mark.parametrize("floating", [False, True])
def test_all_queries_at_once_choose_as_one_by_one(own: tuple[int, int], floating: bool) -> None:
    """Rows with padding after them, before them, or of it alone; and beside one that is half a document of
    its own, which is left to transformers. All keys are seen where every block is taken."""
    config = CONFIG_MAPPING["qwen4_exp_text"](**tiny_config("qwen4_exp_text"))
    indexer = Qwen4ExpTextQSAIndexer(config, 3)
    randomise(indexer)
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril().repeat(ROWS, 1, 1, 1)
    mask[1, :, :, : own[0]] = mask[1, :, :, own[1] :] = False
    mask[2, :, 16:, :16] = own[0] != 20
    hidden = torch.randn(ROWS, TOKENS, config.hidden_size)
    places = Qwen4ExpTextRotaryEmbedding(config)(hidden, torch.arange(TOKENS).expand(3, ROWS, -1))
    given = torch.zeros(mask.shape).masked_fill(~mask, -1e30) if floating else mask
    with torch.no_grad():
        expected = indexer(hidden, places, given, None)
    index_at_once(indexer)
    assert type(indexer) is not Qwen4ExpTextQSAIndexer
    assert torch.equal(indexer(hidden, places, given, None), expected)
    assert (mask & ~expected).any()
    indexer.block_topk, indexer.token_budget = TOKENS, 2 * TOKENS
    assert torch.equal(indexer(hidden, places, given, None), mask)


def test_a_model_that_is_built_has_ours(tmp_path: Path) -> None:
    path = write_config(tmp_path, "qwen4_exp")
    causal, _, _ = build_causal(read_family(path), torch.float32, "eager")
    assert not any(type(module) is Qwen4ExpTextQSAIndexer for module in causal.modules())
