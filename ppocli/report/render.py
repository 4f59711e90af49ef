"""A gathered report as a page or as Markdown, from the templates of this package."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ppocli.report import text
from ppocli.report.facts import Report, total_time
from ppocli.report.samples import SHOWN
from ppocli.text import format_bytes, printable

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
        "fenced": text.fenced, "labelled": text.labelled, "sparkline": text.sparkline,
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
