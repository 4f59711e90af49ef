"""A picture of a run's reward and KL over its episodes, as SVG.

    python benchmarks/curve.py runs/NAME docs/quickstart-curve.svg

Two panels over one axis: reward (every rollout's mean as a thin line, evaluations on the fixed
prompts as dots) and the KL to the starting model. Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

WIDTH, LEFT, RIGHT = 720, 64, 20
PANEL, GAP, TOP, BOTTOM = 190, 26, 46, 52
HEIGHT = TOP + 2 * PANEL + GAP + BOTTOM
INK, GRID, ROLLOUT, EVAL = "#333333", "#dddddd", "#9ecae1", "#08519c"

Points = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture: its title, its lines, and where on the page it begins."""

    title: str
    top: float
    rollouts: Points
    evals: Points


def points(rows: list[dict], name: str) -> Points:
    """(episode, value) of each row that has the figure."""
    return [(row["episode"], row[name]) for row in rows if row.get(name) is not None]


def nice_ceiling(value: float) -> float:
    """The least of 1, 2, 2.5, 5 times a power of ten that isn't below ``value``."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= value - 1e-12)


def text(x: float, y: float, words: str, anchor: str = "middle", size: int = 12) -> str:
    return (f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">'
            f"{escape(words)}</text>")


def line(path: Points, colour: str, width: float) -> str:
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in path)
    return (f'<polyline points="{joined}" fill="none" stroke="{colour}" '
            f'stroke-width="{width:g}"/>')


def draw(panel: Panel, last: float) -> list[str]:
    """The elements of one panel; ``last`` is the episode at the right edge."""
    values = [y for _, y in panel.rollouts + panel.evals]
    # a KL of zero comes out a hair below it
    bottom, ceiling = min(0.0, *(round(v, 3) for v in values)), nice_ceiling(max(values))

    def at(point: tuple[float, float]) -> tuple[float, float]:
        x = LEFT + point[0] / last * (WIDTH - LEFT - RIGHT)
        return x, panel.top + PANEL * (1 - (point[1] - bottom) / (ceiling - bottom))

    parts = [text(LEFT, panel.top - 8, panel.title, "start", 13)]
    for share in (0, 0.25, 0.5, 0.75, 1):
        value = bottom + share * (ceiling - bottom)
        y = at((0, value))[1]
        parts.append(line([(LEFT, y), (WIDTH - RIGHT, y)], GRID, 1))
        parts.append(text(LEFT - 8, y + 4, f"{value:.3g}", "end"))
    parts.append(line([at(p) for p in panel.rollouts], ROLLOUT, 1.5))
    parts.append(line([at(p) for p in panel.evals], EVAL, 2.5))
    parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{EVAL}"/>'
              for x, y in map(at, panel.evals)]
    return parts


def picture(rows: list[dict], title: str) -> str:
    """The whole SVG.

    Raises:
        SystemExit: the rows hold no evaluation or no step to draw.
    """
    second = TOP + PANEL + GAP
    panels = [Panel("reward", TOP, points(rows, "reward/mean"), points(rows, "eval/reward_mean")),
              Panel("KL to the starting model, nats a sample", second,
                    points(rows, "objective/kl"), points(rows, "eval/kl_mean"))]
    if not all(panel.rollouts and panel.evals for panel in panels):
        raise SystemExit("there is nothing to draw: the run has no step or no evaluation yet")
    last = max(row["episode"] for row in rows)
    body = [text(LEFT, 20, title, "start", 14)]
    legend = WIDTH - RIGHT - 290
    body += [line([(legend, 16), (legend + 22, 16)], ROLLOUT, 1.5),
             text(legend + 28, 20, "rollouts", "start"),
             line([(legend + 100, 16), (legend + 122, 16)], EVAL, 2.5),
             text(legend + 128, 20, "evaluation, fixed prompts", "start")]
    for panel in panels:
        body += draw(panel, last)
    y = second + PANEL + 18
    for quarter in range(5):
        x = LEFT + quarter / 4 * (WIDTH - LEFT - RIGHT)
        body.append(text(x, y, f"{last * quarter / 4:g}"))
    body.append(text((LEFT + WIDTH - RIGHT) / 2, y + 22, "episodes"))
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" fill="{INK}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>', *body, "</svg>", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("out", type=Path, help="the SVG file to write")
    parser.add_argument("--title", help="default: the run's name")
    args = parser.parse_args()
    try:
        lines = (args.run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise SystemExit(f"{args.run} holds no metrics.jsonl of a run: {error}") from error
    svg = picture([json.loads(row) for row in lines], args.title or args.run.resolve().name)
    args.out.write_text(svg, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
