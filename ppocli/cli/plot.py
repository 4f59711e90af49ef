"""``ppocli plot`` and ``compare``: curves of runs in the terminal, as a picture, or as numbers; and
runs side by side."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ppocli.cli import output
from ppocli.cli.options import AsJson, complete_run, flag, option
from ppocli.config.text import clean, shown
from ppocli.distributed.standard_output import put, result_stream
from ppocli.errors import ConfigError

if TYPE_CHECKING:
    from ppocli.publish.pictures import Panel

Style = Literal["dots", "colours", "marks", "ascii"]
"""``dots``: braille, for one curve. ``colours``: braille, each curve in a colour of its own.
``marks``: a letter of its own for each curve. ``ascii``: the same, and ASCII frames."""
_ROWS = 15
"""of a chart, its axis included"""
_COLOURS = ("cyan", "orange", "magenta", "green", "blue", "red")
_MARKS, _DOTS = "*ox+#@%&", "ABCDEFGH"
"""of the lines, and of their evaluations where there are no colours"""
_FRAME = "┤│└─┬"


def plot_runs(
        names: Annotated[list[str] | None, typer.Argument(
            metavar="[RUN]...", autocompletion=complete_run, help="Folders or names of runs, drawn "
            "over one another (default: the newest run below runs/).")] = None,
        metric: str = option("NAME,...", "Metrics by their names in metrics.jsonl, or reward, kl, "
            "length, entropy, clip, lr, loss, eval, accuracy, perplexity, margin (default: "
            "reward,kl; of trainings on a data set loss,eval).", "--metric", "-m", default=""),
        smooth: int = option("N", "Show the mean of the last N steps.", default=1),
        out: Path | None = option("FILE", "Write a picture, .svg or .png (pip install "
            "'ppocli[plot]'), instead of drawing in the terminal.", "--output", "-o"),
        overwrite: bool = flag("Replace FILE if it exists.", "--overwrite"),
        as_json: AsJson = False) -> None:
    """Plot metrics of runs in the terminal or to a file.

    \b
    Examples:
      ppocli plot
      ppocli plot runs/NAME --metric eval,kl,policy/grad_norm --smooth 5
      ppocli plot runs/ONE runs/OTHER --metric reward --output reward.svg
    """
    from ppocli.publish.curves import collect, metric_names
    from ppocli.runs.target import find_run, read_runs

    if smooth < 1:
        raise ConfigError(f"--smooth {smooth}: must be at least 1", where="command line")
    check_out(out, overwrite)
    runs = read_runs(names or [str(find_run(None, say=output.say))])
    charts = collect(runs, metric_names(metric, runs), smooth)
    if as_json:
        output.print_json({"smooth": smooth, "series": numbers_of(charts)}, indent=None)
    show_curves([*charts.values()], out, quiet=as_json)


def show_curves(charts: Sequence[Panel], out: Path | None, *, quiet: bool) -> None:
    """Draw charts into a file, whose path is printed, or in the terminal; print nothing if
    ``quiet``.

    Raises:
        ConfigError: matplotlib isn't installed.
        DiskError: the file can't be written.
    """
    from ppocli.publish.pictures import draw as draw_picture
    from ppocli.publish.report_page import write_file

    if out is not None:
        write_file(out, draw_picture(charts, out.suffix.lower().removeprefix(".")))
        if not quiet:
            output.show_text(str(out))
    elif not quiet:
        style = chosen_style(max(len(chart.lines) for chart in charts))
        width = shutil.get_terminal_size().columns
        drawings = [draw(chart, style=style, width=width) for chart in charts]
        put("\n\n".join(map("\n".join, drawings)))


def numbers_of(charts: Mapping[str, Panel]) -> list[dict[str, Any]]:
    """The curves of each metric, for JSON."""
    return [{"run": curve.name, "metric": metric, "steps": [step for step, _ in curve.points],
             "values": [value for _, value in curve.points]}
            for metric, chart in charts.items() for curve in chart.lines]


def check_out(out: Path | None, overwrite: bool) -> None:
    """Refuse an output file for a picture that can't be written.

    Raises:
        ConfigError: its ending is not that of a picture, or it exists already.
    """
    if out is None:
        return
    folder = os.path.isdir(out)
    if out.suffix.lower() not in (".svg", ".png"):
        raise ConfigError(f"--output {out}: must end in .svg or .png", where="command line",
                          fix=f"e.g. --output {out / 'curves.svg' if folder else out}"
                          + ".svg" * (not folder))
    if folder or (os.path.lexists(out) and not overwrite):
        raise ConfigError(f"{out} exists already; nothing is overwritten.", where="--output",
                          fix="choose another name" + ("" if folder else ", or add --overwrite"))


def chosen_style(runs: int) -> Style:
    """The style that distinguishes several curves: colours, or letters without them."""
    try:
        f"⣿{_FRAME}".encode(result_stream().encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return "ascii"
    if runs == 1:
        return "dots"
    return "colours" if output.has_colours() and os.environ.get("TERM") != "dumb" else "marks"


def draw(panel: Panel, *, width: int = 80, style: Style = "dots") -> list[str]:
    """A chart of characters, drawn by plotext.

    Args:
        panel: later lines lie above earlier ones; its title is the first line of the text.
        width: columns the lines may take, the labels of the axis included; at least 24 are taken.
        style: what the curves are made of.
    """
    import plotext

    shown = [curve for curve in panel.lines if curve.points]
    if not shown:
        return [clean(panel.title), "  no values"]
    steps, values = zip(*(point for curve in shown for point in (*curve.points, *curve.evaluated)),
                        strict=True)
    low, high = min(values), max(values)
    plotext.terminal.limit(False, False)
    chart = plotext.figure
    chart.clear()
    chart.theme("colorless").plot_size(max(24, width), _ROWS).label("step", "x")
    chart.axes(False, axis="x", side="upper").axes(False, axis="y", side="right")
    ends = sorted({min(steps), max(steps)})
    chart.ruler("x", "lower").ticks(ends, list(map(str, ends)))
    # a quarter of each value, so that no difference of them overflows; what is nothing beside the
    # range is 0
    marks = {value / 4: "0" if abs(value) < 1e-4 * max(abs(high), abs(low)) else f"{value:.4g}"
             for value in (low, low / 2 + high / 2, high)}
    chart.ruler("y", "left").ticks(list(marks), list(marks.values()))
    keys = {curve.name: f"    {clean(curve.name)}: no values" for curve in panel.lines}
    over = []  # evaluations lie above every line of rollouts
    for number, curve in enumerate(shown):
        colour = plotext.pixel(_COLOURS[number % len(_COLOURS)] if style == "colours" else None)
        sign = "braille" if style in ("dots", "colours") else _MARKS[number % len(_MARKS)]
        dot = "●" if style in ("dots", "colours") else _DOTS[number % len(_DOTS)]
        over += [(curve.evaluated, plotext.marker(dot, colour))] if curve.evaluated else []
        chart.draw(_signal(chart, curve.points, plotext.marker(sign, colour)).lines())
        key = plotext.colorize("⣿⣿").fill(colour).string() if style == "colours" else sign
        keys[curve.name] = f"  {key} {clean(curve.name)}" + (
            f"   {dot} its evaluations" if curve.evaluated else "")
    for points, marker in over:
        chart.draw(_signal(chart, points, marker))
    lines = chart.build().string(colorless=style != "colours")
    if style == "ascii":
        lines = lines.translate(str.maketrans(_FRAME, "|||-+"))
    legend = [*keys.values()] if len(panel.lines) > 1 else [f"  {dot} evaluation"] if over else []
    return [clean(panel.title), *(line.rstrip() for line in lines.splitlines()), *legend]


def _signal(chart: Any, points: Sequence[tuple[float, float]], marker: Any) -> Any:
    """Points of a chart, quartered like its axis."""
    return chart.signal([step for step, _ in points], [value / 4 for _, value in points],
                        marker=marker)


# compare ------------------------------------------------------------------------------------------

def compare(
        names: Annotated[list[str], typer.Argument(
            metavar="RUN RUN...", autocompletion=complete_run,
            help="Folders or names of runs; the others are compared with the first.")],
        metric: str = option("NAME,...", "Compare these figures, and draw their curves over one "
            "another; names as of ppocli plot.", "--metric", "-m", default=""),
        out: Path | None = option("FILE", "Write the curves to a picture, .svg or .png.",
            "--output", "-o"),
        overwrite: bool = flag("Replace FILE if it exists.", "--overwrite"),
        as_json: AsJson = False) -> None:
    """Compare runs: figures after the same number of samples, settings, curves.

    \b
    Examples:
      ppocli compare runs/ONE runs/OTHER
      ppocli compare runs/ONE runs/OTHER --metric reward,kl
      ppocli compare runs/ONE runs/OTHER --metric eval,policy/grad_norm -o curves.svg
      ppocli compare runs/sweep-20260131-120000/0 runs/sweep-20260131-120000/1 --json
    """
    from ppocli.publish.curves import collect, compare_runs, metric_names
    from ppocli.runs.target import read_runs

    check_out(out, overwrite)
    runs = read_runs(names)
    if len(runs) < 2:
        raise ConfigError("Comparing needs two or more different runs.",
                          where="command line", fix="ppocli compare runs/ONE runs/OTHER")
    metrics = metric_names(metric, runs) if metric or out is not None else []
    curves = collect(runs, metrics)
    comparison = compare_runs(runs, metrics if metric else ())
    if as_json:
        output.print_json(comparison | ({"curves": numbers_of(curves)} if curves else {}))
    else:
        _print_comparison(comparison)
    if curves:
        if not as_json:
            put()
        show_curves([*curves.values()], out, quiet=as_json)


def _print_comparison(comparison: dict[str, Any]) -> None:
    runs, ends = comparison["runs"], [run["end"] for run in comparison["runs"]]
    blank = [""] * len(runs)
    rows = [["", *(run["name"] for run in runs)], ["status", *(run["status"] for run in runs)]]
    at_end = all(end["episodes"] == run["equal"]["episodes"]
                 for run, end in zip(runs, ends, strict=True))
    heading = f"after {comparison['episodes']} episodes" + (", the end of all" if at_end else "")
    rows += _section(heading, [run["equal"] for run in runs])
    if not at_end:
        rows += _section("at the end", ends)
    rows += [["", *blank],
             ["best evaluation", *(
                 f"{output.shown_figure(run['best'])} at step {run['best_step']}"
                 if run["best"] is not None else "-" for run in runs)],
             ["", *blank], ["settings that differ", *blank]]
    rows += [[f"  {key}", *map(shown, values.values())]
             for key, values in comparison["config_differences"].items()] or [["  none", *blank]]
    output.print_table(rows, fit=False)


def _section(heading: str, moments: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Rows of one moment of every run; figures that no run has are left out."""
    figures = [at["figures"] for at in moments]
    names = [name for name in dict.fromkeys(chain(*figures))
             if any(of_run.get(name) is not None for of_run in figures)]
    return [[""] * (len(moments) + 1), [heading, *[""] * len(moments)],
            ["  step", *(str(at["step"]) for at in moments)],
            ["  episodes", *(str(at["episodes"]) for at in moments)],
            *([f"  {name}", *(output.shown_figure(of_run.get(name)) for of_run in figures)]
              for name in names),
            ["  seconds", *(f"{at['seconds']:.0f}" for at in moments)]]
