"""What a training checkpoint is, and whether it is intact and fits this run."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from kt_ray.checkpoint.safetensors_file import damaged
from kt_ray.checkpoint_dirs import MANIFEST, list_checkpoints, step_of
from kt_ray.disk import stays_inside
from kt_ray.errors import UserError
from kt_ray.parse import check_shape, read_json

VERSION = 1
_CHUNK = 64 << 20
CHOOSE = "choose another checkpoint (trainer.resume)"


_SHAPE = {
    "step": int,
    "seed": int,
    "data": dict,
    "model": str,
    "fields": dict,
    "state?": dict,
    "shards": [{"file": str, "bytes": int, "crc32": int, "tensors": int}],
}


# A training checkpoint that cannot be resumed from.
unusable = partial(damaged, remedy=CHOOSE)


@dataclass(frozen=True)
class ShardInfo:
    """One file of a checkpoint: its name, bytes, CRC-32 of all of them, and number of tensors."""

    file: str
    bytes: int
    crc32: int
    tensors: int

    @classmethod
    def of(cls, file: Path) -> ShardInfo:
        """Of a file that holds no tensors."""
        return cls(file.name, file.stat().st_size, _crc32(file), 0)

    def check_size(self, directory: Path, what: str, remedy: str) -> None:
        """The file is there, whole."""
        file = directory / self.file
        observed = f"{file.stat().st_size} bytes" if file.is_file() else "no such file"
        if observed != f"{self.bytes} bytes":
            raise damaged(what, file, observed, f"{self.bytes} bytes", remedy)


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is; written last, so its presence says that everything else is there."""

    step: int  # optimizer steps taken
    seed: int
    data: dict[str, Any]  # position in the data (JSON values; what the sampler needs to go on)
    model: str  # fingerprint of the base model (`CheckpointIndex.fingerprint`)
    fields: dict[str, Any]  # settings that must be the same on resume, by configuration key
    shards: tuple[ShardInfo, ...]
    state: dict[str, Any] = field(default_factory=dict)  # anything else that resumes (JSON values)
    version: int = VERSION

    @classmethod
    def load(cls, checkpoint: str | os.PathLike[str]) -> Manifest:
        """Read a manifest; every shard must have its size and checksum.

        Raises:
            UserError: no manifest, a newer format, or damaged shards; then the newest intact earlier
                checkpoint is named.
        """
        path = Path(checkpoint)
        try:
            manifest = cls.read(path)
            manifest.verify(path)
        except UserError as error:
            raise _name_previous(path, error) from error
        return manifest

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Parse the manifest alone; see `load`."""
        file = path / MANIFEST
        if not file.is_file():
            raise unusable(
                "not a complete checkpoint",
                path,
                "no manifest.json" if path.is_dir() else "no such directory",
                "a directory runs/<name>/checkpoints/step_...",
            )
        value = read_json(file, "checkpoint manifest", CHOOSE)
        if value.get("version") != VERSION:
            remedy = "resume with the version of kt_ray that wrote it"
            observed = f"version {value.get('version')}"
            raise damaged("checkpoint has another format", file, observed, f"version {VERSION}", remedy)
        check_shape(value, _SHAPE, file, "checkpoint manifest", CHOOSE)
        try:
            shards = tuple(ShardInfo(**shard) for shard in value.pop("shards"))
            manifest = cls(shards=shards, **value)
        except TypeError as error:  # a key that is unknown
            raise unusable("checkpoint manifest is damaged", file, error) from error
        outside = [shard.file for shard in shards if not stays_inside(shard.file)]
        if outside:
            required = "names of files beside it"
            raise unusable(
                "checkpoint manifest names files outside its directory", file, outside[0], required
            )
        return manifest

    def to_json(self) -> str:
        """What `read` parses."""
        return json.dumps(asdict(self), indent=1) + "\n"

    def verify(self, path: Path) -> None:
        """Compare every shard's size and checksum with the manifest.

        Raises:
            UserError: one differs, or cannot be read.
        """
        for shard in self.shards:
            file = path / shard.file
            try:
                shard.check_size(path, "checkpoint is damaged", CHOOSE)
                crc = _crc32(file)
            except OSError as error:
                raise unusable("checkpoint cannot be read", file, error.strerror) from error
            if crc != shard.crc32:
                required = f"checksum {shard.crc32:08x}"
                raise unusable("checkpoint is damaged", file, f"checksum {crc:08x}", required)

    def require(self, *, model: str, fields: Mapping[str, Any], where: str = "") -> None:
        """Refuse to go on with another model (by fingerprint) or other settings; `where` is for messages."""
        if not model.startswith(self.model):
            raise damaged(
                "checkpoint belongs to another model",
                where,
                f"fingerprint {model[: len(self.model)][-12:]} of the model of this run",
                f"fingerprint {self.model[-12:]}",
                "set model.path and model.experts_path as this run began, or start without trainer.resume",
            )
        now = json.loads(json.dumps(dict(fields)))  # tuples become lists, as in the file
        changed = sorted(k for k in self.fields.keys() | now.keys() if self.fields.get(k) != now.get(k))
        if changed:
            raise damaged(
                "checkpoint was written with other settings",
                where,
                ", ".join(f"{k}={now.get(k)}" for k in changed),
                ", ".join(f"{k}={self.fields.get(k)}" for k in changed),
                "go on with resume=runs/NAME, which takes them from the run, or set these keys as required "
                "(data: the same rows, tokenizer, data.max_length and held-out rows, which "
                "data.eval_fraction=auto leaves out with trainer.eval_every=0), or start without "
                "trainer.resume: lora.adapter=runs/NAME begins a new run with that run's adapter",
            )


def _crc32(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc


def _name_previous(path: Path, error: UserError) -> UserError:
    """The same error, with the newest intact checkpoint before `path` as its remedy."""
    step = step_of(path.resolve().name)
    if step is None:
        return error
    for earlier in reversed(list_checkpoints(path.parent)):
        if (step_of(earlier.name) or 0) < step:
            try:
                Manifest.read(earlier).verify(earlier)
            except UserError:
                continue
            remedy = f"resume from the previous good checkpoint: trainer.resume={earlier}"
            return damaged(error.what, error.where, error.observed, error.required, remedy)
    return error
