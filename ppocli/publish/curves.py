"""Figures of runs for charts: those of a report, thinned to what a chart can show; those of
``ppocli plot``, smoothed; and runs side by side. matplotlib draws them as PNG and SVG files; the
extra ``plot`` installs it.

The report's page draws its own (``report/templates/report.js``), the terminal's are
:mod:`ppocli.cli.results`.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ppocli.config import config_yaml, import_guard
from ppocli.config.text import clean, did_you_mean, pasted, sparkline
from ppocli.errors import ConfigError, InputError
from ppocli.runs import listing
from ppocli.runs.record import RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Pictures -----------------------------------------------------------------------------------------

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


# Figures ------------------------------------------------------------------------------------------

MOST_POINTS = 1000
_MOST_DOTS = 60
_MOST_LINES = 4
"""lines of one run in a chart that also shows other runs"""
_LEAST_EXPLAINED = -1.0


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
    ("Clipped tokens", "share", [("ratio", "policy/clipfrac_avg"), ("value", "val/clipfrac_avg")]),
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


_EVALUATED = {named_figures[0][1]: named_figures[-1][1] for _, _, named_figures in _PLAN
              if named_figures[0][0] in ("rollouts", "training")}
"""figure of rollouts or training -> the same figure of evaluations, drawn over it"""


def curves_of(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Every chart that the runs have values for, in the order of the report, with all runs in one
    chart."""
    plan = list(_PLAN)
    names = list(dict.fromkeys(name for run in runs for name in run.names))
    if parts := [name for name in names if name.startswith("reward/")
                 and name not in ("reward/mean", "reward/std", "reward/invalid")]:
        behind = 1 + [title for title, _, _ in plan].index("Reward")
        plan.insert(behind, ("Rewards by name", "score", [(n.removeprefix("reward/"), n)
                                                          for n in parts]))
    plan += [(f"Metric {name.removeprefix('eval/metrics/')}", "evaluation mean",
              [(name.removeprefix("eval/metrics/"), name)])
             for name in names if name.startswith("eval/metrics/")]
    return [curve for entry in plan if (curve := _curve(runs, *entry)) is not None]


def _curve(runs: Sequence[RunRecord], title: str, unit: str, named_figures: list[tuple[str, str]]
           ) -> dict[str, Any] | None:
    """One chart: lines over the steps, and notes on them."""
    runs = runs[:1] if len(named_figures) > _MOST_LINES else runs
    series = [(number, name, figure, points) for number, run in enumerate(runs)
              for name, figure in named_figures if (points := run.series(figure))]
    if not series:
        return None
    evaluated = any(figure.startswith("eval/") for _, _, figure, _ in series)
    low = min((y for _, _, figure, points in series if figure == "val/var_explained"
               for _, y in points), default=0.0)
    floor = _LEAST_EXPLAINED if low < _LEAST_EXPLAINED else None
    if len(named_figures) > 1 and len(series) == 1 and series[0][1] not in ("rollouts", "training"):
        title = f"{title}: {series[0][1]}"  # a chart of one line has no legend
    lines, figures, labels = [], [], run_labels(runs)
    for number, short, figure, points in series:
        name = short if len(runs) == 1 else f"{short}, {labels[number]}"
        kept = thin(points)
        lines.append({"name": name, "points": kept, "kind": _kind(figure, len(kept), evaluated),
                      "run": number if len(runs) > 1 else -1})
        figures.append(_figures(name, [y for _, y in points], floor))
    return {
        "title": title, "unit": unit, "lines": lines,
        "figures": figures,  # what the whole of each line comes to
        "floor": floor,  # lower values are drawn there
        "note": "" if floor is None else f"Values below {floor:g} are drawn at {floor:g}."}


