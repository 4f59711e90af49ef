"""``ppocli runs list`` and ``ppocli runs prune``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ppocli.cli.options import AsJson, Command
from ppocli.cli.output import print_json, print_table, say
from ppocli.errors import ConfigError, DiskError, InputError, PpocliError

if TYPE_CHECKING:
    from ppocli.runs.listing import Removal, RunInfo

runs_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None,
                       help="List runs, and delete what is no longer needed.")

Folder = Annotated[Path | None, typer.Argument(
    metavar="[DIR]", show_default=False, help="Folder that contains runs (default: runs).")]


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
    from ppocli.storage.atomic import format_bytes
    from ppocli.text import figure

    root = _root(folder)
    found = run_infos(root)
    if as_json:
        print_json([_facts(info) for info in found])
        return
    if not found:
        say(f"There are no runs in {root} yet. Start one: ppocli train +recipe=quickstart")
        return
    rows = [("run", "status", "step", "reward", "best eval", "size", "age", "model", "reward by")]
    rows += [(info.name, f"{info.status} ({info.pid})" if info.pid is not None else info.status,
              "-" if info.total_steps is None else f"{info.step}/{info.total_steps}",
              figure(info.last_reward, 3),
              "-" if info.best is None else f"{figure(info.best, 3)} at {info.best_step}",
              format_bytes(info.size), age(info.written), info.model, info.reward)
             for info in found]
    print_table(rows, right=frozenset({3, 5, 6}))


def _root(given: Path | None) -> Path:
    if given is not None and not given.expanduser().is_dir():
        raise InputError(f"{given} does not exist or is no folder (looked in {Path.cwd()}).",
                         where="DIR", fix="name a folder that holds runs (default: runs)")
    return Path("runs") if given is None else given.expanduser()


def _facts(info: RunInfo) -> dict[str, Any]:
    from datetime import UTC, datetime

    return {"name": info.name, "path": str(info.path.absolute()), "status": info.status,
            "pid": info.pid, "step": info.step, "total_steps": info.total_steps,
            "reward_mean": info.last_reward, "best": info.best, "best_step": info.best_step,
            "bytes": info.size, "model": info.model, "reward": info.reward,
            "written": datetime.fromtimestamp(info.written, UTC).isoformat(timespec="seconds")}


@runs_app.command("prune", cls=Command)
def prune_runs(
        folder: Folder = None,
        checkpoints: Annotated[bool, typer.Option(
            "--checkpoints", help="Delete the checkpoints of finished runs. Their model, "
            "summary, metrics and samples stay; they can't be resumed any more. This is "
            "the default.")] = False,
        failed: Annotated[bool, typer.Option(
            "--failed", help="Delete runs that ended before they saved a checkpoint.")] = False,
        keep_best: Annotated[bool, typer.Option(
            "--keep-best", help="Keep the checkpoint of the best evaluation.")] = False,
        older_than: Annotated[str | None, typer.Option(
            "--older-than", metavar="AGE", show_default=False,
            help="Only runs last written longer ago than this, e.g. 7d or 12h.")] = None,
        dry_run: Annotated[bool, typer.Option(
            "--dry-run", help="List what would be deleted, and its size.")] = False,
        yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
        as_json: AsJson = False) -> None:
    """Delete what finished and failed runs no longer need. Running runs are never touched.

    \b
    Examples:
      ppocli runs prune --dry-run
      ppocli runs prune --keep-best --older-than 7d
      ppocli runs prune --failed --yes
    """
    from ppocli.runs.listing import parse_age, plan_pruning
    from ppocli.storage.atomic import format_bytes

    root = _root(folder)
    plan = plan_pruning(root, checkpoints=checkpoints or not failed, failed=failed,
                        keep_best=keep_best, say=say,
                        older_than=None if older_than is None else parse_age(older_than))
    if not plan:
        if as_json:
            print("[]")
        say(f"There is nothing to delete in {root}.")
        return
    if not as_json:
        _print_plan(plan, root)
    total = format_bytes(sum(removal.size for removal in plan))
    if dry_run:
        say(f"{total} could be given back; nothing was deleted.")
    elif not yes and not _confirmed(total):
        say("Nothing was deleted.")
        return
    deleted, problems = (plan, []) if dry_run else _delete(plan)
    if as_json:
        print_json([{"run": str(removal.run.absolute()), "kind": removal.kind,
                     "because": removal.why,
                     "paths": [str(part.absolute()) for part in removal.parts],
                     "bytes": removal.size}
                    for removal in deleted])
    if not dry_run:
        say(f"{format_bytes(sum(removal.size for removal in deleted))} given back.")
    if problems:
        raise problems[0]


def _print_plan(plan: list[Removal], root: Path) -> None:
    from ppocli.storage.atomic import format_bytes

    rows = [("run", "because", "delete", "size")]
    for removal in plan:
        name = removal.run.name if removal.run == root else \
            removal.run.relative_to(root).as_posix()
        rows.append((name, removal.why, _shown_parts(removal), format_bytes(removal.size)))
    print_table(rows, right=frozenset({3}))


def _shown_parts(removal: Removal) -> str:
    from ppocli.storage.retention import STEP

    if removal.kind == "run":
        return "the whole folder"
    steps = [part.name for part in removal.parts if STEP.fullmatch(part.name)]
    found = [f"{len(steps)} checkpoints" if len(steps) > 2 else " and ".join(steps)]
    found += [part.relative_to(removal.run).as_posix() for part in removal.parts
              if part.name not in steps and not part.is_symlink()]
    return ", ".join(filter(None, found)) or "links"


def _confirmed(total: str) -> bool:
    if sys.stdin is None or not sys.stdin.isatty():
        raise ConfigError("Nothing was deleted: there is no terminal to ask on.",
                          where="command line",
                          fix="look at the list (--dry-run prints it alone), then add --yes")
    sys.stdout.flush()
    sys.stderr.write(f"Delete this ({total})? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _delete(plan: list[Removal]) -> tuple[list[Removal], list[PpocliError]]:
    from ppocli.runs.listing import carry_out
    from ppocli.text import clean

    deleted: list[Removal] = []
    problems: list[PpocliError] = []
    for removal in plan:
        try:
            carry_out(removal)
            deleted.append(removal)
        except PpocliError as problem:
            problems.append(problem)
        except OSError as error:
            problems.append(DiskError(
                f"{removal.run} could not be deleted: {error.strerror or error}.",
                where=str(error.filename or removal.run), fix="look at its permissions"))
    for other in problems[1:]:  # the first one ends the command
        say(f"Error: {clean(other.what)}")
    return deleted, problems
