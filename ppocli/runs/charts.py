"""Line charts and histograms as SVG text: for pages, files and README pictures. Standard library.

Every picture stands alone: nothing is loaded from elsewhere, nothing runs. Colours are written
out for light pages and changed by ``prefers-color-scheme: dark``, so that a program that reads no
CSS still draws the light picture. Selectors begin with ``.ppocli-chart``: a style inside an inline
SVG holds for the whole page around it.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

Points = Sequence[tuple[float, float]]

_LIGHT = ("#1f6fb2", "#d1570a", "#1a7f4b", "#8a3fb0", "#7a6a00", "#c2255c")
_DARK = ("#6cb6ff", "#f69d50", "#57c785", "#d2a8ff", "#d4c04a", "#ff8fb3")
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
_STYLE = "".join([
    ":not(g)>svg.ppocli-chart{max-width:100%;height:auto}",
    "@media (prefers-color-scheme:dark){",
    ".ppocli-chart .pc-page{fill:#16191d}.ppocli-chart .pc-ink{fill:#e6e8ea}",
    ".ppocli-chart .pc-soft{fill:#a9b1ba}.ppocli-chart .pc-grid{stroke:#30363d}",
    ".ppocli-chart .pc-axis{stroke:#7d8590}",
    *(f".ppocli-chart .pc-s{n}{{stroke:{colour}}}.ppocli-chart .pc-f{n}{{fill:{colour}}}"
      for n, colour in enumerate(_DARK)),
    "}"])

_RIGHT, _TOP, _BOTTOM, _ROW = 18, 30, 44, 18
_SIZE, _LETTER = 12, 7.0
"""size of small text, and about how wide one of its letters is"""
_LARGEST = 1e300
"""beyond it a difference of two values may overflow: drawn as if it weren't finite"""
_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff"
                      "\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class Line:
    """One series of a chart."""

    name: str
    points: Points
    """(x, y) in the order they are joined; a y that isn't finite leaves a gap"""
    kind: Literal["line", "thin", "dots"] = "line"
    """``thin`` for noisy figures, ``dots`` for few values that were measured one by one"""


@dataclass(frozen=True, slots=True)
class _Axis:
    """A range of values and the round ones that get a label."""

    low: float
    high: float
    ticks: list[float]
    labels: list[str]

    def share(self, value: float) -> float:
        """0 at the low end, 1 at the high end."""
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True, slots=True)
class _Frame:
    """Where the plot lies on a picture."""

    width: float
    height: float
    left: float
    top: float
    x: _Axis
    y: _Axis
    floor: float

    @property
    def bottom(self) -> float:
        """The y of the lower edge."""
        return self.height - _BOTTOM

    def at(self, x: float, y: float) -> tuple[float, float]:
        """A point of the plot on the picture."""
        return (self.left + self.x.share(x) * (self.width - self.left - _RIGHT),
                self.bottom - self.y.share(max(y, self.floor)) * (self.bottom - self.top))


