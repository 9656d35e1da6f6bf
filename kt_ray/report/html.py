"""Pieces of HTML that both pages are made of. They escape whatever comes from a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from kt_ray.disk import write_atomic
from kt_ray.errors import UserError
from kt_ray.report.charts import HEAT_COLOURS, SERIES_COLOURS


def page(title: str, body: Iterable[str]) -> str:
    """A whole document without scripts, fonts, or anything else to load."""
    content = "\n".join(part for part in body if part)
    # Nothing is fetched and nothing runs, whatever a prompt or an answer contains.
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_style_sheet()}</style></head>\n"
        f"<body><main>\n{content}\n</main></body></html>\n"
    )


def write_page(file: Path, text: str, key: str) -> None:
    """Write a page whole. UserError, naming the key that chooses another place, when that fails."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, text)
    except OSError as error:
        raise UserError(
            "the page cannot be written",
            where=str(file),
            observed=error.strerror or str(error),
            remedy=f"set {key} to a place that you may write to",
        ) from error


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: bool = True,
    classes: Sequence[Sequence[str]] | None = None,
) -> str:
    """A table; every cell is escaped.

    Args:
        columns: headings; none = a table without them.
        numbers: all columns but the first are numbers, aligned right.
        classes: further classes of every cell.
    """

    def cell(tag: str, number: int, text: str, more: str = "") -> str:
        kind = "num" if numbers and number else "key"
        return f'<{tag} class="{f"{kind} {more}".strip()}">{escape(text)}</{tag}>'

    head = "".join(cell("th", c, name) for c, name in enumerate(columns))
    body = []
    for r, row in enumerate(rows):
        cells = (cell("td", c, text, classes[r][c] if classes else "") for c, text in enumerate(row))
        body.append(f"<tr>{''.join(cells)}</tr>")
    thead = f"<thead><tr>{head}</tr></thead>" if columns else ""
    return f'<div class="scroll"><table>{thead}<tbody>{"".join(body)}</tbody></table></div>'


def card(title: str, *parts: str) -> str:
    """A titled box; "" when there is nothing in it."""
    inner = "".join(parts)
    return boxed(f"<h3>{escape(title)}</h3>{inner}") if inner else ""


def boxed(inner: str) -> str:
    return f'<div class="card">{inner}</div>'


def section(title: str, *parts: str) -> str:
    """A heading and what is below it; "" when there is nothing."""
    inner = "\n".join(part for part in parts if part)
    return f"<h2>{escape(title)}</h2>\n{inner}" if inner else ""


def tile(title: str, value: str, note: str = "") -> str:
    """One figure in large."""
    below = f"<small>{escape(note)}</small>" if note else ""
    return f'<div class="card tile"><span>{escape(title)}</span><b>{escape(value)}</b>{below}</div>'


def _style_sheet() -> str:
    """page.css, and the classes that charts use."""
    rules = [Path(__file__).with_name("page.css").read_text(encoding="utf-8")]
    for i in range(SERIES_COLOURS):
        colour = f"var(--s{i})"
        rules.append(f".line.s{i} {{ stroke: {colour}; }} .dot.s{i} {{ fill: {colour}; }}")
        rules.append(f"i.s{i} {{ background: {colour}; }}")
    rules += [f".h{i} {{ fill: var(--h{i}); background: var(--h{i}); }}" for i in range(HEAT_COLOURS)]
    return "\n".join(rules) + "\n"
