"""Which figures of runs are drawn: those of a report together, thinned to what a picture can show,
and those that ``ppocli plot`` is asked for, smoothed, as SVG or PNG.

Drawing in the terminal is :mod:`ppocli.cli.plot`.
"""

import io
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from ppocli.errors import ConfigError, InputError
from ppocli.runs.charts import Line, line_chart, stacked, thin
from ppocli.runs.record import RunRecord
from ppocli.text import did_you_mean, sparkline

MOST_POINTS = 1000
_MOST_DOTS = 60
_LEAST_EXPLAINED = -1.0


@dataclass(frozen=True, slots=True)
class Curve:
    """One picture: lines over the steps, and what has to be said about them."""

    title: str
    unit: str
    lines: list[Line]
    figures: list[dict[str, Any]]
    """what the whole of each line comes to: ``name``, ``first``, ``last``, ``lowest``, ``highest``
    of every step, and ``blocks``, means over equal parts as characters"""
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
    ("Loss", "", [("training", "loss/total"), ("evaluation", "eval/loss")]),
    ("Accuracy", "share of the pairs", [
        ("evaluation", "eval/accuracy"), ("chosen is longer", "eval/accuracy_longer"),
        ("chosen is shorter", "eval/accuracy_shorter")]),
    ("Perplexity", "", [("evaluation", "eval/perplexity")]),
    ("Margin", "chosen less rejected score", [("evaluation", "eval/margin_mean")]),
    ("Calibration error", "share", [("evaluation", "eval/ece")]),
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
    figures: list[dict[str, Any]] = []
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
    if len(wanted) > 1 and len(lines) == 1 and lines[0].name not in ("rollouts", "training"):
        title = f"{title}: {lines[0].name}"  # a picture of one line has no legend
    return Curve(title, unit, lines, figures, floor, note, thinned, record.step)


def _figures(name: str, values: list[float], floor: float | None) -> dict[str, Any]:
    drawn = values if floor is None else [max(value, floor) for value in values]
    return {"name": name, "first": values[0], "last": values[-1], "lowest": min(values),
            "highest": max(values), "blocks": sparkline(drawn)}


def _kind(figure: str, count: int, evaluated: bool) -> Literal["line", "thin", "dots"]:
    """Evaluations are few and exact: dots, with the noisy rollouts thin behind them."""
    if figure.startswith("eval/"):
        return "dots" if count <= _MOST_DOTS else "line"
    return "thin" if evaluated else "line"


SHORT = {
    "reward": ("reward/mean",), "kl": ("objective/kl",),
    "length": ("rollout/response_tokens_mean", "eval/response_tokens_mean"),
    "entropy": ("objective/entropy",), "clip": ("policy/clipfrac_avg",), "lr": ("lr",),
    "loss": ("loss/total_avg", "loss/total"),
    "eval": ("eval/reward_mean", "eval/accuracy", "eval/loss"), "accuracy": ("eval/accuracy",),
    "perplexity": ("eval/perplexity",), "margin": ("eval/margin_mean",)}
"""short names of the figures that are looked at most: the first of each that the runs have"""
_WIDTH, _HEIGHT = 640, 240


@dataclass(frozen=True, slots=True)
class Series:
    """One figure of one run."""

    run: str
    """the run's label, different for each run of a chart"""
    metric: str
    points: list[tuple[int, float]]
    """(step, value) of every step that has a finite value"""


