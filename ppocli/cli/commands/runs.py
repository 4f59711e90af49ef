"""``ppocli runs``, as the shell sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ppocli.cli.options import AsJson
from ppocli.cli.output import ending

runs_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None,
                       help="List runs, and delete what they can spare.")

Folder = Annotated[Path | None, typer.Argument(
    metavar="[DIR]", show_default=False, help="Folder that holds runs (default: runs).")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(runs_app, name="runs")


@runs_app.command("list")
@runs_app.command("ls", hidden=True)
def runs_list(folder: Folder = None, as_json: AsJson = False) -> None:
    """List runs with status, step, reward and size; the one written to last comes first.

    \b
    Examples:
      ppocli runs list
      ppocli runs list runs/sweep-20260131-120000
      ppocli runs list --json
    """
    from ppocli.cli.runs import print_runs

    ending(lambda: print_runs(folder, as_json))


@runs_app.command("prune")
def runs_prune(folder: Folder = None,
               checkpoints: Annotated[bool, typer.Option(
                   "--checkpoints", help="Delete the checkpoints of finished runs. Their model, "
                   "summary, metrics and samples stay; they can't be resumed any more. This is "
                   "the default.")] = False,
               failed: Annotated[bool, typer.Option(
                   "--failed", help="Delete runs that ended before they saved a checkpoint.")
                   ] = False,
               keep_best: Annotated[bool, typer.Option(
                   "--keep-best", help="Keep the checkpoint of the best evaluation.")] = False,
               older_than: Annotated[str | None, typer.Option(
                   "--older-than", metavar="AGE", show_default=False,
                   help="Only runs last written to longer ago, e.g. 7d or 12h.")] = None,
               dry_run: Annotated[bool, typer.Option(
                   "--dry-run", help="List what would be deleted, and its size.")] = False,
               yes: Annotated[bool, typer.Option(
                   "--yes", "-y", help="Don't ask.")] = False,
               as_json: AsJson = False) -> None:
    """Delete what finished and failed runs can spare. Running runs are never touched.

    \b
    Examples:
      ppocli runs prune --dry-run
      ppocli runs prune --keep-best --older-than 7d
      ppocli runs prune --failed --yes
    """
    from ppocli.cli.runs import prune_runs

    ending(lambda: prune_runs(folder, checkpoints=checkpoints, failed=failed, keep_best=keep_best,
                              older_than=older_than, dry_run=dry_run, yes=yes, as_json=as_json))
