"""Rows of a cache that join and leave; tests/generate has whole models."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
from transformers.cache_utils import DynamicLayer

from kt_ray.model.caches import can_join, select
from kt_ray.model.family import read_family
from tests.helpers.families import write_config


class Compressing(DynamicLayer):  # type: ignore[misc]
    """As DeepSeek-V4's layers before transformers 5.23: what they compress does not follow reordered rows."""

    def __init__(self) -> None:
        super().__init__()
        self.compressed_kv = {"compressor": torch.arange(3.0)[:, None], "indexer": None}
        self.entry_count = {"compressor": 2}


def test_what_is_compressed_follows_its_rows() -> None:
    layer = Compressing()
    keys = torch.arange(3.0)[:, None, None, None]
    layer.update(keys, keys)
    select(SimpleNamespace(layers=[layer]), [2, 0, 0, 1], 0, 1, [0])
    assert layer.keys.flatten().tolist() == [2, 0, 0, 1]
    compressed = layer.compressed_kv["compressor"]
    assert compressed is not None and compressed.flatten().tolist() == [2, 0, 0, 1]
    assert layer.compressed_kv["indexer"] is None and layer.entry_count == {"compressor": 2}


def test_rows_without_positions_of_their_own_do_not_share_a_cache(tmp_path: Path) -> None:
    """Llama 4 scales queries by the columns before them, padding included."""
    for tuned in (True, False):
        path = write_config(tmp_path, "llama4_text", attn_temperature_tuning=tuned)
        assert can_join(read_family(path).config) == (not tuned)
