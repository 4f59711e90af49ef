"""``ppocli plot`` and ``ppocli compare``, as the shell sees them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ppocli.cli.completion import complete_metrics, complete_run
from ppocli.cli.options import AsJson
from ppocli.cli.output import ending


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(plot)
    app.command()(compare)


def plot(runs: Annotated[list[str] | None, typer.Argument(
             metavar="[RUN]...", autocompletion=complete_run, show_default=False,
             help="Folders or names of runs, drawn over one another (default: the newest run "
             "below runs/).")] = None,
         metric: Annotated[str, typer.Option(
             "--metric", "-m", metavar="NAME,...", autocompletion=complete_metrics,
             help="Figures of metrics.jsonl, or reward, kl, length, entropy, clip, lr, loss, "
             "eval.")] = "reward,kl",
         smooth: Annotated[int, typer.Option(
             "--smooth", metavar="N", help="Show the mean of the last N steps.")] = 1,
         out: Annotated[Path | None, typer.Option(
             "--out", "-o", metavar="FILE", show_default=False,
             help="Write a picture, .svg or .png (pip install 'ppocli[plot]'), instead of drawing "
             "in the terminal.")] = None,
         overwrite: Annotated[bool, typer.Option(
             "--overwrite", help="Replace FILE if it is there.")] = False,
         as_json: AsJson = False) -> None:
    """Draw how figures of runs went, in the terminal or as a picture.

    \b
    Examples:
      ppocli plot
      ppocli plot runs/NAME --metric eval,kl,policy/grad_norm --smooth 5
      ppocli plot runs/ONE runs/OTHER --metric reward --out reward.svg
    """
    from ppocli.cli.plot import plot_runs

    ending(lambda: plot_runs(runs or [], metric=metric, smooth=smooth, out=out,
                             overwrite=overwrite, as_json=as_json))


def compare(runs: Annotated[list[str], typer.Argument(
                metavar="RUN RUN...", autocompletion=complete_run,
                help="Folders or names of runs; the first is the one to beat.")],
            as_json: AsJson = False) -> None:
    """Set runs side by side: figures after equally many samples, settings, wins on prompts.

    \b
    Examples:
      ppocli compare runs/ONE runs/OTHER
      ppocli compare runs/sweep-20260131-120000/0 runs/sweep-20260131-120000/1 --json
    """
    from ppocli.cli.compare import print_comparison

    ending(lambda: print_comparison(runs, as_json))
