"""Files: written whole or not at all, the cache, and what a file is when it is not what its name says."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from kt_ray.errors import UserError

logger = logging.getLogger(__name__)

_OPEN_FILES = 65536  # at most: Ray, and a server's connections, need no more
_PACKED = {
    b"\x1f\x8b": "a gzip archive (gunzip unpacks it)",
    b"\x28\xb5\x2f\xfd": "a zstd archive (zstd -d unpacks it)",
    b"\xfd7zXZ\x00": "an xz archive (unxz unpacks it)",
    b"BZh": "a bzip2 archive (bunzip2 unpacks it)",
    b"PAR1": "a parquet file",
    b"ARROW1": "an arrow file",
    b"%PDF": "a PDF",
}


@contextlib.contextmanager
def only_warned(what: str) -> Iterator[None]:
    """A fault of the disk in the block is a warning, "WHAT: fault": no run needs what is done there."""
    try:
        yield
    except OSError as error:
        logger.warning("%s: %s", what, error)


def half_written(name: str, process: int | str = "*") -> str:
    """What `write_atomic` calls the file while it writes it."""
    return f".{name}.{process}.partial"


def write_atomic(path: Path, text: str) -> None:
    """Write beside `path` and rename: a reader, or a crash, sees the old file or the whole new one."""
    beside = path.with_name(half_written(path.name, os.getpid()))
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def raise_open_files() -> float:
    """Raise the limit on open files as far as this process may, for what it starts as well. Returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    return math.inf if soft == resource.RLIM_INFINITY else soft


def present(path: Path) -> Path:
    """The path, or the nearest directory above it that is there."""
    while not os.path.exists(path):
        path = path.parent
    return path


def free_bytes(path: Path) -> float:
    """Free bytes of the file system that `path` lies on, or will; infinite where it tells no size, as a tmpfs
    without a limit and some network ones do."""
    usage = shutil.disk_usage(present(path))
    return usage.free if usage.total else math.inf


def cache_root() -> Path:
    """`$KT_RAY_CACHE`, else `~/.cache/kt_ray`."""
    return Path(os.environ.get("KT_RAY_CACHE") or Path.home() / ".cache" / "kt_ray")


def made_once(target: Path, mark: str, make: Callable[[Path], None]) -> Path:
    """A directory in the cache with the file `mark`, made by `make` in one beside it if it is not there.

    It is renamed when complete, so a reader never sees half of it, and two makers may race: the first wins.

    Raises:
        UserError: the cache cannot be written.
    """
    try:
        if not (target / mark).is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
            try:
                make(scratch)
                scratch.chmod(0o755)
                try:
                    scratch.rename(target)
                except OSError:
                    if not (target / mark).is_file():  # not a lost race
                        raise
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise UserError(
            "the cache cannot be written",
            where=str(target.parent),
            observed=error,
            remedy="set KT_RAY_CACHE to a directory you may write to",
        ) from error
    return target


def stays_inside(name: object) -> bool:
    """Whether a file's name, as another file gives it, can only mean something in the same directory."""
    if not isinstance(name, str) or not name or "\0" in name:
        return False
    parts = Path(name).parts
    short = all(len(part.encode("utf-8", "replace")) <= 255 for part in parts) and len(parts) < 16
    return short and not os.path.isabs(name) and ".." not in parts


def content_of(start: bytes, size: int) -> str:
    """What a file really is, from its first bytes; "" when they tell nothing."""
    text = start.lstrip().lower()
    if size == 0:
        return "an empty file"
    if start.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the file itself (git lfs pull fetches it)"
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "a web page (an error page saved under this name)"
    if start.startswith(b"PK\x03\x04"):
        return "a zip archive (PyTorch's format)"
    if start.startswith(b"GGUF"):
        return "a GGUF file"
    for magic, name in _PACKED.items():
        if start.startswith(magic):
            return name
    if start and not any(start):
        return "zeros (space that was reserved and never written: an interrupted download)"
    return ""


def content_of_file(path: Path) -> str:
    """As `content_of`, of a file that could not be parsed; "" when it cannot be read either."""
    try:
        with path.open("rb") as file:
            return content_of(file.read(64), path.stat().st_size)
    except OSError:
        return ""
