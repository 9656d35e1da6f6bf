"""Checkpoints of a train server: directories under tinker:// paths, which outlive it.

    ROOT/RUN/run.json                        what is known of a training
    ROOT/RUN/weights/NAME/checkpoint.json    parameters and optimizer state in NAME/data
    ROOT/RUN/sampler_weights/NAME/...        a PEFT adapter in NAME/data

A checkpoint is written under a hidden name, and then renamed: it is whole or not there. One that it replaces,
or that is deleted, is hidden first.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import shutil
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, Any, TypeVar

from kt_ray.batch import LoraPart
from kt_ray.disk import write_atomic
from kt_ray.serve.api_errors import ApiError

logger = logging.getLogger(__name__)

TRAINING, SAMPLER = "weights", "sampler_weights"
_TYPES = {TRAINING: "training", SAMPLER: "sampler"}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,199}")  # no separator, no leading dot
_HIDDEN = re.compile(r"\.[0-9a-f]{16}")
LONGEST_TTL = 10 * 366 * 24 * 3600

KindT = TypeVar("KindT", "Run", "Saved")


class _OfLora:
    """What of the LoRA a training changes."""

    base_model: str
    rank: int
    train_attn: bool
    train_mlp: bool

    @property
    def part(self) -> LoraPart:
        return LoraPart(self.rank, self.train_attn, self.train_mlp)

    @property
    def lora_card(self) -> dict[str, Any]:
        """As the SDK's records have it."""
        card = {"base_model": self.base_model, "is_lora": True, "lora_rank": self.rank}
        return {**card, "train_unembed": False, "train_mlp": self.train_mlp, "train_attn": self.train_attn}


@dataclass(frozen=True)
class Run(_OfLora):
    """A training."""

    run: str
    base_model: str
    rank: int
    created: str  # ISO 8601
    user_metadata: dict[str, Any] | None = None
    train_attn: bool = True
    train_mlp: bool = True


@dataclass(frozen=True)
class Saved(_OfLora):
    """One checkpoint."""

    run: str
    kind: str  # TRAINING or SAMPLER
    name: str
    base_model: str
    rank: int
    settings: dict[str, Any]  # what a training's state depends on (`Backend.settings`)
    created: str = ""  # ISO 8601, and bytes: known once it is saved
    bytes: int = 0
    expires: str | None = None
    user_metadata: dict[str, str] | None = None
    train_attn: bool = True
    train_mlp: bool = True

    @property
    def place(self) -> tuple[str, str, str]:
        return self.run, self.kind, self.name

    @property
    def path(self) -> str:
        return checkpoint_path(*self.place)

    @property
    def expired(self) -> bool:
        return self.expires is not None and datetime.fromisoformat(self.expires) < datetime.now(UTC)

    @property
    def card(self) -> dict[str, Any]:
        """As the SDK's Checkpoint has it."""
        return {
            "checkpoint_id": f"{self.kind}/{self.name}",
            "checkpoint_type": _TYPES[self.kind],
            "time": self.created,
            "tinker_path": self.path,
            "size_bytes": self.bytes,
            "public": False,
            "user_metadata": self.user_metadata,
            "expires_at": self.expires,
        }


def checkpoint_path(run: str, kind: str, name: str) -> str:
    return f"tinker://{run}/{kind}/{name}"


def now() -> str:
    return datetime.now(UTC).isoformat()


def expiry(seconds: int | None) -> str | None:
    """Raises ApiError: a time that is no time."""
    if seconds is None:
        return None
    if not 0 < seconds <= LONGEST_TTL:
        raise ApiError(400, f"ttl_seconds is {seconds}, required 1 to {LONGEST_TTL}", param="ttl_seconds")
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()


def checked_name(name: str) -> str:
    """Raises ApiError: not a name for a directory."""
    if not _NAME.fullmatch(name):
        raise ApiError(
            400,
            f"'{name[:200]}' is no name of a checkpoint: letters, digits and . _ : - only, the first no dot "
            "or hyphen, at most 200",
            param="path",
        )
    return name


