"""``ppocli watch``: a run seen from another terminal, through what it writes into its folder."""

from __future__ import annotations

import signal
import sys
import time
from typing import Annotated

import typer

from ppocli.cli.options import AsJson, NoProgress, RunFolder
from ppocli.cli.output import complain, display_mode, say


def watch(
        given: RunFolder = None,
        from_start: Annotated[bool, typer.Option(
            "--from-start", help="Show every step, not only the last 5 and those to come.")
            ] = False,
        interval: Annotated[float, typer.Option(
            "--interval", metavar="SECONDS", min=0.1, max=3600.0,
            help="Time between two looks.")] = 1.0,
        plain: NoProgress = False, as_json: AsJson = False) -> None:
    """Follow a run from another terminal until it ends, and say how it ended.

    On a terminal this is the live view of ppocli train; on a pipe, its lines. With --json, rows of
    metrics.jsonl. Ctrl-C leaves the run alone.

    \b
    Examples:
      ppocli watch
      ppocli watch runs/NAME --from-start
      ppocli watch --json | jq '.["reward/mean"]'
    """
    from ppocli.cli.follow import Follower, find_watched, open_pane
    from ppocli.display.console import can_live, open_console

    folder, shown = find_watched(given, say)
    follower = Follower(folder, shown, from_start, as_json)
    console = open_console(sys.stdout)
    if display_mode() == "auto" and not (plain or as_json) and can_live(console):
        follower.pane = open_pane(follower, console)
    try:
        while follower.look():
            time.sleep(interval)
        follower.close()
        complain(follower.ending())
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    finally:
        follower.close()
