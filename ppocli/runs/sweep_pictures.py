"""A sweep as a picture: its jobs as lines through the values of every key and figure (parallel
coordinates), and how much each key decides."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, log10
from typing import Any

from ppocli.errors import ConfigError
from ppocli.runs import pictures, sweeps
from ppocli.text import clean, finite_number

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
    try:
        value = float(text)
    except ValueError:
        return None
    return value if isfinite(value) else None


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
    varied = [sweeps.varied_values(job) for job in told]
    keys = dict.fromkeys(key for values in varied for key in values)
    labels = dict.fromkeys(label for job in told for label in job.shown)
    return [*(axis_of(key, [values.get(key, "-") for values in varied]) for key in keys),
            *(axis_of(label, [str(job.shown.get(label)) for job in told]) for label in labels)], \
        told


def draw(jobs: Sequence[sweeps.JobRecord], importance: Mapping[str, Mapping[str, float]], form: str
         ) -> bytes:
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

    return pictures.drawing_as(form, paint)


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
