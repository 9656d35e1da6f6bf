"""compare.html: curves of several runs over each other, and their table."""

from __future__ import annotations

from kt_ray.report.charts import FEW, SERIES_COLOURS, Line, line_chart, smoothed
from kt_ray.report.comparison import RunComparison
from kt_ray.report.html import boxed, card, page, section, table

_CURVES = (
    ("Training loss, smoothed", "loss", "", False),
    ("Held-out loss", "eval_loss", "", False),
    ("Reward", "policy_reward", "mean reward", False),
    ("Held-out reward", "eval_reward", "mean reward", False),
    ("Throughput", "tokens_per_s", "tokens/s", True),
    ("Time of a step", "seconds", "seconds", True),
    ("Learning rate", "lr", "learning rate", True),
    ("Gradient norm", "grad_norm", "norm", True),
)


def compare_page(comparison: RunComparison) -> str:
    """The whole document. The first eight runs of the table have curves: there are no more colours."""
    best = comparison.best()
    cells = comparison.cells()
    classes = [["best" if (r, c) in best else "" for c in range(len(row))] for r, row in enumerate(cells)]
    settings = comparison.setting_rows()
    labels = [entry.label for entry in comparison.entries]
    left_out = len(labels) - SERIES_COLOURS
    charts = [card(title, _curve(comparison, key, unit, zero)) for title, key, unit, zero in _CURVES]
    return page(
        "runs · kt_ray",
        [
            f"<h1>{len(labels)} runs</h1>",
            section("Results", boxed(table(comparison.headings(), cells, classes=classes))),
            section("Curves", f'<div class="grid2">{"".join(charts)}</div>' if any(charts) else ""),
            f'<p class="soft">Curves of the first {SERIES_COLOURS} runs.</p>' if left_out > 0 else "",
            section(
                "What differs",
                boxed(table(["key", *labels], settings)) if settings else "",
                "" if comparison.differing else '<p class="soft">No configuration key differs.</p>',
            ),
            "<footer>Written by kt_ray mode=compare from the files in the run directories.</footer>",
        ],
    )


def _curve(comparison: RunComparison, key: str, unit: str, from_zero: bool) -> str:
    lines = []
    for number, entry in enumerate(comparison.entries[:SERIES_COLOURS]):
        points = entry.run.series(key)
        if key == "loss" and "reward" in entry.figures:
            continue  # GRPO's says nothing
        if key == "loss" and len(points) >= FEW:
            points = smoothed(points)
        lines.append(Line(entry.label, points, number, dots=key == "eval_loss" and len(points) <= 100))
    units = {entry.run.loss_unit for entry in comparison.entries}
    return line_chart(lines, unit or (units.pop() if len(units) == 1 else "loss"), from_zero=from_zero)
