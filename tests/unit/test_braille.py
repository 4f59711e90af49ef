"""Charts made of characters: where dots come to lie, what fits, what other styles show."""

from __future__ import annotations

import pytest

from ppocli.report.braille import Curve, can_show_braille, draw


def plot_of(lines: list[str]) -> list[str]:
    """The cells right of the axis, row by row."""
    return [line.replace("┤", "│").split("│", 1)[1] for line in lines
            if "┤" in line or "│" in line]


def test_a_rising_line_goes_from_the_lower_left_to_the_upper_right_dot():
    lines = draw([Curve("a", [(0, 0.0), (1, 1.0)])], title="t", width=24, height=3)
    rows = plot_of(lines)
    assert lines[0] == "t"
    assert rows[0][-1] == "⠉"  # of the last cell the upper left and right dots
    assert rows[2][0] == "⣀"
    assert [line.split("┤")[0].strip() for line in lines if "┤" in line] == ["1", "0.5", "0"]
    assert lines[-1].split() == ["0", "step", "1"]


def test_dots_are_joined():
    lines = draw([Curve("a", [(0, 0.0), (10, 5.0), (20, 0.0)])], title="t", width=60, height=6)
    rows = plot_of(lines)
    width = max(map(len, rows))
    assert all(any(cell < len(row) and row[cell] != " " for row in rows) for cell in range(width))


@pytest.mark.parametrize("points", [[(3, 0.5)], [(1, 2.0), (2, 2.0)], [(0, 0.0), (1, 0.0)],
                                    [(0, -1.7e308), (1, 1.7e308)], [(0, 1e-320), (1, 2e-320)]])
def test_odd_series_are_drawn(points):
    rows = plot_of(draw([Curve("a", points)], title="t"))
    assert any(0x2800 < ord(cell) <= 0x28FF for row in rows for cell in row)


@pytest.mark.parametrize("width", [24, 50, 111])
def test_lines_stay_within_the_width(width):
    curve = Curve("a", [(step, 1.23456e-7 * step) for step in range(1000)])
    lines = draw([curve], title="t", width=width)
    assert max(map(len, lines)) <= width
    assert max(map(len, lines)) == width


def test_nothing_to_draw():
    assert draw([Curve("a", [])], title="t") == ["t", "  no values"]
    lines = draw([Curve("a", []), Curve("b", [(0, 1.0)])], title="t", style="marks")
    assert lines[-2:] == ["    a: no values", "  * b"]


def test_several_series_are_told_apart():
    curves = [Curve("low", [(0, 0.0), (9, 0.0)]), Curve("high", [(0, 1.0), (9, 1.0)])]
    marks = draw(curves, title="t", style="marks", width=40)
    assert "o" in marks[1]
    assert "*" in marks[12]
    assert marks[-2:] == ["  * low", "  o high"]
    colours = draw(curves, title="t", style="colours", width=40)
    assert "\x1b[33m" in colours[1]
    assert "\x1b[36m" in colours[12]


def test_ascii_is_ascii():
    lines = draw([Curve("a", [(0, 0.0), (5, 2.0)])], title="t", style="ascii")
    assert "\n".join(lines).isascii()
    assert lines[-3].endswith("*") or any("*" in line for line in lines)


def test_what_is_nothing_beside_the_range_is_0():
    lines = draw([Curve("a", [(0, 3.7e-7), (5, 2.0)])], title="t")
    assert [line.split("┤")[0].strip() for line in lines if "┤" in line][-1] == "0"


@pytest.mark.parametrize(("encoding", "shown"), [("utf-8", True), ("ascii", False),
                                                 ("latin-1", False), (None, False),
                                                 ("no-such", False), ("utf-16", True)])
def test_encodings(encoding, shown):
    assert can_show_braille(encoding) is shown