def line_chart(lines: Sequence[Line], *, title: str, x_label: str = "step", y_label: str = "",
               width: int = 640, height: int = 240, x_range: tuple[float, float] | None = None,
               floor: float = -math.inf) -> str:
    """A complete SVG element of series over one axis; what isn't finite is left out.

    Args:
        lines: series in the order of the legend; a chart of one has none. Without any finite
            value the picture says so.
        title: above the plot, and the picture's accessible name.
        x_label, y_label: what the axes measure.
        width, height: in pixels; a narrower page shrinks the picture.
        x_range: the axis reaches over it, so that pictures below each other line up.
        floor: lower values are drawn there.

    Returns:
        ``<svg ...>...</svg>``, ready for a page or, as it is, for a file.
    """
    drawn = [_finite(line.points) for line in lines]
    xs = [x for segments in drawn for segment in segments for x, _ in segment]
    ys = [max(y, floor) for segments in drawn for segment in segments for _, y in segment]
    names = [line.name for line in lines] if len(lines) > 1 else []
    said = "; ".join(_in_words(line.name, segments)
                     for line, segments in zip(lines, drawn, strict=True))
    if not xs:
        return _document([], names, title, f"{title}: no values", width, height, empty=True)
    xs += x_range or ()
    frame = _frame(_axis(xs, width // 90, whole=all(x == int(x) for x in xs), tight=True),
                   _axis(ys, max(2, height // 50)), names, width, height, floor)
    body = [*_axes(frame, x_label, y_label)]
    for number, (line, segments) in enumerate(zip(lines, drawn, strict=True)):
        body += _series(line, segments, number % len(_LIGHT), frame)
    return _document(body, names, title, f"{title}: {said}", width, height)


def stacked(charts: Sequence[str], width: int, height: int) -> str:
    """Pictures of one size below one another, as one SVG element."""
    parts = "".join(f'<g transform="translate(0 {height * number})">\n{chart}</g>\n'
                    for number, chart in enumerate(charts))
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" '
            f'height="{height * len(charts)}" viewBox="0 0 {width} {height * len(charts)}">\n'
            f"{parts}</svg>\n")


def histogram(groups: Sequence[tuple[str, Sequence[float]]], *, title: str, x_label: str,
              bins: int = 20, width: int = 640, height: int = 240) -> str:
    """A complete SVG element that compares how values are distributed.

    Bars show shares of each group's finite values, so that groups of different sizes compare.

    Args:
        groups: (name, values) of each distribution.
        title, x_label, width, height: as for ``line_chart``.
        bins: about how many equal ranges the values are sorted into; their edges are round.
    """
    kept = [(name, [float(v) for v in values if _drawable(v)]) for name, values in groups]
    names = [f"{name} (n={len(values)})" for name, values in kept]
    everything = [v for _, values in kept for v in values]
    if not everything:
        return _document([], names, title, f"{title}: no values", width, height, empty=True)
    edges = _edges(min(everything), max(everything), max(1, bins))
    shares = [_shares(values, edges) for _, values in kept]
    ceiling = 100 * max(share for row in shares for share in row)
    frame = _frame(_axis(edges, width // 90, tight=True),
                   _axis([0.0, ceiling], max(2, height // 50)), names, width, height)
    body = [*_axes(frame, x_label, "% of samples")]
    for number, row in enumerate(shares):
        colour = number % len(_LIGHT)
        for share, low, high in zip(row, edges[:-1], edges[1:], strict=True):
            if share:
                body.append(_bar(frame, (low, high), 100 * share, (number, len(shares)), colour))
    said = "; ".join(f"{name}: mean {sum(values) / len(values):.4g}"
                     for name, (_, values) in zip(names, kept, strict=True) if values)
    return _document(body, names, title, f"{title}: {said}", width, height)


def thin(points: Points, limit: int = 1000) -> list[tuple[float, float]]:
    """At most ``limit`` points: both ends, and of every run of neighbours between them the lowest
    and the highest.

    Unlike means, this shows single outliers. Points that aren't finite must be gone already.
    """
    if len(points) <= limit:
        return list(points)
    between = points[1:-1]
    buckets = max(1, limit // 2 - 1)
    kept = [points[0]]
    for number in range(buckets):
        bucket = range(number * len(between) // buckets, (number + 1) * len(between) // buckets)
        by_value = sorted(bucket, key=lambda i: between[i][1])
        kept += [between[i] for i in sorted({by_value[0], by_value[-1]})]
    return [*kept, points[-1]]


def _drawable(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and abs(value) < _LARGEST


def _finite(points: Points) -> list[list[tuple[float, float]]]:
    """The series cut where a value is missing; no empty piece."""
    segments: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if _drawable(x) and _drawable(y):
            segments[-1].append((float(x), float(y)))
        elif segments[-1]:
            segments.append([])
    return [segment for segment in segments if segment]


def _in_words(name: str, segments: list[list[tuple[float, float]]]) -> str:
    if not segments:
        return f"{name}: no values"
    (first_x, first), (last_x, last) = segments[0][0], segments[-1][-1]
    if first_x == last_x:
        return f"{name} {last:.4g} at {last_x:g}"
    return f"{name} {first:.4g} at {first_x:g}, {last:.4g} at {last_x:g}"


def _round_step(span: float, parts: int, factors: Sequence[float] = (1, 2, 2.5, 5)) -> float:
    """The least of the factors times a power of ten that needs at most ``parts`` steps."""
    power = 10.0 ** math.floor(math.log10(span / parts))
    return next((factor * power for factor in factors
                 if factor * power * parts >= span * (1 - 1e-9)), 10 * power)


def _widened(low: float, high: float) -> tuple[float, float]:
    """A range with an extent: a constant lies in the middle of its own size, 0 at the bottom."""
    size = max(abs(low), abs(high))
    if size < 1e-300:
        return 0.0, 1.0
    if high - low > 1e-9 * size:
        return low, high
    return low - size / 2, high + size / 2


def _axis(values: Iterable[float], parts: int, *, whole: bool = False,
          tight: bool = False) -> _Axis:
    """Round ticks over all values; a ``tight`` axis ends at the values, not at the ticks."""
    found = list(values)
    low, high = _widened(min(found), max(found))
    if whole and high - low < 1:
        low, high = found[0] - 1, found[0] + 1
    if not tight:
        if 0 < low < 0.5 * high or -1e-3 * high < low < 0:
            low = 0.0  # also for what comes out a hair below it, as an estimated KL does
        if low < 0 and (0.5 * low < high < 0 or high < -1e-3 * low):
            high = max(high, 0.0)
    if whole:
        step = max(1.0, _round_step(high - low, max(1, parts), (1, 2, 5)))
    else:
        step = _round_step(high - low, max(1, parts))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    if tight:
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    ticks = [number * step for number in range(first, last + 1)]
    if tight:
        return _Axis(low, high, ticks, _labels(ticks, step))
    return _Axis(ticks[0], ticks[-1], ticks, _labels(ticks, step))


def _labels(ticks: list[float], step: float) -> list[str]:
    """Short numbers that still tell neighbours apart."""
    size = max((abs(tick) for tick in ticks), default=0.0)
    if size == 0:
        return ["0"] * len(ticks)
    power = math.floor(math.log10(step) + 1e-9)
    fine = 1 if abs(step / 10.0 ** power - 2.5) < 1e-6 else 0
    if 1e-4 <= size < 1e6:
        return [f"{tick + 0.0:.{max(0, fine - power)}f}" for tick in ticks]
    digits = math.floor(math.log10(size)) - power + fine
    return ["0" if tick == 0 else
            re.sub(r"(?:\.0+)?e([+-])0*(\d)", r"e\1\2", f"{tick:.{max(0, digits)}e}")
            for tick in ticks]


def _frame(x: _Axis, y: _Axis, names: list[str], width: int, height: int,
           floor: float = -math.inf) -> _Frame:
    left = 40 + _LETTER * max(4, *(len(label) for label in y.labels))  # short ones line up
    top = _TOP + _ROW * len(_legend_rows(names, width)) + 6
    return _Frame(width, height, left, top, x, y, floor)


def _axes(frame: _Frame, x_label: str, y_label: str) -> list[str]:
    parts = []
    right = frame.width - _RIGHT
    for tick, label in zip(frame.y.ticks, frame.y.labels, strict=True):
        _, y = frame.at(frame.x.low, tick)
        parts += [_stroke(frame.left, y, right, y, "pc-grid", "#dfe3e8"),
                  _label(frame.left - 7, y + 4, label, "end")]
    for tick, label in zip(frame.x.ticks, frame.x.labels, strict=True):
        x, _ = frame.at(tick, frame.y.low)
        parts += [_stroke(x, frame.bottom, x, frame.bottom + 4, "pc-axis", "#8c959f"),
                  _label(x, frame.bottom + 17, label, "middle")]
    parts.append(_stroke(frame.left, frame.bottom, right, frame.bottom, "pc-axis", "#8c959f"))
    if x_label:
        parts.append(_label((frame.left + right) / 2, frame.height - 9, x_label, "middle"))
    if y_label:
        middle = (frame.top + frame.bottom) / 2
        parts.append(_label(15, middle, y_label, "middle",
                            f' transform="rotate(-90 15 {middle:.1f})"'))
    return parts


def _series(line: Line, segments: list[list[tuple[float, float]]], colour: int,
            frame: _Frame) -> list[str]:
    parts = []
    stroke = {"line": 1.8, "thin": 1.1, "dots": 2.2}[line.kind]
    for segment in segments:
        places = [frame.at(x, y) for x, y in segment]
        if len(places) > 1:
            joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline class="pc-s{colour}" points="{joined}" fill="none" '
                         f'stroke="{_LIGHT[colour]}" stroke-width="{stroke}" '
                         'stroke-linejoin="round"/>')
        if line.kind == "dots" or len(places) == 1:
            parts += [f'<circle class="pc-f{colour}" cx="{px:.1f}" cy="{py:.1f}" r="3.2" '
                      f'fill="{_LIGHT[colour]}"><title>{_text(line.name)} {y:.4g} at {x:g}'
                      "</title></circle>"
                      for (px, py), (x, y) in zip(places, segment, strict=True)]
    return parts


def _edges(low: float, high: float, bins: int) -> list[float]:
    """Round edges around all values; one value alone gets one bin."""
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-300):
        low, high = _widened(low, low)
        return [low, high] if low or high != 1 else [-0.5, 0.5]
    step = _round_step(high - low, bins)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def _shares(values: list[float], edges: list[float]) -> list[float]:
    counts = [0] * (len(edges) - 1)
    width = (edges[-1] - edges[0]) / len(counts)
    for value in values:
        counts[min(len(counts) - 1, max(0, int((value - edges[0]) / width + 1e-9)))] += 1
    return [count / max(1, len(values)) for count in counts]


def _bar(frame: _Frame, within: tuple[float, float], percent: float, place: tuple[int, int],
         colour: int) -> str:
    """One group's bar in a bin; ``place`` is (number, groups), next to each other."""
    x0, top = frame.at(within[0], percent)
    x1, bottom = frame.at(within[1], 0)
    number, groups = place
    width = max(0.5, (x1 - x0) * 0.86 / groups)
    left = x0 + (x1 - x0) * 0.07 + number * width
    return (f'<rect class="pc-f{colour}" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" '
            f'height="{bottom - top:.1f}" fill="{_LIGHT[colour]}"><title>{within[0]:.4g} to '
            f"{within[1]:.4g}: {percent:.1f} %</title></rect>")


def _legend_rows(names: list[str], width: int) -> list[list[tuple[float, int, str]]]:
    """(x, number, text) of every entry, in rows that fit the picture."""
    rows: list[list[tuple[float, int, str]]] = []
    x = math.inf
    for number, name in enumerate(names):
        shown = _shortened(name, width - 60)
        extent = 38 + _LETTER * len(shown)
        if x + extent > width - _RIGHT:
            rows.append([])
            x = 14.0
        rows[-1].append((x, number, shown))
        x += extent
    return rows


def _shortened(text: str, room: float) -> str:
    letters = max(4, int(room / _LETTER))
    return text if len(text) <= letters else text[:letters - 1] + "…"


def _document(body: list[str], names: list[str], title: str, said: str, width: int, height: int,
              *, empty: bool = False) -> str:
    legend = []
    for row, entries in enumerate(_legend_rows(names, width)):
        y = _TOP + _ROW * row + 8
        for x, number, name in entries:
            colour = number % len(_LIGHT)
            legend += [f'<rect class="pc-f{colour}" x="{x:.1f}" y="{y - 2:.1f}" width="16" '
                       f'height="4" rx="2" fill="{_LIGHT[colour]}"/>',
                       _label(x + 22, y + 4, name, "start")]
    if empty:
        body = [_label(width / 2, height / 2 + 10, "no values", "middle")]
    heading = _text(_shortened(title, width - 20))
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" class="ppocli-chart" width="{width}" '
        f'height="{height}" viewBox="0 0 {width} {height}" role="img" aria-label="{_text(said)}" '
        f'font-family="{_FONT}" font-size="{_SIZE}">',
        f"<title>{_text(title)}</title>", f"<style>{_STYLE}</style>",
        f'<rect class="pc-page" width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text class="pc-ink" x="14" y="21" font-size="14" font-weight="600" fill="#1f2328">'
        f"{heading}</text>", *legend, *body, "</svg>", ""])


def _label(x: float, y: float, words: str, anchor: str, more: str = "") -> str:
    return (f'<text class="pc-soft" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" '
            f'fill="#57606a"{more}>{_text(words)}</text>')


def _stroke(x1: float, y1: float, x2: float, y2: float, name: str, colour: str) -> str:
    return (f'<line class="{name}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
            f'stroke="{colour}"/>')


def _text(words: str) -> str:
    """Escaped for elements and attributes; what XML can't hold is replaced."""
    return escape(_NOT_XML.sub("�", words), quote=True)
