"""The command that goes on with a run."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

program = "python launch.py" if Path(sys.argv[0]).name != "kt-ray" else "kt-ray"


def resume_line(run: Path) -> str:
    """The command that goes on with a run directory from its newest checkpoint."""
    here = Path.cwd()
    shown = run.relative_to(here) if run.is_relative_to(here) else run
    return f"{program} {shlex.join([f'resume={shown}'])}"
