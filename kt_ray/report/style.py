"""The style sheet of the HTML pages: page.css, and the classes that charts use."""

from __future__ import annotations

from pathlib import Path

from kt_ray.report.charts import HEAT_COLOURS, SERIES_COLOURS


def style_sheet() -> str:
    """All of it, as one text to put into a page."""
    rules = [Path(__file__).with_name("page.css").read_text(encoding="utf-8")]
    for i in range(SERIES_COLOURS):
        colour = f"var(--s{i})"
        rules.append(f".line.s{i} {{ stroke: {colour}; }} .dot.s{i} {{ fill: {colour}; }}")
        rules.append(f"i.s{i} {{ background: {colour}; }}")
    rules += [f".h{i} {{ fill: var(--h{i}); background: var(--h{i}); }}" for i in range(HEAT_COLOURS)]
    return "\n".join(rules) + "\n"
