"""The command line that this process was started with, and the one that goes on with its run."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

program = "python launch.py" if Path(sys.argv[0]).name != "kt-ray" else "kt-ray"
given: list[str] = []  # arguments of this process, or of this job of a multirun; the command line sets them
# Keys that the command to go on sets itself.
_REPLACED = ("run.name=", "run.root=", "run.overwrite=", "trainer.resume=")


def resume_line(run: Path) -> str:
    """The command that goes on with a run directory from its newest checkpoint."""
    kept = [argument for argument in given if not argument.startswith(_REPLACED)]
    keys = [f"run.root={run.parent}", f"run.name={run.name}", "trainer.resume=latest"]
    return f"{program} {shlex.join([*kept, *keys])}"
