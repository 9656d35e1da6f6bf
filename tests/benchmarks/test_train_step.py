"""The training-step benchmark runs, keeps the JSON frame, and compares like with like."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
SCRIPT = REPO / "benchmarks" / "train_step.py"


def run(*arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "KT_RAY_TEST_DATA"}
    environment |= {"KT_RAY_CACHE": str(cache)}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
    )


@pytest.mark.exhaustive
def test_frame_and_equal_losses(tmp_path: Path) -> None:
    """One measured step: every field is there, and kt_ray's float32 losses are the factored peer's."""
    out = tmp_path / "out.json"
    arguments = (
        "--model demo --impls hf --rounds 1 --steps 1 --warmup 0 --check-steps 3 --batch 4 --max-length 48"
    )
    done = run(*arguments.split(), "--json", str(out), cache=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    frame = json.loads(out.read_text(encoding="utf-8"))
    assert set(frame) == {"machine", "commit", "records"}
    assert frame["machine"]["cores"] >= 1 and "hostname" not in frame["machine"]
    records = frame["records"]
    assert [(r["impl"], r["dtype"]) for r in records] == [
        ("hf", "bfloat16"),
        ("kt_ray_local", "float32"),
        ("hf_factored", "float32"),
    ]
    for record in records:
        assert record["model"] == "demo" and record["data"] == "demo"
        assert record["tokens"] > 0 and record["median_s"] > 0 and record["peak_rss_bytes"] > 0
        assert record["tokens_per_s"] == pytest.approx(record["tokens"] / record["median_s"], rel=0.01)
    hf, ours, factored = records
    assert ours["tokens"] == factored["tokens"]
    assert ours["trainable_parameters"] == factored["trainable_parameters"] > hf["trainable_parameters"]
    # Three steps: the first is the forward, the others hold only if gradients and updates agree too.
    assert len(ours["losses"]) == 3 and ours["losses"][2] != ours["losses"][0]
    assert ours["losses"] == pytest.approx(factored["losses"], rel=1e-5)
    assert ours["losses"][0] == pytest.approx(factored["losses"][0], rel=1e-6)
    # bf16 against float32 of the same model and rows
    assert hf["losses"][0] == pytest.approx(factored["losses"][0], rel=2e-2)


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    done = run("--impls", "nonsense", cache=tmp_path)
    assert done.returncode != 0
    assert "nonsense" in done.stderr and "hf_factored" in done.stderr


def test_what_the_configuration_refuses_is_one_line(tmp_path: Path) -> None:
    """As the demo, which has its own tokenizer, with rows that bring another."""
    (tmp_path / "nekoqa").mkdir()
    (tmp_path / "nekoqa" / "neko_union_alpaca.json").write_text("[]")
    done = run("--model", "demo", "--data", str(tmp_path), cache=tmp_path)
    assert done.returncode == 1 and "model=demo_random" in done.stderr and done.stderr.count("\n") == 1
