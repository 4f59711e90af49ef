"""A gathered report as a page or as Markdown, from the templates of this package: where it is
written, and what it never replaces."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ppocli.errors import ConfigError, DiskError
from ppocli.report import text
from ppocli.report.facts import Report, total_time
from ppocli.report.samples import SHOWN
from ppocli.storage.atomic import write_atomic
from ppocli.storage.run_folder import probe_writable
from ppocli.text import format_bytes, printable, sparkline

FORMATS = ("html", "md")


def render(report: Report, form: str) -> str:
    """The report as text.

    Args:
        form: ``html``, one page that needs nothing else, or ``md``.
    """
    environment = Environment(
        loader=PackageLoader("ppocli.report"), autoescape=form == "html", trim_blocks=True,
        lstrip_blocks=True, undefined=StrictUndefined, keep_trailing_newline=True)
    environment.filters.update(_filters())
    template = environment.get_template(f"report.{form}.jinja")
    return template.render(report=report, samples=report.samples, shown=SHOWN,
                           total_time=total_time(report))


def _filters() -> dict[str, Any]:
    return {
        "number": text.number, "rounded": text.rounded, "visible": printable,
        "inline": text.inline, "code": text.code,
        "fenced": text.fenced, "labelled": text.labelled, "sparkline": sparkline,
        "duration": text.duration, "bytes": format_bytes,
        "percent": lambda share: f"{100 * share:.0f} %",
        "svg": lambda drawn: Markup(drawn.svg()),  # charts escape their own texts
        "verdict": _verdict,
    }


def _verdict(figures: tuple[float | None, float | None]) -> str:
    """``+0.486`` from two figures; empty without both."""
    before, after = figures
    if before is None or after is None:
        return ""
    change = after - before
    return ("+" if change >= 0 else "-") + text.rounded(abs(change))


NAME = "report"
_OURS = re.compile(rb'(?:<meta name="generator" content="|<!-- generator: )ppocli report ')
_HEAD = 2048
_SUFFIXES = {".html": "html", ".htm": "html", ".md": "md", ".markdown": "md"}


@dataclass(frozen=True, slots=True)
class Destination:
    """A file to be written, and in which format."""

    path: Path
    form: str


def destinations(run_dir: Path, output: Path | None, form: str | None) -> list[Destination]:
    """Where a report is written: in the run's folder, or where the user said.

    Args:
        output: a file, whose suffix tells the format, or an existing folder; None: ``run_dir``.
        form: ``html``, ``md`` or ``both``; None: as ``output`` tells, else both.

    Raises:
        ConfigError: the suffix tells no format, or another than ``form``.
    """
    if form not in (None, "both", *FORMATS):
        raise ConfigError(f"--format {form} is unknown.", where="--format",
                          fix="one of: html, md, both")
    folder = run_dir if output is None else output
    if output is None or os.path.isdir(output):
        wanted = FORMATS if form in (None, "both") else (form,)
        return [Destination(folder / f"{NAME}.{each}", each) for each in wanted if each]
    told = _SUFFIXES.get(output.suffix.lower())
    if form == "both":
        stem = output.with_suffix("") if told else output
        return [Destination(stem.with_name(f"{stem.name}.{each}"), each) for each in FORMATS]
    if told is None and form is None:
        raise ConfigError(f"{output} doesn't tell the format of the report.", where="--output",
                          fix="end it in .html or .md, or add --format html, md or both")
    if told is not None and form is not None and told != form:
        raise ConfigError(f"{output} ends like another format than --format {form}.",
                          where="--output", fix="leave --format out, or change the ending")
    return [Destination(output, form or told or "html")]


def check_replaceable(targets: Sequence[Destination], overwrite: bool) -> None:
    """Refuse before anything is written to replace a file that is no report of ours.

    Raises:
        ConfigError: there is such a file and ``overwrite`` isn't given, or a folder of that name.
        DiskError: a file there can't be read.
    """
    for target in targets:
        if os.path.isdir(target.path):
            raise ConfigError(f"{target.path} is a folder.", where=str(target.path),
                              fix="name a file: --output FILE")
        if os.path.exists(target.path) and not overwrite and not _is_ours(target.path):
            raise ConfigError(f"{target.path} exists and was not written by ppocli report.",
                              where=str(target.path),
                              fix="choose another file with --output, or replace it with "
                              "--overwrite")


def _is_ours(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return _OURS.search(file.read(_HEAD)) is not None
    except OSError as error:
        raise DiskError(f"{path} can't be read: {error.strerror}.", where=str(path),
                        fix="choose another file with --output") from error


def write_file(path: Path, content: str | bytes, option: str) -> None:
    """Write a file that an option named, whole or not at all; missing folders are made.

    Raises:
        DiskError: the disk is full, read-only, or refuses, or a file is where a folder should be.
    """
    try:
        probe_writable(path.absolute().parent)
        write_atomic(path, content)
    except DiskError as error:
        raise DiskError(error.what, where=error.where,
                        fix=f"name a file on another disk or in another folder: {option} FILE"
                        ) from error
