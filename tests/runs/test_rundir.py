"""The rules of the run directory: names, what is never overwritten, and which run a resume continues."""

from __future__ import annotations

import dataclasses
import datetime
import errno
import json
import os
import time
from pathlib import Path

import pytest
import yaml

from kt_ray.config.mapping import with_keys
from kt_ray.errors import UserError
from kt_ray.runs.environment import environment
from kt_ray.runs.rundir import RunDir as Directory
from kt_ray.runs.rundir import dated_as_before, find_checkpoints, plain, refuse_taken


class RunDir(Directory):
    """Of a run that has ended."""

    @classmethod
    def create(cls, *arguments):
        run = Directory.create(*arguments)
        run.close()
        return run


def test_a_root_that_cannot_be_looked_at_is_refused_by_its_key(tmp_path, make_config):
    with pytest.raises(UserError, match=r"cannot be written.*File name too long.*set run\.root"):
        RunDir.create(make_config(tmp_path / ("x" * 300)))


def test_a_directory_that_cannot_be_written_is_refused_before_anything_is_read(
    tmp_path, make_config, monkeypatch
):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot be written.*file is no directory.*set run\.root"):
        refuse_taken(make_config(tmp_path / "file" / "runs"))
    refuse_taken(make_config(tmp_path / "new" / "runs"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # which root may always
    with pytest.raises(UserError, match=rf"cannot be written; at {tmp_path}/new.* {tmp_path} may not be"):
        refuse_taken(make_config(tmp_path / "new", name="a"))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("resume", ["checkpoint", "latest"])
def test_a_run_that_goes_on_in_its_own_directory_writes_no_root(
    tmp_path, make_config, add_checkpoint, monkeypatch, resume
):
    """A working directory that may only be read is none of its business."""
    run = RunDir.create(make_config(tmp_path / "runs", name="a"))
    checkpoint = add_checkpoint(run.path, 3)
    root = tmp_path / "runs" if resume == "latest" else tmp_path / "mine"
    resume = str(checkpoint) if resume == "checkpoint" else resume
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).is_relative_to(run.path))
    refuse_taken(make_config(root, resume=resume))
    with pytest.raises(UserError, match=r"cannot be written.*/b; found"):
        refuse_taken(make_config(root, name="b", resume=str(checkpoint)))


def test_default_names_are_unique_and_absolute(tmp_path, make_config, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = make_config(Path("runs"), model="my org/model")
    runs = [RunDir.create(config) for _ in range(3)]
    assert len({run.path for run in runs}) == 3
    for run in runs:
        assert run.path.is_absolute() and run.path.parent == tmp_path / "runs"
        assert run.path.name.startswith("my-org-model-20")
        assert not run.continued and run.checkpoint is None


def test_config_yaml_is_the_resolved_configuration(tmp_path, make_config):
    config = make_config(tmp_path, name="a")
    run = RunDir.create(config)
    loaded = yaml.safe_load((run.path / "config.yaml").read_text())
    assert loaded == json.loads(json.dumps(plain(config)))
    assert loaded["optim"]["betas"] == [0.9, 0.999] and loaded["run"]["name"] == "a"


@pytest.mark.parametrize("figures", ["", '{"step": 0, "eval_loss": 2.5}\n', '{"step": 0}\n{"step": 1, "lo'])
def test_a_run_that_ended_before_its_first_step_may_be_started_again(tmp_path, make_config, figures):
    """As it says where a signal came in the first step, after the evaluation of the untrained model."""
    run = RunDir.create(make_config(tmp_path, name="a"))
    (run.path / "metrics.jsonl").write_text(figures)
    again = RunDir.create(make_config(tmp_path, name="a"))
    assert again.path == run.path and not (run.path / "metrics.jsonl").exists()


@pytest.mark.parametrize("begun", [False, True])
def test_what_a_killed_process_left_half_written_is_in_nobodys_way(tmp_path, make_config, begun):
    if begun:
        RunDir.create(make_config(tmp_path, name="a")).close()
    half = [tmp_path / "a" / f".{name}.7.partial" for name in ("config.yaml", "env.json")[: 1 + begun]]
    half[0].parent.mkdir(exist_ok=True)
    for file in half:
        file.write_text("mode: tr")
    run = RunDir.create(make_config(tmp_path, name="a"))
    assert {path.name for path in run.path.iterdir()} == {"config.yaml", ".lock"}


def test_a_file_system_that_renames_no_directories_is_refused_before_the_first_step(
    tmp_path, make_config, monkeypatch
):
    def refused(path: Path, target: Path) -> Path:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(path))

    config = make_config(tmp_path, name="a")
    with (
        monkeypatch.context() as patch,
        pytest.raises(UserError, match=r"rename directories.*set run\.root"),
    ):
        patch.setattr(Path, "rename", refused)
        RunDir.create(config)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [".lock", "config.yaml"]
    (tmp_path / "a" / ".directory").touch()  # which file managers write
    RunDir.create(config)  # the lock was let go
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [".directory", ".lock", "config.yaml"]


