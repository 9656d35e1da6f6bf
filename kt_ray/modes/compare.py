"""mode=compare: several runs, or the jobs of multiruns, as a table, Markdown, JSON and a page of curves."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kt_ray.config.schema import Config
from kt_ray.report.comparison import RunComparison, compare_runs, find_runs
from kt_ray.report.comparison_page import compare_page
from kt_ray.report.html import write_page
from kt_ray.terminal import screen_console


def run(config: Config) -> int:
    """Print the table; write compare.html, compare.md and compare.json. Returns the exit code.

    Raises:
        UserError: fewer than two runs, a name that is no run, a damaged file, a place not to be written.
    """
    root = Path(config.run.root)
    comparison = compare_runs(find_runs(config.compare.runs, root), config.compare.sort)
    out = Path(config.compare.out) if config.compare.out else root
    texts = {
        "compare.md": comparison.markdown(),
        "compare.json": json.dumps(comparison.to_dict(), ensure_ascii=False, indent=1) + "\n",
        "compare.html": compare_page(comparison),
    }
    for name, text in texts.items():
        write_page(out / name, text, "compare.out")
    show(comparison, screen_console(file=sys.stdout, highlight=False))
    print("written: " + ", ".join(str(out / name) for name in texts))
    return 0


def show(comparison: RunComparison, screen: Console) -> None:
    """The tables on a terminal, the best figures in bold."""
    best = comparison.best()
    results = Table(box=SIMPLE_HEAD, pad_edge=False)
    for number, heading in enumerate(comparison.headings()):
        results.add_column(
            heading, justify="right" if number else "left", no_wrap=not number, overflow="fold"
        )
    for r, row in enumerate(comparison.cells()):
        results.add_row(*(Text(cell, "bold" if (r, c) in best else "") for c, cell in enumerate(row)))
    if not screen.is_terminal:
        # A file has no right edge.
        endless = screen.options.update(max_width=1000)
        screen.width = max(screen.width, screen.measure(results, options=endless).maximum)
    screen.print(results)
    rows = comparison.setting_rows()
    if rows:
        settings = Table(title="what differs", title_justify="left")
        for heading in ("key", *(entry.label for entry in comparison.entries)):
            settings.add_column(Text(heading), overflow="fold")  # of a name, brackets are no markup
        for row in rows:
            settings.add_row(*map(Text, row))
        screen.print(settings)
    if not comparison.differing:
        screen.print("no configuration key differs")
