"""load.py measures a small checkpoint, and its parts count right."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from kt_ray.checkpoint import CheckpointIndex, ExpertLayout
from kt_ray.demo import ensure_demo_model

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(REPO / "benchmarks"))
    return importlib.import_module("load")


def test_two_actors_hold_every_expert_once(tool: Any, tmp_path: Path) -> None:
    model = ensure_demo_model("demo", cache_dir=tmp_path)
    out = tmp_path / "out.json"
    arguments = "--actors 2 --rounds 1 --threads 2 --conditions cold,warm --timeout 120"
    assert tool.main([model, *arguments.split(), "--json", str(out)]) == 0
    frame = json.loads(out.read_text(encoding="utf-8"))
    assert set(frame) == {"machine", "commit", "records"}
    layout = ExpertLayout.detect(CheckpointIndex.open(model))
    assert [record["condition"] for record in frame["records"]] == ["cold", "warm"]
    for record in frame["records"]:
        elements = 3 * layout.num_experts * layout.hidden * layout.intermediate * len(layout.moe_layers)
        assert record["weight_bytes"] == 2 * elements
        assert record["gb_per_s"] > 0 and record["cat_gb_per_s"] > 0 and record["ratio"] > 0
        assert record["peak_rss_bytes"] >= record["resident_bytes"] - (4 << 20)
        assert record["resident_bytes"] >= record["baseline_bytes"]
        assert 0 <= record["peak_over_resident"] < 256 << 20
    assert frame["records"][1]["cached_before"] == 1.0


def test_joined(tool: Any) -> None:
    """Two that overlap: 3 GB in the 2 s from the first's begin to the second's end; memory of the worse."""
    one = {"begun": 10.0, "ended": 11.0, "weight_bytes": 10**9, "baseline_bytes": 1}
    two = {"begun": 10.5, "ended": 12.0, "weight_bytes": 2 * 10**9, "baseline_bytes": 2}
    result = tool.joined(
        [
            {**one, "load_peak_bytes": 50, "resident_bytes": 40},
            {**two, "load_peak_bytes": 30, "resident_bytes": 31},
        ]
    )
    assert result["seconds"] == 2.0 and result["gb_per_s"] == 1.5 and result["weight_bytes"] == 3 * 10**9
    assert result["peak_over_resident"] == 10 and result["baseline_bytes"] == 1


def test_cached(tool: Any, tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(os.urandom(1 << 20))
    tool.fill([file])
    assert tool.cached([file]) == 1.0
    tool.drop([file])
    assert tool.cached([file]) <= 1.0  # a file system in memory keeps it
    assert tool.cached([]) == 0.0
