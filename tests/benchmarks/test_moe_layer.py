"""benchmarks/moe_layer.py runs, keeps the frame all benchmarks share, and its records add up."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmarks import each other as scripts do."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def run(*arguments: str, out: Path) -> tuple[dict[str, Any], str]:
    common = ["--shape", "tiny", "--rank", "4", "--threads", "1", "--rounds", "2", "--peak-seconds", "0.01"]
    command = [sys.executable, str(BENCHMARKS / "moe_layer.py"), *common, *arguments, "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text()), done.stdout


def test_moe_layer(tmp_path: Path) -> None:
    """Two peers and ours with and without LoRA: the figures of a record follow from its times."""
    arguments = ("--tokens", "32", "--profile", "--against", "torch,grouped_mm")
    report, printed = run(*arguments, out=tmp_path / "deeper" / "moe.json")
    assert set(report) == {"machine", "commit", "records"}
    found = [(r["impl"], r["rank"], r["direction"]) for r in report["records"]]
    ours, peer = ("forward", "backward", "predict"), ("forward", "backward")
    who = {("kt_ray", 4): ours, ("kt_ray", 0): ours, ("torch", 4): peer, ("grouped_mm", 0): peer}
    assert found == [(*w, direction) for w, directions in who.items() for direction in directions]
    rates = report["machine"]["peak"].get("1", {})
    for record in report["records"]:
        assert record["model"] == record["shape"] == "tiny"
        assert (record["tokens"], record["threads"], record["format"]) == (32, 1, "bf16")
        assert record["peak_rss_bytes"] > 0 and record["tokens_per_s"] > 0
        assert (record["isa"] is None) == (record["impl"] != "kt_ray")
        assert len(record["times_ms"]) == 2 and record["min_ms"] == min(record["times_ms"])
        flops = 6 * 2 * 32 * 256 * 128
        assert record["gflops"] == pytest.approx(flops / record["median_ms"] / 1e6, rel=0.02, abs=0.02)
        if record["peak_loop"]:
            peak = rates[record["peak_loop"]]
            assert record["of_peak"] == pytest.approx(record["gflops"] / peak, rel=0.02, abs=1e-3)
            assert record["floor_ms"] == pytest.approx(flops / peak / 1e6, rel=0.02, abs=1e-3)
        assert record["touched_bytes"] == 8 * 3 * 256 * 128 * 2
    assert "of ours" in printed and "without LoRA" in printed


def test_failures_are_records(tmp_path: Path) -> None:
    """A format or instruction set that cannot run says why; the others are measured."""
    arguments = ("--tokens", "1", "--isas", "auto,abacus", "--against", "none", "--experts", "4")
    report, printed = run(*arguments, out=tmp_path / "moe.json")
    *measured, failed = report["records"]
    assert [r["direction"] for r in measured] == ["forward", "backward", "predict"]
    assert all(r["of_bandwidth"] is None or r["of_bandwidth"] > 0 for r in measured)
    assert failed["isa"] == "abacus" and failed["direction"] is None and "abacus" in failed["error"]
    assert "abacus" in printed


def test_going_on_measures_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole groups of the same options stay; of other options nothing does."""
    import moe_layer

    measured: list[tuple[int, str]] = []

    def run_group(group: Any, *_: object) -> None:
        measured.append((group.case.tokens, group.case.format))
        if len(measured) == 3:
            raise KeyboardInterrupt
        for participant in (*group.participants, *group.baselines):
            participant.times = {"forward": [1.0], "backward": [2.0]}

    monkeypatch.setattr(moe_layer, "run_group", run_group)
    monkeypatch.setattr(moe_layer, "is_quiet", lambda seconds: True)
    monkeypatch.setenv("CXX", "false")
    out = tmp_path / "moe.json"
    common = ["--shape", "tiny", "--against", "none", "--json", str(out), "--resume"]
    sizes = ["--tokens", "4,1", "--formats", "bf16,fp8"]
    with pytest.raises(KeyboardInterrupt):
        moe_layer.main([*common, *sizes])
    assert moe_layer.main([*common, *sizes]) == 0
    assert measured == [(4, "bf16"), (4, "fp8"), (1, "bf16"), (1, "bf16"), (1, "fp8")]
    records = json.loads(out.read_text())["records"]
    groups = [(tokens, name) for tokens in (4, 1) for name in ("bf16", "fp8")]
    assert [(r["tokens"], r["format"]) for r in records] == [g for g in groups for _ in range(2)]
    moe_layer.main([*common, "--rounds", "1", "--tokens", "4"])
    assert measured[5:] == [(4, "bf16")] and len(json.loads(out.read_text())["records"]) == 2
    assert list(tmp_path.iterdir()) == [out]


