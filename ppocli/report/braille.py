"""Line charts made of characters: braille dots, or plain ASCII where these can't be shown.

A braille character (U+2800 to U+28FF) has 2 by 4 dots, one bit each, so a terminal of 80 columns
draws 160 points side by side.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Points = Sequence[tuple[float, float]]
Style = Literal["dots", "colours", "marks", "ascii"]
"""``dots``: braille, for one series. ``colours``: braille, a series in a colour of its own.
``marks``: a letter of its own for each series. ``ascii``: the same, and ASCII frames."""

_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # [row][column] of a character
_COLOURS = (36, 33, 35, 32, 34, 31)  # of the ANSI escapes ESC [ n m
_MARKS = "*ox+#@%&"
_SAMPLE = "⣿┤│└─"


@dataclass(frozen=True, slots=True)
class Curve:
    """One series of a chart."""

    name: str
    points: Points
    """(x, y), finite, in the order they are joined"""


def can_show_braille(encoding: str | None) -> bool:
    """Whether text of this encoding can hold the characters of a chart."""
    try:
        _SAMPLE.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def draw(curves: Sequence[Curve], *, title: str, x_label: str = "step", width: int = 80,
         height: int = 12, style: Style = "dots") -> list[str]:
    """A chart as lines of text.

    Args:
        curves: drawn over one pair of axes; later ones lie above earlier ones.
        title: the first line.
        x_label: what the horizontal axis measures.
        width: columns the lines may take, the labels of the axis included; at least 24 are taken.
        height: rows of the plot, at least 3.
        style: what the curves are made of.
    """
    shown = [curve for curve in curves if curve.points]
    if not shown:
        return [title, "  no values"]
    xs, ys = zip(*(point for curve in shown for point in curve.points), strict=True)
    low, high = _range(ys)
    height = max(3, height)
    labels = {row: _shown(_at(high, low, row, height), high, low)
              for row in (0, height // 2, height - 1)}
    margin = max(map(len, labels.values()))
    columns = max(8, max(24, width) - margin - 2)
    canvas = _Canvas(columns, height, (min(xs), max(xs)), (low, high), style)
    for number, curve in enumerate(shown):
        canvas.add(curve.points, number)
    tick, bar, corner, dash = "|||-" if style == "ascii" else "┤│└─"
    lines = [title]
    for row, text in enumerate(canvas.rows()):
        label = labels.get(row, "")
        lines.append(f"{label:>{margin}} {tick if label else bar}{text}")
    lines.append(" " * margin + f" {corner}{dash * columns}")
    lines.append(_x_labels(min(xs), max(xs), x_label, margin + 2, columns))
    if len(curves) > 1:
        lines += _legend(curves, shown, style)
    return lines


def _range(ys: Sequence[float]) -> tuple[float, float]:
    low, high = min(ys), max(ys)
    if low == high:
        return low - abs(low) * 0.1 - 0.1, high + abs(high) * 0.1 + 0.1
    return low, high


def _at(high: float, low: float, row: int, height: int) -> float:
    share = row / (height - 1)
    return high * (1 - share) + low * share


def _shown(value: float, high: float, low: float) -> str:
    """A value of the axis; ``0`` for what is nothing beside the range."""
    return "0" if abs(value) < 1e-4 * max(abs(high), abs(low)) else f"{value:.4g}"


def _x_labels(low: float, high: float, label: str, margin: int, columns: int) -> str:
    first, last = f"{low:g}", f"{high:g}"
    gap = columns - len(first) - len(last)
    middle = f"{label:^{gap}}" if gap >= len(label) + 2 else " " * max(1, gap)
    return " " * margin + first + middle + (last if high != low else "")


def _legend(curves: Sequence[Curve], shown: Sequence[Curve], style: Style) -> list[str]:
    lines = []
    for curve in curves:
        if curve not in shown:
            lines.append(f"    {curve.name}: no values")
            continue
        number = shown.index(curve)
        key = _coloured("⣿⣿", number) if style == "colours" else _MARKS[number % len(_MARKS)]
        lines.append(f"  {key} {curve.name}")
    return lines


def _coloured(text: str, number: int) -> str:
    return f"\x1b[{_COLOURS[number % len(_COLOURS)]}m{text}\x1b[0m"


class _Canvas:
    """Cells of characters, and the dots or marks in them."""

    def __init__(self, columns: int, rows: int, xs: tuple[float, float], ys: tuple[float, float],
                 style: Style) -> None:
        self.columns, self.height = columns, rows
        self.braille = style in ("dots", "colours")
        self.style = style
        self.xs, self.ys = xs, ys
        self.across, self.down = (2, 4) if self.braille else (1, 1)
        self.bits = [[0] * columns for _ in range(rows)]
        self.owner = [[-1] * columns for _ in range(rows)]

    def add(self, points: Points, number: int) -> None:
        """Draw a series: its points, joined by straight lines."""
        places = [self._place(x, y) for x, y in points]
        for start, end in zip([places[0], *places], places, strict=False):
            for column, row in _line(start, end):
                self._set(column, row, number)

    def _place(self, x: float, y: float) -> tuple[int, int]:
        """Column and row of a dot; row 0 is at the top."""
        return (_scaled(x, *self.xs, self.columns * self.across - 1),
                self.height * self.down - 1 - _scaled(y, *self.ys, self.height * self.down - 1))

    def _set(self, column: int, row: int, number: int) -> None:
        cell, line = column // self.across, row // self.down
        self.bits[line][cell] |= _BITS[row % 4][column % 2] if self.braille else 1
        self.owner[line][cell] = number

    def rows(self) -> Iterator[str]:
        """The rows as text, the top one first, without blanks at their ends."""
        for bits, owners in zip(self.bits, self.owner, strict=True):
            cells = [self._cell(*cell) for cell in zip(bits, owners, strict=True)]
            while cells and cells[-1] == " ":
                cells.pop()
            yield "".join(cells)

    def _cell(self, bits: int, owner: int) -> str:
        if not bits:
            return " "
        if not self.braille:
            return _MARKS[owner % len(_MARKS)]
        dots = chr(0x2800 + bits)
        return _coloured(dots, owner) if self.style == "colours" else dots


def _scaled(value: float, low: float, high: float, last: int) -> int:
    """0 for ``low`` up to ``last`` for ``high``; halved first, so that no difference overflows."""
    span = high / 2 - low / 2
    share = 0.5 if span == 0 or not math.isfinite(span) else (value / 2 - low / 2) / span
    return min(last, max(0, round(share * last)))


def _line(start: tuple[int, int], end: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """The dots of a straight line, both ends included."""
    steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]))
    for step in range(steps + 1):
        share = step / steps if steps else 0.0
        yield (round(start[0] + (end[0] - start[0]) * share),
               round(start[1] + (end[1] - start[1]) * share))
