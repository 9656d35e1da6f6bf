"""The campaign of faults: twenty deaths here, whole processes in `make chaos`."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def chaos(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return importlib.import_module("chaos")


@pytest.mark.slow
def test_twenty_deaths_leave_every_run_as_undisturbed(chaos: Any) -> None:
    record = chaos.inside(20, seed=7)
    assert record["faults"] >= 20 and record["runs"] >= 1


def test_what_would_hide_a_difference_is_seen(chaos: Any, tmp_path: Path) -> None:
    """The judge looks at losses, adapter and leftovers."""
    campaign = chaos.Campaign(tmp_path, "local", 0, 1.0, own_disk=False)
    assert not any(what == "full" or target in chaos.RAY for what, target in campaign.harm.kinds)
    run = tmp_path / "runs" / "a"
    (run / "adapter").mkdir(parents=True)
    (run / "adapter" / "adapter_model.safetensors").write_bytes(b"x")
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": s, "loss": s / 2}) + "\n" for s in (1, 2)))
    campaign.expected = chaos.outcome(run)
    assert list(campaign._judge(run, 0)) == []
    (run / ".step_000001.partial").mkdir()
    assert "left behind" in next(campaign._judge(run, 0))
    (run / ".step_000001.partial").rmdir()
    campaign.expected = (campaign.expected[0], b"y")
    assert list(campaign._judge(run, 0)) == ["another adapter"]
    campaign.expected = ([(1, "loss", 0.5), (2, "loss", 1.5)], b"x")
    assert "others than the undisturbed run's" in next(campaign._judge(run, 0))
    (tmp_path / "a.log").write_text("error: what\n")
    assert "exit code 2: error: what" in next(campaign._judge(run, 2))
