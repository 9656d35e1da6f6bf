"""What a host has and sees, looked at from inside. Imports neither torch nor Ray: it runs in a small task."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import re
import secrets
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kt_ray.errors import UserError
from kt_ray.hardware.describe import listed_gpus, this_host
from kt_ray.hardware.machine import Gpu, Hardware

_PACKAGES = ("kt_ray", "torch", "transformers")


@dataclass(frozen=True)
class Shared:
    """What every host must see: directories and files by what they hold, and the run directory.

    contents: path -> digest (see `digest`). run_dir: None = not checked. mark: name of a file that the
    driver wrote there for the time of the check.
    """

    contents: tuple[tuple[str, str], ...]
    run_dir: str | None = None
    mark: str = ""


@dataclass(frozen=True)
class Sight:
    """What the task found on a node. unseen: what is not as it is for the driver, in words. cards: all GPUs
    of the machine, also those that Ray hides from a task without GPUs; () = none, or not known."""

    hardware: Hardware
    versions: tuple[tuple[str, str], ...]
    unseen: tuple[str, ...]
    cards: tuple[Gpu, ...] = ()


def digest(path: str) -> str:
    """What lies at `path`, cheaply: names and sizes of weights, and config.json where a directory has one. Of
    a file of a split set, all its parts.
    """
    place = Path(path)
    hasher = hashlib.sha256()
    if place.is_dir() and (place / "config.json").is_file():
        hasher.update((place / "config.json").read_bytes())
    for file in _weights(place):
        hasher.update(f"{file.name} {file.stat().st_size}".encode())
    return hasher.hexdigest()


def _weights(place: Path) -> list[Path]:
    """Raises OSError: there is nothing at `place`."""
    if place.is_dir():
        return sorted(file for file in place.iterdir() if file.suffix in (".safetensors", ".gguf"))
    place.stat()
    split = re.fullmatch(r"(.*)-\d{5}-of-\d{5}\.gguf", place.name)
    return sorted(place.parent.glob(f"{glob.escape(split[1])}-*-of-*.gguf")) if split else [place]


def versions() -> tuple[tuple[str, str], ...]:
    """Versions of the packages that must agree."""
    pairs = []
    for name in _PACKAGES:
        try:
            pairs.append((name, version(name)))
        except PackageNotFoundError:
            pairs.append((name, "not installed"))
    return tuple(pairs)


def look(shared: Shared) -> Sight:
    """Runs on a node: its hardware, its packages, and what of `shared` it does not see."""
    unseen = []
    for path, wanted in shared.contents:
        try:
            if digest(path) != wanted:
                unseen.append(f"{path} holds something else there")
        except OSError as error:
            unseen.append(f"{path} cannot be read there ({error.strerror})")
    if shared.run_dir is not None:
        own = Path(shared.run_dir) / f"{shared.mark}-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            (Path(shared.run_dir) / shared.mark).read_bytes()
            own.touch(exist_ok=False)
            own.unlink()
        except OSError as error:
            unseen.append(f"the run directory {shared.run_dir} is not shared with it ({error.strerror})")
    cards: tuple[Gpu, ...] = ()
    with contextlib.suppress(UserError):  # then the plan's are looked at when Ray has reserved them
        cards = listed_gpus(None)
    return Sight(this_host(), versions(), tuple(unseen), cards)
