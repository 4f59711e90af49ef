"""``ppocli watch``, ``report``, and ``ppocli runs``, which lists, shows and prunes run folders."""

from __future__ import annotations

import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ppocli.cli import options as opt
from ppocli.cli import output
from ppocli.cli.options import AsJson, Command, NoProgress, RunFolder, flag, option
from ppocli.config.text import figure, format_bytes, printable
from ppocli.distributed.standard_output import put, result_stream
from ppocli.errors import ConfigError, InputError

if TYPE_CHECKING:
    from ppocli.runs.listing import Removal, RunInfo


def watch(
        name: RunFolder = None,
        from_start: bool = flag(
            "Show every step, not only the last 5 and the following ones.", "--from-start"),
        interval: float = option("SECONDS", "Seconds between two reads of the folder.",
            default=1.0, min=0.1, max=3600.0),
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
    from ppocli.cli.follow import Follower, find_watched
    from ppocli.publish.live_view import LiveView
    from ppocli.training.console import Outlet

    follower = Follower(find_watched(name), from_start, as_json)
    console = Outlet(result_stream())
    live = output.display_mode() == "auto" and not (plain or as_json) and console.can_live
    try:
        with LiveView(console, follower.board) if live else nullcontext():
            while follower.look():
                time.sleep(interval)
        output.complain(follower.ending())
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None


def report(
        run: RunFolder = None,
        out: Path | None = option("FILE", "Where to write it (default: report.html in the "
            "run's folder).", "--output", "-o"),
        others: list[str] | None = option("RUN", "Another run, whose curves are drawn over this "
            "one's (may be repeated).", "--with", autocompletion=opt.complete_run),
        overwrite: bool = flag("Also replace a file that is no report.", "--overwrite"),
        as_json: AsJson = False) -> None:
    """Write a report of a run: outcome, curves, samples over the steps, warnings, settings.

    The page is one file and loads nothing. Unfinished and failed runs work too. An earlier report
    is replaced; any other file only with --overwrite.

    \b
    Examples:
      ppocli report
      ppocli report runs/NAME
      ppocli report runs/NAME -o talk/reviews.html
      ppocli report runs/NAME --with runs/OTHER
      ppocli report runs/NAME --json | jq .outcome
    """
    from ppocli.publish import facts, report_page
    from ppocli.runs.record import read_run
    from ppocli.runs.target import find_run, read_runs

    if as_json and out is not None:
        raise ConfigError("--json prints the report's data and writes no file.", where="--json",
                          fix="leave out --output")
    folder = find_run(run, say=output.say)
    path = report_page.destination(folder, out)
    if not as_json:
        report_page.check_replaceable(path, overwrite)
    record = read_run(folder)
    more = [run for run in read_runs(others or ()) if run.folder.path != record.folder.path]
    gathered = facts.gather(record, str(folder), more)
    if as_json:
        output.print_json(gathered)
    else:
        report_page.write_file(path, report_page.render(gathered))
        put(printable(str(path)))


# runs list and runs show --------------------------------------------------------------------------

runs_app = opt.group("List and show runs, and prune files that they no longer need.")

Folder = Annotated[Path | None, typer.Argument(
    metavar="[DIR]", help="Folder that contains runs (default: runs).")]


@runs_app.command("list", cls=Command)
def print_runs(folder: Folder = None, as_json: AsJson = False) -> None:
    """List runs with status, step, reward and size, most recently written first.

    \b
    Examples:
      ppocli runs list
      ppocli runs list runs/sweep-20260131-120000
      ppocli runs list --json
    """
    from ppocli.runs.listing import age, run_infos

    root = root_of(folder)
    infos = run_infos(root)
    if as_json:
        output.print_json([_info_json(info) for info in infos])
        return
    if not infos:
        output.say(f"There are no runs in {root} yet. Start one: ppocli train +recipe=quickstart")
        return
    ppo = all(info.kind in ("ppo", "?") for info in infos)
    rows = [("run", "status", "step", "reward" if ppo else "now", "best eval", "size", "age",
             "model", "reward by" if ppo else "reward or data")]
    rows += [(info.name, _status(info),
              "-" if info.total_steps is None else f"{info.step}/{info.total_steps}",
              figure(info.reward_mean, 3) if ppo else _now(info),
              "-" if info.best is None else f"{'' if ppo else _label(info.metric)}"
              f"{figure(info.best, 3)} at {info.best_step}",
              format_bytes(info.bytes), age(info.written), info.model, info.reward)
             for info in infos]
    output.print_table(rows, right=frozenset({3, 5, 6}))


def _info_json(info: RunInfo) -> dict[str, Any]:
    return {**asdict(info), "path": str(info.path.absolute()),
            "written": datetime.fromtimestamp(info.written, UTC).isoformat(timespec="seconds")}


@runs_app.command("show", cls=Command)
def show_run(run: RunFolder = None, as_json: AsJson = False) -> None:
    """Show one run: status, figures, checkpoints, size, and the command that trains it again.

    \b
    Examples:
      ppocli runs show
      ppocli runs show NAME --json | jq .status
    """
    from ppocli.runs.listing import age, run_info
    from ppocli.runs.record import read_run
    from ppocli.runs.retention import list_steps
    from ppocli.runs.target import find_run

    folder = find_run(run, say=output.say)
    record, info = read_run(folder), run_info(folder, folder.parent)
    checkpoints, command = list_steps(record.folder.checkpoints), record.command
    if as_json:
        places = [str(path.absolute()) for _, path in checkpoints]
        output.print_json({**_info_json(info), "checkpoints": places, "command": command})
        return
    rows = [("run", str(folder)), ("status", _status(info)),
            ("step", f"{info.step} of {info.total_steps}, {record.episodes} samples"),
            ("model", info.model), ("learns from", info.reward), ("newest", _now(info)),
            ("best", "-" if info.best is None else f"{_label(info.metric)}{figure(info.best, 3)} "
             f"at step {info.best_step}"),
            ("checkpoints", ", ".join(path.name for _, path in checkpoints) or "-"),
            ("size", format_bytes(info.bytes)), ("written", f"{age(info.written)} ago")]
    output.print_table([row for row in rows if row[1] != "-"])
    if command is not None:
        output.show_text(command)


def _status(info: RunInfo) -> str:
    return info.status if info.pid is None else f"{info.status} ({info.pid})"


def _now(info: RunInfo) -> str:
    """The newest figure of a run among those of other kinds: ``reward 0.812``, ``loss 2.103``."""
    name, value = ("reward", info.reward_mean) if info.loss is None else ("loss", info.loss)
    return "-" if value is None else f"{name} {figure(value, 3)}"


def _label(metric: str) -> str:
    return f"{'reward' if metric == 'reward_mean' else metric.rpartition('/')[2]} "


def root_of(folder: Path | None) -> Path:
    if folder is not None and not folder.expanduser().is_dir():
        raise InputError(f"{folder} does not exist or is no folder (looked in {Path.cwd()}).",
                         where="DIR", fix="name a folder that holds runs (default: runs)")
    return Path("runs") if folder is None else folder.expanduser()


# prune --------------------------------------------------------------------------------------------

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")]


@runs_app.command("prune", cls=Command)
def prune_runs(
        folder: Folder = None,
        keep_best: bool = flag("Keep the checkpoint of the best evaluation.", "--keep-best"),
        older_than: str | None = option(
            "AGE", "Only runs last written longer ago than this, e.g. 7d or 12h."),
        dry_run: bool = flag("List what would be deleted, and its size.", "--dry-run"),
        yes: Yes = False, as_json: AsJson = False) -> None:
    """Delete the checkpoints of finished runs. Their model, summary, metrics and samples stay; they
    can't be resumed any more.

    \b
    Examples:
      ppocli runs prune --dry-run
      ppocli runs prune --keep-best --older-than 7d
    """
    from ppocli.runs.listing import parse_age, plan_pruning

    root = root_of(folder)
    plan = plan_pruning(root, keep_best=keep_best, say=output.say,
                        older_than=None if older_than is None else parse_age(older_than))
    if not plan:
        _print_removals(plan, as_json)
        output.say(f"There is nothing to delete in {root}.")
        return
    if not as_json:
        rows = [
            (removal.run.name if removal.run == root else removal.run.relative_to(root).as_posix(),
             _shown_parts(removal), format_bytes(removal.size)) for removal in plan]
        output.print_table([("run", "delete", "size"), *rows], right=frozenset({2}))
    if dry_run:
        output.say(f"{_size(plan)} could be given back; nothing was deleted.")
        _print_removals(plan, as_json)
    else:
        _delete(plan, yes, as_json)


def _shown_parts(removal: Removal) -> str:
    from ppocli.runs.retention import STEP

    steps = [part.name for part in removal.parts if STEP.fullmatch(part.name)]
    names = [f"{len(steps)} checkpoints" if len(steps) > 2 else " and ".join(steps)]
    names += [part.relative_to(removal.run).as_posix() for part in removal.parts
              if part.name not in steps and not part.is_symlink()]
    return ", ".join(filter(None, names)) or "links"


def _size(plan: list[Removal]) -> str:
    return format_bytes(sum(removal.size for removal in plan))


def _delete(plan: list[Removal], yes: bool, as_json: bool = False) -> None:
    """Ask, unless with ``yes``, and delete."""
    from ppocli.runs.listing import carry_out

    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError("Nothing was deleted: there is no terminal to ask on.",
                              where="command line", fix="look at the list, then add --yes")
        if not typer.confirm(f"Delete this ({_size(plan)})?", err=True):
            output.say("Nothing was deleted.")
            return
    for removal in plan:
        carry_out(removal)
    _print_removals(plan, as_json)
    output.say(f"{_size(plan)} given back.")


def _print_removals(deleted: list[Removal], as_json: bool) -> None:
    if as_json:
        output.print_json([
            {"run": str(removal.run.absolute()), "bytes": removal.size,
             "paths": [str(part.absolute()) for part in removal.parts]}
            for removal in deleted])
