"""``ppocli plot``: curves of runs in the terminal, as a picture, or as numbers."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ppocli.cli.output import say
from ppocli.errors import ConfigError
from ppocli.report.braille import Curve, Style, can_show_braille, draw
from ppocli.report.files import write_file
from ppocli.report.plot import (
    Series,
    as_png,
    as_svg,
    by_metric,
    chart_title,
    collect,
    metric_names,
)
from ppocli.runs.record import RunRecord, read_run
from ppocli.runs.target import find_run
from ppocli.text import clean


def plot_runs(given: Sequence[str], *, metric: str, smooth: int, out: Path | None, overwrite: bool,
              as_json: bool) -> None:
    """Draw figures of runs over their steps.

    Args:
        given: runs; none takes the newest below ``runs``. Several share one pair of axes.
        metric: names with commas between them, see :data:`ppocli.report.plot.SHORT`.
        smooth: show the mean of so many steps.
        out: a ``.svg`` or ``.png`` file to write; its path is printed.
        overwrite: replace it if it is there.
        as_json: print the points instead of a chart.

    Raises:
        ConfigError: an unknown figure, an ``out`` that is no picture or is there already, or
            matplotlib is missing.
        InputError: no such run, or it has no figures yet.
        DiskError: ``out`` can't be written.
    """
    if smooth < 1:
        raise ConfigError(f"--smooth {smooth}: must be at least 1", where="command line")
    if out is not None:
        _check_out(out, overwrite)
    runs = _read(given)
    series = collect(runs, metric_names(metric, runs), smooth)
    if out is not None:
        picture = as_svg(series, smooth) if out.suffix.lower() == ".svg" else \
            as_png(series, smooth)
        write_file(out, picture, "--out")
    if as_json:
        print(json.dumps({"smooth": smooth, "series": [
            {"run": each.run, "metric": each.metric,
             "steps": [step for step, _ in each.points],
             "values": [value for _, value in each.points]} for each in series]},
            indent=None, ensure_ascii=False))
    elif out is not None:
        print(out)
    else:
        _print_charts(series, smooth)


def _read(given: Sequence[str]) -> list[RunRecord]:
    if not given:
        return [read_run(find_run(None, say=say))]
    runs = {run.folder.path: run for run in (read_run(find_run(each)) for each in given)}
    return list(runs.values())


def _check_out(out: Path, overwrite: bool) -> None:
    if out.suffix.lower() not in (".svg", ".png"):
        raise ConfigError(f"--out {out}: must end in .svg or .png", where="command line",
                          fix=f"e.g. --out {out.with_suffix('.svg')}")
    if os.path.isdir(out) or (os.path.lexists(out) and not overwrite):
        raise ConfigError(f"{out} exists already; nothing is overwritten.", where="--out",
                          fix="choose another name"
                          + ("" if os.path.isdir(out) else ", or add --overwrite"))


def _print_charts(series: Sequence[Series], smooth: int) -> None:
    width = shutil.get_terminal_size().columns
    style = _style(len({each.run for each in series}))
    for number, (metric, group) in enumerate(by_metric(series)):
        if number:
            print()
        curves = [Curve(clean(each.run), each.points) for each in group]
        print("\n".join(draw(curves, title=clean(chart_title(metric, group, smooth)), width=width,
                             style=style)), flush=True)


def _style(runs: int) -> Style:
    """Several curves are told apart by colours, or by letters where there are none."""
    if not can_show_braille(sys.stdout.encoding):
        return "ascii"
    if runs == 1:
        return "dots"
    colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR") \
        and os.environ.get("TERM") != "dumb"
    return "colours" if colours else "marks"
