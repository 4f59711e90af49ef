"""Curves, and a sweep as lines through the values of every key and figure of its jobs (parallel
coordinates) with how much each key decides, as PNG and SVG files. matplotlib draws them, which the
extra ``plot`` installs.

The report's page draws its own (``report/templates/report.js``), the terminal's are
:mod:`ppocli.cli.plot`.
"""

import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import log10
from typing import Any, Literal

from ppocli.config import extras
from ppocli.errors import ConfigError
from ppocli.runs import sweeps
from ppocli.text import clean, finite_number

MISSING = "it needs matplotlib, which is not installed: pip install 'ppocli[plot]'"
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
    def parts(self) -> "list[Line]":
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


def installed() -> bool:
    """Whether there is a matplotlib to draw with."""
    return extras.installed("matplotlib")


def draw(panels: Sequence[Panel], form: str = "svg") -> bytes:
    """Panels below one another as a file of the given form, ``svg`` or ``png``; equal panels give
    equal bytes.

    Raises:
        ConfigError: matplotlib isn't installed.
    """
    def paint(figure: Any) -> None:
        figure.set_size_inches(8, 3 * len(panels))
        for axes, panel in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels,
                               strict=True):
            axes.set(title=clean(panel.title), xlabel=panel.x_label, ylabel=panel.y_label)
            lines = [part for line in panel.lines for part in line.parts]
            for number, line in enumerate(lines):
                axes.plot(
                    [x for x, _ in line.points],
                    [max(-_LARGEST, min(_LARGEST, y)) for _, y in line.points],
                    color=f"C{(number if line.run < 0 else line.run) % 10}",
                    alpha=0.5 if line.kind == "thin" else 1.0,
                    linewidth=1.0 if line.kind == "thin" else 1.8,
                    linestyle="" if line.kind == "scatter" else "-",
                    marker="o" if line.kind in ("dots", "scatter") or len(line.points) == 1 else "",
                    markersize=4, label=f" {clean(line.name)}")  # "_..." would be left out
            if len(lines) > 1:
                axes.legend()

    return drawing_as(form, paint)


def drawing_as(form: str, paint: Callable[[Any], None]) -> bytes:
    """What ``paint`` puts into a figure of matplotlib, as a file.

    Raises:
        ConfigError: matplotlib isn't installed.
    """
    if not installed():
        raise ConfigError(f"Drawing a .{form} needs matplotlib, which is not installed.",
                          where="--output", fix=extras.pip_line("matplotlib"))
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    buffer = io.BytesIO()
    with warnings.catch_warnings(), rc_context(_STYLE):  # type: ignore[arg-type]
        warnings.simplefilter("ignore")  # letters of a run's name that the font hasn't got
        drawing = Figure(dpi=100, layout="constrained")
        paint(drawing)
        facts = dict.fromkeys(("Date", "Creator", "Format", "Type")) if form == "svg" else None
        drawing.savefig(buffer, format=form, metadata=facts)
    drawn = buffer.getvalue()
    return drawn[drawn.index(b"<svg"):] if form == "svg" else drawn  # no DOCTYPE, no addresses


_MOST_TICKS = 8
_SEVERAL_DECADES = 30.0
"""a ratio of the largest to the smallest value from which on logarithms are drawn"""


@dataclass(frozen=True, slots=True)
class Axis:
    """One upright axis: where each job crosses it, from 0 at the bottom to 1, and its labels."""

    name: str
    places: list[float]
    ticks: list[tuple[float, str]]


def axis_of(name: str, values: Sequence[str]) -> Axis:
    """An axis of numbers, of their logarithms where they span decades, or of words in order."""
    numbers = [_number(value) for value in values]
    if None in numbers or len(set(numbers)) < 2:
        words = sorted(set(values))
        place = {word: number / max(1, len(words) - 1) for number, word in enumerate(words)}
        shown = words if len(words) <= _MOST_TICKS else [words[0], words[-1]]
        return Axis(name, [place[value] for value in values],
                    [(place[word], word) for word in shown])
    found = [number for number in numbers if number is not None]
    low, high = min(found), max(found)
    scale = log10 if low > 0 and high / low >= _SEVERAL_DECADES else float
    span = scale(high) - scale(low)
    return Axis(name, [(scale(number) - scale(low)) / span for number in found],
                [(0.0, f"{low:.4g}"), (1.0, f"{high:.4g}")])


