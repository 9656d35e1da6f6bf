"""trainer.timeline_every: a trace has every actor and operation on one clock; metrics say who was busy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kt_ray.modes.train import run
from tests.helpers.composing import compose
from tests.helpers.exhaustive import exhaustive


@pytest.fixture(scope="module", params=["local", exhaustive("ray")])
def run_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    address = ["cluster.address=local", "cluster.dashboard=false"] if request.param == "ray" else []
    config = compose(
        [
            f"cluster={request.param}",
            *address,
            "rule=cpu_2workers_2sockets",
            "trainer.max_steps=4",
            "trainer.eval_every=0",
            "trainer.timeline_every=2",
            "tracking.progress=false",
            "tracking.plot=false",
            f"run.root={root}",
            "run.name=traced",
        ]
    )
    assert run(config) == 0
    return root / "traced"


def test_every_nth_step_is_written(run_dir: Path) -> None:
    assert sorted(f.name for f in (run_dir / "timelines").iterdir()) == [
        "step_000002.json",
        "step_000004.json",
    ]


def test_a_trace_holds_all_actors_on_one_clock(run_dir: Path) -> None:
    trace = json.loads((run_dir / "timelines" / "step_000004.json").read_text(encoding="utf-8"))
    events = trace["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(lanes.values()) == {"driver", "worker-0", "worker-1", "experts-0", "experts-1"}
    spans = [e for e in events if e["ph"] == "X"]
    by_actor = {name: [e for e in spans if lanes[e["tid"]] == name] for name in lanes.values()}
    (whole,) = (e for e in by_actor["driver"] if e["name"] == "pass")
    for actor, mine in by_actor.items():
        if actor != "driver":  # a driver's pass encloses what the actors did in it
            assert min(e["ts"] for e in mine) >= whole["ts"] - 1
            assert max(e["ts"] + e["dur"] for e in mine) <= whole["ts"] + whole["dur"] + 1
    kinds = {e["name"] for e in by_actor["worker-0"] + by_actor["worker-1"]}
    wanted = "begin embed forward join recompute backward loss send_hidden recv_hidden send_grad recv_grad"
    assert set(wanted.split()) <= kinds
    assert {"submit forward", "submit backward", "experts-0 forward", "experts-1 backward"} <= kinds
    for actor in ("experts-0", "experts-1"):
        calls = [e for e in by_actor[actor] if e["cat"] == "compute"]
        assert {e["name"] for e in calls} == {"forward", "backward"}
        assert len(calls) == len([e for e in by_actor[actor] if e["name"].startswith("wait")])
    arrows = [e for e in events if e["ph"] == "s"]
    assert len(arrows) == sum(
        len([e for e in by_actor[f"experts-{i}"] if e["cat"] == "compute"]) * 2 for i in (0, 1)
    )


def test_metrics_carry_busy_fractions_and_queue_depths(run_dir: Path) -> None:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 4
    for line in lines:
        for actor in ("worker-0", "worker-1", "experts-0", "experts-1"):
            assert 0 < line[f"busy_{actor}"] <= 1.02, actor
        assert all(0 <= line[f"queue_depth_{actor}"] < 20 for actor in ("experts-0", "experts-1"))