@pytest.mark.parametrize("remains", ["metrics.jsonl", "checkpoints", "adapter"])
def test_an_existing_run_is_refused_and_overwritten_only_on_request(tmp_path, make_config, remains):
    run = RunDir.create(make_config(tmp_path, name="a  b"))
    if remains == "metrics.jsonl":
        (run.path / "metrics.jsonl").write_text('{"step": 1}\n')
    else:
        (run.path / remains).mkdir()
    (run.path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="already holds a run") as caught:
        RunDir.create(make_config(tmp_path, name="a  b"))
    assert (
        "run.overwrite=true" in caught.value.remedy and f"at {tmp_path / 'a  b'}. To" in caught.value.line()
    )
    assert (run.path / remains).exists()

    again = RunDir.create(make_config(tmp_path, name="a  b", overwrite=True))
    assert again.path == run.path
    assert sorted(p.name for p in run.path.iterdir()) == [".lock", "config.yaml", "notes.txt"]


@pytest.mark.parametrize(
    ("key", "inside", "refused"),
    [
        ("lora.adapter", "", True),
        ("lora.adapter", "adapter", True),
        ("rule.experts.load", "checkpoints/step_000001", True),
        ("model.chat_template", "adapter/chat_template.jinja", True),
        ("data.path", "rollouts.jsonl", True),
        ("data.path", "", True),
        ("model.tokenizer", "adapter", True),
        ("data.sources", "rollouts.jsonl", True),
        ("data.eval_path", "notes.txt", False),
        ("lora.adapter", "../b", False),
    ],
)
def test_overwrite_does_not_delete_what_the_new_run_reads(tmp_path, make_config, key, inside, refused):
    run = RunDir.create(make_config(tmp_path, name="a"))
    (run.path / "adapter").mkdir()
    (run.path / "link").symlink_to(run.path)
    given: object = str(run.path / "link" / inside).rstrip("/")
    config = with_keys(
        make_config(tmp_path, name="a", overwrite=True),
        {key: [{"path": given}] if key == "data.sources" else given},
    )
    if not refused:
        RunDir.create(config)
        return
    with pytest.raises(UserError, match=rf"would delete what the run is to read.*{key}="):
        RunDir.create(config)
    assert (run.path / "adapter").is_dir()


def test_overwrite_never_touches_a_directory_that_is_no_run(tmp_path, make_config):
    (tmp_path / "thesis" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match="holds other files"):
        RunDir.create(make_config(tmp_path, name="thesis", overwrite=True))
    assert (tmp_path / "thesis" / "checkpoints").exists()


def test_overwrite_removes_a_link_and_not_what_it_points_to(tmp_path, make_config):
    elsewhere = tmp_path / "big_disk"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("x")
    run = RunDir.create(make_config(tmp_path / "runs", name="a"))
    (run.path / "checkpoints").symlink_to(elsewhere)
    RunDir.create(make_config(tmp_path / "runs", name="a", overwrite=True))
    assert not (run.path / "checkpoints").exists() and (elsewhere / "precious").exists()


@pytest.mark.parametrize("name", [None, "a"])
@pytest.mark.parametrize("resume", [None, "latest"])
def test_a_root_that_is_a_file(tmp_path, make_config, name, resume):
    (tmp_path / "runs").write_text("no directory")
    with pytest.raises(UserError) as caught:
        RunDir.create(make_config(tmp_path / "runs", name=name, resume=resume))
    assert caught.value.remedy


def test_resume_latest_by_name_takes_the_newest_complete_checkpoint(tmp_path, make_config, add_checkpoint):
    run = RunDir.create(make_config(tmp_path, name="a"))
    for step in (9, 100):
        add_checkpoint(run.path, step)
    add_checkpoint(run.path, 200, complete=False)
    resumed = RunDir.create(make_config(tmp_path, name="a", resume="latest"))
    assert resumed.path == run.path and resumed.continued
    assert resumed.checkpoint == run.checkpoints / "step_000100"
    assert [c.name for c in find_checkpoints(run.path)] == ["step_000009", "step_000100"]


def test_a_run_goes_on_with_its_date(tmp_path, make_config, add_checkpoint):
    fresh = make_config(tmp_path, name="a")
    assert dated_as_before(fresh).data.date == datetime.date.today().isoformat()
    config = dataclasses.replace(fresh, data=dataclasses.replace(fresh.data, date="2024-02-03"))
    add_checkpoint(RunDir.create(dated_as_before(config)).path, 9)
    assert dated_as_before(make_config(tmp_path, name="a", resume="latest")).data.date == "2024-02-03"