def metric_names(text: str, runs: Sequence[RunRecord]) -> list[str]:
    """Full names for ``reward,kl`` or ``policy/grad_norm``, each once; for nothing those of what
    the runs train: reward and KL, or the loss and what evaluations found.

    Raises:
        ConfigError: a name that none of the runs has, with what they have.
        InputError: the runs have no figures at all yet.
    """
    known = list(dict.fromkeys(name for run in runs for name in run.names))
    if not known:
        going = any(run.status == "running" for run in runs)
        raise InputError(f"There are no figures in {', '.join(run.name for run in runs)}"
                         + (" yet." if going else "."), where="metrics.jsonl",
                         fix="wait for the first step" if going else "it ended without a row: "
                         "name another run, or go on with this one: "
                         f"ppocli resume {runs[0].folder.path}")
    names = []
    short = {key: next((name for name in full if name in known), full[0])
             for key, full in SHORT.items()}
    text = text or ("reward,kl" if short["reward"] in known else
                    ",".join(key for key in ("loss", "eval") if short[key] in known) or known[0])
    for given in (part.strip() for part in text.split(",")):
        name = short.get(given, given)
        if name not in known:
            there = [key for key, full in short.items() if full in known]
            raise ConfigError(
                f"--metric {given}: " + (f"these runs have no {name}" if given in short else
                                         "there is no such figure in these runs")
                + did_you_mean(given, [*there, *known]), where="command line",
                fix=f"choose of: {', '.join(there)}; or by full name: {', '.join(known)}")
        names.append(name)
    return list(dict.fromkeys(names))


def run_labels(runs: Sequence[RunRecord]) -> list[str]:
    """A label for each run: its name, with as much of its path as tells it from the others."""
    for depth in range(1, 16):
        labels = ["/".join(run.folder.path.parts[-depth:]) for run in runs]
        if len(set(labels)) == len({run.folder.path for run in runs}):
            return labels
    return [str(run.folder.path) for run in runs]


def collect(runs: Sequence[RunRecord], metrics: Sequence[str], smooth: int = 1) -> list[Series]:
    """The series of all charts, metric by metric, in the order of the runs."""
    labels = run_labels(runs)
    return [Series(label, metric, smoothed(run.series(metric), smooth))
            for metric in metrics for label, run in zip(labels, runs, strict=True)]


def smoothed(points: Sequence[tuple[int, float]], steps: int) -> list[tuple[int, float]]:
    """The mean of the values of the last ``steps`` steps at every point; 1 changes nothing."""
    found = []
    first = 0
    for number, (step, _) in enumerate(points):
        while points[first][0] <= step - steps:
            first += 1
        window = [value for _, value in points[first:number + 1]]
        found.append((step, sum(window) / len(window)))
    return found


def as_svg(series: Sequence[Series], smooth: int = 1) -> str:
    """One SVG file with a chart for each metric, one below the other."""
    charts = [line_chart([Line(each.run, thin(each.points)) for each in group],
                         title=chart_title(metric, group, smooth), x_label="step", y_label="",
                         width=_WIDTH, height=_HEIGHT) for metric, group in by_metric(series)]
    return charts[0] if len(charts) == 1 else stacked(charts, _WIDTH, _HEIGHT)


def as_png(series: Sequence[Series], smooth: int = 1) -> bytes:
    """The same as a PNG, drawn by matplotlib.

    Raises:
        ConfigError: matplotlib isn't installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("Drawing a .png needs matplotlib, which is not installed.",
                          where="--out", fix="pip install 'ppocli[plot]'; or write a .svg, which "
                          "needs nothing") from None
    groups = by_metric(series)
    drawing = Figure(figsize=(8, 3 * len(groups)), dpi=100, layout="constrained")
    axes = drawing.subplots(len(groups), 1, squeeze=False)[:, 0]
    for axis, (metric, group) in zip(axes, groups, strict=True):
        for each in group:
            axis.plot([step for step, _ in each.points], [value for _, value in each.points],
                      marker="." if len(each.points) < 20 else None,
                      label=f" {each.run}")  # one that begins with "_" would be left out
        heading = axis.set_title(chart_title(metric, group, smooth), loc="left", fontsize=11)
        heading.set_parse_math(False)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        for text in axis.legend(fontsize=9).get_texts() if len(group) > 1 else ():
            text.set_parse_math(False)
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # letters of a run's name that the font hasn't got
        drawing.savefig(buffer, format="png")
    return buffer.getvalue()


def chart_title(metric: str, group: Sequence[Series], smooth: int) -> str:
    """What stands above a chart."""
    of = f" of {group[0].run}" if len(group) == 1 else ""
    return f"{metric}{of}" + (f", mean of {smooth} steps" if smooth > 1 else "")


def by_metric(series: Sequence[Series]) -> list[tuple[str, list[Series]]]:
    """The series of each chart, in order."""
    return [(metric, list(group)) for metric, group in groupby(series, lambda each: each.metric)]
