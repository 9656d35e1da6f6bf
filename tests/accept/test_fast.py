"""Section `fast`: records of benchmarks become tables and claims; a benchmark that breaks is a failure."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kt_ray.accept import fast
from kt_ray.accept.items import Directory, Task, complete
from kt_ray.hardware.nominal import nominal_rates
from tests.placement.configs import make_config, make_hardware

PROGRAM = """
import json, sys
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
records = json.loads(open({records!r}).read())
if records:
    open(arguments["--json"], "w").write(json.dumps({{"records": records}}))
sys.exit({code})
"""


def record(impl: str, isa: str | None, direction: str = "forward", **more: Any) -> dict[str, Any]:
    sizes = {"shape": "deepseek_v3", "format": "fp8", "tokens": 512, "median_ms": 10.0}
    shares = {"rows_per_expert": 384.0, "of_peak": 0.22}
    return {"impl": impl, "isa": isa, "direction": direction, **sizes, **shares, **more}


def layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: list[dict[str, Any]], code: int = 0):
    """The result of an item whose benchmark writes these records and ends so."""
    (tmp_path / "records").write_text(json.dumps(records))
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.format(records=str(tmp_path / "records"), code=code))
    monkeypatch.setattr(fast, "_script", lambda name: [sys.executable, str(script)])
    config = make_config(accept={"against": ["kt"]})
    items = {item.name: item for item in fast.items(config, make_hardware(), 1 << 40, quick=False)}
    return complete(items["layer_deepseek_v3"], Directory(tmp_path / "out"), 60)


def test_targets_on_amx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [
        record("kt_ray", "amx"),
        record("kt_ray", "amx", "backward", of_peak=0.14),
        record("kt_ray", "amx", "backward", of_peak=0.05, rows_per_expert=48.0),
        record("kt", None, ratio_to_ours=2.5, ratio_to_ours_both=2.4),
        record("kt_ray", "avx512_bf16", of_peak=0.1),
    ]
    result = layer(tmp_path, monkeypatch, records)
    assert [(c.status, c.found) for c in result.claims] == [
        ("pass", "22% of the measured peak"),
        ("warn", "14% of the measured peak"),
        ("pass", "2.40 times"),
    ]
    (rows,) = result.tables.values()
    assert len(rows) == 6 and rows[4] == ("kt", "", "fp8", "512", "forward", "10.00", "22%", "2.50")


def test_without_amx_nothing_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [record("kt_ray", "avx2"), record("kt", None, ratio_to_ours_both=0.5)]
    large = {
        **record("torch", None),
        "direction": None,
        "error": "needs about 9.0 GB of memory, 1.0 GB are free",
    }
    result = layer(tmp_path, monkeypatch, [*records, large])
    assert result.status == "pass" and not result.claims
    assert result.tables["deepseek_v3, 4 threads"][3][4].startswith("needs about")


@pytest.mark.parametrize(("impl", "status"), [("kt_ray", "fail"), ("kt", "warn")])
def test_an_implementation_that_gave_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, impl: str, status: str
) -> None:
    broken = {**record(impl, "amx"), "direction": None, "error": "ended with SIGILL"}
    result = layer(tmp_path, monkeypatch, [record("kt_ray", "avx2"), broken])
    assert result.status == status and result.claims[0].found == "ended with SIGILL"


def test_amx_without_a_measured_peak_is_no_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = layer(tmp_path, monkeypatch, [record("kt_ray", "amx", of_peak=None)])
    assert [(c.status, c.found) for c in result.claims] == [("warn", "no peak was measured")]


def test_rates_of_an_earlier_day_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = tmp_path / "rates.json"
    stored.write_text("{}")
    os.utime(stored, (1, 1))
    monkeypatch.setattr(fast, "rates_path", lambda hardware: stored)
    monkeypatch.setattr(Task, "run", lambda self, command: 1)
    items = {item.name: item for item in fast.items(make_config(), make_hardware(), 1 << 40, quick=False)}
    result = complete(items["rates"], Directory(tmp_path), 60)
    assert result.status == "fail" and "nothing was stored" in result.claims[0].found


def test_every_measured_figure_stands_beside_a_nominal_one() -> None:
    rates = nominal_rates(make_hardware())
    names = fast.figures(rates, rates.experts)
    assert any(name.startswith("experts avx512 ") for name in names) and "disk, bytes" in names
    shown = [replace(e, hidden=e.hidden + 64) for e in rates.experts]  # another shape than the nominal one
    assert len(fast.figures(rates, shown)) == len(names)


def test_a_benchmark_that_breaks_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = layer(tmp_path, monkeypatch, [record("kt_ray", "avx2")], code=3)
    assert result.status == "fail" and result.claims[0].found == "exit status 3"
    assert len(result.records) == 1, "what it had measured is kept"
    (tmp_path / "b").mkdir()
    assert layer(tmp_path / "b", monkeypatch, []).status == "fail", "it wrote nothing"


def test_a_layer_goes_on_and_leaves_no_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Path] = []

    def run(self: Task, command: list[str], environment: dict[str, str], cpus: object) -> int:
        assert "--resume" in command
        seen.append(Path(environment["TMPDIR"]))
        assert seen[0].is_dir() and tmp_path in seen[0].parents
        raise KeyboardInterrupt

    monkeypatch.setattr(Task, "run", run)
    items = {i.name: i for i in fast.items(make_config(), make_hardware(), 1 << 40, quick=False)}
    with pytest.raises(KeyboardInterrupt):
        complete(items["layer_deepseek_v3"], Directory(tmp_path), 60)
    assert seen and not seen[0].exists()


def test_little_memory_takes_fewer_experts() -> None:
    items = {i.name: i for i in fast.items(make_config(), make_hardware(), 4 << 30, quick=False)}
    assert not items["layer_qwen3_30b"].missing
    none = {i.name: i for i in fast.items(make_config(), make_hardware(), 1 << 20, quick=False)}
    assert "too little free memory" in none["layer_deepseek_v3"].missing
