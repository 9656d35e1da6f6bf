"""Training checkpoints: one shard per actor, keyed by parameter name, so another rule can resume them.

    checkpoints/step_000300/  worker-0.safetensors  experts-0.safetensors ...  manifest.json
    checkpoints/latest -> step_000300

Every actor writes its shard into a hidden directory; the driver writes the manifest last and renames
the directory. A directory without manifest.json is therefore never a checkpoint. Shard keys are
"param/<name>", "exp_avg/<name>" and "exp_avg_sq/<name>", all float32; which shard holds a name is
read from the shards' own headers, so no second index can disagree with them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from kt_ray.checkpoint.index import some
from kt_ray.checkpoint.safetensors_file import (
    TORCH_DTYPES,
    TensorInfo,
    build_header,
    read_header,
    read_into,
    read_json,
    tensor_bytes,
)
from kt_ray.errors import UserError

MANIFEST = "manifest.json"
LATEST = "latest"
VERSION = 1
_STEP = re.compile(r"^step_(\d{6,})$")
_CHUNK = 64 << 20


@dataclass(frozen=True)
class ShardInfo:
    """One file of a checkpoint: its name, bytes, CRC-32 of all of them, and number of tensors."""

    file: str
    bytes: int
    crc32: int
    tensors: int


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is; written last, so its presence says that everything else is there.

    Attributes:
        step: optimizer steps taken.
        seed: the run's seed.
        data: position in the data (JSON values; what the sampler needs to go on).
        model: fingerprint of the base model (`CheckpointIndex.fingerprint`).
        fields: settings that must be the same on resume, by configuration key.
        shards: the files.
        state: anything else that resumes (JSON values).
    """

    step: int
    seed: int
    data: dict[str, Any]
    model: str
    fields: dict[str, Any]
    shards: tuple[ShardInfo, ...]
    state: dict[str, Any] = field(default_factory=dict)
    version: int = VERSION

    @classmethod
    def load(cls, checkpoint: str | os.PathLike[str], *, verify: bool = True) -> Manifest:
        """Read a manifest and, with `verify`, every shard's size and checksum.

        Raises:
            UserError: no manifest, a newer format, or damaged shards; then the newest intact earlier
                checkpoint is named.
        """
        path = Path(checkpoint)
        try:
            manifest = cls._read(path)
            if verify:
                manifest._verify(path)
        except UserError as error:
            raise _name_previous(path, error) from error
        return manifest

    @classmethod
    def _read(cls, path: Path) -> Manifest:
        file = path / MANIFEST
        if not file.is_file():
            raise UserError(
                "not a complete checkpoint",
                where=str(path),
                observed="no manifest.json" if path.is_dir() else "no such directory",
                required="a directory runs/<name>/checkpoints/step_...",
                remedy="choose another checkpoint (trainer.resume)",
            )
        value = read_json(file, "checkpoint manifest", "choose another checkpoint (trainer.resume)")
        if value.get("version") != VERSION:
            raise UserError(
                "checkpoint has another format",
                where=str(file),
                observed=f"version {value.get('version')}",
                required=f"version {VERSION}",
                remedy="resume with the version of kt_ray that wrote it",
            )
        try:
            shards = tuple(ShardInfo(**shard) for shard in value.pop("shards"))
            return cls(shards=shards, **value)
        except (KeyError, TypeError) as error:
            raise UserError(
                "checkpoint manifest is damaged",
                where=str(file),
                observed=error,
                remedy="choose another checkpoint (trainer.resume)",
            ) from error

    def _verify(self, path: Path) -> None:
        for shard in self.shards:
            file = path / shard.file
            size = file.stat().st_size if file.is_file() else None
            if size != shard.bytes:
                raise UserError(
                    "checkpoint is damaged",
                    where=str(file),
                    observed="no such file" if size is None else f"{size} bytes",
                    required=f"{shard.bytes} bytes",
                    remedy="choose another checkpoint (trainer.resume)",
                )
            found = _crc32(file)
            if found != shard.crc32:
                raise UserError(
                    "checkpoint is damaged",
                    where=str(file),
                    observed=f"checksum {found:08x}",
                    required=f"checksum {shard.crc32:08x}",
                    remedy="choose another checkpoint (trainer.resume)",
                )

    def require(self, *, model: str, fields: Mapping[str, Any], where: str = "") -> None:
        """Refuse to go on with another model or other settings.

        Args:
            model: fingerprint of the model that is loaded now.
            fields: this run's values of the keys that must match.
            where: the checkpoint's directory, for the message.
        """
        if model != self.model:
            raise UserError(
                "checkpoint belongs to another model",
                where=where,
                observed=f"fingerprint {model[:12]} of the model of this run",
                required=f"fingerprint {self.model[:12]}",
                remedy="set model.path to the model this run began with, or start without trainer.resume",
            )
        now = json.loads(json.dumps(dict(fields)))  # tuples become lists, as in the file
        changed = sorted(k for k in self.fields.keys() | now.keys() if self.fields.get(k) != now.get(k))
        if changed:
            raise UserError(
                "checkpoint was written with other settings",
                where=where,
                observed=", ".join(f"{k}={now.get(k)}" for k in changed),
                required=", ".join(f"{k}={self.fields.get(k)}" for k in changed),
                remedy="set these keys as required, or start without trainer.resume",
            )


