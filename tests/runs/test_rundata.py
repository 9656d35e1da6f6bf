"""What is read from a run directory, and what is remarked on."""

from __future__ import annotations

import json

import pytest

from kt_ray.config.schema import TrainerConfig
from kt_ray.errors import UserError
from kt_ray.report.findings import findings
from kt_ray.runs.rundata import read_run


def rewrite(path, change) -> None:
    """Applies `change` to every record of metrics.jsonl."""
    file = path / "metrics.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(change(r) or r) + "\n" for r in records))


def test_figures_of_a_run(tmp_path, make_run):
    run = read_run(make_run(tmp_path, "a", steps=60))
    figures = run.figures()
    assert run.steps == figures["steps"] == 60
    loss = [r["loss"] for r in run.records if "loss" in r]
    assert figures["first_loss"] == loss[0] and figures["loss"] == pytest.approx(sum(loss[-10:]) / 10)
    assert figures["eval_loss_before"] == 5.25 and figures["eval_loss"] == figures["eval_loss_best"]
    assert figures["seconds"] == pytest.approx(4.0 + 59 * 1.6)
    tokens = [r["tokens"] for r in run.records if "tokens" in r]
    assert figures["tokens"] == sum(tokens)
    assert figures["tokens_per_s"] == pytest.approx(sum(tokens[1:]) / (59 * 1.6))  # not the slow first step
    assert figures["host_bytes"] == 8e8 + 1.1e9 + 2.6e9 and "gpu_bytes" not in figures


def test_changed_settings_are_those_off_their_default(tmp_path, make_run):
    changed = read_run(
        make_run(tmp_path, "a", rank=16, trainer=TrainerConfig(max_steps=60))
    ).changed_settings()
    assert (
        changed["lora.rank"] == 16 and changed["trainer.max_steps"] == 60 and changed["model.name"] == "demo"
    )
    assert "optim.betas" not in changed and "trainer.batch_size" not in changed


def test_the_newest_complete_checkpoint_tells_the_load(tmp_path, make_run):
    path = make_run(tmp_path, "a", steps=60, layers=2, experts=4)
    torn = path / "checkpoints" / "step_000070"
    torn.mkdir()
    (torn / "expert_load.json").write_text('{"slots": {"1": [9, 9, 9, 9]}}')  # no manifest: incomplete
    run = read_run(path)
    assert run.load_step == 60 and list(run.load) == [1, 2] and run.load[1] == [13, 20, 27, 11]


def test_a_run_that_has_only_begun_is_read(tmp_path, make_run):
    path = make_run(tmp_path, "a")
    for name in ("metrics.jsonl", "env.json"):
        (path / name).unlink()
    run = read_run(path)
    assert run.records == [] and run.figures() == {} and run.environment == {} and findings(run) == []


@pytest.mark.parametrize("name", ["config.yaml", "env.json", "eval.json"])
def test_damaged_files_are_named(tmp_path, make_run, name):
    path = make_run(tmp_path, "a")
    (path / name).write_text("{" if name.endswith("json") else "- 1")
    with pytest.raises(UserError, match=name):
        read_run(path)


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no config\.yaml"):
        read_run(tmp_path)
    with pytest.raises(UserError, match="no such directory"):
        read_run(tmp_path / "x")


def test_a_healthy_run_has_no_remarks(tmp_path, make_run):
    assert findings(read_run(make_run(tmp_path, "a"))) == []


@pytest.mark.parametrize(
    ("change", "level", "text"),
    [
        (lambda r: r | {"loss": None} if r["step"] == 7 else None, "bad", "not finite at step 7"),
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
        (lambda r: r | {"seconds_transport": 1.2}, "look", "waits 75%"),
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
