"""Charts made of characters: what fits, how curves are told apart, what odd figures give."""


import pytest

from ppocli.cli.results import draw
from ppocli.publish.pictures import Line, Panel


def curve(points: list[tuple[int, float]], run: str = "a") -> Line:
    return Line(run, points)


@pytest.mark.parametrize("points", [[(3, 0.5)], [(1, 2.0), (2, 2.0)], [(0, 0.0), (1, 0.0)],
                                    [(0, -1.7e308), (1, 1.7e308)], [(0, 1e-320), (1, 2e-320)]])
def test_odd_series_are_drawn(points):
    rows = draw(Panel("t", [curve(points)]))
    assert any(0x2800 < ord(cell) <= 0x28FF for row in rows for cell in row)


def test_several_series_are_told_apart():
    curves = [curve([(0, 0.0), (9, 0.0)], "low"), curve([(0, 1.0), (9, 1.0)], "high")]
    marks = draw(Panel("t", curves), style="marks", width=40)
    assert "o" in marks[1]
    assert "*" in marks[12]
    assert marks[-2:] == ["  * low", "  o high"]
    colours = draw(Panel("t", curves), style="colours", width=40)
    yellow, cyan = "\x1b[38;5;3m", "\x1b[38;5;6m"
    assert yellow in colours[1]
    assert cyan in colours[12]
    assert colours[-2:] == [f"  {cyan}⣿⣿\x1b[0m low", f"  {yellow}⣿⣿\x1b[0m high"]


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
