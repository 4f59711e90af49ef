"""A gathered report as a page, from this package's template; where it is written, and which files
it never replaces."""

import math
import os
from base64 import b64encode
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ppocli.config.text import figure, format_bytes, printable
from ppocli.errors import ConfigError
from ppocli.publish.facts import SHOWN, spreads
from ppocli.runs import atomic, run_folder

_VENDOR = "vendor/uPlot"
"""the library that draws the page's curves, copied together with its license"""


def render(report: dict[str, Any]) -> str:
    """The report of :func:`ppocli.publish.facts.gather` as one page that needs nothing else."""
    loader = PackageLoader("ppocli.publish")
    environment = Environment(
        loader=loader, autoescape=True, trim_blocks=True,
        lstrip_blocks=True, undefined=StrictUndefined, keep_trailing_newline=True)
    environment.filters |= {
        "number": number, "rounded": rounded, "visible": printable, "verdict": _verdict,
        "duration": duration, "bytes": format_bytes,
        "percent": lambda share: f"{100 * share:.0f} %"}
    phases, score_spreads = report["phases"], spreads(report["samples"])
    total = duration(sum(phase["seconds"] for phase in phases)) if phases else ""
    # no templates: braces of a minified script aren't Jinja's
    library, license_of, ours, style, our_style = (
        loader.get_source(environment, name)[0] for name in (
            f"{_VENDOR}.iife.min.js", f"{_VENDOR}.LICENSE", "report.js", f"{_VENDOR}.min.css",
            "report.css"))
    script = f"{library}/*\n{license_of}\n*/\n{ours}"
    return environment.get_template("report.html.jinja").render(
        report=report, samples=report["samples"], spreads=score_spreads,
        figures={row["name"]: row for row in report["outcome"]}, shown=SHOWN, total_time=total,
        script=Markup(script), style=Markup(f"{style}\n{our_style}"),
        data=_chart_data(report, score_spreads),
        digest=b64encode(sha256(script.encode()).digest()).decode())


def _chart_data(report: dict[str, Any], spreads: list[dict[str, Any]]) -> dict[str, Any]:
    """The data for the page's script: texts escaped, figures rounded to six digits."""
    def columns(points: Iterable[tuple[float, float]]) -> list[list[float]]:
        return [[float(f"{value:.6g}") for value in column] for column in zip(*points, strict=True)]

    return {
        "step": report["step"], "shares": spreads, "curves": [
            {"title": printable(curve["title"]), "unit": curve["unit"], "floor": curve["floor"],
             "notes": curve["note"], "lines": [
                 {"name": printable(line["name"]), "kind": line["kind"], "run": line["run"],
                  "points": columns(line["points"])} for line in curve["lines"]]}
            for curve in report["curves"]]}


def _verdict(figures: tuple[float | None, float | None]) -> str:
    """``+0.486`` from two figures; empty without both."""
    before, after = figures
    if before is None or after is None:
        return ""
    change = after - before
    return ("+" if change >= 0 else "-") + rounded(abs(change))


def number(value: float | None) -> str:
    """A figure in few characters: ``0.466``, ``1,234``, ``9.7e-04``; ``-`` for none."""
    if value is None or not math.isfinite(value):
        return "-"
    if value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    if abs(value) >= 1e9 or abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else figure(value, 3)


def rounded(value: float | None) -> str:
    """A figure of about 1 with three decimals; a tiny KL becomes 0."""
    return number(value) if value is None or abs(value) >= 1000 else figure(value, 3)


def duration(seconds: float) -> str:
    """``34 s``, ``12 min``, ``3 h 05 min``."""
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


NAME = "report.html"
_OURS = b'<meta name="generator" content="ppocli report '
_HEAD = 2048


def destination(run_dir: Path, output: Path | None) -> Path:
    """The file to be written: in the run's folder, in an existing one that the user named, or the
    file that the user named.

    Raises:
        ConfigError: that isn't called a page.
    """
    if output is None or os.path.isdir(output):
        return (output or run_dir) / NAME
    if output.suffix.lower() != ".html":
        raise ConfigError(f"{output} is no name of a page.", where="--output",
                          fix="end it in .html")
    return output


def check_replaceable(path: Path, overwrite: bool) -> None:
    """Refuse, before anything is written, to replace a file that is not one of our reports.

    Raises:
        ConfigError: there is such a file and ``overwrite`` isn't given.
    """
    if os.path.exists(path) and not overwrite and _OURS not in path.read_bytes()[:_HEAD]:
        raise ConfigError(f"{path} exists and was not written by ppocli report.", where=str(path),
                          fix="choose another file with --output, or replace it with --overwrite")


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file that ``--output`` named, whole or not at all; missing folders are made.

    Raises:
        DiskError: the disk is full, read-only, or refuses, or a file is where a folder should be.
    """
    run_folder.probe_writable(path.absolute().parent)
    atomic.write_atomic(path, content)
