"""``ppocli runs prune``, ``rm`` and ``rename``: what is deleted of runs, and their names."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ppocli.cli.options import AsJson, Command, OneRun, complete_run, flag, option
from ppocli.cli.output import print_json, print_table, say, show_text
from ppocli.cli.runs import Folder, root_of, runs_app
from ppocli.errors import CheckpointError, ConfigError, DiskError, PpocliError
from ppocli.text import clean, format_bytes, pasted

if TYPE_CHECKING:
    from ppocli.runs.listing import Removal

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")]


@runs_app.command("prune", cls=Command)
def prune_runs(
        folder: Folder = None,
        checkpoints: bool = flag("Delete the checkpoints of finished runs. Their model, summary, "
            "metrics and samples stay; they can't be resumed any more. This is the default.",
            "--checkpoints"),
        failed: bool = flag("Delete runs that ended before they saved a checkpoint.", "--failed"),
        keep_best: bool = flag("Keep the checkpoint of the best evaluation.", "--keep-best"),
        older_than: str | None = option(
            "AGE", "Only runs last written longer ago than this, e.g. 7d or 12h."),
        dry_run: bool = flag("List what would be deleted, and its size.", "--dry-run"),
        yes: Yes = False, as_json: AsJson = False) -> None:
    """Delete what finished and failed runs no longer need. Running runs are never touched.

    \b
    Examples:
      ppocli runs prune --dry-run
      ppocli runs prune --keep-best --older-than 7d
      ppocli runs prune --failed --yes
    """
    from ppocli.runs.listing import parse_age, plan_pruning

    root = root_of(folder)
    plan = plan_pruning(root, checkpoints=checkpoints or not failed, failed=failed,
                        keep_best=keep_best, say=say,
                        older_than=None if older_than is None else parse_age(older_than))
    if not plan:
        if as_json:
            print("[]")
        say(f"There is nothing to delete in {root}.")
        return
    if not as_json:
        rows = [
            (removal.run.name if removal.run == root else removal.run.relative_to(root).as_posix(),
             removal.why, _shown_parts(removal), format_bytes(removal.size)) for removal in plan]
        print_table([("run", "because", "delete", "size"), *rows], right=frozenset({3}))
    total = format_bytes(sum(removal.size for removal in plan))
    if dry_run:
        say(f"{total} could be given back; nothing was deleted.")
    elif not yes and not _confirmed(total):
        say("Nothing was deleted.")
        return
    deleted, problems = (plan, []) if dry_run else _delete(plan)
    for other in problems[1:]:  # the first one ends the command
        say(f"Error: {clean(other.what)}")
    if as_json:
        print_json([
            {"run": str(removal.run.absolute()), "kind": removal.kind, "because": removal.why,
             "paths": [str(part.absolute()) for part in removal.parts], "bytes": removal.size}
            for removal in deleted])
    if not dry_run:
        say(f"{format_bytes(sum(removal.size for removal in deleted))} given back.")
    if problems:
        raise problems[0]


@runs_app.command("rm", cls=Command)
def remove_runs(
        given: Annotated[list[str], typer.Argument(
            metavar="RUN...", autocompletion=complete_run, help="Folders or names of runs.")],
        yes: Yes = False) -> None:
    """Delete runs with all they hold. Running runs are never touched.

    \b
    Examples:
      ppocli runs rm NAME
      ppocli runs rm runs/ONE runs/OTHER --yes
    """
    from ppocli.runs.listing import whole_folder

    plan = [whole_folder(folder) for folder in dict.fromkeys(map(_named, given))]
    print_table([("delete", "size"), *((str(removal.run), format_bytes(removal.size))
                                       for removal in plan)], right=frozenset({1}))
    if not yes and not _confirmed(format_bytes(sum(removal.size for removal in plan))):
        say("Nothing was deleted.")
        return
    deleted, problems = _delete(plan)
    say(f"{format_bytes(sum(removal.size for removal in deleted))} given back.")
    if problems:
        raise problems[0]


@runs_app.command("rename", cls=Command)
def rename_run(run: OneRun, name: Annotated[str, typer.Argument(
               metavar="NAME", help="The new name.")]) -> None:
    """Rename a run's folder. Running runs and jobs of sweeps keep their names.

    \b
    Examples:
      ppocli runs rename quickstart-20260131-120000 baseline
    """
    from ppocli.runs.sweeps import is_sweep
    from ppocli.storage.run_folder import lock

    folder = _named(run)
    target = folder.with_name(name) if name not in ("", ".", "..") and "/" not in name else None
    if target is None:
        raise ConfigError(f"{name!r} must be a plain folder name.", where="NAME",
                          fix=f"to move the folder: mv {pasted(folder)} FOLDER")
    if is_sweep(folder.parent):
        raise ConfigError(f"{folder} is a job of a sweep, which finds it by its name.",
                          where="RUN", fix=f"ppocli sweep show {pasted(folder.parent)}")
    with lock(folder):
        if target.exists() or target.is_symlink():
            raise CheckpointError(f"{target} exists already; nothing is overwritten.",
                                  where="NAME", fix="choose another name")
        try:
            folder.rename(target)
        except OSError as error:
            raise DiskError(f"{folder} can't be renamed: {error.strerror}",
                            where=str(folder.parent), fix="look at its permissions") from error
    show_text(str(target))


def _named(given: str) -> Path:
    """The folder of the run that is named; a part of a run doesn't stand for it here."""
    from ppocli.runs.record import is_run
    from ppocli.runs.target import find_run, run_named

    folder = run_named(given)
    if is_run(folder):
        return folder
    found = find_run(given)  # refuses what is no part of a run either
    raise ConfigError(f"{given} is a part of a run.", where="RUN", fix=f"name the run: {found}")


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
                          where="command line", fix="look at the list, then add --yes")
    sys.stdout.flush()
    print(f"Delete this ({total})? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _delete(plan: list[Removal]) -> tuple[list[Removal], list[PpocliError]]:
    from ppocli.runs.listing import carry_out

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
    return deleted, problems
