"""Small SVG drawings without scripts: lines over steps, and a map of cells.

Colours are CSS classes (`s0` … `s7` for series, `h0` … `h9` for heat), so that a page chooses them for
light and dark. Long series are drawn as means of neighbouring steps: 600 points are more than a screen has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from kt_ray.runs.rundata import Points
from kt_ray.tracking.plot import smooth

WIDTH, HEIGHT = 560, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 12, 34
_POINTS = 600
SERIES_COLOURS, HEAT_COLOURS = 8, 10
FEW = 5  # points that smoothing would tell nothing of


@dataclass(frozen=True)
class Line:
    """One curve."""

    label: str  # in the legend; "" = not in it
    points: Points  # (step, value) in order of steps
    colour: int = 0  # number of its class, taken modulo `SERIES_COLOURS`
    faint: bool = False  # thin and pale, as for raw values behind a smoothed curve
    dots: bool = False  # a mark on every point


def line_chart(lines: Sequence[Line], unit: str, *, from_zero: bool = False) -> str:
    """An SVG with its legend above; "" when no line has a point.

    Args:
        lines: drawn in this order, the last on top.
        unit: label of the vertical axis.
        from_zero: the axis begins at zero, for amounts that are compared by their heights.
    """
    lines = [line for line in lines if line.points]
    if not lines:
        return ""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    x_low, x_high = min(xs), max(xs)
    ends = [0.0] if from_zero else []
    ticks = nice_ticks(min(ys + ends), max(ys + ends))
    low, high = ticks[0], ticks[-1]

    def sx(x: float) -> float:
        share = (x - x_low) / (x_high - x_low) if x_high > x_low else 0.5
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def sy(y: float) -> float:
        return _TOP + (1 - (y - low) / (high - low)) * (HEIGHT - _TOP - _BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(unit)} over steps">']
    for tick, text in zip(ticks, tick_labels(ticks), strict=True):
        y = sy(tick)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    for tick in _step_ticks(x_low, x_high):
        parts.append(f'<text x="{sx(tick):.1f}" y="{HEIGHT - 16}" text-anchor="middle">{tick}</text>')
    parts.append(f'<text x="{WIDTH - _RIGHT}" y="{HEIGHT - 2}" text-anchor="end" class="axis">step</text>')
    for line in lines:
        parts += _drawn(line, sx, sy)
    parts.append("</svg>")
    return _legend(lines, unit) + "".join(parts)


def _drawn(line: Line, sx: Callable[[float], float], sy: Callable[[float], float]) -> list[str]:
    colour = f"s{line.colour % SERIES_COLOURS}"
    points = thinned(line.points, _POINTS)
    path = "".join(f"{'L' if i else 'M'}{sx(x):.1f} {sy(y):.1f}" for i, (x, y) in enumerate(points))
    parts = []
    if len(points) > 1:
        parts.append(f'<path class="line {colour}{" faint" if line.faint else ""}" d="{path}"/>')
    if line.dots or len(points) == 1:
        named = escape(line.label or "value")
        parts += [
            f'<circle class="dot {colour}" cx="{sx(x):.1f}" cy="{sy(y):.1f}" r="3.2">'
            f"<title>{named}, step {x:g}: {y:.5g}</title></circle>"
            for x, y in points
        ]
    return parts


def _legend(lines: Sequence[Line], unit: str) -> str:
    entries = [
        f'<span class="key"><i class="s{line.colour % SERIES_COLOURS}"></i>{escape(line.label)}</span>'
        for line in lines
        if line.label
    ]
    return f'<div class="legend"><span class="unit">{escape(unit)}</span>{"".join(entries)}</div>'


def heat_map(rows: Mapping[int, Sequence[float]], top: float) -> str:
    """An SVG of cells, a layer's experts per row; colours from 0 to `top`, above it the last one.

    Cells of a colour are one path, so that 60 layers of 384 experts stay small; each cell has a tooltip
    up to 4,096 cells, beyond that each row.
    """
    if not rows:
        return ""
    columns = max(len(row) for row in rows.values())
    width, left, bottom = 1000, 46, 30
    cell = (width - left) / columns
    height = max(9.0, min(22.0, 420 / len(rows)))
    total = height * len(rows)
    paths: list[list[str]] = [[] for _ in range(HEAT_COLOURS)]
    tips: list[str] = []
    by_cell = columns * len(rows) <= 4096
    for number, (name, row) in enumerate(rows.items()):
        y = number * height
        for column, value in enumerate(row):
            level = min(HEAT_COLOURS - 1, int(value / top * HEAT_COLOURS))
            path = f"M{left + column * cell:.1f} {y:.1f}h{cell:.2f}v{height:.1f}h-{cell:.2f}z"
            paths[level].append(path)
            if by_cell:
                text = f"layer {name}, expert {column}: {value:.2f}"
                tips.append(f'<path d="{path}"><title>{text}</title></path>')
        if not by_cell:
            fullest = max(range(len(row)), key=lambda i: row[i])
            tips.append(
                f'<path d="M{left} {y:.1f}H{width}v{height:.1f}H{left}z"><title>layer {name}: '
                f"fullest expert {fullest}, {row[fullest]:.2f}</title></path>"
            )
    every = math.ceil(len(rows) / max(1, int(total / 14)))
    labels = [
        f'<text x="{left - 6}" y="{(i + 0.5) * height + 4:.1f}" text-anchor="end">{name}</text>'
        for i, name in enumerate(rows)
        if i % every == 0
    ]
    for tick in _step_ticks(0, columns - 1, 12):
        x = left + (tick + 0.5) * cell
        labels.append(f'<text x="{x:.1f}" y="{total + 15:.1f}" text-anchor="middle">{tick}</text>')
    labels.append(f'<text x="{width}" y="{total + 28:.1f}" text-anchor="end" class="axis">expert</text>')
    labels.append(f'<text x="0" y="{total + 15:.1f}" class="axis">layer</text>')
    cells = "".join(f'<path class="h{i}" d="{"".join(path)}"/>' for i, path in enumerate(paths) if path)
    attributes = 'role="img" aria-label="layer by expert" shape-rendering="crispEdges"'
    drawn = f'{cells}<g class="tips">{"".join(tips)}</g>{"".join(labels)}'
    return f'<svg viewBox="0 0 {width} {total + bottom:.0f}" {attributes}>{drawn}</svg>'


def heat_scale(top: float) -> str:
    """The legend of a heat map."""
    cells = "".join(f'<i class="h{i}"></i>' for i in range(HEAT_COLOURS))
    return f'<div class="legend"><span>0</span><span class="scale">{cells}</span><span>≥ {top:g}</span></div>'


def smoothed(points: Points) -> list[tuple[int, float]]:
    return list(zip([step for step, _ in points], smooth([value for _, value in points]), strict=True))


def thinned(points: Points, limit: int) -> list[tuple[float, float]]:
    """At most `limit` points: means of equal groups of neighbours; unchanged when there are no more."""
    if len(points) <= limit:
        return [(float(x), y) for x, y in points]
    size = math.ceil(len(points) / limit)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round values that enclose low..high, about `count` of them: multiples of 1, 2 or 5 times 10^n."""
    largest = max(abs(low), abs(high))
    if high - low <= max(1e-9 * largest, 1e-300):  # equal but for rounding
        spread = largest * 0.1 or 1.0
        low, high = low - spread, high + spread
    raw = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Short texts, equally precise: 0, 0.5, 1; 20k, 40k; 1e-05."""
    largest = max(abs(tick) for tick in ticks)
    if largest and (largest < 1e-3):
        return [f"{tick:.3g}" for tick in ticks]
    units = ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"), (0.0, 1.0, ""))
    scale, suffix = next((scale, suffix) for least, scale, suffix in units if largest >= least)
    gaps = [b - a for a, b in pairwise(ticks) if b > a]
    gap = min(gaps, default=largest or 1.0) / scale
    digits = max(0, min(6, -math.floor(math.log10(gap) + 1e-9)))
    return [f"{tick / scale:.{digits}f}{suffix if tick else ''}" for tick in ticks]


def _step_ticks(low: int, high: int, count: int = 7) -> list[int]:
    if high <= low:
        return [low]
    return [int(t) for t in nice_ticks(low, high, count) if t == int(t) and low <= t <= high]
