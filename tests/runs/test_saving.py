"""A disk that is full while a run saves: one error, no half checkpoint, and the earlier one resumes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kt_ray import cli
from kt_ray.checkpoint import training
from kt_ray.checkpoint.training import begin_checkpoint
from kt_ray.disk import write_atomic
from kt_ray.runs import saving

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


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The demo model is built once, and not into the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KT_RAY_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


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


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the same run with room on the disk."""
    root = tmp_path_factory.mktemp("undisturbed")
    assert cli.main([*RUN, "run.name=b", f"run.root={root}"]) == 0
    return root / "b"


@pytest.mark.parametrize(
    "file",
    [
        "experts-0.safetensors",
        "worker-0.safetensors",
        "expert_load.json",
        "manifest.json",
    ],
)
def test_a_full_disk_ends_the_run_with_a_checkpoint_that_resumes(
    file: str, undisturbed: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    with monkeypatch.context() as patch:
        full_at(2, file, patch)
        assert cli.main([*RUN, "run.name=a"]) == 2
    error = capfd.readouterr().err
    assert error.count("checkpoint cannot be written") == 1 and "No space left on device" in error
    assert "free space" in error and error.rstrip().endswith("then continue with trainer.resume=latest")
    assert "Traceback" not in error
    checkpoints = Path("runs/a/checkpoints")
    assert sorted(os.listdir(checkpoints)) == ["latest", "step_000001"]

    assert cli.main([*RUN, "run.name=a", "trainer.resume=latest"]) == 0
    assert curve(Path("runs/a")) == curve(undisturbed) and len(curve(undisturbed)) == 3
    own, other = (run / "adapter" / "adapter_model.safetensors" for run in (Path("runs/a"), undisturbed))
    assert own.read_bytes() == other.read_bytes()


def test_a_full_disk_before_the_first_checkpoint(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    full_at(1, "experts-0.safetensors", monkeypatch)
    assert cli.main([*RUN, "run.name=a"]) == 2
    assert "then start the run again (it had no checkpoint yet" in capfd.readouterr().err
