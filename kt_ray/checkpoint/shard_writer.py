"""Write a checkpoint shard by shard, in bounded memory; an interrupted job resumes.

Everything is laid out before a byte is computed. A unit is a few tensors that are produced together; units
with their keys, types and shapes fill the shards, so every header is known, and values are written into
their places as they come, one expert at a time. A shard is written to a temporary name, flushed and
renamed. A resumed job skips the shards that have the right header and size.

    OUT/.job/job.json                the job: the command's parameters and a digest of the layout
    OUT/.job/model-00003-....json    sums that a finished shard reports (errors, counts)

The directory .job is removed when the checkpoint is complete.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from kt_ray.checkpoint.encode_weights import Entry
from kt_ray.checkpoint.safetensors_file import (
    TensorInfo,
    build_header,
    damaged,
    read_tensor,
    tensor_bytes,
    write_from,
    writing,
)
from kt_ray.disk import free_bytes, write_atomic
from kt_ray.errors import UserError
from kt_ray.parse import check_shape, read_json
from kt_ray.terminal import screen_console

logger = logging.getLogger(__name__)

SHARD_BYTES = 4 << 30
_JOB = ".job"
_CHUNK = 8 << 20
_RESUMES = "free space and repeat the command: it resumes"
_WEIGHTS = (
    *(".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack"),
)


class Piece(NamedTuple):
    """Some of a tensor's values: `value` begins at index `start` of the first dimension."""

    key: str
    value: torch.Tensor
    start: int = 0


class Notes(dict[str, list[float]]):
    """Sums by name that the units of a shard report."""

    def add(self, name: str, *values: float) -> None:
        sums = self.get(name, [0.0] * len(values))
        self[name] = [a + b for a, b in zip(sums, values, strict=True)]


@dataclass(frozen=True)
class Unit:
    """Tensors that are made together."""

    entries: tuple[Entry, ...]  # what is written, in file order
    # yields all values of all entries, in any order; may add sums to the notes
    produce: Callable[[Notes], Iterator[Piece]]

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)


