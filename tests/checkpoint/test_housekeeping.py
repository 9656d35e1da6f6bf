"""What is done around valid checkpoints: it keeps the right ones, and no fault in it ends a run."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from kt_ray.checkpoint import housekeeping
from kt_ray.checkpoint.housekeeping import (
    best_checkpoint,
    best_step,
    mark_best,
    prune_checkpoints,
    set_aside_later,
)
from kt_ray.checkpoint.manifest import Manifest
from kt_ray.checkpoint.training import begin_checkpoint
from kt_ray.checkpoint_dirs import list_checkpoints
from kt_ray.errors import UserError
from tests.checkpoint.test_training import save


def names(root: Path) -> list[str]:
    return [path.name for path in list_checkpoints(root)]


def test_latest_points_at_the_newest_and_pruning_keeps_it(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    root = tmp_path / "checkpoints"
    assert (root / "latest").resolve().name == "step_000030"
    assert [p.name for p in list_checkpoints(root)] == ["step_000010", "step_000020", "step_000030"]
    assert [p.name for p in prune_checkpoints(root, 2)] == ["step_000010"]
    assert [p.name for p in list_checkpoints(root)] == ["step_000020", "step_000030"]
    assert not list(root.glob(".step*"))
    assert prune_checkpoints(root, 0) == []


def test_the_best_checkpoint_outlives_newer_ones(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    assert best_checkpoint(root) is None
    for step in (10, 20):
        save(tmp_path, step)
    mark_best(root, 10, 0.5, "rows")
    for step in (30, 40):
        save(tmp_path, step)
    assert [p.name for p in prune_checkpoints(root, 1)] == ["step_000020", "step_000030"]
    assert [p.name for p in list_checkpoints(root)] == ["step_000010", "step_000040"]
    assert best_checkpoint(root) == root / "step_000010"
    mark_best(root, 40, 0.25, "rows")
    assert [p.name for p in prune_checkpoints(root, 1)] == ["step_000010"]
    assert Manifest.load(root / "step_000040").state == {"lr": 0.5, "eval_loss": 0.25, "eval_digest": "rows"}


def test_a_run_that_goes_back_sets_later_checkpoints_aside(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    for step in (200, 300, 400):
        save(tmp_path, step)
    aside = set_aside_later(root, 200)
    assert sorted(p.name for p in aside) == ["superseded_step_000300", "superseded_step_000400"]
    assert (root / "latest").resolve().name == "step_000200"
    save(tmp_path, 250)
    prune_checkpoints(root, 2)
    assert [p.name for p in list_checkpoints(root)] == ["step_000200", "step_000250"]
    assert (root / "latest").resolve().name == "step_000250"
    (root / "latest").unlink()
    (root / "latest").symlink_to("step_000200")  # the process died before it named its last one
    assert set_aside_later(root, 250) == []
    assert (root / "latest").resolve().name == "step_000250"
    save(tmp_path, 300)
    assert [p.name for p in set_aside_later(root, 250)] == ["superseded_step_000300_2"]
    assert all((path / "manifest.json").is_file() for path in aside)


def test_an_old_one_that_cannot_be_deleted_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "checkpoints"
    for step in (10, 20):
        save(tmp_path, step)

    def refused(path: Path, *_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(shutil, "rmtree", refused)
        save(tmp_path, 30)
        prune_checkpoints(root, 1)
    assert "Permission denied" in caplog.text and "takes room" in caplog.text
    # Half removed it is no checkpoint any more, and the next one's clean-up takes it.
    assert names(root) == ["step_000030"]
    assert sorted(p.name for p in root.glob(".*")) == [".step_000010.old", ".step_000020.old"]
    save(tmp_path, 40)
    assert sorted(p.name for p in root.iterdir()) == ["latest", "step_000030", "step_000040"]


def test_what_cannot_even_be_renamed_stays_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "checkpoints"
    for step in (10, 20):
        save(tmp_path, step)

    def refused(path: Path, target: Path) -> Path:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(Path, "rename", refused)
        assert prune_checkpoints(root, 1) == []
    assert f"an old checkpoint stays: {root / 'step_000010'}" in caplog.text
    assert Manifest.load(root / "step_000010").step == 10


@pytest.mark.parametrize("call", ["symlink", "fsync"])
def test_file_systems_without_links_or_fsync_of_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def no_links(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    fsync = os.fsync

    def no_directories(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(fd)

    if call == "symlink":
        monkeypatch.setattr(os, "symlink", no_links)
    else:
        monkeypatch.setattr(os, "fsync", no_directories)
    root = tmp_path / "checkpoints"
    for step in (10, 20, 30):
        save(tmp_path, step)
    mark_best(root, 10, 0.5, "rows")
    mark_best(root, 20, 0.25, "rows")
    assert best_checkpoint(root) == root / "step_000020" and best_step(root) == 20
    prune_checkpoints(root, 1)
    assert names(root) == ["step_000020", "step_000030"]
    assert (root / "latest").is_symlink() == (call == "fsync")


def test_a_linked_checkpoint_loses_its_link_alone(tmp_path: Path) -> None:
    """Someone moved a checkpoint to another disk and left a link."""
    root = tmp_path / "checkpoints"
    for step in (10, 20):
        save(tmp_path, step)
    elsewhere = (root / "step_000010").rename(tmp_path / "archive")
    (root / "step_000010").symlink_to(elsewhere)
    assert names(root) == ["step_000010", "step_000020"]
    assert [p.name for p in prune_checkpoints(root, 1)] == ["step_000010"]
    assert names(root) == ["step_000020"] and Manifest.load(elsewhere).step == 10
    assert not list(root.glob(".*"))


def test_links_of_a_run_copied_with_its_links_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "checkpoints"
    shutil.copytree(save(tmp_path, 10), tmp_path / "copy")
    mark_best(root, 10, 0.5, "rows")
    for name in ("latest", "best"):
        (root / name).unlink()
        shutil.copytree(tmp_path / "copy", root / name)
    save(tmp_path, 15)
    assert prune_checkpoints(root, 1) == [] and best_checkpoint(root) == root / "step_000010"
    save(tmp_path, 20)
    mark_best(root, 20, 0.25, "rows")
    assert "renamed to copied_latest" in caplog.text
    assert (root / "latest").resolve() == best_checkpoint(root) == root / "step_000020"
    assert Manifest.load(root / "copied_latest").step == Manifest.load(root / "copied_best").step == 10
    # Once more: what lies there already is not overwritten.
    (root / "best").unlink()
    shutil.copytree(root / "step_000020", root / "best")
    save(tmp_path, 30)
    mark_best(root, 30, 0.125, "rows")
    assert best_checkpoint(root) == root / "step_000030"
    assert [Manifest.load(root / name).step for name in ("copied_best", "copied_best_2")] == [10, 20]


def test_a_best_that_cannot_be_named_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "checkpoints"
    for step in (10, 20):
        save(tmp_path, step)
    mark_best(root, 10, 0.5, "rows")
    monkeypatch.setattr(housekeeping, "point", lambda *_: None)  # which only warns
    with pytest.raises(UserError, match=r"best checkpoint cannot be named.*step_000010.*step_000020"):
        mark_best(root, 20, 0.25, "rows")


@pytest.mark.parametrize("copied", [False, True])
def test_a_best_that_was_set_aside_is_none(tmp_path: Path, copied: bool) -> None:
    root = tmp_path / "checkpoints"
    for step in (10, 20):
        save(tmp_path, step)
    mark_best(root, 20, 0.5, "rows")
    if copied:
        (root / "best").unlink()
        shutil.copytree(root / "step_000020", root / "best")
    set_aside_later(root, 10)
    save(tmp_path, 20)  # again, another state
    assert best_step(root) is None and best_checkpoint(root) is None


@pytest.mark.parametrize("renamed", [True, False])
def test_what_a_dead_process_was_writing_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renamed: bool
) -> None:
    """Also from a lower layer of an overlay (a container's image), where no directory can be renamed."""

    def refused(path: Path, _target: Path) -> Path:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(path))

    root = tmp_path / "checkpoints"
    (begin_checkpoint(root, 10) / "worker-0.safetensors").write_bytes(b"x" * 100)
    if not renamed:
        monkeypatch.setattr(Path, "rename", refused)
    assert begin_checkpoint(root, 20).is_dir()
    assert [p.name for p in root.iterdir()] == [".step_000020.partial"]