def thin(points: Sequence[tuple[float, float]], limit: int = MOST_POINTS
         ) -> list[tuple[float, float]]:
    """At most ``limit`` points: both ends, and of every run of neighbours between them the lowest
    and the highest, so that single outliers stay."""
    if len(points) <= limit:
        return list(points)
    between, buckets, kept = points[1:-1], max(1, limit // 2 - 1), [points[0]]
    for number in range(buckets):
        bucket = between[number * len(between) // buckets:(number + 1) * len(between) // buckets]
        ends = {min(bucket, key=lambda point: point[1]), max(bucket, key=lambda point: point[1])}
        kept += sorted(ends)
    return [*kept, points[-1]]


def _figures(name: str, values: list[float], floor: float | None) -> dict[str, Any]:
    """``first``, ``last``, ``lowest``, ``highest`` of every step, and ``blocks``, means over equal
    parts as characters."""
    clamped = values if floor is None else [max(value, floor) for value in values]
    return {"name": name, "first": values[0], "last": values[-1], "lowest": min(values),
            "highest": max(values), "blocks": sparkline(clamped)}


def _kind(figure: str, count: int, evaluated: bool) -> Literal["line", "thin", "dots"]:
    """Evaluations are few and exact, and become dots; the noisy rollouts become thin lines behind
    them."""
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
"""short names of the most common figures: the first that the runs have counts"""


def metric_names(text: str, runs: Sequence[RunRecord]) -> list[str]:
    """Full names for ``reward,kl`` or ``policy/grad_norm``, each once. An empty text stands for the
    main figures of the runs: reward and KL, or the losses of training and evaluation.

    Raises:
        ConfigError: none of the runs has such a figure; the message lists those they have.
        InputError: the runs have no figures at all yet.
    """
    recorded = list(dict.fromkeys(name for run in runs for name in run.names))
    if not recorded:
        going = any(run.status == "running" for run in runs)
        raise InputError(f"There are no figures in {', '.join(run.name for run in runs)}"
                         + (" yet." if going else "."), where="metrics.jsonl",
                         fix="wait for the first step" if going else "it ended without a row: "
                         "name another run, or go on with this one: "
                         f"ppocli resume {pasted(runs[0].folder.path)}")
    short = {key: next((name for name in full if name in recorded), full[0])
             for key, full in SHORT.items()}
    text = text or ("reward,kl" if short["reward"] in recorded else ",".join(
        key for key in ("loss", "eval") if short[key] in recorded) or recorded[0])
    names = []
    for word in (part.strip() for part in text.split(",")):
        name = short.get(word, word)
        if name not in recorded:
            short_names = [key for key, full in short.items() if full in recorded]
            raise ConfigError(
                f"--metric {word}: " + (f"these runs have no {name}" if word in short else
                                        "there is no such figure in these runs")
                + did_you_mean(word, [*short_names, *recorded]), where="command line",
                fix=f"choose of: {', '.join(short_names)}; or by full name: {', '.join(recorded)}")
        names.append(name)
    return list(dict.fromkeys(names))


def run_labels(runs: Sequence[RunRecord]) -> list[str]:
    """A label for each run: its name, with as much of its path as distinguishes it from the
    others."""
    for depth in range(1, 16):
        labels = ["/".join(run.folder.path.parts[-depth:]) for run in runs]
        if len(set(labels)) == len({run.folder.path for run in runs}):
            return labels
    return [str(run.folder.path) for run in runs]


def collect(runs: Sequence[RunRecord], metrics: Sequence[str], smooth: int = 1) -> dict[str, Panel]:
    """A chart for each metric, with a line for every run in their order, named by its label."""
    labels = run_labels(runs)
    of = f" of {labels[0]}" if len(runs) == 1 else ""
    how = f", mean of {smooth} steps" if smooth > 1 else ""
    return {metric: Panel(f"{metric}{of}{how}", [
        Line(label, smoothed(run.series(metric), smooth), run=number if len(runs) > 1 else -1,
             evaluated=run.series(_EVALUATED.get(metric, "")))
        for number, (label, run) in enumerate(zip(labels, runs, strict=True))])
        for metric in metrics}


def smoothed(points: Sequence[tuple[int, float]], steps: int) -> list[tuple[int, float]]:
    """The mean of the values of the last ``steps`` steps at every point; 1 changes nothing."""
    means, first = [], 0
    for number, (step, _) in enumerate(points):
        while points[first][0] <= step - steps:
            first += 1
        window = [value for _, value in points[first:number + 1]]
        means.append((step, sum(window) / len(window)))
    return means


# Side by side -----------------------------------------------------------------------------------

_COMPARED = ("reward/mean", "objective/kl", "objective/entropy", "rollout/response_tokens_mean",
            "rollout/finished_share", "loss/total", "eval/reward_mean", "eval/kl_mean",
            "eval/loss", "eval/perplexity", "eval/accuracy", "eval/accuracy_stderr",
            "eval/accuracy_pairs", "eval/margin_mean", "eval/ece", "eval/response_tokens_mean",
            "eval/distinct_2")


def compare_runs(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Compare runs with the first one, as ``ppocli compare --json`` prints it."""
    labels = run_labels(runs)
    episodes = min(_episodes(run.rows) for run in runs)
    compared = []
    for label, run in zip(labels, runs, strict=True):
        best_step, best = listing.best_evaluation(run)
        compared.append({
            "name": label, "path": str(run.folder.path), "status": run.status,
            "equal": _at(run, episodes), "end": _at(run, _episodes(run.rows)),
            "best": best, "best_step": best_step, "best_metric": run.config.checkpoint.metric})
    return {
        # the largest number of samples that all runs have reached, which `equal` is after
        "episodes": episodes, "runs": compared,
        # the value of each run, for every setting that isn't the same in all
        "config_differences": _differences(dict(zip(labels, runs, strict=True)))}


def _episodes(rows: Sequence[dict[str, Any]]) -> int:
    return int(rows[-1].get("episode") or 0) if rows else 0


def _at(run: RunRecord, episodes: int) -> dict[str, Any]:
    """A run after ``episodes`` samples: ``seconds`` spent in steps and evaluations until then, and
    the newest ``figures`` up to then."""
    rows = [row for row in run.rows if int(row.get("episode") or 0) <= episodes]
    extra = [name for name in run.names if name.startswith("eval/metrics/")]
    return {
        "step": int(rows[-1]["step"]) if rows else 0, "episodes": _episodes(rows),
        "seconds": sum(row.get(name) or 0.0 for row in rows for name in ("time/step", "time/eval")),
        "figures": {name: next((row[name] for row in reversed(rows) if row.get(name) is not None),
                               None) for name in (*_COMPARED, *extra)}}


def _differences(runs: dict[str, RunRecord]) -> dict[str, dict[str, Any]]:
    first, *others = (run.config for run in runs.values())
    keys = dict.fromkeys(key for other in others
                         for key, _, _ in config_yaml.config_differences(first, other))
    values = {label: config_yaml.flat(run.config) for label, run in runs.items()}
    return {key: {label: settings.get(key) for label, settings in values.items()} for key in keys}
