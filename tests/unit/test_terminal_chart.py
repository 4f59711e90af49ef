"""Charts made of characters: what fits, how curves are told apart, what odd figures give."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from ppocli.cli.plot import chosen_style, draw
from ppocli.report.plot import Series


def curve(points: list[tuple[int, float]], run: str = "a") -> Series:
    return Series(run, "reward/mean", points)


def plot_of(lines: list[str]) -> list[str]:
    """The cells right of the axis, row by row."""
    return [line.replace("┤", "│").split("│", 1)[1] for line in lines if "┤" in line or "│" in line]


def labels_of(lines: list[str]) -> list[str]:
    return [line.split("┤")[0].strip() for line in lines if "┤" in line]


def test_a_rising_line_goes_from_the_lower_left_to_the_upper_right_dot():
    lines = draw([curve([(0, 0.0), (1, 1.0)])], title="t", width=24)
    rows = plot_of(lines)
    assert lines[0] == "t"
    assert [len(rows[0]), len(rows[0].strip())] == [max(map(len, rows)), 1]  # in the last cell
    assert rows[-1][0] not in " ⠉"
    starts = [len(row) - len(row.lstrip()) for row in rows]
    assert starts == sorted(starts, reverse=True)
    assert labels_of(lines) == ["1", "0.5", "0"]
    assert [line.split() for line in lines[-2:]] == [["0", "1"], ["step"]]


def test_dots_are_joined():
    lines = draw([curve([(0, 0.0), (10, 5.0), (20, 0.0)])], title="t", width=60)
    rows = plot_of(lines)
    width = max(map(len, rows))
    assert all(any(cell < len(row) and row[cell] != " " for row in rows) for cell in range(width))


@pytest.mark.parametrize("points", [[(3, 0.5)], [(1, 2.0), (2, 2.0)], [(0, 0.0), (1, 0.0)],
                                    [(0, -1.7e308), (1, 1.7e308)], [(0, 1e-320), (1, 2e-320)]])
def test_odd_series_are_drawn(points):
    rows = plot_of(draw([curve(points)], title="t"))
    assert any(0x2800 < ord(cell) <= 0x28FF for row in rows for cell in row)


@pytest.mark.parametrize("width", [24, 50, 111])
def test_lines_stay_within_the_width(width):
    lines = draw([curve([(step, 1.23456e-7 * step) for step in range(1000)])], title="t",
                 width=width)
    assert max(map(len, lines)) == width


def test_nothing_to_draw():
    assert draw([curve([])], title="t") == ["t", "  no values"]
    lines = draw([curve([]), curve([(0, 1.0)], "b")], title="t", style="marks")
    assert lines[-2:] == ["    a: no values", "  * b"]


def test_several_series_are_told_apart():
    curves = [curve([(0, 0.0), (9, 0.0)], "low"), curve([(0, 1.0), (9, 1.0)], "high")]
    marks = draw(curves, title="t", style="marks", width=40)
    assert "o" in marks[1]
    assert "*" in marks[12]
    assert marks[-2:] == ["  * low", "  o high"]
    colours = draw(curves, title="t", style="colours", width=40)
    yellow, cyan = "\x1b[38;5;3m", "\x1b[38;5;6m"
    assert yellow in colours[1]
    assert cyan in colours[12]
    assert colours[-2:] == [f"  {cyan}⣿⣿\x1b[0m low", f"  {yellow}⣿⣿\x1b[0m high"]


def test_ascii_is_ascii():
    lines = draw([curve([(0, 0.0), (5, 2.0)])], title="t", style="ascii")
    assert "\n".join(lines).isascii()
    assert "*" in lines[1]


def test_what_is_nothing_beside_the_range_is_0():
    assert labels_of(draw([curve([(0, 3.7e-7), (5, 2.0)])], title="t"))[-1] == "0"


@pytest.mark.parametrize(("encoding", "dots"), [("utf-8", True), ("ascii", False),
                                                ("latin-1", False), (None, False),
                                                ("no-such", False), ("utf-16", True)])
def test_encodings(encoding, dots, monkeypatch):
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(encoding=encoding, isatty=lambda: False))
    assert chosen_style(runs=1) == ("dots" if dots else "ascii")
    assert chosen_style(runs=2) == ("marks" if dots else "ascii")
