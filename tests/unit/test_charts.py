"""Charts: whole SVG elements whatever the values, round ticks, nothing that leaks or runs."""

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppocli.runs.charts import Line, histogram, line_chart, thin

SVG = "{http://www.w3.org/2000/svg}"


def parsed(svg: str) -> ElementTree.Element:
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    assert root.get("role") == "img"
    assert root.find(f"{SVG}title") is not None
    return root


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in parsed(svg).iter(f"{SVG}text")]


def coordinates(svg: str) -> list[tuple[float, float]]:
    """Every point of every line and dot."""
    root = parsed(svg)
    found = [tuple(map(float, pair.split(","))) for line in root.iter(f"{SVG}polyline")
             for pair in line.get("points").split()]
    return found + [(float(dot.get("cx")), float(dot.get("cy")))
                    for dot in root.iter(f"{SVG}circle")]


def test_a_line_goes_where_its_values_are():
    svg = line_chart([Line("reward", [(0, 0.0), (5, 1.0), (10, 0.5)])], title="Reward")
    (x0, low), (x1, high), (x2, middle) = coordinates(svg)
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert low - middle == pytest.approx(middle - high, abs=0.2)
    assert middle > high
    assert {"Reward", "0.00", "0.25", "1.00", "4", "10", "step"} <= set(texts(svg))


def test_one_series_has_no_legend_and_several_have_one():
    one = texts(line_chart([Line("alone", [(3, 1.0), (4, 2.0)])], title="t", x_label=""))
    assert "alone" not in one
    assert {"3", "4"} <= set(one)
    assert "3.5" not in one, "half a step"
    two = line_chart([Line("first", [(0, 1), (1, 2)]), Line("second", [(0, 2)])], title="t")
    assert {"first", "second"} <= set(texts(two))


def test_a_long_legend_takes_more_rows_and_stays_inside():
    names = [f"a name of some length, number {number}" for number in range(6)] + ["x" * 300]
    svg = line_chart([Line(name, [(0, 1), (1, 2)]) for name in names], title="t" * 300, width=480)
    for element in parsed(svg).iter(f"{SVG}text"):
        assert float(element.get("x")) >= 0
        assert len(element.text) * 5.5 < 480
    plot = [y for _, y in coordinates(svg)]
    legend = [float(e.get("y")) for e in parsed(svg).iter(f"{SVG}text") if "number" in e.text]
    assert max(legend) < min(plot)


def test_values_below_the_floor_are_drawn_there_and_told_as_they_are():
    svg = line_chart([Line("c", [(0, -50.0), (1, -1.0), (2, 1.0)])], title="t", floor=-1.0)
    (_, first), (_, second), (_, third) = coordinates(svg)
    assert first == second > third
    assert {"-1.0", "1.0"} <= set(texts(svg))
    assert "c -50 at 0, 1 at 2" in parsed(svg).get("aria-label")


def test_what_is_not_finite_leaves_a_gap():
    svg = line_chart([Line("x", [(0, 1.0), (1, 2.0), (2, math.nan), (3, 1.0), (4, math.inf),
                                 (5, 1.0), (6, 2.0)])], title="t")
    assert len(list(parsed(svg).iter(f"{SVG}polyline"))) == 2
    assert len(list(parsed(svg).iter(f"{SVG}circle"))) == 1, "the lone value between is a dot"


@pytest.mark.parametrize("lines", [[], [Line("a", [])], [Line("a", [(0, math.nan)])]])
def test_without_values_the_picture_says_so(lines):
    assert "no values" in texts(line_chart(lines, title="t"))


def test_a_constant_lies_inside_and_has_ticks():
    for value in (0.02, 0, -3, 1e-5, 1e9):
        svg = line_chart([Line("c", [(step, value) for step in range(5)])], title="t")
        assert len({y for _, y in coordinates(svg)}) == 1
        labels = [e.text for e in parsed(svg).iter(f"{SVG}text")
                  if e.get("text-anchor") == "end"]
        assert len(labels) == len(set(labels)) >= 3, labels


def test_texts_are_escaped_and_cleaned():
    nasty = '</title></svg><script>alert(1)</script> "quoted" & \x1b[31m \x00 \ud800 \u202e'
    for svg in (line_chart([Line(nasty, [(0, 1), (1, 2)]), Line("b", [])], title=nasty,
                           x_label=nasty, y_label=nasty),
                histogram([(nasty, [1.0, 2.0])], title=nasty, x_label=nasty)):
        parsed(svg)
        svg.encode()
        assert "<script" not in svg
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202e]", svg)


def test_every_colour_has_one_for_dark_pages():
    lines = [Line(str(n), [(0, n), (1, n)]) for n in range(6)]
    svg = line_chart(lines, title="t")
    used = {e.get("class") for e in parsed(svg).iter() if e.get("class")} - {"ppocli-chart"}
    style = parsed(svg).find(f"{SVG}style").text
    assert {name for name in used if f".{name}{{" not in style} == set()


def test_a_histogram_shows_shares_of_each_group():
    svg = histogram([("before", [0.0, 0.0, 0.0, 1.0]), ("after", [1.0, 1.0, math.nan, None])],
                    title="t", x_label="reward", bins=4)
    said = [e.find(f"{SVG}title").text for e in parsed(svg).iter(f"{SVG}rect")
            if e.find(f"{SVG}title") is not None]
    assert said == ["0 to 0.25: 75.0 %", "0.75 to 1: 25.0 %", "0.75 to 1: 100.0 %"]
    assert {"before (n=4)", "after (n=2)"} <= set(texts(svg))


def test_thinning_keeps_ends_of_the_range_and_every_outlier():
    points = [(float(step), math.sin(step / 50)) for step in range(10_000)]
    points[4321] = (4321.0, 99.0)
    points[7000] = (7000.0, -99.0)
    kept = thin(points, 1000)
    assert len(kept) <= 1000
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)
    assert {points[4321], points[7000]} <= set(kept)
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    peak = [(0.0, 0.5), *((float(step), float(step % 7)) for step in range(1, 5000)), (5000.0, 0.5)]
    assert [thin(peak)[at] for at in (0, -1)] == [(0.0, 0.5), (5000.0, 0.5)]
    assert thin(points[:1000], 1000) == points[:1000]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats()), max_size=12))
def test_any_values_give_a_picture_inside_its_frame(points):
    svg = line_chart([Line("a", points), Line("b", points, "dots")], title="t", y_label="y")
    for x, y in coordinates(svg):
        assert 0 <= x <= 640
        assert 0 <= y <= 240
    assert "nan" not in svg
    histogram([("a", [y for _, y in points])], title="t", x_label="x")
