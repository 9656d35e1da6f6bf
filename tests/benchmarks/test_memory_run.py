"""The parts of memory_run.py: what is summed, how it is grouped, what is read from a run's files."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(REPO / "benchmarks"))
    return importlib.import_module("memory_run")


def test_peak_is_of_the_sum(tool: Any) -> None:
    """Each process peaks at another time; the sum peaks in the second sample."""
    names = {
        1: "python launch.py",
        2: "ray::RayActor",
        3: "ray::RayActor.compute",
        4: "gcs_server --x",
        5: "sh",
    }
    samples = tool.Samples(
        times=[0.0, 1.0, 2.0],
        pss=[{1: 100, 4: 1}, {1: 60, 2: 50, 3: 40, 4: 2, 5: 3}, {1: 10, 3: 90}],
        processes={pid: tool.Seen(name, peak=100) for pid, name in names.items()},
    )
    figures = tool.memory_figures(samples, 1, {2: "worker-0", 3: "experts-0"})
    assert figures["peak_pss_bytes"] == 155 and figures["peak_at_s"] == 1.0 and figures["processes"] == 5
    assert figures["peak_by_group"] == {
        "attention worker": 50,
        "driver": 60,
        "expert actor": 40,
        "other": 3,
        "ray system": 2,
    }
    assert figures["peak_of_group"]["driver"] == 100 and figures["peak_of_group"]["expert actor"] == 90
    assert figures["own_peaks_bytes"] == 500 and figures["interval_s"] == 1.0


def test_run_files(tool: Any, tmp_path: Path) -> None:
    budgets = [
        {"device": "socket 0", "total": 100, "items": {"experts": 60}},
        {"device": "cuda:0", "total": 1000, "items": {}},
        {"device": "socket 1", "total": 50, "items": {"experts": 40}},
    ]
    plan = {
        "memory": budgets,
        "model": {"model_type": "deepseek_v2", "expert_format": "fp8"},
        "tokens_per_step": 8,
        "experts": [{"activations": "recompute"}],
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    actor = {"actor": "experts-0", "pid": 7, "weight_bytes": 3 * 10**9, "load_seconds": 2.0}
    (tmp_path / "env.json").write_text(json.dumps({"actors": [actor]}))
    steps = [{"step": s, "loss": 1.0, "tokens": 8, "seconds": s, "tokens_per_s": 8 / s} for s in (9, 2, 4, 2)]
    skipped = {"step": 5, "skipped": 1, "loss": None, "grad_norm": None}
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in [{"step": 0, "eval_loss": 2.0}, *steps, skipped])
    )
    figures = tool.run_figures(tmp_path)
    assert figures["plan_bytes"] == 150 and figures["activations"] == ["recompute"]
    assert figures["load"]["experts-0"]["gb_per_s"] == 1.5 and figures["actor_pids"] == {7: "experts-0"}
    assert (
        figures["steps"] == 4 and figures["median_s"] == 2 and figures["tokens_per_s"] == 4
    )  # without the first
    samples = tool.Samples(times=[0.0], pss=[{1: 120}], processes={1: tool.Seen("x")})
    against = tool.against_plan(samples, figures)
    assert against["peak_to_plan"] == 0.8 and "actor_pids" not in against
    assert tool.find_run_dir(["hello\n", f"run directory: {tmp_path}\n"]) == tmp_path
    assert tool.find_run_dir(["run directory: /nowhere/at/all\n"]) is None


def measured(tmp_path: Path, *command: str) -> tuple[int, dict[str, Any]]:
    """In a process of its own: the tool adopts orphans and takes every child's exit status."""
    out = tmp_path / "out.json"
    script = str(REPO / "benchmarks" / "memory_run.py")
    arguments = ["--interval", "0.1", "--json", str(out), "--", *command]
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, timeout=120)
    return done.returncode, json.loads(out.read_text(encoding="utf-8"))["records"][0]


def test_orphans_count(tmp_path: Path) -> None:
    """The command holds 50 MB; what it started lives on alone, with 80 MB, as Ray's processes may."""
    there = tmp_path / "there"
    orphan = f"import time; b = b'x' * (80 << 20); open({str(there)!r}, 'w').close(); time.sleep(4)"
    middle = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {orphan!r}])"
    code = (
        "import os, subprocess, sys, time; b = b'x' * (50 << 20)\n"
        f"subprocess.run([sys.executable, '-c', {middle!r}])\n"
        f"while not os.path.exists({str(there)!r}): time.sleep(0.1)\n"
        "time.sleep(2)"
    )
    exit_code, record = measured(tmp_path, sys.executable, "-c", code)
    assert exit_code == record["exit_code"] == 0 and record["samples"] >= 3
    assert 50 << 20 < record["peak_by_group"]["driver"] < 80 << 20
    assert 80 << 20 < record["peak_by_group"]["other"] < 120 << 20
    assert record["own_peaks_bytes"] >= record["peak_pss_bytes"] > 130 << 20
    assert "peak_to_plan" not in record


def test_exit_code_and_no_folders(tmp_path: Path) -> None:
    exit_code, record = measured(tmp_path, "/bin/sh", "-c", "exit 3", "model.path=/a/b/c")
    assert exit_code == record["exit_code"] == 3
    assert record["command"] == ["sh", "-c", "exit 3", "model.path=c"]
