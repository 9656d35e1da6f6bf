"""What a file is that is not what its name says. Without torch: placement reads config.json, too."""

from __future__ import annotations

from pathlib import Path


def content_of(start: bytes, size: int) -> str:
    """What a file is that is not what its name says, from its first bytes; "" where they tell nothing."""
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
    """As `content_of`, of a file that could not be parsed; "" where it cannot be read either."""
    try:
        with path.open("rb") as file:
            return content_of(file.read(64), path.stat().st_size)
    except OSError:
        return ""