def step_name(step: int) -> str:
    return f"step_{step:06d}"


def begin_checkpoint(root: str | os.PathLike[str], step: int) -> Path:
    """An empty hidden directory beside the checkpoints, for the actors to write their shards into."""
    path = Path(root) / f".{step_name(step)}.partial"
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True)
    return path


def write_shard(
    directory: str | os.PathLike[str], filename: str, tensors: Mapping[str, torch.Tensor]
) -> ShardInfo:
    """Write one actor's tensors to `directory/filename`, flushed to the disk.

    Raises:
        ValueError: a tensor that is not float32.
        UserError: the disk is full or not writable.
    """
    other = sorted(name for name, tensor in tensors.items() if tensor.dtype != torch.float32)
    if other:
        raise ValueError(f"checkpoint tensors must be float32: {some(other)}")
    head, _, size = build_header((name, "F32", tuple(tensor.shape)) for name, tensor in tensors.items())
    path = Path(directory) / filename
    crc = zlib.crc32(head)
    try:
        with path.open("wb") as file:
            file.write(head)
            for tensor in tensors.values():
                value = tensor.detach().cpu().contiguous()
                view = tensor_bytes(value)
                crc = zlib.crc32(view, crc)
                file.write(view)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(
            "checkpoint cannot be written",
            where=str(path),
            observed=error,
            required=f"{size} bytes of free space",
            remedy="free space, or set run.root to another disk",
        ) from error
    return ShardInfo(filename, size, crc, len(tensors))


