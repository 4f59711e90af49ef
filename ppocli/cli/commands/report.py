"""``ppocli report``, as the shell sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ppocli.cli.completion import complete_form
from ppocli.cli.options import AsJson, RunFolder
from ppocli.cli.output import ending


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(report)


def report(run: RunFolder = None,
           output: Annotated[Path | None, typer.Option(
               "--output", "-o", metavar="FILE", show_default=False,
               help="Where to write it; .html or .md tells the format (default: report.html and "
                    "report.md in the run's folder).")] = None,
           form: Annotated[str | None, typer.Option(
               "--format", metavar="html|md|both", autocompletion=complete_form,
               show_default=False,
               help="What to write (default: as --output ends, else both).")] = None,
           overwrite: Annotated[bool, typer.Option(
               "--overwrite", help="Replace files that no report was written to before.")] = False,
           as_json: AsJson = False) -> None:
    """Tell what a run was asked and what it did: curves, samples before and after, warnings.

    The page needs nothing but itself: no script, no network. Unfinished and failed runs get one
    too. An earlier report is replaced; any other file only with --overwrite.

    \b
    Examples:
      ppocli report
      ppocli report runs/NAME
      ppocli report runs/NAME -o talk/reviews.html
      ppocli report runs/NAME --format md
      ppocli report runs/NAME --json | jq .outcome
    """
    from ppocli.cli.report import report as implementation

    ending(lambda: implementation(run, output, form, overwrite, as_json))
