"""``ppocli report``: a page and a Markdown file that tell what a run was asked and what it did."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ppocli.cli.options import AsJson, RunFolder
from ppocli.cli.output import print_json, say
from ppocli.errors import ConfigError

if TYPE_CHECKING:
    from ppocli.config.schema import TrainConfig


def report(
        run: RunFolder = None,
        output: Annotated[Path | None, typer.Option(
            "--output", "-o", metavar="FILE", show_default=False,
            help="Where to write it; .html or .md sets the format (default: report.html and "
                 "report.md in the run's folder).")] = None,
        form: Annotated[str | None, typer.Option(
            "--format", metavar="html|md|both", show_default=False,
            autocompletion=lambda: ["html", "md", "both"],
            help="What to write (default: by the ending of --output, otherwise both).")] = None,
        overwrite: Annotated[bool, typer.Option(
            "--overwrite", help="Also replace files that aren't reports.")] = False,
        as_json: AsJson = False) -> None:
    """Write a report of a run: settings, curves, samples before and after, warnings.

    The page is self-contained: no script, no network. Unfinished and failed runs work too. An
    earlier report is replaced; any other file only with --overwrite.

    \b
    Examples:
      ppocli report
      ppocli report runs/NAME
      ppocli report runs/NAME -o talk/reviews.html
      ppocli report runs/NAME --format md
      ppocli report runs/NAME --json | jq .outcome
    """
    from ppocli.report.facts import gather
    from ppocli.report.render import check_replaceable, destinations, render, write_file
    from ppocli.runs.record import read_run
    from ppocli.runs.target import find_run

    if as_json and (output is not None or form is not None):
        raise ConfigError("--json prints the report's data and writes no file.", where="--json",
                          fix="leave out --output and --format")
    folder = find_run(run, say=say)
    targets = [] if as_json else destinations(folder, output, form)
    check_replaceable((path for path, _ in targets), overwrite)
    record = read_run(folder)
    gathered = gather(record, command=_command(record.config), shown_as=str(folder))
    if as_json:
        print_json(gathered.as_json())
        return
    for path, form_of_file in targets:
        write_file(path, render(gathered, form_of_file), "--output")
        print(path)


def _command(config: TrainConfig) -> str | None:
    """The command that trains so again; None for a run of Python objects."""
    from ppocli.config.resolved import PYTHON_OBJECT, flat, training_command

    if PYTHON_OBJECT in flat(config).values():
        return None
    return training_command(config)
