"""The checkpoints of a run on disk: how their directories are called, and which are complete.

Apart from the package `checkpoint`, which loads torch to read and write them.
"""

from __future__ import annotations

import os
from pathlib import Path

MANIFEST = "manifest.json"  # written last: a directory that holds it is a checkpoint
SUPERSEDED = "superseded_"  # before the name of one that its run, which went back to an earlier one, has left


def step_name(step: int) -> str:
    """Directory name of a step's checkpoint."""
    return f"step_{step:06d}"


def step_of(name: str) -> int | None:
    """The step whose checkpoint has this directory name; None = it is no checkpoint's."""
    number = name.removeprefix("step_")
    return int(number) if number != name and number.isdecimal() else None


def list_checkpoints(root: str | os.PathLike[str]) -> list[Path]:
    """Complete checkpoints below `root` (a run's checkpoints/), oldest step first."""
    complete = (manifest.parent for manifest in Path(root).glob(f"step_*/{MANIFEST}"))
    numbered = [(step, path) for path in complete if (step := step_of(path.name)) is not None]
    return [path for _, path in sorted(numbered)]
