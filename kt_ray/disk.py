"""Files: text written whole or not at all, and what a file is when it is not what its name says."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_atomic(path: Path, text: str) -> None:
    """Write beside `path` and rename: a reader, or a crash, sees the old file or the whole new one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
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
