"""The command line that this process was started with; those that go on with its run or talk to its model."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

program = "python launch.py" if Path(sys.argv[0]).name != "kt-ray" else "kt-ray"
given: list[str] = []  # arguments of this process, or of this job of a multirun; the command line sets them
# Keys that the command to go on sets itself.
_REPLACED = ("run.name=", "run.root=", "run.overwrite=", "trainer.resume=")
# What says which model it is, how questions to it are written, and where it runs.
_OF_THE_MODEL = (
    *("model", "rule", "cluster", "experiment=", "recipe=", "data.template=", "data.date=", "--config-dir"),
)


def resume_line(run: Path) -> str:
    """The command that goes on with a run directory from its newest checkpoint."""
    kept = [argument for argument in given if not argument.startswith(_REPLACED)]
    keys = [f"run.root={run.parent}", f"run.name={run.name}", "trainer.resume=latest"]
    return f"{program} {shlex.join([*kept, *keys])}"


def chat_line(run: Path) -> str:
    """The command that talks to the model of a finished run."""
    kept = [argument for argument in given if argument.startswith(_OF_THE_MODEL)]
    return f"{program} {shlex.join(['mode=chat', f'generate.adapter={run}', *kept])}"