def _number(text: str) -> float | None:
    with suppress(ValueError):
        return finite_number(float(text))
    return None


def axes_of(jobs: Sequence[sweeps.JobRecord]) -> tuple[list[Axis], list[sweeps.JobRecord]]:
    """The axes of what differs between jobs and of their figures, and the jobs that are drawn:
    those that have every figure, best first.

    Raises:
        ConfigError: fewer than two jobs have figures.
    """
    told = [job for job in jobs if job.rank is not None
            and all(finite_number(value) is not None for value in job.shown.values())]
    if len(told) < 2:
        raise ConfigError("Fewer than two jobs of this sweep have been evaluated: there is nothing "
                          "to draw.", where="--output", fix="wait for them, or go on with the "
                          "sweep: ppocli sweep resume")
    told.sort(key=lambda job: job.rank or 0.0)
    varied = [sweeps.varied_values(job.varied) for job in told]
    keys = dict.fromkeys(key for values in varied for key in values)
    labels = dict.fromkeys(label for job in told for label in job.shown)
    return [*(axis_of(key, [values.get(key, "-") for values in varied]) for key in keys),
            *(axis_of(label, [str(job.shown.get(label)) for job in told]) for label in labels)], \
        told


def draw_sweep(jobs: Sequence[sweeps.JobRecord], importance: Mapping[str, Mapping[str, float]],
               form: str) -> bytes:
    """The picture as a file of the form ``svg`` or ``png``.

    Args:
        importance: for each metric the share of each key, where a search tells it.

    Raises:
        ConfigError: matplotlib isn't installed, or there is nothing to draw.
    """
    axes, told = axes_of(jobs)

    def paint(figure: Any) -> None:
        rows = 1 + len(importance)
        heights = [4.0, *(0.6 + 0.3 * len(shares) for shares in importance.values())]
        figure.set_size_inches(max(6.0, 1.6 * len(axes)), sum(heights))
        parts = figure.subplots(rows, 1, squeeze=False, height_ratios=heights)[:, 0]
        _draw_lines(parts[0], axes, len(told))
        for part, (metric, shares) in zip(parts[1:], importance.items(), strict=True):
            ordered = sorted(shares.items(), key=lambda each: each[1])
            bars = part.barh([clean(key) for key, _ in ordered], [share for _, share in ordered])
            part.bar_label(bars, [f"{share:.0%}" for _, share in ordered], padding=3)
            part.set(title=f"share of each key in {clean(metric)}", xlim=(0, 1.1), xticks=())

    return drawing_as(form, paint)


def _draw_lines(part: Any, axes: Sequence[Axis], jobs: int) -> None:
    """Lines from the worst job to the best, which lies above the others."""
    import matplotlib

    colours = matplotlib.colormaps["viridis"]
    for number in reversed(range(jobs)):
        part.plot(range(len(axes)), [axis.places[number] for axis in axes],
                  color="C3" if number == 0 else colours(1 - number / jobs),
                  linewidth=2.5 if number == 0 else 1.2, alpha=1.0 if number == 0 else 0.7,
                  label="best job" if number == 0 else None)
    for place, axis in enumerate(axes):
        part.axvline(place, color="0.6", linewidth=0.8)
        for height, label in axis.ticks:
            part.annotate(clean(label), (place, height), xytext=(4, 0), fontsize=8,
                          textcoords="offset points", va="center")
    part.set(title=f"{jobs} jobs, brighter is better", yticks=(), xticks=range(len(axes)),
             xlim=(-0.1, len(axes) - 0.4))
    part.set_xticklabels([clean(axis.name).replace(".", ".\n") for axis in axes], fontsize=8)
    part.spines["left"].set_visible(False)
    part.grid(False)
    part.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14))
