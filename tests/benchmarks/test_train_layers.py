"""train_layers.py: equal work for all parties, failures recorded, ratios the right way round."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kt_ray.demo import ensure_demo_model

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(REPO / "benchmarks"))
    return importlib.import_module("train_layers")


@pytest.mark.exhaustive
def test_parties_take_the_same_steps(tmp_path: Path) -> None:
    """Rows of exactly the tokens asked for; checkpointing changes no loss; a failure is one record."""
    model, out = ensure_demo_model("demo", cache_dir=tmp_path), tmp_path / "out.json"
    arguments = (
        "--parties kt_ray_local,hf,hf_ckpt,hf_factored,peft --tokens 48 --accumulate 2 --steps 1 --rounds 1"
    )
    command = [sys.executable, str(REPO / "benchmarks" / "train_layers.py"), model, *arguments.split()]
    done = subprocess.run(
        [*command, "--json", str(out), "--warmup", "1"],
        env={**os.environ, "KT_RAY_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    records = {r["impl"]: r for r in json.loads(out.read_text(encoding="utf-8"))["records"]}
    assert list(records) == ["kt_ray_local", "hf", "hf_ckpt", "hf_factored", "peft"]
    assert not [r["error"] for r in records.values() if "error" in r]
    assert {r["tokens"] for r in records.values()} == {96}
    assert records["hf"]["losses"] == pytest.approx(records["hf_ckpt"]["losses"], rel=1e-6)
    assert records["hf_ckpt"]["checkpointing"] and not records["hf"]["checkpointing"]
    assert records["peft"]["expert_lora"] and not records["hf"]["expert_lora"]
    first = [r["losses"][0] for r in records.values()]
    assert first == pytest.approx([first[0]] * len(first), rel=1e-2)  # bfloat16, rounded in other places


def test_ratios(tool: Any, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"kt_ray_ray": 2.0, "hf": 5.0, "hf_ckpt": 4.0, "zero3": 30.0}
    records = [
        {"impl": n, "median_s": s, "tokens_per_s": 1 / s, "peak_rss_bytes": 1, "losses": [8.0 + s / 10]}
        for n, s in names.items()
    ]
    records.append({"impl": "peft", "error": "out of memory: 0.1 GB available"})
    tool.compare(records)
    assert [r.get("ratio_to_ours") for r in records] == [1.0, 2.5, 2.0, 15.0, None]
    assert math.isclose(records[1]["first_loss_difference"], 0.3 / 8.2)
    tool.show(records)
    printed = capsys.readouterr().out
    assert "the faster Hugging Face + PEFT: 2.00 times" in printed and "ZeRO-3: 15.00 times" in printed
    assert "out of memory" in printed


def test_a_party_that_needs_too_much_memory_is_ended(tool: Any, tmp_path: Path) -> None:
    """More must stay available than any machine has: it is ended at once, with all it started."""
    job = tool.Job("hf", [], str(tmp_path), 0, 1, 1)
    with pytest.raises(tool.JobFailed, match="hf: out of memory"):
        tool.run_job(job, tmp_path, "round 1/1", spare_bytes=1 << 60)


def test_zero3_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal accumulation, stage 3, both kinds of state offloaded."""
    monkeypatch.syspath_prepend(str(REPO / "benchmarks"))
    for name in ("DS_ACCELERATOR", "TORCH_EXTENSIONS_DIR"):  # the module sets them: put back afterwards
        monkeypatch.setenv(name, os.environ.get(name, ""))
        monkeypatch.delenv(name)
    from kt_ray.config.compose import compose

    config = compose(["trainer.batch_size=4", "trainer.micro_batch_size=1"])
    engine = importlib.import_module("zero3_peer").engine_config(config)
    assert engine["gradient_accumulation_steps"] == 4 and engine["train_batch_size"] == 4
    zero = engine["zero_optimization"]
    assert zero["stage"] == 3
    assert zero["offload_param"]["device"] == zero["offload_optimizer"]["device"] == "cpu"
    assert engine["gradient_clipping"] == config.optim.max_grad_norm


def test_rows_are_long_enough(tool: Any) -> None:
    rows = [json.loads(line) for line in tool.long_rows(3, 500).splitlines()]
    assert len(rows) == 3 and all(len(row["output"]) >= 500 for row in rows)
    assert len({row["output"] for row in rows}) == 3
