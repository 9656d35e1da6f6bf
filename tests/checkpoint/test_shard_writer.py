"""Shards: laid out first, resumed after a kill, refused for another job."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from safetensors.torch import load_file

from kt_ray.checkpoint import CheckpointIndex
from kt_ray.checkpoint import shard_writer as sw
from kt_ray.checkpoint.encode_weights import Entry
from kt_ray.checkpoint.shard_writer import Notes, Piece, Unit, copied, finish, write_shards
from kt_ray.errors import UserError
from tests.helpers.tiny_moe import CONFIG, per_expert, save

JOB = {"tool": "test", "x": 1}


def unit(name: str, value: torch.Tensor, made: list[str]) -> Unit:
    def produce(notes: Notes) -> Iterator[Piece]:
        made.append(name)
        notes.add("sum", float(value.sum()), 1.0)
        for i in reversed(range(value.shape[0])):
            yield Piece(name, value[i], i)

    return Unit((Entry(name, "F32", tuple(value.shape)),), produce)


def units(made: list[str], fail: str = "") -> list[Unit]:
    result = [unit(f"w{i}", torch.full((4, 3), float(i)), made) for i in range(5)]

    def broken(notes: Notes) -> Iterator[Piece]:
        raise KeyboardInterrupt
        yield

    return [Unit(u.entries, broken) if u.entries[0].key == fail else u for u in result]


def test_shards_hold_what_units_produce(tmp_path: Path) -> None:
    made: list[str] = []
    source = save(tmp_path / "source", per_expert())
    notes = write_shards(tmp_path / "out", units(made), JOB, shard_bytes=100)
    finish(tmp_path / "out", source, CONFIG, units(made), 100)
    assert notes == {"sum": [120.0, 5.0]} and made == [f"w{i}" for i in range(5)]
    index = CheckpointIndex.open(tmp_path / "out")
    assert len(index.files) == 3 and sorted(index.names) == made
    assert all(torch.equal(index.read(f"w{i}"), torch.full((4, 3), float(i))) for i in range(5))
    assert load_file(index.files[0]).keys() == {"w0", "w1"}  # another reader agrees
    names = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert "tokenizer.json" in names and not any(n.startswith(".") for n in names)


def test_threads_change_nothing(tmp_path: Path) -> None:
    made: list[str] = []
    notes = [write_shards(tmp_path / str(n), units(made), JOB, shard_bytes=150, threads=n) for n in (1, 4)]
    assert notes[0] == notes[1] and len(made) == 10
    files = sorted(p.name for p in (tmp_path / "1").glob("*.safetensors"))
    assert len(files) == 2
    assert all((tmp_path / "1" / f).read_bytes() == (tmp_path / "4" / f).read_bytes() for f in files)
    with pytest.raises(KeyboardInterrupt):
        write_shards(tmp_path / "x", units(made, fail="w1"), JOB, threads=2)


def test_a_stopped_job_goes_on(tmp_path: Path) -> None:
    made: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        write_shards(tmp_path / "out", units(made, fail="w3"), JOB, shard_bytes=100)
    assert made == ["w0", "w1", "w2"]
    shard = tmp_path / "out" / "model-00001-of-00003.safetensors"
    before = shard.stat().st_mtime_ns
    notes = write_shards(tmp_path / "out", units(made), JOB, shard_bytes=100)
    assert made[3:] == ["w2", "w3", "w4"] and shard.stat().st_mtime_ns == before
    assert notes == {"sum": [120.0, 5.0]}
    shard.write_bytes(shard.read_bytes()[:-1])  # damaged: made again
    write_shards(tmp_path / "out", units(made), JOB, shard_bytes=100)
    assert made[6:] == ["w0", "w1"]


def test_another_job_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path / "out", units([]), JOB, shard_bytes=100)
    with pytest.raises(UserError, match=r"another job.*x 1.*x 2"):
        write_shards(tmp_path / "out", units([]), JOB | {"x": 2}, shard_bytes=100)
    with pytest.raises(UserError, match=r"another job.*layout"):
        write_shards(tmp_path / "out", units([])[1:], JOB, shard_bytes=100)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    with pytest.raises(UserError, match="not empty"):
        write_shards(tmp_path / "full", units([]), JOB)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        write_shards(tmp_path / "file", units([]), JOB)
    with pytest.raises(UserError, match=r"output directory cannot be written.*To fix: name a directory"):
        write_shards(Path("/proc/out"), units([]), JOB)


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path / "out", units([]), JOB)
    fd = os.open(tmp_path / "out" / ".job" / "job.json", os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(UserError, match="another process"):
        write_shards(tmp_path / "out", units([]), JOB)
    os.close(fd)


@pytest.mark.parametrize("fault", [None, errno.ENOSYS])
def test_file_systems_with_other_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: int | None
) -> None:
    """NFS locks for one process alone what it has opened for writing; Lustre may keep no locks at all."""

    def flock(file: BinaryIO, operation: int) -> None:
        if fault is not None:
            raise OSError(fault, os.strerror(fault))
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr(fcntl, "flock", flock)
    write_shards(tmp_path / "out", units([]), JOB)
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert ("keeps no locks" in caplog.text) == (fault is not None)


def test_too_little_space_is_seen_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = sw.shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(sw.shutil, "disk_usage", lambda path: usage)
    made: list[str] = []
    with pytest.raises(UserError, match="too little disk space"):
        write_shards(tmp_path / "out", units(made), JOB)
    assert made == []


@pytest.mark.parametrize("file", ["note", "config.json"])
def test_a_disk_that_fills_up_is_said_and_the_job_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """Also while the small files are written."""
    real = sw.write_atomic

    def full(path: Path, text: str) -> None:
        if path.name == file or (file == "note" and path.name.startswith("model")):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, text)

    source = save(tmp_path / "source", per_expert())
    monkeypatch.setattr(sw, "write_atomic", full)
    made = units([])
    with pytest.raises(UserError, match=r"cannot be written.*No space left"):
        write_shards(tmp_path / "out", made, JOB)
        finish(tmp_path / "out", source, {}, made, sw.SHARD_BYTES)
    assert not list((tmp_path / "out").glob(".model*.partial"))
    monkeypatch.setattr(sw, "write_atomic", real)
    write_shards(tmp_path / "out", made, JOB)
    finish(tmp_path / "out", source, {}, made, sw.SHARD_BYTES)
    assert (tmp_path / "out" / "config.json").is_file() and not (tmp_path / "out" / ".job").exists()


def test_units_must_produce_what_they_announce(tmp_path: Path) -> None:
    def short(notes: Notes) -> Iterator[Piece]:
        yield Piece("w", torch.zeros(1, 3))

    def long(notes: Notes) -> Iterator[Piece]:
        yield Piece("w", torch.zeros(3, 3))

    for produce, message in ((short, "12 bytes were not produced"), (long, "beyond its end")):
        with pytest.raises(ValueError, match=message):
            write_shards(tmp_path / message[:2], [Unit((Entry("w", "F32", (2, 3)),), produce)], JOB)


def test_copies_are_byte_by_byte_and_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sw, "_CHUNK", 200)
    index = CheckpointIndex.open(save(tmp_path / "source", per_expert()))
    made = [copied(index.tensors[name]) for name in sorted(index.tensors)]
    write_shards(tmp_path / "out", made, JOB)
    finish(tmp_path / "out", index.path, index.config, made, 1 << 30)
    out = CheckpointIndex.open(tmp_path / "out")
    assert out.fingerprint == index.fingerprint
    assert all(torch.equal(out.read(name), index.read(name)) for name in index.tensors)