class SavedModels:
    """
    Args:
        root: made if it is not there; one server writes there at a time.

    Attributes:
        comes: whether a path's save waits or runs.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.comes: Callable[[str], bool] = lambda path: False
        self._unreadable: set[Path] = set()
        self._lock = threading.Lock()  # what is found under a name is what is changed there
        root.mkdir(parents=True, exist_ok=True)
        for described in root.glob("*/run.json"):
            for kind in _TYPES:
                self._tidy(described.parent / kind)

    def find(self, path: str) -> Saved:
        """By tinker:// path.

        Raises:
            ApiError: it is no such path, or nothing is there.
        """
        parts = path.removeprefix("tinker://").split("/")
        if not path.startswith("tinker://") or len(parts) != 3 or parts[1] not in _TYPES:
            raise ApiError(
                400,
                f"'{path[:300]}' is no checkpoint's path: tinker://RUN/weights/NAME or "
                "tinker://RUN/sampler_weights/NAME",
            )
        found = self._read(checked_name(parts[0]), parts[1], checked_name(parts[2]))
        if found is None or found.expired:
            yet = " yet: its save waits, or runs. To fix: wait for the save's result" * self.comes(path)
            raise ApiError(404, f"there is no checkpoint {path}{yet}", code="checkpoint_not_found")
        return found

    def data(self, saved: Saved) -> Path:
        return self._place(saved) / "data"

    def exists(self, run: str, kind: str, name: str) -> bool:
        """Whether the name is taken, if only by what cannot be read."""
        found = self._read(run, kind, name)
        return os.path.lexists(self.root / run / kind / name) if found is None else not found.expired

    def save(self, run: Run, saved: Saved, write: Callable[[Path], None]) -> Saved:
        """
        Args:
            write: makes the directory that it is given.
        """
        place = self._place(saved)
        place.parent.mkdir(parents=True, exist_ok=True)
        described = self.root / run.run / "run.json"
        if not described.exists():
            _write_json(described, asdict(run))
        made = _hidden(place)
        try:
            made.mkdir()
            write(made / "data")
            size = sum(file.stat().st_size for file in (made / "data").rglob("*") if file.is_file())
            saved = replace(saved, bytes=size, created=self._after_all(run.run))
            _write_json(made / "checkpoint.json", asdict(saved))
            with self._lock:
                gone = self._hide(place)
                made.rename(place)
            _remove(gone)
        finally:
            shutil.rmtree(made, ignore_errors=True)
        return saved

    def delete(self, saved: Saved) -> None:
        """At once for who looks; then the bytes."""
        _remove(self._hide(self._place(saved)))

    def set_expiry(self, path: str, expires: str | None) -> None:
        """Raises ApiError: as `find`."""
        with self._lock:
            saved = self.find(path)
            _write_json(self._place(saved) / "checkpoint.json", {**asdict(saved), "expires": expires})

    def sweep(self) -> None:
        """Delete what has expired."""
        for saved in self.all(expired=True):
            if saved.expired:
                with self._lock:  # unless it was replaced meanwhile
                    gone = self._hide(self._place(saved)) if self._read(*saved.place) == saved else None
                if gone is not None:
                    _remove(gone)

    def runs(self) -> list[Run]:
        """All that have saved, the newest first."""
        files = self.root.glob("*/run.json")
        found = [run for file in files if (run := self._described(file, Run)) is not None]
        return sorted(found, key=lambda run: run.created, reverse=True)

    def all(self, run: str = "*", *, expired: bool = False) -> list[Saved]:
        """The newest first."""
        files = self.root.glob(f"{run}/*/*/checkpoint.json")
        places = [file.parent.parts[-3:] for file in files if not file.parent.name.startswith(".")]
        found = [saved for place in places if (saved := self._read(*place)) is not None]
        kept = [saved for saved in found if expired or not saved.expired]
        return sorted(kept, key=lambda saved: saved.created, reverse=True)

    def _after_all(self, run: str) -> str:
        """Now, or just after the run's last checkpoint where the clock was set back: their order stays."""
        last, created = max((one.created for one in self.all(run, expired=True)), default=""), now()
        if created > last:
            return created
        return (datetime.fromisoformat(last) + timedelta(microseconds=1)).isoformat()

    def last_state(self, run: str) -> Saved | None:
        """The newest one that a training can go on from; None = there is none."""
        found = self.all(run) if _NAME.fullmatch(run) else []
        return next((saved for saved in found if saved.kind == TRAINING), None)

    def archive(self, saved: Saved, to: IO[bytes]) -> None:
        """A tar.gz of what it consists of. Raises ApiError: it is deleted meanwhile."""
        try:
            with tarfile.open(fileobj=to, mode="w:gz", compresslevel=1) as tar:
                for file in self._files(saved):
                    tar.add(file, arcname=file.name)
        except FileNotFoundError:
            self.find(saved.path)
            raise

    def _tidy(self, directory: Path) -> None:
        """What a server that was killed left hidden: a checkpoint is found again where its name is free."""
        hidden = [left for left in directory.glob(".*") if _HIDDEN.fullmatch(left.name)]
        found = {left: self._described(left / "checkpoint.json", Saved) for left in hidden}
        for left, saved in sorted(
            found.items(), key=lambda one: one[1].created if one[1] else "", reverse=True
        ):
            if saved and _NAME.fullmatch(saved.name) and not left.with_name(saved.name).exists():
                left.rename(left.with_name(saved.name))
            else:
                _remove(left)

    def _hide(self, place: Path) -> Path:
        """Where a checkpoint, if there is one, lies from now on: nobody finds it."""
        gone = _hidden(place)
        with contextlib.suppress(FileNotFoundError):
            place.rename(gone)
        return gone

    def _files(self, saved: Saved) -> Iterator[Path]:
        return iter(sorted(self.data(saved).iterdir()))

    def _place(self, saved: Saved) -> Path:
        return self.root.joinpath(*saved.place)

    def _read(self, run: str, kind: str, name: str) -> Saved | None:
        found = self._described(self.root / run / kind / name / "checkpoint.json", Saved)
        # A copy that somebody made is where it lies, and not what it is a copy of.
        return found and replace(found, run=run, kind=kind, name=name)

    def _described(self, file: Path, kind: type[KindT]) -> KindT | None:
        """None = the file is not there, or says nothing, of which the log is told once."""
        try:
            return kind(**json.loads(file.read_text()))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, TypeError) as error:
            if file not in self._unreadable:
                self._unreadable.add(file)
                logger.warning("%s is passed over, it cannot be read: %s", file, error)
            return None


def _hidden(place: Path) -> Path:
    """A new name beside `place`."""
    return place.with_name(f".{secrets.token_hex(8)}")


def _remove(hidden: Path) -> None:
    """First what makes it a checkpoint: where a kill ends this, it does not come back in part."""
    with contextlib.suppress(OSError):
        (hidden / "checkpoint.json").unlink()
    shutil.rmtree(hidden, ignore_errors=True)


def _write_json(file: Path, fields: dict[str, Any]) -> None:
    write_atomic(file, json.dumps(fields, indent=2) + "\n")
