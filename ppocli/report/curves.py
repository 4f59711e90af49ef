"""Which figures of a run are drawn together, thinned to what a picture can show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ppocli.runs.charts import Line, line_chart, thin
from ppocli.runs.record import RunRecord

MOST_POINTS = 1000
_MOST_DOTS = 60
_LEAST_EXPLAINED = -1.0


@dataclass(frozen=True, slots=True)
class Curve:
    """One picture: lines over the steps, and what has to be said about them."""

    title: str
    unit: str
    lines: list[Line]
    note: str
    """how the lines were changed for drawing; often empty"""
    steps: int
    """where the axis ends: the run's newest step"""

    def svg(self, width: int = 480, height: int = 220) -> str:
        """The picture as an SVG element."""
        return line_chart(self.lines, title=self.title, y_label=self.unit, width=width,
                          height=height, x_range=(0, self.steps))


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
        "rollout", "reward", "scoring", "optimize", "eval")]),
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
    lines, notes = [], []
    evaluated = any(figure.startswith("eval/") and record.series(figure) for _, figure in wanted)
    for name, figure in wanted:
        points: list[tuple[float, float]] = [(float(x), y) for x, y in record.series(figure)]
        if not points:
            continue
        if figure == "val/var_explained" and min(y for _, y in points) < _LEAST_EXPLAINED:
            points = [(x, max(y, _LEAST_EXPLAINED)) for x, y in points]
            notes.append(f"Values below {_LEAST_EXPLAINED:g} are drawn there.")
        kept = thin(points, MOST_POINTS)
        if len(kept) < len(points):
            notes.append(f"Of about every {2 * len(points) / MOST_POINTS:.0f} neighbouring steps "
                         "the lowest and the highest value are drawn.")
        lines.append(Line(name, kept, _kind(figure, len(kept), evaluated)))
    return Curve(title, unit, lines, " ".join(dict.fromkeys(notes)), record.step) if lines else None


def _kind(figure: str, count: int, evaluated: bool) -> Literal["line", "thin", "dots"]:
    """Evaluations are few and exact: dots, with the noisy rollouts thin behind them."""
    if figure.startswith("eval/"):
        return "dots" if count <= _MOST_DOTS else "line"
    return "thin" if evaluated else "line"
