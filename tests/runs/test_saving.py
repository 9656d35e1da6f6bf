"""Saving and resuming a run: full disks, torn checkpoints, and what is never lost."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kt_ray import cli, supervisor
from kt_ray.checkpoint import training
from kt_ray.checkpoint.housekeeping import mark_best
from kt_ray.checkpoint.training import begin_checkpoint
from kt_ray.config.schema import Config
from kt_ray.disk import write_atomic
from kt_ray.errors import UserError
from kt_ray.runs import disk_room, prepare, saving
from kt_ray.runs.rundir import RunDir
from kt_ray.runs.saving import intact_checkpoint
from kt_ray.train import trainer
from kt_ray.train.cluster_protocol import ActorLost
from tests.checkpoint.test_training import save
from tests.helpers.composing import compose
from tests.helpers.exhaustive import spread

RUN = [
    "cluster=local",
    "data.limit=20",
    "trainer.batch_size=4",
    "trainer.eval_every=0",
    "eval.after_training=0",
    "trainer.max_steps=3",
    "trainer.save_every=1",
    "tracking.plot=false",
]


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """runs/ is in the working directory."""
    monkeypatch.chdir(tmp_path)


def full_at(step: int, file: str, patch: pytest.MonkeyPatch) -> None:
    """A checkpoint's file lands on a full disk: the kernel's own ENOSPC."""

    def begin(root: Path, at: int) -> Path:
        path = begin_checkpoint(root, at)
        if at == step and file.endswith(".json"):
            for module in (saving, training):
                patch.setattr(module, "write_atomic", write)
        elif at == step:
            (path / file).symlink_to("/dev/full")
        return path

    def write(path: Path, text: str) -> None:
        if path.name == file:
            Path("/dev/full").write_text(text)
        write_atomic(path, text)

    patch.setattr(saving, "begin_checkpoint", begin)


def curve(run: Path) -> list[tuple[Any, ...]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [(r["step"], r["loss"], r["grad_norm"]) for r in map(json.loads, lines)]


def adapter(run: Path) -> bytes:
    return (run / "adapter" / "adapter_model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the same run with room on the disk."""
    root = tmp_path_factory.mktemp("undisturbed")
    assert cli.main([*RUN, "run.name=b", f"run.root={root}"]) == 0
    return root / "b"


