"""What a resumed run takes over of the plan before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kt_ray.config.mapping import with_keys
from kt_ray.placement.lane_share import NOTHING
from kt_ray.placement.plan import make_plan
from kt_ray.placement.render import plan_to_dict
from kt_ray.runs import known_load
from kt_ray.timing.choose import choice_of, with_choice
from tests.placement.configs import make_config, make_hardware, small_dims


@pytest.mark.parametrize("activations", ["group", "micro_batch", "host"])
def test_the_choice_of_the_plan_before(
    tmp_path: Path, activations: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resident = 2 if activations == "host" else "auto"
    held = {"activations": activations, "resident_layers": resident}
    rule = {**held, "groups": 3, "experts": {"activations": "recompute"}}
    plan = make_plan(small_dims(), make_config(rule=rule, trainer={"batch_size": 6}), make_hardware())
    (tmp_path / "plan.json").write_text(json.dumps(plan_to_dict(plan)))
    checkpoint = tmp_path / "checkpoints" / "step_000001"
    monkeypatch.setattr(known_load, "checkpoint_to_resume", lambda config: checkpoint)
    assert known_load.resumed_choice(make_config()) == choice_of(plan)._replace(tuning=NOTHING)
    assert choice_of(plan)[2:5] == (3, 6, "recompute") and choice_of(plan).attention == activations
    assert choice_of(plan).resident == (2 if activations == "host" else None)


def test_plans_of_earlier_versions_and_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plan = plan_to_dict(make_plan(small_dims(), make_config(), make_hardware()))
    del plan["activations"], plan["resident"], plan["micro_batch_tokens"], plan["micro_batch_rows"]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    checkpoint = tmp_path / "checkpoints" / "step_000001"
    monkeypatch.setattr(known_load, "checkpoint_to_resume", lambda config: checkpoint)
    choice = known_load.resumed_choice(make_config())
    assert choice is not None and choice.attention == "group" and choice.resident is None
    assert (choice.micro_batch_rows, choice.micro_batch_tokens) == (0, None)
    keys = {"trainer.micro_batch_size": "auto", "data.max_length": 100, "trainer.batch_size": 20}
    auto = with_keys(make_config(), keys | {"data.pad_to_multiple_of": 64})
    packed = known_load.resumed_choice(auto)
    assert packed is not None and (packed.micro_batch_rows, packed.micro_batch_tokens) == (5, 5 * 128)
    assert auto.micro_batch_rows(1) == 4  # padding counts now: what is resumed keeps its rows
    again = with_choice(auto, packed)
    assert (again.micro_batch_rows(1), again.micro_batch_tokens(1)) == (5, 5 * 128)
    (tmp_path / "plan.json").write_text("{}")
    assert known_load.resumed_choice(make_config()) is None and "plan.json is no plan" in caplog.text
    (tmp_path / "plan.json").unlink()
    assert known_load.resumed_choice(make_config()) is None and "plan.json is not there" in caplog.text


def test_whether_experts_were_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run without streamed experts goes on without, whatever is the default now."""
    monkeypatch.setattr(
        known_load, "checkpoint_to_resume", lambda config: tmp_path / "checkpoints" / "step_1"
    )
    for stream_to in ("actors", "workers"):
        experts = {"stream": 0.5, "stream_to": stream_to, "lane_device": "cpu"}
        config = make_config(rule={"device": "cpu", "experts": experts})
        plan = make_plan(small_dims(), config, make_hardware())
        assert plan.streams and plan.stream_to == stream_to
        (tmp_path / "plan.json").write_text(json.dumps(plan_to_dict(plan)))
        assert known_load.resumed_choice(make_config()) == choice_of(plan)
