"""``ppocli watch``, ``report``, ``compare``, ``runs list`` and ``show``: runs by their folders."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ppocli.cli import options as opt
from ppocli.cli import output
from ppocli.cli.options import AsJson, Command, NoProgress, RunFolder, complete_run, flag, option
from ppocli.errors import ConfigError, InputError
from ppocli.text import figure, format_bytes, printable, shown

if TYPE_CHECKING:
    from ppocli.runs.listing import RunInfo
    from ppocli.runs.record import RunRecord


def watch(
        given: RunFolder = None,
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
    from ppocli.display.live_view import LiveView, Outlet

    folder, shown = find_watched(given, output.say)
    follower = Follower(folder, shown, from_start, as_json)
    console = Outlet(sys.stdout)
    live = output.display_mode() == "auto" and not (plain or as_json) and console.can_live
    try:
        with LiveView(console, follower.board.lines) if live else nullcontext():
            while follower.look():
                time.sleep(interval)
        output.complain(follower.ending())
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None


def report(
        run: RunFolder = None,
        out: Path | None = option("FILE", "Where to write it; .html or .md sets the format "
            "(default: report.html and report.md in the run's folder).", "--output", "-o"),
        form: str | None = option("html|md|both", "What to write (default: by the ending of "
            "--output, otherwise both).", "--format",
            autocompletion=lambda: ["html", "md", "both"]),
        others: list[str] | None = option("RUN", "Another run, whose curves are drawn over this "
            "one's (may be repeated).", "--with", autocompletion=complete_run),
        overwrite: bool = flag("Also replace files that aren't reports.", "--overwrite"),
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
      ppocli report runs/NAME --format md
      ppocli report runs/NAME --json | jq .outcome
    """
    from ppocli.report import facts, render
    from ppocli.runs.record import read_run
    from ppocli.runs.target import find_run, read_runs

    if as_json and (out is not None or form is not None):
        raise ConfigError("--json prints the report's data and writes no file.", where="--json",
                          fix="leave out --output and --format")
    folder = find_run(run, say=output.say)
    targets = [] if as_json else render.destinations(folder, out, form)
    render.check_replaceable((path for path, _ in targets), overwrite)
    record = read_run(folder)
    more = [run for run in read_runs(others or ()) if run.folder.path != record.folder.path]
    gathered = facts.gather(record, command=_command_of(record), shown_as=str(folder), others=more)
    if as_json:
        output.print_json(gathered)
    for path, form_of_file in targets:
        render.write_file(path, render.render(gathered, form_of_file))
        print(printable(str(path)))


def _command_of(run: RunRecord) -> str | None:
    """What trains again; None for a run with Python objects, which no command has."""
    from ppocli.config.resolved import PYTHON_OBJECT, flat, training_command

    return None if PYTHON_OBJECT in flat(run.config).values() else training_command(run.config)


# compare ------------------------------------------------------------------------------------------

def compare(
        given: Annotated[list[str], typer.Argument(
            metavar="RUN RUN...", autocompletion=complete_run,
            help="Folders or names of runs; the others are compared with the first.")],
        metric: str = option("NAME,...", "Compare these figures, and draw their curves over one "
            "another; names as of ppocli plot.", "--metric", "-m", default=""),
        out: Path | None = option("FILE", "Write the curves to a picture, .svg or .png.",
            "--output", "-o"),
        overwrite: bool = flag("Replace FILE if it exists.", "--overwrite"),
        as_json: AsJson = False) -> None:
    """Compare runs: figures after the same number of samples, settings, win rates, curves.

    \b
    Examples:
      ppocli compare runs/ONE runs/OTHER
      ppocli compare runs/ONE runs/OTHER --metric reward,kl
      ppocli compare runs/ONE runs/OTHER --metric eval,policy/grad_norm -o curves.svg
      ppocli compare runs/sweep-20260131-120000/0 runs/sweep-20260131-120000/1 --json
    """
    from ppocli.cli.plot import check_out, numbers_of, show_curves
    from ppocli.report.curves import collect, compare_runs, metric_names
    from ppocli.runs.target import read_runs

    if out is not None:
        check_out(out, overwrite)
    runs = read_runs(given)
    if len(runs) < 2:
        raise ConfigError("Comparing needs two or more different runs.",
                          where="command line", fix="ppocli compare runs/ONE runs/OTHER")
    wanted = metric_names(metric, runs) if metric or out is not None else []
    curves = collect(runs, wanted, 1) if wanted else []
    found = compare_runs(runs, wanted if metric else ())
    if as_json:
        output.print_json(found | ({"curves": numbers_of(curves)} if curves else {}))
    else:
        _print_comparison(found)
    if curves:
        if not as_json:
            print()
        show_curves(curves, out, quiet=as_json)


