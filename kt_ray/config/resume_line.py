"""The commands that go on with a run, or talk to its model."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path


def _program(started: str) -> str:
    """As one types what was started: launch.py by its path, which may be another directory's."""
    name = Path(started).name
    if name == "kt-ray":
        return name
    return f"python {shlex.quote(started)}" if name == "launch.py" else "python launch.py"


program = _program(sys.argv[0])


def resume_line(run: Path) -> str:
    """The command that goes on with a run directory from its newest checkpoint."""
    return f"{program} {shlex.join([_resume(run)])}"


def chat_line(run: Path) -> str:
    """The command that talks to the model of a finished run, with its adapter."""
    return f"{program} {shlex.join([_resume(run), 'mode=chat'])}"


def _resume(run: Path) -> str:
    here = Path.cwd()
    return f"resume={run.relative_to(here) if run.is_relative_to(here) else run}"
