"""Which figures of a run are drawn together, thinned to what a picture can show."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ppocli.runs.charts import Line, line_chart, thin
from ppocli.runs.record import RunRecord
from ppocli.text import sparkline

MOST_POINTS = 1000
_MOST_DOTS = 60
_LEAST_EXPLAINED = -1.0


@dataclass(frozen=True, slots=True)
class Figures:
    """What the whole of a line comes to, every step of it."""

    name: str
    first: float
    last: float
    lowest: float
    highest: float
    blocks: str
    """means over equal parts, as characters"""


@dataclass(frozen=True, slots=True)
class Curve:
    """One picture: lines over the steps, and what has to be said about them."""

    title: str
    unit: str
    lines: list[Line]
    figures: list[Figures]
    """of each line"""
    floor: float | None
    """lower values are drawn there"""
    note: str
    """the same in words; often empty"""
    thinned: str
    """which points of a long run ``lines`` have, in words"""
    steps: int
    """where the axis ends: the run's newest step"""

    def svg(self, width: int = 480, height: int = 220) -> str:
        """The picture as an SVG element."""
        return line_chart(self.lines, title=self.title, y_label=self.unit, width=width,
                          height=height, x_range=(0, self.steps),
                          floor=-math.inf if self.floor is None else self.floor)


# title, unit, (name of the line, figure)
_PLAN: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("Reward", "score", [("rollouts", "reward/mean"), ("evaluation", "eval/reward_mean")]),
    ("KL to the reference", "nats a response",
     [("rollouts", "objective/kl"), ("evaluation", "eval/kl_mean")]),
    ("KL coefficient", "", [("coefficient", "objective/kl_coef")]),
    ("Entropy", "nats a response", [("entropy", "objective/entropy")]),
    ("Entropy of a token", "nats", [("entropy", "policy/entropy_avg")]),
    ("Value error", "squared", [("value error", "val/error")]),
    ("Explained variance of the returns", "share", [("explained", "val/var_explained")]),
    ("Clipped tokens", "share", [("ratio", "policy/clipfrac_avg"),
                                 ("value", "val/clipfrac_avg")]),
    ("Policy movement in a step", "nats a token", [("KL to the rollout's policy",
                                                    "policy/policykl_avg")]),
    ("Gradient norm", "before clipping", [("norm", "policy/grad_norm")]),
    ("Response length", "tokens", [("rollouts", "rollout/response_tokens_mean"),
                                   ("longest", "rollout/response_tokens_max"),
                                   ("evaluation", "eval/response_tokens_mean")]),
    ("Finished responses", "share", [("rollouts", "rollout/finished_share"),
                                     ("evaluation", "eval/finished_share")]),
    ("Learning rate", "", [("learning rate", "lr")]),
    ("Time of a step", "seconds", [(name, f"time/{name}") for name in (
        "rollout", "reward", "scoring", "optimize", "other", "eval")]),
]


def curves_of(record: RunRecord) -> list[Curve]:
    """Every picture that a run has values for, in the order of the report."""
    plan = list(_PLAN)
    parts = [name for name in record.names if name.startswith("reward/")
             and name not in ("reward/mean", "reward/std", "reward/invalid")]
    if parts:
        plan.insert(1, ("Rewards by name", "score", [(n.removeprefix("reward/"), n)
                                                     for n in parts]))
    plan += [(f"Metric {name.removeprefix('eval/metrics/')}", "evaluation mean",
              [(name.removeprefix("eval/metrics/"), name)])
             for name in record.names if name.startswith("eval/metrics/")]
    found = (_curve(record, *entry) for entry in plan)
    return [curve for curve in found if curve is not None]


def _curve(record: RunRecord, title: str, unit: str, wanted: list[tuple[str, str]]
           ) -> Curve | None:
    lines: list[Line] = []
    figures: list[Figures] = []
    floor, note, thinned = None, "", ""
    evaluated = any(figure.startswith("eval/") and record.series(figure) for _, figure in wanted)
    for name, figure in wanted:
        points: list[tuple[float, float]] = [(float(x), y) for x, y in record.series(figure)]
        if not points:
            continue
        if figure == "val/var_explained" and min(y for _, y in points) < _LEAST_EXPLAINED:
            floor = _LEAST_EXPLAINED
            note = f"Values below {floor:g} are drawn at {floor:g}."
        kept = thin(points, MOST_POINTS)
        if len(kept) < len(points):
            thinned = (f"Of about every {2 * len(points) / MOST_POINTS:.0f} neighbouring steps the "
                       "lowest and the highest value are drawn.")
        lines.append(Line(name, kept, _kind(figure, len(kept), evaluated)))
        figures.append(_figures(name, [y for _, y in points], floor))
    if not lines:
        return None
    if len(wanted) > 1 and len(lines) == 1 and lines[0].name != "rollouts":
        title = f"{title}: {lines[0].name}"  # a picture of one line has no legend
    return Curve(title, unit, lines, figures, floor, note, thinned, record.step)


def _figures(name: str, values: list[float], floor: float | None) -> Figures:
    drawn = values if floor is None else [max(value, floor) for value in values]
    return Figures(name, values[0], values[-1], min(values), max(values), sparkline(drawn))


def _kind(figure: str, count: int, evaluated: bool) -> Literal["line", "thin", "dots"]:
    """Evaluations are few and exact: dots, with the noisy rollouts thin behind them."""
    if figure.startswith("eval/"):
        return "dots" if count <= _MOST_DOTS else "line"
    return "thin" if evaluated else "line"
