"""Charts of files and of characters: what fits, how curves are told apart, odd figures."""

import math

import pytest

from ppocli.cli.results import draw
from ppocli.publish.curves import Line, Panel, thin


def test_thinning_keeps_the_ends_and_every_outlier():
    points = [(float(step), math.sin(step / 50)) for step in range(10_000)]
    points[4321] = (4321.0, 99.0)
    points[7000] = (7000.0, -99.0)
    kept = thin(points, 1000)
    assert len(kept) <= 1000
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)
    assert {points[4321], points[7000]} <= set(kept)
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert thin(points[:1000], 1000) == points[:1000]


@pytest.mark.parametrize("points", [[(0, 0.0), (1, 0.0)], [(0, -1.7e308), (1, 1.7e308)]])
def test_odd_series_are_drawn(points):
    rows = draw(Panel("t", [Line("a", points)]))
    assert any(0x2800 < ord(cell) <= 0x28FF for row in rows for cell in row)


@pytest.mark.parametrize(("style", "dots"), [("dots", "●"), ("marks", "A")])
def test_evaluations_are_dots_over_every_line(style, dots):
    one = Line("a", [(0, 1.0), (10, 1.0)], evaluated=[(5, 1.0), (10, 0.0)])
    rows = draw(Panel("t", [one]), style=style, width=40)
    assert rows[1].count(dots) == 1, "in the middle of the line of rollouts"
    assert 18 <= rows[1].index(dots) <= 24
    assert any(row.endswith(dots) for row in rows[9:14])
    assert rows[-1] == f"  {dots} evaluation"
    other = Line("b", [(0, 1.0), (10, 1.0)])
    rows = draw(Panel("t", [one, other]), style=style, width=40)
    assert rows[1].count(dots) == 1, "not under the second run"
    assert rows[-2].endswith(f" a   {dots} its evaluations")
