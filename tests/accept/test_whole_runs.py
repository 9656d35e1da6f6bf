"""Section `runs`: as many layers as fit, and what is judged of a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kt_ray.accept import whole_runs
from kt_ray.accept.items import Claim, Directory, Found, complete
from kt_ray.accept.whole_runs import STEPS, TINY, Fitted, Run, long_rows
from kt_ray.hardware.machine import Hardware
from kt_ray.placement.memory import GIB
from kt_ray.placement.plan import make_plan
from kt_ray.placement.plan_types import Budget
from tests.placement.configs import make_config, make_hardware, small_dims

RUN = Run("small", "deepseek_v2_lite", "bf16", 4, 256)
GOOD: dict[str, Any] = {
    "steps": STEPS,
    "losses": [2.0] * STEPS,
    "tokens_per_s": 100.0,
    "predicted_tokens_per_s": 90.0,
    "median_s": 1.0,
    "peak_pss_bytes": 10 * GIB,
    "plan_bytes": 10 * GIB,
    "gpu": {"cuda:0": {"peak_bytes": 9 * GIB, "plan_bytes": 9 * GIB}},
}


def judged(**changes: Any) -> list[Claim]:
    plan = make_plan(small_dims(), make_config(), make_hardware())
    fitted = Fitted(2, 27, 4, 256, [], plan)
    found: Found = whole_runs._judge(RUN, fitted, GOOD | changes)
    return list(found.claims)


def test_a_run_as_planned_and_predicted() -> None:
    claims = judged()
    assert [c.status for c in claims] == ["pass"] * 4
    assert "2 of 27 layers" in claims[0].found and "+11%" in claims[1].found


@pytest.mark.parametrize(
    ("changes", "number", "status"),
    [
        ({"losses": [2.0, float("nan"), 2.0, 2.0]}, 0, "fail"),
        ({"losses": [2.0]}, 0, "fail"),
        ({"predicted_tokens_per_s": 50.0}, 1, "warn"),
        ({"peak_pss_bytes": 11 * GIB}, 2, "fail"),
        ({"peak_pss_bytes": 8 * GIB}, 2, "warn"),
        ({"gpu": {"cuda:0": {"peak_bytes": 10 * GIB, "plan_bytes": 9 * GIB}}}, 3, "fail"),
    ],
)
def test_what_is_off(changes: dict[str, Any], number: int, status: str) -> None:
    claims = judged(**changes)
    assert claims[number].status == status
    assert all(c.status == "pass" for i, c in enumerate(claims) if i != number)


def test_a_model_that_cannot_fit_is_left_out_and_weights_that_cannot_be_made_fail(tmp_path: Path) -> None:
    hardware = make_hardware(memory=GIB // 8)
    directory = Directory(tmp_path)
    config = make_config(cluster="local")
    result = complete(whole_runs._item(TINY, config, hardware), directory, 600)
    assert result.status == "skip" and "of socket 0, which has" in result.notes[0]
    result = complete(
        whole_runs._item(TINY._replace(format="int4", shape=("hidden_size=100",)), config, hardware),
        directory,
        600,
    )
    assert result.status == "fail" and "making its weights" in result.claims[0].found


def test_dense_layers_take_no_room_of_experts() -> None:
    """Three dense layers and two with experts of 10 GiB each: five fit."""
    dims = replace(small_dims(), num_layers=9, moe_layers=tuple(range(3, 9)))
    budget = Budget("socket 0", {"experts": 60 * GIB, "caches": 9 * GIB, "fixed": GIB}, 27 * GIB)
    assert whole_runs._layers_for(budget, dims) == 5


def test_what_others_use_is_not_planned_with(monkeypatch: pytest.MonkeyPatch) -> None:
    listing = "GPU-aa, 2048\nGPU-bb, [N/A]\n"
    monkeypatch.setattr("kt_ray.hardware.describe.nvidia_smi", lambda fields: listing)
    seen: list[Hardware] = []
    monkeypatch.setattr(whole_runs, "_item", lambda run, config, hardware: seen.append(hardware))
    hardware = make_hardware(gpus=2)
    cards = (replace(hardware.gpus[0], uuid="GPU-aa"), replace(hardware.gpus[1], uuid="GPU-bb"))
    list(whole_runs.items(make_config(), replace(hardware, gpus=cards), 10 * GIB, quick=True))
    assert [gpu.memory_bytes for gpu in seen[0].gpus] == [2 * GIB, 24 * GIB]
    assert seen[0].sockets[0].memory_bytes == int(0.9 * 10 * GIB)


def test_rows_differ_and_are_long_enough() -> None:
    rows = [json.loads(line) for line in long_rows(5, 1000).splitlines()]
    assert len({row["completion"] for row in rows}) == 5
    assert all(len(row["completion"]) >= 1000 for row in rows)
