"""Curves as PNG and SVG files. matplotlib draws them; the extra ``plot`` installs it.

The report's page draws its own (``report/templates/report.js``), the terminal's are
:mod:`ppocli.cli.results`.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from ppocli.config import import_guard
from ppocli.config.text import clean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LARGEST = 1e300
"""beyond it a difference of two values may overflow: drawn there"""
_STYLE = {"svg.fonttype": "none", "svg.hashsalt": "ppocli", "text.parse_math": False,
          "axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left",
          "axes.titlesize": 11, "legend.fontsize": 9, "legend.frameon": False,
          "axes.grid": True, "grid.alpha": 0.3}


@dataclass(frozen=True, slots=True)
class Line:
    """One series of a picture."""

    name: str
    points: Sequence[tuple[float, float]]
    """(x, y) in the order they are joined"""
    kind: Literal["line", "thin", "dots", "scatter"] = "line"
    """``thin`` for noisy figures, ``dots`` for few values that were measured one by one,
    ``scatter`` for those that have no order and aren't joined (in pictures alone)"""
    run: int = -1
    """which of several runs it is of: those of one run have one colour; -1 where there is one"""
    evaluated: Sequence[tuple[float, float]] = ()
    """evaluations of the same, where ``points`` are of rollouts or of training: dots over a thin
    line"""

    @property
    def parts(self) -> list[Line]:
        """Its evaluations as a line of their own behind it."""
        dots = Line(f"{self.name}, evaluation", self.evaluated, "dots", self.run)
        return [replace(self, kind="thin"), dots] if self.evaluated else [self]


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines over one pair of axes; several have a legend."""

    title: str
    lines: Sequence[Line]
    x_label: str = "step"
    y_label: str = ""


def draw(panels: Sequence[Panel], form: str = "svg") -> bytes:
    """Panels below one another as a file of the given form, ``svg`` or ``png``; equal panels give
    equal bytes.

    Raises:
        InputError: matplotlib isn't installed.
    """
    import_guard.require("matplotlib", f"Drawing a .{form}", "--output")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    buffer = io.BytesIO()
    with warnings.catch_warnings(), rc_context(_STYLE):  # type: ignore[arg-type]
        warnings.simplefilter("ignore")  # letters of a run's name that the font lacks
        figure = Figure(figsize=(8, 3 * len(panels)), dpi=100, layout="constrained")
        for axes, panel in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels,
                               strict=True):
            _draw_panel(axes, panel)
        facts = dict.fromkeys(("Date", "Creator", "Format", "Type")) if form == "svg" else None
        figure.savefig(buffer, format=form, metadata=facts)
    drawing = buffer.getvalue()
    return drawing[drawing.index(b"<svg"):] if form == "svg" else drawing  # without its DOCTYPE


def _draw_panel(axes: Axes, panel: Panel) -> None:
    axes.set(title=clean(panel.title), xlabel=panel.x_label, ylabel=panel.y_label)
    lines = [part for line in panel.lines for part in line.parts]
    for number, line in enumerate(lines):
        axes.plot(
            [x for x, _ in line.points], [max(-_LARGEST, min(_LARGEST, y)) for _, y in line.points],
            color=f"C{(number if line.run < 0 else line.run) % 10}",
            alpha=0.5 if line.kind == "thin" else 1.0,
            linewidth=1.0 if line.kind == "thin" else 1.8,
            linestyle="" if line.kind == "scatter" else "-",
            marker="o" if line.kind in ("dots", "scatter") or len(line.points) == 1 else "",
            markersize=4, label=f" {clean(line.name)}")  # "_..." would be left out
    if len(lines) > 1:
        axes.legend()
