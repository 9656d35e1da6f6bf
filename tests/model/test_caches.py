"""Rows of a cache that join and leave; tests/generate has whole models."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from transformers.cache_utils import DynamicLayer

from kt_ray.model.caches import select


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
