"""Every benchmark starts and ends with a record, at its smallest size: what nobody runs would rot. Those that
take longest are exhaustive.

A script stands in STARTS with arguments that end after one record, in TESTED with the test that starts it, or
in CHILDREN with the script that starts it. Files without a main are parts of others.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]
BENCHMARKS = REPO / "benchmarks"

STARTS = {
    "cpu_products": "--hidden 64 --rows 1 8 --threads 1 --rounds 1 --json {out}",
    "decode": "--rows 1 --groups 2x2 --prompt 8 --tokens 3 --warmup 1 --rounds 1 "
    "--clusters local --json {out} -- model=demo_random",
    "dispatch_turns": "--callers 1 2 --calls 4 --per-turn 2 --rounds 1 --json {out}",
    "doorbell": "--rounds 20 --pause-ms 0 --repeats 1 --json {out}",
    "first_night": "--scratch {tmp}/night --rows 24 --json {out} cluster=local plan.rates=nominal "
    "data.eval_fraction=0.1 trainer.batch_size=2 generate.max_new_tokens=4",
    "int8_products": "--hidden 256 --inter 128 --tokens 8 --threads 1 --json {out}",
    "joined_trainings": "--trainings 2 --tokens 4 --rounds 1 --json {out} -- model=demo_random",
    "kept_activations": "--hidden 256 --inter 128 --tokens 8 --threads 1 --json {out}",
    "lane_products": "--hidden 256 --inter 128 --tokens 8 --threads 1 --json {out}",
    "network": "--gbit= --links 1 --repeats 1 --steps 0 --json {out}",
    "prediction": "--scratch {tmp} --cases demo.local_1x1 --rates nominal --warmup 0 --steps 1 --json {out}",
    "soak": "--steps 2 --every 1 --warm 1 --json {out} -- cluster=local",
    "train_server": "--trainings 2 --rows 1 --tokens 4 --layers 1 --steps 1 --rounds 1 --json {out}",
}
LONG = {
    "decode",
    "doorbell",
    "first_night",
    "joined_trainings",
    "network",
    "prediction",
    "soak",
    "train_server",
}
WITH_RAY = {"doorbell", "network"}
TESTED = {
    "chaos": "test_chaos.py",
    "elementwise_bytes": "test_elementwise_bytes.py",
    "fuzz": "test_fuzz.py",
    "lane_on_paper": "test_lane_on_paper.py",
    "load": "test_load.py",
    "memory_run": "test_memory_run.py",
    "moe_layer": "test_moe_layer.py",
    "nekoqa": "test_start.py",
    "paced_schedule": "test_paced_schedule.py",
    "reference_schedule": "test_reference_schedule.py",
    "run_record": "test_simulator_check.py",
    "scaling": "test_start.py",
    "simulator_check": "test_simulator_check.py",
    "step_timeline": "test_step_timeline.py",
    "train_layers": "test_train_layers.py",
    "train_step": "test_train_step.py",
}
CHILDREN = {
    "kt_child": "layer_session",
    "layer_child": "layer_session",
    "load_child": "load",
    "step_timeline_child": "step_timeline",
    "train_child": "train_step",
    "train_server_child": "train_server",
}


def test_every_script_is_started_somewhere() -> None:
    scripts = {p.stem for p in BENCHMARKS.glob("*.py") if '__name__ == "__main__"' in p.read_text()}
    assert scripts == STARTS.keys() | TESTED.keys() | CHILDREN.keys()
    for script, test in TESTED.items():
        assert script in (Path(__file__).parent / test).read_text(), f"{test} does not start {script}.py"
    for child, parent in CHILDREN.items():
        assert f"{child}.py" in (BENCHMARKS / f"{parent}.py").read_text()


def marked(script: str) -> Any:
    marks = [(pytest.mark.exhaustive, LONG), (pytest.mark.ray, WITH_RAY)]
    return pytest.param(script, marks=[mark for mark, scripts in marks if script in scripts])


@pytest.mark.bench
@pytest.mark.parametrize("script", [marked(script) for script in STARTS])
def test_a_benchmark_ends_in_a_record(script: str, tmp_path: Path) -> None:
    if script == "network" and (os.geteuid() != 0 or not shutil.which("tc")):
        pytest.skip("needs root and tc for a network of its own")
    out = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, BENCHMARKS / f"{script}.py", *STARTS[script].format(tmp=tmp_path, out=out).split()],
        env={k: v for k, v in os.environ.items() if k != "KT_RAY_TEST_DATA"},
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=800,
    )
    # The exit code may say that a figure missed its aim; one step proves nothing.
    assert out.is_file(), done.stderr[-3000:] + done.stdout[-1000:]
    whole = json.loads(out.read_text(encoding="utf-8"))
    assert whole["machine"]["cores"] > 0 and whole["records"]
    assert not [
        record for record in whole["records"] if "failed" in record or "error" in record.get("kind", "")
    ]


def test_prediction_refuses_a_case_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import prediction

    with pytest.raises(SystemExit):
        prediction.main(["--scratch", str(tmp_path), "--cases", "demo_local", "--quick"])
    assert "unknown case demo_local" in capsys.readouterr().err
    cases = [word for line in prediction.__doc__.splitlines() if "--cases" in line for word in line.split()]
    for case in cases[cases.index("--cases") + 1].split(","):
        model, layout = case.split(".")
        assert model in prediction.MODELS and layout in prediction.LAYOUTS


def test_scaling_predicts_a_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import scaling

    monkeypatch.setattr(scaling, "MACHINES", scaling.MACHINES[:1])
    monkeypatch.setattr(scaling, "LAYOUTS", {"2 stages": scaling.LAYOUTS["2 stages"]})
    assert scaling.main(["--only", "machines", "--json", str(tmp_path / "out.json")]) == 0
    (record,) = json.loads((tmp_path / "out.json").read_text())["records"]
    assert record["tokens_per_s"] > 0


def test_nekoqa_prepares(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import nekoqa

    rows = [{"instruction": f"你好{i}？", "input": "", "output": "喵"} for i in range(20)]
    (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    (tmp_path / "prompts.json").write_text(json.dumps([{"question": "猫？"}]), encoding="utf-8")
    given = ["--data", str(tmp_path / "rows.json"), "--prompts", str(tmp_path / "prompts.json")]
    nekoqa.main(["prepare", *given, "--out", str(tmp_path / "out")])
    held_out = json.loads((tmp_path / "out" / "eval.json").read_text(encoding="utf-8"))
    assert len(held_out) == 2 and (tmp_path / "out" / "base.jsonl").stat().st_size > 0
