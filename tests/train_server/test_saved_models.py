"""Checkpoints on disk: what a kill leaves, and files of others beside them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from kt_ray.serve.api_errors import ApiError
from kt_ray.train_server.saved_models import TRAINING, Run, Saved, SavedModels, now

RUN = Run("run", "base", 4, now())


def kept(models: SavedModels, name: str, text: str = "", *, run: Run = RUN) -> Saved:
    """A checkpoint, saved."""

    def write(directory: Path) -> None:
        directory.mkdir()
        (directory / "state").write_text(text)

    return models.save(run, Saved(run.run, TRAINING, name, run.base_model, run.rank, {}), write)


def text_of(models: SavedModels, name: str) -> str:
    return (models.data(models.find(f"tinker://run/weights/{name}")) / "state").read_text()


def test_a_new_server_removes_only_what_a_server_left(tmp_path: Path) -> None:
    models = SavedModels(tmp_path)
    kept(models, "a")
    left = tmp_path / "run" / "weights" / ".0123456789abcdef" / "data"
    foreign = [
        *("project/repo/.git/HEAD", "project/repo/.env", "project/weights/.0123456789abcdef/file"),
        *("run/weights/.git/HEAD", "run/checkpoints/.0123456789abcdef/file", "snapshots/file"),
    ]
    for file in (left / "half", *(tmp_path / name for name in foreign)):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("precious")
    SavedModels(tmp_path)
    assert not left.parent.exists() and all((tmp_path / name).exists() for name in foreign)
    assert [one.name for one in models.all()] == ["a"]


class KilledError(Exception):
    pass


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_save_that_a_kill_ends_loses_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    """Before the old one is hidden, before the new one has its name, before the old one is removed."""
    models, done = SavedModels(tmp_path), 0
    kept(models, "a", "old")
    rename = Path.rename

    def dying(path: Path, target: Path) -> Path:
        nonlocal done
        if "a" in (path.name, target.name):
            done += 1
            if done > renames:
                raise KilledError
        return rename(path, target)

    def killed(*_: object, **__: object) -> None:
        raise KilledError

    monkeypatch.setattr(Path, "rename", dying)
    monkeypatch.setattr("kt_ray.train_server.saved_models.shutil.rmtree", lambda *_, **__: None)
    if renames == 2:
        monkeypatch.setattr("kt_ray.train_server.saved_models._remove", killed)
    with pytest.raises(KilledError):
        kept(models, "a", "new")
    monkeypatch.undo()
    models = SavedModels(tmp_path)
    assert text_of(models, "a") == ("old" if renames == 0 else "new")
    assert [file.name for file in (tmp_path / "run" / "weights").iterdir()] == ["a"]


def test_a_deletion_that_a_kill_ends_brings_back_nothing_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = SavedModels(tmp_path)
    saved = kept(models, "a")
    monkeypatch.setattr("kt_ray.train_server.saved_models.shutil.rmtree", lambda *_, **__: None)
    models.delete(saved)
    monkeypatch.undo()
    assert SavedModels(tmp_path).all() == [] and not list((tmp_path / "run" / "weights").iterdir())


def test_what_replaces_an_expired_checkpoint_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved anew after the old one was found to have expired, before it is deleted."""
    models = SavedModels(tmp_path)
    path = kept(models, "a", "old").path
    models.set_expiry(path, "2026-01-01T00:00:00+00:00")
    (expired,) = models.all(expired=True)
    assert expired.expired
    kept(models, "a", "new")
    monkeypatch.setattr(models, "all", lambda **_: [expired])
    models.sweep()
    assert text_of(models, "a") == "new"
    models.set_expiry(path, later := "2999-01-01T00:00:00+00:00")
    assert models.find(path).expires == later and models.find(path).created != expired.created


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"run": "b"}', '{"unknown": 1}', "\0"])
def test_files_that_say_nothing_are_passed_over(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    models = SavedModels(tmp_path)
    kept(models, "a")
    kept(models, "b")
    kept(models, "a", run=replace(RUN, run="other"))
    files = [tmp_path / "run" / "weights" / "b" / "checkpoint.json", tmp_path / "other" / "run.json"]
    for file in files:
        file.write_text(text)
    for _ in range(2):
        assert sorted((one.run, one.name) for one in models.all()) == [("other", "a"), ("run", "a")]
        assert [run.run for run in models.runs()] == ["run"]
        with pytest.raises(ApiError, match="there is no checkpoint"):
            models.find("tinker://run/weights/b")
    models.sweep()
    assert [sum(str(file) in line.getMessage() for line in caplog.records) for file in files] == [1, 1]
    assert [one.name for one in SavedModels(tmp_path).all("run")] == ["a"]


def test_the_last_state_is_the_last_one_saved_though_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, days = SavedModels(tmp_path), iter(("2026-03-02", "2026-03-01", "2026-03-01", "2026-03-03"))
    monkeypatch.setattr("kt_ray.train_server.saved_models.now", lambda: f"{next(days)}T00:00:00+00:00")
    for name in "abcd":
        kept(models, name)
        last = models.last_state("run")
        assert last is not None and last.name == name
    assert [one.name for one in models.all()] == ["d", "c", "b", "a"]


def test_a_copy_made_by_hand_is_what_its_directory_says(tmp_path: Path) -> None:
    models = SavedModels(tmp_path)
    place = tmp_path / "run" / "weights"
    kept(models, "a", "text")
    shutil.copytree(place / "a", place / "b")
    models.delete(models.find("tinker://run/weights/b"))
    assert [one.name for one in models.all()] == ["a"] and text_of(models, "a") == "text"


def test_a_file_in_a_directorys_place_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text("")
    with pytest.raises(ApiError, match="there is no checkpoint"):
        SavedModels(tmp_path).find("tinker://server.log/weights/x")