@pytest.mark.parametrize(
    "file",
    spread(["experts-0.safetensors", "worker-0.safetensors", "manifest.json", "expert_load.json"], 2),
)
def test_a_disk_that_is_full_at_the_end_leaves_a_checkpoint_that_resumes(
    file: str, undisturbed: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    with monkeypatch.context() as patch:
        full_at(3, file, patch)
        assert cli.main([*RUN, "run.name=a"]) == 2
    error = capfd.readouterr().err
    assert error.count("checkpoint cannot be written") == 1 and "No space left on device" in error
    assert "free space" in error and error.rstrip().endswith("then continue: python launch.py resume=runs/a")
    assert "Traceback" not in error
    checkpoints = Path("runs/a/checkpoints")
    assert sorted(os.listdir(checkpoints)) == ["latest", "step_000001", "step_000002"]

    assert cli.main([*RUN, "run.name=a", "trainer.resume=latest"]) == 0
    assert curve(Path("runs/a")) == curve(undisturbed) and len(curve(undisturbed)) == 3
    assert adapter(Path("runs/a")) == adapter(undisturbed)


def test_a_disk_that_is_full_for_a_while_costs_nothing(
    undisturbed: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    full_at(1, "experts-0.safetensors", monkeypatch)
    monkeypatch.setattr(trainer, "SAVE_AGAIN", 0.0)
    assert cli.main([*RUN, "run.name=a"]) == 0
    told = capfd.readouterr()
    assert "Training goes on, the checkpoint is tried again" in told.out
    assert "No space left on device" in told.out and "Traceback" not in told.err
    assert sorted(os.listdir("runs/a/checkpoints")) == ["latest", "step_000002", "step_000003"]
    assert curve(Path("runs/a")) == curve(undisturbed)
    assert adapter(Path("runs/a")) == adapter(undisturbed)


def test_too_little_room_is_seen_before_a_byte_is_written(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """At the start for all checkpoints to come, and again before each."""
    capfd.readouterr()
    monkeypatch.setattr(disk_room, "free_bytes", lambda _: 10_000_000)
    assert cli.main([*RUN, "run.name=a"]) == 2
    error = capfd.readouterr().err
    assert "the disk has no room for this run's checkpoints" in error and "found 10.0 MB free" in error
    assert "3 checkpoints at once" in error and "set trainer.keep_checkpoints=1" in error
    assert not Path("runs").exists()

    free = iter([10**9, 10**6, 10**9])
    monkeypatch.setattr(disk_room, "free_bytes", lambda _: next(free))
    assert cli.main([*RUN, "run.name=a", "trainer.max_steps=2"]) == 0
    told = capfd.readouterr().out
    assert "checkpoint cannot be written" in told and "found 1.0 MB free" in told
    assert sorted(os.listdir("runs/a/checkpoints")) == ["latest", "step_000002"]


def test_the_last_checkpoint_waits_for_room(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """No longer than the steps took that would be lost."""
    free = itertools.chain([10**9, 10**9], itertools.repeat(10**6))  # the start, step 1, every try of step 2
    monkeypatch.setattr(disk_room, "free_bytes", lambda _: next(free))
    monkeypatch.setattr(trainer, "SAVE_AGAIN", 0.001)
    assert cli.main([*RUN, "run.name=a", "trainer.max_steps=2"]) == 2
    told = capfd.readouterr()
    assert told.out.count("checkpoint cannot be written") == 1 and "is tried again for 0 min" in told.out
    assert told.err.rstrip().endswith("then continue: python launch.py resume=runs/a")

    monkeypatch.setattr(trainer.Trainer, "_patience_ends", lambda *_: time.monotonic() + 600)
    free = iter([10**9, 10**9, 10**6, 10**6, 10**9])
    assert cli.main([*RUN, "run.name=b", "trainer.max_steps=2"]) == 0
    assert sorted(os.listdir("runs/b/checkpoints")) == ["latest", "step_000001", "step_000002"]


@pytest.mark.parametrize("room", [False, True])
def test_a_signal_ends_the_wait_for_room(
    room: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """...after another try."""
    tries: list[int] = []

    def free_bytes(place: Path) -> int:
        if not (place / "step_000001").exists():
            return 10**9
        tries.append(len(tries))
        if len(tries) == 1:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return 10**9 if room and len(tries) > 1 else 10**6

    monkeypatch.setattr(disk_room, "free_bytes", free_bytes)
    monkeypatch.setattr(trainer, "SAVE_AGAIN", 600.0)
    monkeypatch.setattr(trainer.Trainer, "_patience_ends", lambda *_: time.monotonic() + 600)
    assert cli.main([*RUN, "run.name=a", "trainer.max_steps=2"]) == (0 if room else 2)
    assert tries == [0, 1] and "SIGTERM: saving" in capfd.readouterr().err
    assert Path("runs/a/adapter").exists() == room


def test_what_a_dead_driver_was_writing_makes_room_for_the_next_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert cli.main([*RUN, "run.name=a", "trainer.max_steps=1"]) == 0
    checkpoints = Path("runs/a/checkpoints")
    left = checkpoints / ".step_000002.partial" / "experts-0.safetensors"
    left.parent.mkdir()
    left.touch()
    os.truncate(left, 10**9)
    monkeypatch.setattr(disk_room, "free_bytes", lambda _: 0 if left.exists() else 10**9)
    assert cli.main([*RUN, "run.name=a", "trainer.resume=latest", "trainer.max_steps=2"]) == 0
    assert sorted(os.listdir(checkpoints)) == ["latest", "step_000001", "step_000002"]


def test_a_signal_before_the_first_step_from_another_runs_checkpoint(
    undisturbed: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its state has been evaluated here, so the same command alone would be refused."""
    branch = [*RUN, "run.name=c", f"trainer.resume={undisturbed / 'checkpoints/step_000002'}"]
    branch.append("trainer.eval_every=2")
    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "step", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        assert cli.main(branch) == 75
    assert "again, with run.overwrite=true if run.name is set" in capfd.readouterr().err
    assert cli.main([*branch, "run.overwrite=true"]) == 0
    assert (Path("runs/c/adapter")).is_dir()


def test_a_full_disk_before_the_first_checkpoint(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    full_at(1, "experts-0.safetensors", monkeypatch)
    assert cli.main([*RUN, "run.name=a", "trainer.max_steps=1"]) == 2
    assert "then start the run again (it had no checkpoint yet" in capfd.readouterr().err


@pytest.mark.parametrize("file", ["experts-0.safetensors", "expert_load.json", "manifest.json"])
def test_latest_passes_a_torn_checkpoint_over(
    file: str, undisturbed: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert cli.main([*RUN, "run.name=a", "trainer.max_steps=2"]) == 0
    torn = Path("runs/a/checkpoints/step_000002") / file
    os.truncate(torn, torn.stat().st_size // 2)
    capfd.readouterr()
    assert cli.main([*RUN, "run.name=a", "trainer.resume=latest"]) == 0
    assert "the one before it is taken" in caplog.text
    assert "superseded_step_000002" in capfd.readouterr().out
    assert curve(Path("runs/a")) == curve(undisturbed)
    assert adapter(Path("runs/a")) == adapter(undisturbed)

    # Whoever names a checkpoint gets that one or none.
    os.truncate("runs/a/checkpoints/step_000003/manifest.json", 10)
    named = f"trainer.resume={Path('runs/a/checkpoints/step_000003').absolute()}"
    assert cli.main([*RUN, "run.name=a", named]) == 2
    assert "resume from the previous good checkpoint" in capfd.readouterr().err


def test_preference_checkpoints_of_versions_without_gamma_stay_valid() -> None:
    fields = saving._stage_fields(compose(["trainer.stage=dpo"]))
    assert "gamma" not in fields["preference"] and fields["preference"]["beta"] == 0.1
    simpo = saving._stage_fields(compose(["trainer.stage=dpo", "preference.loss=simpo"]))
    assert simpo["preference"]["gamma"] == 0.5


def test_patterns_in_another_order_are_another_adapter() -> None:
    """The first pattern that matches counts, so their order is a setting."""
    one, other = (
        compose([f"lora.rank_pattern={{{patterns}}}"]).lora
        for patterns in ("q_proj:4,proj:2", "proj:2,q_proj:4")
    )
    assert one.rank_pattern == other.rank_pattern  # as mappings compare
    assert saving.lora_fields(one) != saving.lora_fields(other)


def test_layers_in_another_order_are_the_same_adapter() -> None:
    one, other = (compose([f"lora.layers={layers}"]).lora for layers in ("[0,3]", "[3,0,3]"))
    assert saving.lora_fields(one) == saving.lora_fields(other)


def test_the_time_limit_counts_from_the_start_of_the_command_across_restarts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "began", time.monotonic() - 3601)
    assert cli.main([*RUN, "run.name=a", "trainer.max_hours=1"]) == 0
    assert len(curve(Path("runs/a"))) == 1
    # As another command does.
    monkeypatch.setattr(supervisor, "began", None)
    assert cli.main([*RUN, "run.name=a", "trainer.max_hours=1", "trainer.resume=latest"]) == 0
    assert len(curve(Path("runs/a"))) == 3


@pytest.mark.parametrize("marked", ["rows", "row", "others", None])  # "row": of GRPO, by an earlier version
def test_the_best_counts_for_the_rows_that_it_was_the_best_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, marked: str | None
) -> None:
    prepared: Any = SimpleNamespace(eval_digest="rows")
    rundir = RunDir(tmp_path)
    manifest = save(tmp_path, 10) / "manifest.json"
    mark_best(rundir.checkpoints, 10, 0.5, marked or "rows")
    if marked is None:  # as an earlier version wrote it
        manifest.write_text(manifest.read_text().replace("eval_digest", "other"))
    assert saving.best_so_far(prepared, rundir) == (None if marked == "others" else (10, 0.5))
    assert ("others than those that step_000010 was the best for" in caplog.text) == (marked == "others")


@pytest.mark.parametrize(
    ("fault", "raised", "left"),
    [
        (None, UserError, []),  # no room for the file
        (UserError("no room"), UserError, []),
        (OSError("no room"), UserError, []),
        (ActorLost("gone"), ActorLost, [".adapter_model.safetensors.partial"]),  # comes again
    ],
)
def test_an_adapter_that_cannot_be_written_leaves_the_room(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Exception | None,
    raised: type[Exception],
    left: list[str],
) -> None:
    def write(directory: str, *_: Any) -> None:
        (Path(directory) / ".written-1").touch()
        raise fault or AssertionError

    if fault is None:
        monkeypatch.setattr(
            os, "posix_fallocate", lambda *_: os.write(os.open("/dev/full", os.O_WRONLY), b" ")
        )
    monkeypatch.setattr(saving, "adapter_info", lambda *_: SimpleNamespace(model_type=""))
    prepared: Any = SimpleNamespace(
        config=Config(), model_dir="", plan=SimpleNamespace(dims=None), expert_modules={}
    )
    cluster: Any = SimpleNamespace(parameter_shapes=lambda: {"q.lora_A.weight": (2, 3)}, write_adapter=write)
    with pytest.raises(raised):
        saving.write_adapter(prepared, tmp_path / "adapter", cluster)
    assert [name for name in os.listdir(tmp_path / "adapter") if name != ".written-1"] == left


@pytest.mark.parametrize("changes", [False, True])
def test_results_go_with_their_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: bool
) -> None:
    """Also where no step is left: trainer.save_best may choose another state."""
    rundir = RunDir(tmp_path)
    weights = rundir.adapter / "adapter_model.safetensors"
    rundir.adapter.mkdir()
    for file in (weights, answers := tmp_path / "predictions.jsonl"):
        file.write_text("{}")
    write = weights.write_text if changes else str
    monkeypatch.setattr(saving, "write_adapter", lambda *_: write("another"))
    prepared: Any = SimpleNamespace(data=SimpleNamespace(tokenizer=SimpleNamespace(chat_template="{{ 1 }}")))
    unused: Any = None
    lines = saving.publish_adapter(prepared, rundir, unused)
    assert (rundir.adapter / "chat_template.jinja").read_text() == "{{ 1 }}"
    assert lines == (["removed: predictions.jsonl (of the adapter so far)"] if changes else [])
    assert answers.is_file() != changes


def test_rows_are_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    flat = prepare.flat

    def counted(rows: Any) -> Any:
        hashed.append(len(rows))
        return flat(rows)

    monkeypatch.setattr(prepare, "flat", counted)
    assert cli.main([*RUN, "run.name=a", "trainer.eval_every=1", "trainer.save_best=true"]) == 0
    assert hashed == [18, 2]  # those that are trained on, and those that are held out


def test_the_newest_run_is_named_when_none_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    newest = save(tmp_path / "runs" / "a", 10)
    for step in (5, 20):
        (save(tmp_path / "runs" / "a", step) / "manifest.json").unlink()
    (tmp_path / "runs" / "a" / "config.yaml").write_text("model: {name: demo}")
    config, manifest = intact_checkpoint(compose(["trainer.resume=latest"]))
    assert config.trainer.resume == str(newest) and manifest is not None and manifest.step == 10
    assert f"resuming the newest run of demo: {newest}" in caplog.text
    assert "step_000020 has no manifest.json" in caplog.text and "step_000005" not in caplog.text


def test_checkpoints_on_another_disk_are_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "runs" / "a"
    checkpoint = save(run, 10)
    (run / "config.yaml").write_text("model: {name: demo}")
    (run / "checkpoints").rename(tmp_path / "disk")
    (run / "checkpoints").symlink_to(tmp_path / "disk")
    config, manifest = intact_checkpoint(compose(["run.name=a", "trainer.resume=latest"]))
    assert manifest is not None
    batches = SimpleNamespace(total_steps=20)
    prepared: Any = SimpleNamespace(config=config, fingerprint=manifest.model, batches=batches)
    monkeypatch.setattr(saving, "_fields", lambda _: manifest.fields)
    point = saving.resume_point(prepared, manifest)
    assert point is not None and point.directory == checkpoint
    rundir = RunDir.create(config, point.directory)
    rundir.close()
    assert rundir.continued and rundir.path == run
