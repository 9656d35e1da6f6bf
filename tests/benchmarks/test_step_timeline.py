"""step_timeline.py: a run ends in a record with busy fractions and a trace; ratios the right way round."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kt_ray.demo import ensure_demo_model
from kt_ray.dims.config_json import dims_from_dir
from kt_ray.model.stage_spec import StageSpec
from tests.helpers.exhaustive import exhaustive

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(REPO / "benchmarks"))
    return importlib.import_module


@pytest.mark.parametrize("case, clusters", [("mixtral", ["local"]), exhaustive(("paced", ["local", "ray"]))])
def test_a_run_ends_in_a_record_and_a_trace(case: str, clusters: list[str], tmp_path: Path) -> None:
    """The demo's model stands in for the shapes; under Ray the stand-in stage travels to the worker."""
    model, out = ensure_demo_model("demo", cache_dir=tmp_path), tmp_path / "out.json"
    command = [sys.executable, str(REPO / "benchmarks" / "step_timeline.py"), model, "--case", case]
    command += ["--clusters", ",".join(clusters)]
    arguments = "--tokens 48 --rows 2 --steps 2 --set cluster.dashboard=false"
    done = subprocess.run(
        [*command, *arguments.split(), "--json", str(out), "--traces", str(tmp_path / "traces")],
        env={**os.environ, "KT_RAY_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    whole = json.loads(out.read_text(encoding="utf-8"))
    assert whole["machine"]["cores"] > 0 and len(whole["commit"]) >= 40
    records = whole["records"]
    assert [record["cluster"] for record in records] == clusters
    for record in records:
        assert record["tokens"] == 96 and len(record["all_s"]) == 2
        assert 0 < record["busy"]["expert"] < 1.02 and 0 < record["busy"]["attention"] < 1.02
        assert 0 < record["expert_kernel_s"] <= record["expert_cpu_s"]
        assert record["wall_over_cpu_bound"] > 0.9
        assert ("stand_in" in record) == (case == "paced")
        trace = json.loads((tmp_path / "traces" / f"{case}_auto_{record['cluster']}.json").read_text())
        lanes = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
        assert lanes == {"driver", "worker-0", "experts-0"}
    for ray in records[1:]:
        assert ray["same_losses_as_local"]
        assert ray["time_over_local"] == ray["median_s"] / records[0]["median_s"]


def test_a_failed_run_says_why(bench: Any, tmp_path: Path) -> None:
    tool = bench("step_timeline")
    job = tool.Job("broken", ["model=custom", "model.path=/nowhere", "data=demo", "cluster=local"], 1, 0, 2)
    with pytest.raises(bench("common").JobFailed, match="nowhere"):
        tool.run_job(job, tmp_path, 0.1, 100)


def test_ratios(bench: Any) -> None:
    tool = bench("step_timeline")
    seconds = {("auto", "local"): 2.0, ("auto", "ray"): 2.1, ("off", "local"): 3.0, ("off", "ray"): 4.2}
    records = [{"variant": v, "cluster": c, "median_s": s, "losses": [1.0]} for (v, c), s in seconds.items()]
    tool.compare(records)
    found = {(r["variant"], r["cluster"]): r for r in records}
    assert "time_over_auto" not in found["auto", "local"]
    assert found["auto", "ray"]["time_over_local"] == pytest.approx(1.05)
    assert found["off", "local"]["time_over_auto"] == 1.5
    assert found["off", "ray"]["time_over_auto"] == pytest.approx(2.0) and found["off", "ray"][
        "time_over_local"
    ] == pytest.approx(1.4)


def test_figures_of_a_step(bench: Any) -> None:
    """Busy counts kernels over wall and threads; paced attention counts its waits for the GPU."""
    child = bench("step_timeline_child")
    from kt_ray.timeline import Activity, Span

    calls = (
        Span("wait forward", "wait", 10.0, 11.0, 1, 0),
        Span("forward", "compute", 11.0, 13.0, 1, 0),
        Span("backward", "compute", 13.0, 17.0, 1, 0),
    )
    experts = Activity("experts-0", "h", 10.0, 17.0, 0.0, {}, 0.5, 9.0, 2, spans=calls)
    worker = Activity("worker-0", "h", 10.0, 17.5, 0.0, {"compute": 4.0}, 3.0, 0.0, 1)
    driver = Activity("driver", "h", 10.0, 19.0, 0.0, {}, spans=(Span("pass", "wait", 10.0, 18.0),))
    metrics = SimpleNamespace(seconds=9.0, tokens=64, busy={"worker-0": 0.33})
    result = child.figures(metrics, [driver, worker, experts], True)
    assert result["busy_expert"] == 0.5 and result["busy_attention"] == pytest.approx(4 / 9)
    assert result["attention_cpu_s"] == 3.0 and result["expert_cpu_s"] == 9.5
    assert result["experts_first_wait_s"] == 1.0 and result["experts_after_last_call_s"] == 2.0
    assert child.figures(metrics, [driver, worker, experts], False)["busy_attention"] == 0.33


def test_the_pace_is_flops_over_the_gpus_rate(bench: Any, tmp_path: Path) -> None:
    paced = bench("paced_stage")
    dims = dims_from_dir(ensure_demo_model("demo", cache_dir=tmp_path))
    gpu = {"bf16_flops": 1e12, "use": 0.5, "pcie_bytes": 1e9}
    pace = paced.pace_of(dims, 100, gpu)
    layer = dims.moe_layers[0]
    scores = dims.attention_flops(layer, 1, 100) / 100
    carried = 6 * dims.expert_width / 1e9
    assert pace.before[layer] == pytest.approx((2 * dims.attention_params[layer] + scores) / 5e11 + carried)
    assert pace.after[layer] == pytest.approx(2 * dims.dense_params[layer] / 5e11)
    assert pace.loss == pytest.approx(4 * dims.embedding_params / 5e11)


def test_the_stand_in_sends_what_a_stage_would(bench: Any, tmp_path: Path) -> None:
    import numpy as np

    from kt_ray.batch import MicroBatch, PassSpec

    paced = bench("paced_stage")
    dims = dims_from_dir(ensure_demo_model("demo", cache_dir=tmp_path))
    fast = paced.pace_of(dims, 8, {"bf16_flops": 1e18, "use": 1.0, "pcie_bytes": 1e18})
    whole = StageSpec("", (0, dims.num_layers), dims.num_layers)
    stage = paced.PacedStage(fast, whole)
    sent: list[tuple[Any, ...]] = []
    exchange = SimpleNamespace(
        submit_forward=lambda *a: sent.append(a), submit_backward=lambda *a: sent.append(a)
    )
    ids = np.ones((1, 8), dtype=np.int64)
    micro = MicroBatch(ids, ids, np.array([6]), np.array([3]))
    loop = stage.begin(PassSpec(1, 0, "train", 0, (((micro,),),), 5), 0, exchange)
    layer = dims.moe_layers[0]
    loop.forward(layer, 0)
    loop.recompute(layer, 0)
    (_, _, x, chosen, weights, keys, keep), (_, _, dy) = sent
    assert x.shape == dy.shape == (6, dims.expert_width) and x.dtype == torch.bfloat16 and keep
    assert chosen.shape == (6, dims.experts_per_token) and int(chosen.max()) < dims.num_experts
    assert all(len(set(row.tolist())) == len(row) for row in chosen)
    assert torch.allclose(weights.sum(1), torch.ones(6)) and keys.shape == (6,)
    with pytest.raises(ValueError, match="one stage"):
        paced.PacedStage(fast, replace(whole, layers=(0, 1)))
    # One micro-batch of two is recomputed early, and as much in all.
    exchange.join_backward = lambda *a: None
    waits = {}
    for kind in ("group", "micro_batch"):
        stage = paced.PacedStage(fast, replace(whole, activations=kind))
        loop = stage.begin(PassSpec(1, 0, "train", 0, (((micro, micro),),), 5), 0, exchange)
        loop.recompute(layer, 0)
        early = loop.seconds()["attention"]
        loop.backward(layer, 0)
        waits[kind] = (early, loop.seconds()["attention"])
    assert waits["micro_batch"][0] == pytest.approx(waits["group"][0] / 2)
    assert waits["micro_batch"][1] == pytest.approx(waits["group"][1])
