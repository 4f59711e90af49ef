"""Plain tables on standard output: columns that a person can read and ``awk`` can cut."""

from __future__ import annotations

from collections.abc import Sequence

from ppocli.display.figures import clean


def aligned(rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset()) -> list[str]:
    """Rows as lines whose columns begin below one another; texts are cleaned of control characters.

    Args:
        rows: all of the same length; the first is usually the heading.
        right: columns that are set to the right, for numbers.
    """
    cells = [[clean(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    sides = [str.rjust if number in right else str.ljust for number in range(len(widths))]
    return ["  ".join(side(cell, width) for side, cell, width in
                      zip(sides, row, widths, strict=True)).rstrip() for row in cells]


def print_table(rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset()) -> None:
    """Print :func:`aligned` rows."""
    for line in aligned(rows, right):
        print(line, flush=True)


def shown_figure(value: float | None, digits: int = 4) -> str:
    """A figure with so many significant digits, ``-`` for none; what only rounding left is 0."""
    if value is None:
        return "-"
    return "0" if abs(value) < 5e-7 else f"{value:.{digits}g}"
