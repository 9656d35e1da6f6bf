"""What a run will write is known before it begins."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from kt_ray import cli
from kt_ray.modes.plan import model_dims
from kt_ray.placement.memory import checkpoint_bytes
from kt_ray.runs.disk_room import DiskNeed, disk_need, shortage
from kt_ray.runs.rundir import place_to_write
from tests.helpers.composing import compose


@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_a_checkpoint_and_an_adapter_are_as_large_as_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optim: str
) -> None:
    asked: list[tuple[int, Path]] = []
    monkeypatch.setattr("kt_ray.runs.saving.check_next", lambda *room: asked.append(room))
    settings = [
        *("cluster=local", "data.limit=8", "trainer.batch_size=4", "trainer.max_steps=1"),
        *("eval.after_training=0", "trainer.eval_every=0", "tracking.plot=false"),
        *(f"run.root={tmp_path}", "run.name=a", f"optim.name={optim}"),
    ]
    assert cli.main(settings) == 0
    config = compose(settings)
    need = disk_need(model_dims(config.model), config, 1, 1.0)
    written = sum(f.stat().st_size for f in (tmp_path / "a/checkpoints/step_000001").glob("*.safetensors"))
    adapter = (tmp_path / "a/adapter/adapter_model.safetensors").stat().st_size
    # Headers are what is left: 100 to 200 bytes per tensor.
    assert 0 <= written - need.checkpoint < 0.2 * need.checkpoint
    assert 0 <= adapter - need.adapter < 0.3 * need.adapter
    assert need.checkpoint == checkpoint_bytes(model_dims(config.model), config)
    assert {(size, place.name) for size, place in asked} == {
        (need.checkpoint, "checkpoints")
    }  # may be a link


@pytest.mark.parametrize(
    ("settings", "steps", "seconds", "at_once"),
    [
        ({}, 100, 1.0, 1),  # 100 s: only the one at the end
        ({}, 100, 60.0, 3),  # every 30 minutes of 100: two that are kept, one being written
        ({"save_every": "1h"}, 100, 60.0, 2),
        ({"save_every": 10}, 100, 0.1, 3),
        ({"save_every": 0}, 100, 3600.0, 1),
        ({"save_every": 10, "keep_checkpoints": 0}, 100, 0.1, 10),
        ({"save_every": 10, "keep_checkpoints": 4}, 35, 0.1, 4),
        ({"save_every": 10, "save_best": True, "eval_every": 5}, 100, 0.1, 4),
        ({"save_every": "1epoch"}, 100, 0.1, 2),  # of 50 steps
        ({"save_every": "0.25epoch"}, 100, 0.1, 3),
        ({"save_every": 0, "save_best": True, "eval_every": "1epoch"}, 60, 0.1, 2),
        ({"save_every": 10}, None, 0.1, 3),  # an unknown number of steps
        ({"save_every": 10, "keep_checkpoints": 0}, None, 0.1, 1),
    ],
)
def test_checkpoints_at_once(
    settings: dict[str, Any], steps: int | None, seconds: float, at_once: int
) -> None:
    config = compose([f"trainer.{key}={value}" for key, value in settings.items()])
    assert disk_need(model_dims(config.model), config, steps, seconds, 50).checkpoints == at_once


def test_mode_plan_says_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main(["mode=plan", "plan.rates=nominal"]) == 0
    assert "disk       5.2 MB: a checkpoint of 3.9 MB, the adapter 1.3 MB" in capsys.readouterr().out
    monkeypatch.setattr("kt_ray.runs.disk_room.free_bytes", lambda _: 10**6)
    assert cli.main(["mode=plan", "plan.rates=nominal"]) == 0
    assert "note: the disk has no room for this run's checkpoints" in capsys.readouterr().out
    assert cli.main(["mode=plan", "plan.hardware=laptop_16gb"]) == 0  # another machine's disk
    assert "no room" not in capsys.readouterr().out


def test_a_plan_knows_how_many_checkpoints_an_epoch_brings(capsys: pytest.CaptureFixture[str]) -> None:
    every = ["trainer.epochs=3", "trainer.save_every=1epoch", "trainer.keep_checkpoints=0"]
    assert cli.main(["mode=plan", "plan.rates=nominal", *every]) == 0
    assert "3 checkpoints at once of 3.9 MB each" in capsys.readouterr().out


def test_a_plan_of_a_run_that_goes_on_counts_what_is_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kt_ray.runs.plan_time.resumed_step", lambda config: 270)
    every = ["trainer.max_steps=300", "trainer.save_every=30", "trainer.keep_checkpoints=0"]
    assert cli.main(["mode=plan", "plan.rates=nominal", *every]) == 0
    text = capsys.readouterr().out
    assert "disk       5.2 MB: a checkpoint of 3.9 MB" in text
    assert "for 30 of 300 steps (trainer.max_steps)" in text
    assert cli.main(["mode=plan", "plan.rates=nominal", "trainer.epochs=10"]) == 0
    assert "10 epochs of 275 rows: 350 steps, 80 of them left; shorter" in capsys.readouterr().out


def test_a_plan_of_grpo_counts_the_checkpoints_of_its_sampling(capsys: pytest.CaptureFixture[str]) -> None:
    """Steps of 1.2 s and 5.8 s of sampling each: several checkpoints of 15 s, not one."""
    grpo = ["trainer.stage=grpo", "reward=numeric", "grpo.group_size=4", "trainer.batch_size=8"]
    grpo += ["data.max_length=512", "generate.max_new_tokens=256", "eval.after_training=0"]
    plan = ["mode=plan", "plan.rates=nominal", "trainer.max_steps=10", "trainer.save_every=15s"]
    assert cli.main([*plan, *grpo]) == 0
    assert "3 checkpoints at once of 3.9 MB each" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "place", "reused"),
    [
        ([], "", 0),
        (["run.name=a"], "a", 0),
        (["run.name=a", "run.overwrite=true"], "a", 360),
        (["run.name=a", "trainer.resume=latest"], "a", 360),
        (["trainer.resume={root}/a/checkpoints/step_000002"], "a", 360),
        (["trainer.resume={root}/a/checkpoints/step_000001"], "a", 60),  # the later one is set aside
        (["run.name=a", "trainer.resume=latest", "trainer.keep_checkpoints=0"], "a", 57),  # all stay
        (["run.name=b", "trainer.resume={root}/a/checkpoints/step_000002"], "b", 0),
    ],
)
def test_the_disk_and_the_room_are_those_of_the_directory_that_is_written(
    tmp_path: Path, settings: list[str], place: str, reused: int
) -> None:
    checkpoint = tmp_path / "a" / "checkpoints" / "step_000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_bytes(b" " * 100)
    (checkpoint / "worker-0.safetensors").write_bytes(b" " * 200)
    earlier = checkpoint.with_name("step_000001")
    earlier.mkdir()
    (earlier / "manifest.json").write_bytes(b" " * 3)
    left = checkpoint.with_name(".step_000003.partial")  # by a driver that died
    left.mkdir()
    (left / "worker-0.safetensors").write_bytes(b" " * 50)
    (tmp_path / "a" / "adapter").mkdir()
    (tmp_path / "a" / "adapter" / ".adapter_model.safetensors.partial").write_bytes(b" " * 7)
    (tmp_path / "a" / "config.yaml").write_text("seed: 1")
    config = compose([f"run.root={tmp_path}", *(s.format(root=tmp_path) for s in settings)])
    assert place_to_write(config) == (tmp_path / place, reused)


def test_checkpoints_on_another_disk_need_its_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose disk is full goes on where its checkpoints were moved and linked to."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        if os.stat(other).st_dev == os.stat(tmp_path).st_dev:
            pytest.skip("both are on one disk")
        (tmp_path / "checkpoints").symlink_to(other)
        free = {"checkpoints": 4_000_000, tmp_path.name: 5_000}
        monkeypatch.setattr("kt_ray.runs.disk_room.free_bytes", lambda path: free[path.name])
        need = DiskNeed(checkpoint=1_000_000, checkpoints=3, adapter=4_000)
        assert shortage(need, tmp_path, 0) is None
        for fault, where, what in (
            (dataclasses.replace(need, adapter=6_000), tmp_path, "the adapter"),
            (dataclasses.replace(need, checkpoints=5), tmp_path / "checkpoints", "5 checkpoints"),
        ):
            found = shortage(fault, tmp_path, 0)
            assert found is not None and found.where == str(where) and what in str(found.required)
