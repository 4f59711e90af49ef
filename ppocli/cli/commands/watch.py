"""``ppocli watch``, as the shell sees it."""

from __future__ import annotations

from typing import Annotated

import typer

from ppocli.cli.options import AsJson, NoProgress, RunFolder
from ppocli.cli.output import ending


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(watch)


def watch(run: RunFolder = None,
          from_start: Annotated[bool, typer.Option(
              "--from-start", help="Show every step, not only the last 5 and those to come.")
              ] = False,
          interval: Annotated[float, typer.Option(
              "--interval", metavar="SECONDS", min=0.1, max=3600.0,
              help="Time between two looks.")] = 1.0,
          no_progress: NoProgress = False, as_json: AsJson = False) -> None:
    """Follow a run from another terminal until it ends, and say how it ended.

    On a terminal this is the live view of ppocli train; on a pipe, its lines. With --json, rows of
    metrics.jsonl. Ctrl-C leaves the run alone.

    \b
    Examples:
      ppocli watch
      ppocli watch runs/NAME --from-start
      ppocli watch --json | jq '.["reward/mean"]'
    """
    from ppocli.cli.watch import watch as follow

    ending(lambda: follow(run, interval=interval, from_start=from_start, plain=no_progress,
                          as_json=as_json))