@pytest.mark.parametrize("exists", [False, True])
def test_resume_latest_by_name_without_a_checkpoint(tmp_path, make_config, add_checkpoint, exists):
    if exists:
        run = RunDir.create(make_config(tmp_path, name="a"))
        add_checkpoint(run.path, 5, complete=False)
    with pytest.raises(UserError, match="nothing to resume"):
        RunDir.create(make_config(tmp_path, name="a", resume="latest"))
    assert (tmp_path / "a").exists() == exists


def test_resume_latest_without_a_name_takes_the_newest_run_of_this_model(
    tmp_path, make_config, add_checkpoint
):
    now = time.time()
    for age, name, model in ((30, "old", "demo"), (20, "new", "demo"), (10, "other", "mixtral")):
        run = RunDir.create(make_config(tmp_path, name=name, model=model))
        manifest = add_checkpoint(run.path, 7) / "manifest.json"
        os.utime(manifest, (now - age, now - age))
    RunDir.create(make_config(tmp_path, name="unsaved"))
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "config.yaml").write_text("- just\n- a list\n")
    add_checkpoint(tmp_path / "foreign", 1)

    resumed = RunDir.create(make_config(tmp_path, resume="latest"))
    assert resumed.path == tmp_path / "new" and resumed.continued

    with pytest.raises(UserError, match="'qwen' has a checkpoint"):
        RunDir.create(make_config(tmp_path, model="qwen", resume="latest"))


def test_resume_from_a_checkpoint_directory(tmp_path, make_config, add_checkpoint):
    run = RunDir.create(make_config(tmp_path, name="a"))
    checkpoint = add_checkpoint(run.path, 3)
    (run.checkpoints / "latest").symlink_to("step_000003")

    continued = RunDir.create(make_config(tmp_path, resume=str(run.checkpoints / "latest")))
    assert continued.path == run.path and continued.checkpoint == checkpoint and continued.continued

    branched = RunDir.create(make_config(tmp_path, name="b", resume=str(checkpoint)))
    assert branched.path == tmp_path / "b" and branched.checkpoint == checkpoint and not branched.continued

    for missing in (tmp_path / "nowhere", add_checkpoint(run.path, 4, complete=False)):
        with pytest.raises(UserError, match="no complete checkpoint"):
            RunDir.create(make_config(tmp_path, resume=str(missing)))

    # What the run left when it went back goes on elsewhere: two walks would mix in one directory.
    left = checkpoint.rename(checkpoint.with_name("superseded_step_000003_2"))
    for name in ("a", None):
        with pytest.raises(UserError, match=r"add run\.name=NEW"):
            RunDir.create(make_config(tmp_path, name=name, resume=str(left)))
    assert RunDir.create(make_config(tmp_path, name="c", resume=str(left))).checkpoint == left


@pytest.mark.parametrize("named", ["latest", "step_000003"])
def test_checkpoints_on_another_disk_belong_to_their_run(tmp_path, make_config, add_checkpoint, named):
    run = RunDir.create(make_config(tmp_path, name="a"))
    add_checkpoint(run.path, 3)
    (run.checkpoints / "latest").symlink_to("step_000003")
    disk = run.checkpoints.rename(tmp_path / "disk")
    run.checkpoints.symlink_to(disk)
    for name in ("a", None):
        resumed = RunDir.create(make_config(tmp_path, name=name, resume=str(run.checkpoints / named)))
        assert resumed.continued and resumed.checkpoint == run.checkpoints / "step_000003"
    # A link from elsewhere names the run that it points into.
    (tmp_path / "step_000003").symlink_to(run.checkpoints / "step_000003")
    run.checkpoints.unlink()
    disk.rename(run.checkpoints)
    linked = RunDir.create(make_config(tmp_path, resume=str(tmp_path / "step_000003")))
    assert linked.continued and linked.path == run.path


def test_plan_and_env(tmp_path, make_config):
    run = RunDir.create(make_config(tmp_path, name="a"))
    run.write_plan({"layers": (0, 4), "where": Path("/x")})
    assert json.loads((run.path / "plan.json").read_text()) == {"layers": [0, 4], "where": "/x"}
    run.write_env(environment())
    env = json.loads((run.path / "env.json").read_text())
    assert env["pid"] == os.getpid() and env["memory_bytes"] > 0 and env["cpu"]
    assert env["packages"]["torch"] and env["packages"]["ray"] and env["python"].startswith("3.")


def test_a_full_disk_costs_notes_and_not_the_run(tmp_path, make_config, monkeypatch, caplog):
    run = RunDir.create(make_config(tmp_path, name="a"))

    def full(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kt_ray.runs.rundir.write_atomic", full)
    run.write_plan({"a": 1})
    run.write_env({"b": 2})
    assert caplog.text.count("cannot be written: [Errno 28]") == 2
