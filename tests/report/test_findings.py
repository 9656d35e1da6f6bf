"""What is remarked on in a run's figures."""

from __future__ import annotations

import json

import pytest

from kt_ray.report.findings import findings
from kt_ray.runs.rundata import read_run


def rewrite(path, change) -> None:
    """Applies `change` to every record of metrics.jsonl."""
    file = path / "metrics.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(change(r) or r) + "\n" for r in records))


def test_a_healthy_run_has_no_remarks(tmp_path, make_run):
    path = make_run(tmp_path, "a")
    assert findings(read_run(path)) == []
    (path / "metrics.jsonl").unlink()
    assert findings(read_run(path)) == []  # it has only begun


@pytest.mark.parametrize(
    ("change", "level", "text"),
    [
        (lambda r: r | {"loss": None} if r["step"] == 7 else None, "bad", "not finite at step 7"),
        (
            lambda r: r | {"eval_loss": None} if "eval_loss" in r and r["step"] > 40 else None,
            "bad",
            "held-out loss is not finite at step 50",
        ),
        (
            lambda r: r | {"eval_reward": None} if r["step"] == 20 else None,
            "bad",
            "No held-out answer got a reward at step 20",
        ),
        (
            lambda r: {"step": 7, "skipped": 1, "loss": None, "grad_norm": 1e9} if r["step"] == 7 else None,
            "look",
            "1 of 60 steps was skipped, the first at step 7",
        ),
        (
            lambda r: r | {"skipped": 1, "loss": 9e9} if r["step"] % 2 and "loss" in r else None,
            "bad",
            "30 of 60 steps were skipped",
        ),
        (lambda r: r | {"loss": 3.0 + r["step"] / 100}, "bad", "did not fall"),
        (
            lambda r: r | {"eval_loss": 2 + abs(r["step"] - 20) / 50} if "eval_loss" in r else None,
            "look",
            "overfits",
        ),
        (
            lambda r: r | {"grad_norm": 40.0} if r["step"] == 9 else None,
            "look",
            "spiked 1 time (up to 40 at step 9",
        ),
        (lambda r: r | {"expert_load_imbalance": 7.0}, "look", "7.0 times the mean"),
        (lambda r: r | {"actor_load_imbalance": 1.6}, "look", "rule.experts.placement=balanced"),
        (lambda r: r | {"seconds_transport": 1.2}, "look", "waits 75% of the time while no experts compute"),
        (lambda r: {k: 0.1 if k.startswith("busy") else v for k, v in r.items()}, "look", "more than 10%"),
        (lambda r: r | {"loss_tokens": 20}, "look", "1.0% of the tokens"),
        (
            lambda r: r | {"recoveries": 2, "seconds_lost": 31.0},
            "look",
            "2 lost actors were brought back, 31 s",
        ),
    ],
)
def test_remarks(tmp_path, make_run, change, level, text):
    path = make_run(tmp_path, "a")
    rewrite(path, change)
    (found,) = findings(read_run(path))
    assert found.level == level and text in found.text


def test_sampling_is_not_taken_for_idle_actors(tmp_path, make_run):
    """Busy shares and terms count the training passes, `seconds` the sampling, too."""
    path = make_run(tmp_path, "a")
    share = {"busy_worker-0": 0.062, "busy_experts-0": 0.055, "busy_experts-1": 0.052}
    rewards = {"policy_reward": 1.0, "policy_seconds_sampling": 14.4}
    rewrite(path, lambda r: r | share | rewards | {"seconds": 16.0} if "seconds" in r else None)
    assert findings(read_run(path)) == []
    rewrite(path, lambda r: r | {"seconds_transport": 1.2} if "seconds" in r else None)
    (found,) = findings(read_run(path))
    assert "waits 75%" in found.text
