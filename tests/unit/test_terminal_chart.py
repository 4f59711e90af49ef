"""Charts made of characters: what fits, how curves are told apart, what odd figures give."""


import pytest

from ppocli.cli.results import draw
from ppocli.publish.pictures import Line, Panel


def curve(points: list[tuple[int, float]], run: str = "a") -> Line:
    return Line(run, points)


@pytest.mark.parametrize("points", [[(0, 0.0), (1, 0.0)], [(0, -1.7e308), (1, 1.7e308)]])
def test_odd_series_are_drawn(points):
    rows = draw(Panel("t", [curve(points)]))
    assert any(0x2800 < ord(cell) <= 0x28FF for row in rows for cell in row)


@pytest.mark.parametrize(("style", "dots"), [("dots", "●"), ("marks", "A")])
def test_evaluations_are_dots_over_every_line(style, dots):
    one = Line("a", [(0, 1.0), (10, 1.0)], evaluated=[(5, 1.0), (10, 0.0)])
    rows = draw(Panel("t", [one]), style=style, width=40)
    assert rows[1].count(dots) == 1, "in the middle of the line of rollouts"
    assert 18 <= rows[1].index(dots) <= 24
    assert any(row.endswith(dots) for row in rows[9:14])
    assert rows[-1] == f"  {dots} evaluation"
    rows = draw(Panel("t", [one, curve([(0, 1.0), (10, 1.0)], "b")]), style=style, width=40)
    assert rows[1].count(dots) == 1, "not under the second run"
    assert rows[-2].endswith(f" a   {dots} its evaluations")