def test_kt_kernel_without_ensurepip_is_an_absent_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import kt_venv

    def create(folder: Path, with_pip: bool) -> None:
        raise subprocess.CalledProcessError(1, "ensurepip")

    monkeypatch.setattr(kt_venv.venv, "create", create)
    with pytest.raises(RuntimeError, match="install python3-venv"):
        kt_venv.kt_python(tmp_path / "kt")


@pytest.mark.parametrize("option", [("--formats", "bf17"), ("--experts", "9"), ("--tokens", "0")])
def test_wrong_arguments(option: tuple[str, str]) -> None:
    command = [sys.executable, str(BENCHMARKS / "moe_layer.py"), "--shape", "tiny", *option]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and option[0] in done.stderr


def test_weights_are_finite_and_as_large_as_counted() -> None:
    import layer_inputs as inputs

    for name in inputs.FORMATS:
        stored = inputs.store(name, 5, 4, 256, seed=1)
        assert stored.shape == (5, 4, 256) and stored.data.shape[:2] == (5, 4)
        size = sum(t.nbytes for t in (stored.data, stored.scales) if t is not None)
        assert size == 5 * inputs.matrix_bytes(name, 4, 256), name
        assert torch.equal(stored.data[0].view(torch.uint8), stored.data[4].view(torch.uint8))
        if name in inputs.GGUF:
            quants = pytest.importorskip("gguf.quants")
            from gguf import GGMLQuantizationType

            kind = GGMLQuantizationType[name.upper()]
            values = torch.from_numpy(quants.dequantize(stored.data.numpy(), kind))
        else:
            values = stored.data.float()
        assert values.isfinite().all() and values.abs().max() > 0, name
    # As llama.cpp does where rows are no multiple of 256; other formats refuse.
    assert inputs.store("q6_k", 2, 4, 96, seed=1).format == "q8_0"
    with pytest.raises(ValueError, match=r"mxfp4.*100"):
        inputs.store("mxfp4", 2, 4, 100, seed=1)


@pytest.mark.parametrize(
    "name", ["fp8", "fp8_channel", "mxfp4", "int8", "int4", "q8_0", "q6_k", "q4_k", "q5_1"]
)
def test_weights_are_what_the_engine_calls_them(name: str) -> None:
    """The engine's own checks accept the stored matrices, edges included; values have the right size."""
    pytest.importorskip("kt_ray.native.matrix")
    from layer_child import Native
    from layer_inputs import store

    for n, k in ((130, 2080), (512, 512)):
        values = Native._matrix(store(name, 2, n, k, seed=1)).dequantize()
        assert values.shape == (2, n, k) and values.isfinite().all()
        assert 0.3 < values.std() * k**0.5 < 3.5


def test_same_inputs_in_every_process() -> None:
    from layer_inputs import Case, make_inputs, make_weights

    case = Case("tiny", 8, 4, 2, "bf16", 1)
    one, two = make_inputs(case), make_inputs(case)
    assert torch.equal(one.x, two.x) and torch.equal(one.routings[3][0], two.routings[3][0])
    assert all(
        torch.equal(a.data, b.data) for a, b in zip(make_weights(case), make_weights(case), strict=True)
    )


