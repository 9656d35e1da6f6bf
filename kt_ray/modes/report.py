"""mode=report: one self-contained HTML page about a run."""

from __future__ import annotations

from pathlib import Path

from kt_ray.config.schema import Config
from kt_ray.errors import UserError
from kt_ray.report.html import write_page
from kt_ray.report.page import report_page
from kt_ray.runs.rundata import read_run
from kt_ray.runs.rundir import runs_in


def run(config: Config) -> int:
    """Write report.html and print its path. Returns the exit code.

    Raises:
        UserError: no such run, a damaged file, or a page that cannot be written.
    """
    directory = which_run(config)
    file = Path(config.report.out) if config.report.out else directory / "report.html"
    if file.is_dir():
        file = file / "report.html"
    write_page(file, report_page(read_run(directory), config.report.samples), "report.out")
    print(f"written: {file}")
    return 0


def which_run(config: Config) -> Path:
    """The run directory that report.run or run.name means; without either, the newest under run.root."""
    if config.report.run:
        return Path(config.report.run)
    root = Path(config.run.root)
    if config.run.name:
        return root / config.run.name
    runs = runs_in(root)
    if not runs:
        raise UserError(
            "there is no run to report on",
            where=str(root),
            observed="no directory with a config.yaml" if root.is_dir() else "no such directory",
            remedy="set report.run=<run directory>, or run.root=<where runs are>",
        )
    return max(runs, key=_last_written)


def _last_written(directory: Path) -> int:
    """When the run last wrote figures, in ns; of a run without any, when it was made."""
    metrics = directory / "metrics.jsonl"
    return (metrics if metrics.exists() else directory / "config.yaml").stat().st_mtime_ns