def copied(info: TensorInfo) -> Unit:
    """A tensor copied byte by byte."""
    count = info.shape[0] if info.shape else 1
    width = info.nbytes // max(1, count)
    rows = max(1, _CHUNK // max(1, width))
    if info.fill is None:
        raw = replace(info, dtype="U8", shape=(count, width))
    else:  # values of a hole (`random --sparse`) are made by their type
        raw = replace(info, shape=info.shape or (1,))

    def produce(notes: Notes) -> Iterator[Piece]:
        for start in range(0, count, rows):
            yield Piece(info.name, read_tensor(raw.rows(start, min(start + rows, count))), start)

    return Unit((Entry(info.name, info.dtype, info.shape),), produce)


def write_shards(
    out: Path,
    units: Sequence[Unit],
    job: Mapping[str, Any],
    *,
    shard_bytes: int = SHARD_BYTES,
    threads: int = 1,
    title: str = "writing",
) -> Notes:
    """Write all units; a job that was interrupted resumes.

    Args:
        out: directory; new, empty, or begun by the same job.
        units: in file order; no key twice.
        job: what decides the result (paths, options, fingerprints), as JSON.
        shard_bytes: largest shard, unless one unit alone is larger.
        threads: units produced at the same time; memory grows with them, the result does not change.

    Returns:
        The sums of all shards. `finish` completes the directory.

    Raises:
        UserError: another job's directory, a directory with other files, too little disk space.
        ValueError: a unit that does not produce what it announced.
    """
    shards = _split(units, shard_bytes)
    layout = {
        name: build_header((e.key, e.dtype, e.shape) for u in part for e in u.entries)
        for name, part in shards.items()
    }
    digest = hashlib.sha256(b"".join(head for head, _, _ in layout.values())).hexdigest()
    with _begin(out, {**job, "layout": digest}):
        waiting = [name for name, (head, _, size) in layout.items() if not _is_done(out, name, head, size)]
        _check_space(out, sum(layout[name][2] for name in waiting))
        with _progress(title, sum(layout[name][2] for name in waiting)) as advance:
            for name in waiting:
                _write_shard(out, name, layout[name], shards[name], advance, threads)
    total = Notes()
    for name in shards:
        file, what = _notes_file(out, name), "the record of a shard"
        notes = read_json(file, what, "remove this directory and begin again")
        check_shape(notes, {str: [float]}, file, what, "remove this directory and begin again")
        for key, values in notes.items():
            total.add(key, *values)
    return total


def finish(
    out: Path,
    source: Path,
    config: Mapping[str, Any],
    units: Sequence[Unit],
    shard_bytes: int,
    *,
    left_out: Collection[str] = (),
    over: Sequence[Path] = (),
) -> None:
    """Index, config.json and the small files of `source` (tokenizer, licence); then the job is over.

    Args:
        out, units, shard_bytes: as given to `write_shards`.
        config: config.json of the result.
        left_out: those of `source` that are not copied: the command writes its own, or they are true no more.
        over: small files that replace those of their names in `source`.

    Raises:
        UserError: the disk is full; the command may be repeated.
    """
    shards = _split(units, shard_bytes)
    with writing("output", out, remedy=_RESUMES):
        for file in (*sorted(source.iterdir()), *over):
            ours = file.name.endswith(_WEIGHTS) or file.name in ("config.json", *left_out)
            if file.is_file() and not file.name.startswith(".") and not ours:
                shutil.copyfile(file, out / file.name)
        if len(shards) > 1:
            where = {e.key: name for name, part in shards.items() for u in part for e in u.entries}
            size = sum(unit.nbytes for unit in units)
            index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}
            write_atomic(out / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")
        write_atomic(out / "config.json", json.dumps(config, indent=2) + "\n")
    shutil.rmtree(out / _JOB)


def _split(units: Sequence[Unit], shard_bytes: int) -> dict[str, list[Unit]]:
    parts: list[list[Unit]] = [[]]
    size = 0
    for unit in units:
        if parts[-1] and size + unit.nbytes > shard_bytes:
            parts.append([])
            size = 0
        parts[-1].append(unit)
        size += unit.nbytes
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    return {f"model-{i:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts, 1)}


def _notes_file(out: Path, name: str) -> Path:
    return out / _JOB / f"{name}.json"


@contextmanager
def _begin(out: Path, job: dict[str, Any]) -> Iterator[None]:
    """Claim the directory for this job; a second process of it is refused."""
    record = out / _JOB / "job.json"
    try:
        present = sorted(p.name for p in out.iterdir()) if out.exists() else []
    except NotADirectoryError as error:
        raise UserError("output is a file", where=str(out), remedy="choose another directory") from error
    if present == [_JOB] and not record.is_file():
        present = []  # stopped before it began
    if present and not record.is_file():
        raise damaged(
            "output directory is not empty",
            out,
            ", ".join(present[:5]),
            "a new directory, or one that a stopped run of the same command left",
            "choose another directory, or remove this one",
        )
    job = json.loads(json.dumps(job))
    if present:
        begun = read_json(record, "the record of the job", "choose another directory, or remove this one")
        other = sorted(key for key in {*begun, *job} if begun.get(key) != job.get(key))
        if other:
            raise damaged(
                "output directory belongs to another job",
                record,
                ", ".join(f"{key} {begun.get(key)!r}" for key in other),
                ", ".join(f"{key} {job.get(key)!r}" for key in other),
                "repeat the command that began it, or choose another directory",
            )
    else:
        with writing("output directory", out, remedy="name a directory that you may write to"):
            record.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(record, json.dumps(job, indent=2) + "\n")
    with record.open("r+b") as lock:  # for writing: else NFS refuses an exclusive lock
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                "another process is writing this directory", where=str(out), remedy="wait for it to end"
            ) from error
        except OSError as error:  # ENOLCK, ENOSYS, EOPNOTSUPP
            what = "the file system keeps no locks: start no second process that writes this directory"
            logger.warning("%s; %s (%s)", what, out, error.strerror)
        yield


def _is_done(out: Path, name: str, head: bytes, size: int) -> bool:
    file = out / name
    if not file.is_file() or file.stat().st_size != size or not _notes_file(out, name).is_file():
        return False
    with file.open("rb") as opened:
        return opened.read(len(head)) == head


def _check_space(out: Path, needed: int) -> None:
    stale = sum(p.stat().st_size for p in out.glob(".*.partial"))
    free = free_bytes(out) + stale
    if needed > free:
        observed, remedy = f"{free / 1e9:.1f} GB free", "free space, or choose a directory on another disk"
        raise damaged("too little disk space", out, observed, f"{needed / 1e9:.1f} GB", remedy)


def _in_order(action: Callable[[Unit], Notes], units: Sequence[Unit], threads: int) -> Iterator[Notes]:
    pool = ThreadPoolExecutor(max_workers=threads)
    try:
        yield from pool.map(action, units)
    finally:
        pool.shutdown(cancel_futures=True)  # of a stopped or failed job; otherwise there are none


def _write_unit(
    fd: int, unit: Unit, ranges: Mapping[str, tuple[int, int]], advance: Callable[[int], None]
) -> Notes:
    notes = Notes()
    missing = {entry.key: entry.nbytes for entry in unit.entries}
    wide = {e.key: e.nbytes // e.shape[0] if e.shape and e.shape[0] else 0 for e in unit.entries}
    for key, value, start in unit.produce(notes):
        contiguous = value.contiguous()  # keeps the bytes of the view
        view = tensor_bytes(contiguous)
        at = ranges[key][0] + start * wide[key]
        if at + len(view) > ranges[key][1]:
            raise ValueError(f"{key}: values beyond its end")
        write_from(fd, view, at)
        missing[key] -= len(view)
        advance(len(view))
    wrong = sorted(key for key, count in missing.items() if count)
    if wrong:
        raise ValueError(f"{wrong[0]}: {missing[wrong[0]]} bytes were not produced")
    return notes


def _write_shard(
    out: Path,
    name: str,
    layout: tuple[bytes, dict[str, tuple[int, int]], int],
    units: Sequence[Unit],
    advance: Callable[[int], None],
    threads: int,
) -> None:
    head, ranges, size = layout
    partial = out / f".{name}.partial"
    notes = Notes()
    with writing("output", out / name, remedy=_RESUMES), partial.open("wb") as file:
        fd = file.fileno()
        try:
            os.ftruncate(fd, size)
            write_from(fd, memoryview(head), 0)
            for own in _in_order(lambda unit: _write_unit(fd, unit, ranges, advance), units, threads):
                for key, values in own.items():  # summed in the units' order: the same sums with any threads
                    notes.add(key, *values)
            os.fsync(fd)
            write_atomic(_notes_file(out, name), json.dumps(notes))
            os.replace(partial, out / name)
        except OSError:
            partial.unlink(missing_ok=True)  # a full disk gets its space back
            raise


@contextmanager
def _progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = screen_console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.advance(task, count)