def test_peers_compute_the_same_layer() -> None:
    """Ours and factored torch on the benchmark's inputs: the comparison is of one function."""
    from layer_child import FactoredTorch, Native
    from layer_inputs import Case

    from kt_ray.native import Engine

    case = Case("tiny", 8, 32, 4, "f32", 1)
    theirs, ours = FactoredTorch(case), Native(case)
    ids, router = ours.inputs.routings[0]
    with Engine("reference", threads=1) as engine:
        y, _ = engine.forward(ours.weights, ours.inputs.x, ids, router, lora=ours.lora, save=False)
    layer = theirs.layer(ids, router)
    torch.testing.assert_close(y, layer.detach(), rtol=1e-4, atol=1e-4)
    names, left = set[str](), [layer.grad_fn]
    while left:
        node = left.pop()
        if node is not None:
            names.add(node.name())
            left += [following for following, _ in node.next_functions]
    assert "UnbindBackward0" in names and "SelectBackward0" not in names, "zeros of all experts, for each"
    for engine in ours.engines.values():
        engine.close()


def test_children_answer_fail_and_end(tmp_path: Path) -> None:
    """Errors are answers; a crash, silence and other output are told apart; stopping works."""
    from child import Child, ChildError

    script = tmp_path / "serve.py"
    script.write_text(
        "import os, sys, time\n"
        f"sys.path.insert(0, {str(BENCHMARKS)!r})\n"
        "from child import serve\n"
        "def answer(q):\n"
        "    print('noise')\n"
        "    if q['do'] == 'raise': raise ValueError('no such thing')\n"
        "    if q['do'] == 'abort': os.abort()\n"
        "    if q['do'] == 'sleep': time.sleep(60)\n"
        "    return {'did': q['do']}\n"
        "serve(answer)\n"
    )

    def start() -> Child:
        return Child([sys.executable, str(script)], {}, tmp_path / "log")

    def failing(child: Child, what: str, timeout: float = 60.0) -> Callable[[], object]:
        return lambda: child.ask({"do": what}, timeout=timeout)

    child = start()
    assert child.ask({"do": "a"})["did"] == "a"
    child.pause()
    child.resume()
    with pytest.raises(ChildError, match="ValueError: no such thing"):
        failing(child, "raise")()
    assert child.ask({"do": "b"})["did"] == "b"
    with pytest.raises(ChildError, match="SIGABRT"):
        failing(child, "abort")()
    child.close()
    child = start()
    begin = time.monotonic()
    with pytest.raises(ChildError, match="no answer"):
        failing(child, "sleep", 0.5)()
    assert time.monotonic() - begin < 30
    child.close()


def test_disturbed_rounds_are_repeated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rounds in which others computed do not count while there is patience; without it they are marked."""
    import layer_session as session

    def turn(participant: session.Participant, child: object) -> None:
        participant.times.setdefault("forward", []).append(float(next(clock)))

    monkeypatch.setattr(
        session, "_start", lambda p, all_, children, kt, logs: children.update({p.process: Idle()})
    )
    monkeypatch.setattr(session, "_turn", turn)
    monkeypatch.setattr(session, "wait_quiet", lambda *a, **k: True)
    case = session.Case("tiny", 8, 4, 2, "bf16", 1)
    for patience, repeated, times in ((60.0, 1, [1.0, 3.0]), (0.0, 0, [1.0, 2.0])):
        clock, busy = iter(range(10)), iter([0.0, 0.0, 0.0, 0.0, 0.0, 900.0, 900.0, 900.0])
        monkeypatch.setattr(session, "cpu_seconds", lambda busy=busy: (0.0, next(busy)))
        group = session.make_group(case, ["auto"], [], profile=False)
        session.run_group(group, 2, patience, "", tmp_path)
        assert (group.repeated, group.participants[0].times["forward"]) == (repeated, times)
        assert group.quiet == (patience > 0)


class Idle:
    """A child that does nothing."""

    def close(self) -> None:
        pass


def test_a_peak_that_cannot_be_compiled_or_run_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a compiler behind another program, and where nothing in TMPDIR may be executed."""
    peak = importlib.import_module("peak")
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n: > "$2"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", f"env {compiler}")
    with peak.Peak() as measured:
        assert measured.error == ""
        assert measured.measure([1], 0.01) == {}
        assert measured.error.startswith("peak: ") and "Permission denied" in measured.error
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    with peak.Peak() as measured:
        assert measured.measure([1], 0.01) == {} and "No such file" in measured.error
