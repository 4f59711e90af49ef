"""``ppocli watch``: a run seen from another terminal."""

from __future__ import annotations

import signal
import sys
import time
from contextlib import nullcontext
from typing import Annotated

import typer

from ppocli.cli import options as opt
from ppocli.cli.options import AsJson, NoProgress
from ppocli.cli.output import complain, display_mode, say


def watch(
        given: opt.RunFolder = None,
        from_start: Annotated[bool, typer.Option(
            "--from-start", help="Show every step, not only the last 5 and the following ones.")
            ] = False,
        interval: Annotated[float, typer.Option(
            "--interval", metavar="SECONDS", min=0.1, max=3600.0,
            help="Seconds between two reads of the folder.")] = 1.0,
        plain: NoProgress = False, as_json: AsJson = False) -> None:
    """Follow a run from another terminal until it ends, and say how it ended.

    On a terminal, this is the live view of ppocli train; in a pipe, its lines. With --json, it
    prints rows of metrics.jsonl. Ctrl-C doesn't affect the run.

    \b
    Examples:
      ppocli watch
      ppocli watch runs/NAME --from-start
      ppocli watch --json | jq '.["reward/mean"]'
    """
    # what reads runs is heavy, and every command loads this module
    from ppocli.cli.follow import Follower, find_watched
    from ppocli.display.live_view import LiveView, Outlet

    folder, shown = find_watched(given, say)
    follower = Follower(folder, shown, from_start, as_json)
    console = Outlet(sys.stdout)
    live = display_mode() == "auto" and not (plain or as_json) and console.can_live
    try:
        with LiveView(console, follower.board.lines) if live else nullcontext():
            while follower.look():
                time.sleep(interval)
        complain(follower.ending())
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
