"""``ppocli plot``, ``compare`` and ``export``: curves of runs, runs side by side, and a policy as a
folder that others can load."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ppocli.cli import output
from ppocli.cli.options import AsJson, Best, Run, Step, Trust, complete_run, flag, option
from ppocli.cli.output import say, working
from ppocli.config.text import clean, short_path, shown
from ppocli.distributed.standard_output import put
from ppocli.errors import ConfigError

if TYPE_CHECKING:
    from ppocli.publish.curves import Panel


Style = Literal["dots", "colours", "marks"]
"""``dots``: braille, for one curve. ``colours``: braille, each curve in a colour of its own.
``marks``: a letter of its own for each curve."""
_ROWS = 15
"""of a chart, its axis included"""
_COLOURS = ("cyan", "orange", "magenta", "green", "blue", "red")
_MARKS, _DOTS = "*ox+#@%&", "ABCDEFGH"
"""of the lines, and of their evaluations where there are no colours"""


def plot_runs(
        names: Annotated[list[str] | None, typer.Argument(
            metavar="[RUN]...", autocompletion=complete_run, help="Folders or names of runs, drawn "
            "over one another (default: the newest run below runs/).")] = None,
        metric: str = option("NAME,...", "Metrics by their names in metrics.jsonl, or reward, kl, "
            "length, entropy, clip, lr, loss, eval, accuracy, perplexity, margin (default: "
            "reward,kl; of trainings on a data set loss,eval).", "--metric", "-m", default=""),
        smooth: int = option("N", "Show the mean of the last N steps.", default=1, min=1),
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
    from ppocli.publish import curves
    from ppocli.publish.report_page import write_file
    from ppocli.runs.target import find_run, read_runs

    if out is not None and out.suffix.lower() not in (".svg", ".png"):
        raise ConfigError(f"{out} must end in .svg or .png.", where="--output",
                          fix="--output curves.svg")
    if out is not None and os.path.lexists(out) and not overwrite:
        raise ConfigError(f"{out} exists already; nothing is overwritten.", where="--output",
                          fix="choose another name, or add --overwrite")
    runs = read_runs(names or [str(find_run(None, say=output.say))])
    charts = curves.collect(runs, curves.metric_names(metric, runs), smooth)
    if as_json:
        output.print_json({"smooth": smooth, "series": [
            {"run": curve.name, "metric": name, "steps": [step for step, _ in curve.points],
             "values": [value for _, value in curve.points]}
            for name, chart in charts.items() for curve in chart.lines]}, indent=None)
    if out is not None:
        write_file(out, curves.draw([*charts.values()], out.suffix.lower().removeprefix(".")))
        if not as_json:
            output.show_text(str(out))
    elif not as_json:
        several = max(len(chart.lines) for chart in charts.values()) > 1
        style: Style = "dots" if not several else "colours" if output.has_colours() else "marks"
        drawings = [draw(chart, style=style, width=shutil.get_terminal_size().columns)
                    for chart in charts.values()]
        put("\n\n".join(map("\n".join, drawings)))


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
        as_json: AsJson = False) -> None:
    """Compare runs: figures after the same number of samples, and settings that differ.

    \b
    Examples:
      ppocli compare runs/ONE runs/OTHER
      ppocli compare runs/sweep-20260131-120000/0 runs/sweep-20260131-120000/1 --json
    """
    from ppocli.publish.curves import compare_runs
    from ppocli.runs.target import read_runs

    runs = read_runs(names)
    if len(runs) < 2:
        raise ConfigError("Comparing needs two or more different runs.",
                          where="command line", fix="ppocli compare runs/ONE runs/OTHER")
    comparison = compare_runs(runs)
    if as_json:
        output.print_json(comparison)
    else:
        _print_comparison(comparison)


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


# export -------------------------------------------------------------------------------------------

def export_command(
        run: Run = None,
        output: Path | None = option("DIR", "Folder to write (default: RUN/export/NAME, e.g. "
            "step-000024).", "--output", "-o"),
        best: Best = False, step: Step = None,
        dtype: Literal["fp32", "bf16", "fp16"] | None = option(
            "fp32|bf16|fp16", "Store the weights in this type (default: unchanged)."),
        merge: bool | None = option(None, "For a LoRA policy: a whole model with the adapter "
            "merged in (default), or the adapter's own folder.", "--merge/--adapter"),
        overwrite: bool = flag("Replace an existing export.", "--overwrite"),
        dry_run: bool = flag("Print what would be done and write nothing.", "--dry-run"),
        as_json: AsJson = False, trust: Trust = False,
        to_hub: str | None = option("USER/NAME", "Push the verified folder to this repository on "
            "the Hub."),
        public: bool = typer.Option(False, "--public/--private", help="Visibility of the "
            "repository (default: private).")) -> None:
    """Export a policy as a verified Hugging Face folder with a model card; optionally push it.

    The folder is reloaded with transformers and compared with its source before it gets its final
    name. The last line on standard output is its path, or its address on the Hub.

    \b
    Examples:
      ppocli export runs/NAME
      ppocli export runs/NAME --best --dtype bf16 -o ./my-model
      ppocli export runs/LORA --adapter -o ./my-adapter
      ppocli export ./lm --dtype fp16 -o ./lm-fp16
      ppocli export runs/NAME --to-hub USER/NAME --dry-run
      ppocli export ./my-model --to-hub USER/NAME --public
    """
    from ppocli.publish import model_folder
    from ppocli.runs.target import find_target

    if public and to_hub is None:
        raise ConfigError("--public is the visibility of a repository, and none is named.",
                          where="--public", fix="add --to-hub USER/NAME")
    folder, result = Path(run or "").expanduser().absolute(), dict[str, Any]()
    changes = output or best or dtype or overwrite or step is not None or merge is not None
    if to_hub is None or changes or model_folder.read_record(folder) is None:
        target = find_target(run, say=say, step=step, best=best)
        plan = model_folder.plan_export(target, output, to_hub, merge, dtype, overwrite, trust)
        folder, what = plan.folder, f"{target.name} to {short_path(str(plan.folder))}"
        if dry_run:
            put(f"would export:  {what}")
        else:
            say(f"exporting {what}")
            with working(fix="nothing was written; export again") as stop:
                result = model_folder.write_export(plan, stop.check)
            say("Verified: reloaded with transformers, relative difference of logits "
                f"{result['logits_difference']:.1g}.")
    if dry_run:
        put(f"would push to: {to_hub or 'nothing'} ({'public' if public else 'private'})\n"
            "Nothing was written (--dry-run).")
        return
    if to_hub is not None:
        result["url"] = model_folder.push(folder, to_hub, public=public)
    put(json.dumps({"folder": str(folder), **result}, indent=2) if as_json else
        result.get("url", folder))
