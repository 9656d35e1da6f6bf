"""What is read from a run directory."""

from __future__ import annotations

import json

import pytest

from kt_ray.config.schema import TrainerConfig
from kt_ray.errors import UserError
from kt_ray.runs.rundata import read_run


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


def test_skipped_steps_and_steps_of_another_run_are_not_averaged(tmp_path, make_run):
    path = make_run(tmp_path, "a", steps=12, eval_every=0)
    file = path / "metrics.jsonl"
    lines = file.read_text().splitlines()[4:]  # it began at another run's checkpoint
    lines[-1] = '{"step": 12, "skipped": 1, "loss": 9e9, "grad_norm": null}'
    file.write_text("\n".join(lines) + "\n")
    run = read_run(path)
    figures = run.figures()
    assert run.steps == figures["steps"] == 12 and figures["skipped"] == 1
    assert figures["seconds_per_step"] == pytest.approx(1.6) and figures["loss"] < 6


def test_recoveries_of_all_processes_add_up(tmp_path, make_run):
    path = make_run(tmp_path, "a", steps=9, eval_every=0)
    file = path / "metrics.jsonl"
    seen = {2: (1, 5.0), 3: (3, 9.0), 6: (1, 2.0), 7: (1, 2.0), 8: (1, 1.0), 9: (1, 1.0)}  # three processes
    records = [json.loads(line) for line in file.read_text().splitlines()]
    for record in records:
        if record["step"] in seen:
            record["recoveries"], record["seconds_lost"] = seen[record["step"]]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    figures = read_run(path).figures()
    assert figures["recoveries"] == 5 and figures["seconds_lost"] == 12.0


def test_memory_that_is_no_number_is_left_out(tmp_path, make_run):
    path = make_run(tmp_path, "a", steps=1, eval_every=0)
    odd = '{"step": 1, "loss": 1.0, "host_rss_bytes_driver": NaN, "host_rss_bytes_worker": 5, '
    (path / "metrics.jsonl").write_text(
        odd + '"host_rss_bytes_expert": "x", "gpu_memory_bytes_cuda0": Infinity}'
    )
    figures = read_run(path).figures()
    assert figures["host_bytes"] == 5 and "gpu_bytes" not in figures


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
    assert run.records == [] and run.figures() == {} and run.environment == {}


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
