"""The SVG pieces: what they show, and that they are well-formed."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from kt_ray.report.charts import Line, heat_map, line_chart, nice_ticks, thinned, tick_labels


def svg(text: str) -> ET.Element:
    return ET.fromstring(text[text.index("<svg") :])


def test_a_line_chart_puts_points_where_they_belong():
    text = line_chart([Line("a<b", [(0, 0.0), (10, 10.0)], 1, dots=True)], "GB", from_zero=True)
    dots = list(svg(text).iter("circle"))
    assert [float(d.get("cx")) for d in dots] == [58, 548]
    assert [float(d.get("cy")) for d in dots] == [216, 12]  # axis 0 to 10, top at 12, bottom at 250 - 34
    assert dots[1][0].text == "a<b, step 10: 10" and "a&lt;b</span>" in text and "s1" in dots[0].get("class")


def test_charts_without_points_are_empty_and_single_points_are_dots():
    assert line_chart([Line("a", [])], "x") == "" and heat_map({}, 1) == ""
    one = svg(line_chart([Line("a", [(3, 2.0)])], "x"))
    assert len(list(one.iter("circle"))) == 1 and not [
        p for p in one.iter("path") if p.get("class") != "grid"
    ]


def test_constant_values_and_long_series():
    svg(line_chart([Line("a", [(s, 0.0) for s in range(5)])], "x"))
    svg(line_chart([Line("a", [(1, 0.7), (2, 0.7000000000000001), (3, 0.7 - 2e-16)])], "x"))
    svg(line_chart([Line("a", [(1, -1.0), (2, -2.0)])], "x", from_zero=True))
    svg(line_chart([Line("a", [(1, 5e-324), (2, 0.0)])], "x"))
    long = [(s, float(s % 2)) for s in range(100_000)]
    assert len(line_chart([Line("a", long)], "x")) < 20_000
    few = thinned(long, 600)
    assert len(few) <= 600 and sum(y for _, y in few) / len(few) == pytest.approx(0.5, abs=0.01)
    assert thinned([(1, 2.0)], 600) == [(1.0, 2.0)]


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0, 0.0013), (1.1, 5.9), (-3, 3), (0, 4.7e9), (2, 2), (0, 0), (1e-6, 3e-5)]
)
def test_ticks_enclose_their_range_with_few_distinct_labels(low, high):
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low and ticks[-1] >= high and 3 <= len(ticks) <= 9
    labels = tick_labels(ticks)
    assert len(set(labels)) == len(ticks) and all(len(label) <= 9 for label in labels)


def test_tick_labels_read_well():
    assert tick_labels([0, 0.5, 1.0]) == ["0.0", "0.5", "1.0"] and tick_labels([0, 20000]) == ["0", "20k"]
    assert tick_labels([0.0, 1e-5, 2e-5]) == ["0", "1e-05", "2e-05"]


def test_a_heat_map_has_every_cell_with_its_value():
    text = heat_map({1: [0.0, 1.0], 7: [2.0, 9.0]}, 2.0)
    titles = [t.text for t in svg(text).iter("title")]
    assert titles == [
        "layer 1, expert 0: 0.00",
        "layer 1, expert 1: 1.00",
        "layer 7, expert 0: 2.00",
        "layer 7, expert 1: 9.00",
    ]
    cells = {m[1]: m[2].count("M") for m in re.finditer(r'<path class="(h\d)" d="([^"]*)"', text)}
    assert cells == {"h0": 1, "h5": 1, "h9": 2}  # at the top and above it: the last colour


def test_a_large_heat_map_stays_small_and_names_the_fullest_of_each_row():
    rows = {layer: [1.0] * 383 + [3.0] for layer in range(60)}
    text = heat_map(rows, 3.0)
    assert len(text) < 900_000
    assert [t.text for t in svg(text).iter("title")][5] == "layer 5: fullest expert 383, 3.00"