def _print_comparison(found: dict[str, Any]) -> None:
    runs, ends = found["runs"], [run["end"] for run in found["runs"]]
    blank = [""] * len(runs)
    rows = [["", *(run["name"] for run in runs)], ["status", *(run["status"] for run in runs)]]
    at_end = all(end["episodes"] == run["equal"]["episodes"]
                 for run, end in zip(runs, ends, strict=True))
    heading = f"after {found['episodes']} episodes" + (", the end of all" if at_end else "")
    rows += _section(heading, [run["equal"] for run in runs])
    if not at_end:
        rows += _section("at the end", ends)
    rows += [["", *blank],
             ["best evaluation", *(
                 f"{output.shown_figure(run['best'])} at step {run['best_step']}"
                 if run["best"] is not None else "-" for run in runs)],
             ["", *blank], ["settings that differ", *blank]]
    rows += [[f"  {key}", *map(shown, values.values())]
             for key, values in found["config_differences"].items()] or [["  none", *blank]]
    output.print_table(rows, fit=False)
    print()
    for wins in found["win_rates"]:
        rate = f"none, {wins['reason']}" if wins["rate"] is None else (
            f"{100 * wins['rate']:.1f} % on {wins['prompts']} shared prompts, ties half")
        print(printable(f"win rate of {wins['run']} over {wins['against']}: {rate}"))


def _section(heading: str, moments: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Rows of one moment of every run; figures that no run has are left out."""
    figures = [at["figures"] for at in moments]
    names = [name for name in dict.fromkeys(chain(*figures))
             if any(of_run.get(name) is not None for of_run in figures)]
    return [[""] * (len(moments) + 1), [heading, *[""] * len(moments)],
            ["  step", *(str(at["step"]) for at in moments)],
            ["  episodes", *(str(at["episodes"]) for at in moments)],
            *([f"  {name}", *(output.shown_figure(of_run.get(name)) for of_run in figures)]
              for name in names),
            ["  seconds", *(f"{at['seconds']:.0f}" for at in moments)]]


# runs list and runs show --------------------------------------------------------------------------

runs_app = opt.group("List, show, rename and delete runs, and what of them is no longer needed.")

Folder = Annotated[Path | None, typer.Argument(
    metavar="[DIR]", help="Folder that contains runs (default: runs).")]


@runs_app.command("list", cls=Command)
@runs_app.command("ls", hidden=True, cls=Command)
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
    found = run_infos(root)
    if as_json:
        output.print_json([_info_json(info) for info in found])
        return
    if not found:
        output.say(f"There are no runs in {root} yet. Start one: ppocli train +recipe=quickstart")
        return
    ppo = all(info.kind in ("ppo", "?") for info in found)
    rows = [("run", "status", "step", "reward" if ppo else "now", "best eval", "size", "age",
             "model", "reward by" if ppo else "reward or data")]
    rows += [(info.name, _status(info),
              "-" if info.total_steps is None else f"{info.step}/{info.total_steps}",
              figure(info.reward_mean, 3) if ppo else _now(info),
              "-" if info.best is None else f"{'' if ppo else _label(info.metric)}"
              f"{figure(info.best, 3)} at {info.best_step}",
              format_bytes(info.bytes), age(info.written), info.model, info.reward)
             for info in found]
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
    from ppocli.runs.target import find_run
    from ppocli.storage.retention import list_steps

    folder = find_run(run, say=output.say)
    record, info = read_run(folder), run_info(folder, folder.parent)
    checkpoints, command = list_steps(record.folder.checkpoints), _command_of(record)
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


def root_of(given: Path | None) -> Path:
    if given is not None and not given.expanduser().is_dir():
        raise InputError(f"{given} does not exist or is no folder (looked in {Path.cwd()}).",
                         where="DIR", fix="name a folder that holds runs (default: runs)")
    return Path("runs") if given is None else given.expanduser()
