"""benchmarks/moe_layer.py runs and keeps the frame all benchmarks share."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_moe_layer(tmp_path: Path) -> None:
    out = tmp_path / "deeper" / "moe.json"
    arguments = ["--shape", "tiny", "--tokens", "16", "--rank", "4", "--threads", "1", "--rounds", "1"]
    command = [sys.executable, str(ROOT / "benchmarks/moe_layer.py"), *arguments, "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert set(report) == {"machine", "commit", "records"}
    assert len(report["records"]) == 2
    for record in report["records"]:
        assert {"impl", "model", "tokens", "median_s", "tokens_per_s", "peak_rss_bytes"} <= set(record)
        assert record["tokens"] == 16
        assert record["forward_s"] > 0
        assert record["backward_s"] > 0