def commit_checkpoint(partial: Path, final: Path, manifest: Manifest) -> Path:
    """Write the manifest, rename `partial` to `final` and point `latest` at it.

    Raises:
        UserError: a shard is absent or short (an actor on another node wrote elsewhere).
    """
    for shard in manifest.shards:
        file = partial / shard.file
        size = file.stat().st_size if file.is_file() else None
        if size != shard.bytes:
            raise UserError(
                "an actor's shard did not arrive in the run directory",
                where=str(file),
                observed="no such file" if size is None else f"{size} bytes",
                required=f"{shard.bytes} bytes",
                remedy="set run.root to a directory that all nodes share",
            )
    write_text(partial / MANIFEST, json.dumps(asdict(manifest), indent=1) + "\n")
    _fsync_dir(partial)
    if final.exists():  # the same step again, after a replay: equal by construction, the newer one stays
        old = final.with_name(f".{final.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        partial.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    else:
        partial.rename(final)
    link = final.parent / f".{LATEST}.partial"
    link.unlink(missing_ok=True)
    link.symlink_to(final.name)
    os.replace(link, final.parent / LATEST)
    _fsync_dir(final.parent)
    return final


def list_checkpoints(root: str | os.PathLike[str]) -> list[Path]:
    """Complete checkpoints below `root` (a run's checkpoints/), oldest step first."""
    found: list[tuple[int, Path]] = []
    for path in Path(root).glob("step_*"):
        match = _STEP.match(path.name)
        if match and (path / MANIFEST).is_file():
            found.append((int(match.group(1)), path))
    return [path for _, path in sorted(found)]


def prune_checkpoints(root: str | os.PathLike[str], keep: int) -> list[Path]:
    """Remove all but the `keep` newest checkpoints (0 keeps all) and what interrupted writes left.

    Returns:
        The checkpoints that were removed.
    """
    for pattern in (".step_*.partial", ".step_*.old"):
        for path in Path(root).glob(pattern):
            shutil.rmtree(path, ignore_errors=True)
    complete = list_checkpoints(root)
    removed = complete[:-keep] if keep > 0 else []
    for path in removed:
        (path / MANIFEST).unlink()  # first: what is half removed is no checkpoint any more
        shutil.rmtree(path)
    return removed


def find_checkpoint(run_dir: str | os.PathLike[str], which: str) -> Path:
    """The checkpoint that `trainer.resume` names: "latest" of a run directory, or a path.

    Raises:
        UserError: there is none.
    """
    if which != LATEST:
        path = Path(which)
        if not path.is_absolute() and not path.exists():
            path = Path(run_dir) / "checkpoints" / which
        Manifest._read(path)
        return path.resolve()
    complete = list_checkpoints(Path(run_dir) / "checkpoints")
    if not complete:
        raise UserError(
            "trainer.resume=latest: the run has no checkpoint",
            where=str(Path(run_dir) / "checkpoints"),
            required="a complete checkpoint step_...",
            remedy="start without trainer.resume, and set trainer.save_every to save during the run",
        )
    return complete[-1].resolve()


def read_named(checkpoint: str | os.PathLike[str], names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Read tensors by key ("param/<name>", ...) from whichever shards hold them.

    Returns:
        key -> float32 tensor on the CPU, in the order asked for.

    Raises:
        UserError: the checkpoint does not hold some of them, or holds one twice.
    """
    path = Path(checkpoint)
    held: dict[str, TensorInfo] = {}
    for file in sorted(path.glob("*.safetensors")):
        for name, info in read_header(
            file, remedy="choose another checkpoint (trainer.resume)"
        ).tensors.items():
            if name in held:
                raise UserError(
                    "checkpoint holds a parameter twice",
                    where=f"{file} and {held[name].file.name}",
                    observed=name,
                    remedy="choose another checkpoint (trainer.resume)",
                )
            held[name] = info
    wanted = list(names)
    missing = sorted(name for name in wanted if name not in held)
    if missing:
        raise UserError(
            "checkpoint lacks parameters of this run",
            where=str(path),
            observed=f"missing: {some(missing)}",
            required=f"{len(wanted)} tensors",
            remedy="set lora.target_modules and lora.experts as in the run that wrote it",
        )
    result = {name: torch.empty(held[name].shape, dtype=TORCH_DTYPES[held[name].dtype]) for name in wanted}
    fds: dict[Path, int] = {}
    try:
        for name in sorted(wanted, key=lambda n: (held[n].file, held[n].start)):
            info = held[name]
            if info.file not in fds:
                fds[info.file] = os.open(info.file, os.O_RDONLY)
            read_into(fds[info.file], tensor_bytes(result[name]), info.start, info.file)
    finally:
        for fd in fds.values():
            os.close(fd)
    return result


def write_text(path: Path, text: str) -> None:
    """Write a small file beside and rename it, flushed to the disk."""
    beside = path.with_name(f".{path.name}.partial")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def _crc32(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc


def _fsync_dir(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _name_previous(path: Path, error: UserError) -> UserError:
    """The same error, with the newest intact checkpoint before `path` as its remedy."""
    match = _STEP.match(path.resolve().name)
    if match is None:
        return error
    for earlier in reversed(list_checkpoints(path.resolve().parent)):
        if int(earlier.name.removeprefix("step_")) < int(match.group(1)):
            try:
                Manifest._read(earlier)._verify(earlier)
            except UserError:
                continue
            return UserError(
                error.what,
                where=error.where,
                observed=error.observed,
                required=error.required,
                remedy=f"resume from the previous good checkpoint: trainer.resume={earlier}",
            )
    return error
