"""``ppocli runs list`` and ``ppocli runs prune``."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ppocli.cli.output import say
from ppocli.cli.tables import print_table
from ppocli.display.figures import clean, figure
from ppocli.errors import ConfigError, DiskError, InputError, PpocliError
from ppocli.runs.listing import RunInfo, age, run_infos
from ppocli.runs.pruning import Removal, carry_out, parse_age, plan_pruning
from ppocli.storage.atomic import format_bytes
from ppocli.storage.retention import STEP

RUNS = Path("runs")


def print_runs(given: Path | None, as_json: bool) -> None:
    """Print the runs below a folder, as a table or as JSON.

    Raises:
        InputError: the folder that was named does not exist.
    """
    root = _root(given)
    infos = run_infos(root)
    if as_json:
        print(json.dumps([_as_json(info) for info in infos], indent=2, ensure_ascii=False))
        return
    if not infos:
        say(f"There are no runs in {root} yet. Start one: ppocli train +recipe=quickstart")
        return
    rows = [("run", "status", "step", "reward", "best eval", "size", "age", "model", "reward by")]
    rows += [(info.name, _status(info), _step(info), figure(info.last_reward, 3), _best(info),
              format_bytes(info.size), age(info.written), info.model, info.reward)
             for info in infos]
    print_table(rows, right=frozenset({3, 5, 6}))


def _root(given: Path | None) -> Path:
    if given is not None and not given.expanduser().is_dir():
        raise InputError(f"{given} does not exist or is no folder (looked in {Path.cwd()}).",
                         where="DIR", fix="name a folder that holds runs (default: runs)")
    return RUNS if given is None else given.expanduser()


def _status(info: RunInfo) -> str:
    return f"{info.status} ({info.pid})" if info.pid is not None else info.status


def _step(info: RunInfo) -> str:
    return "-" if info.total_steps is None else f"{info.step}/{info.total_steps}"


def _best(info: RunInfo) -> str:
    return "-" if info.best is None else f"{figure(info.best, 3)} at {info.best_step}"


def _as_json(info: RunInfo) -> dict[str, Any]:
    return {"name": info.name, "path": str(info.path.absolute()), "status": info.status,
            "pid": info.pid, "step": info.step, "total_steps": info.total_steps,
            "reward_mean": info.last_reward, "best": info.best, "best_step": info.best_step,
            "bytes": info.size, "written": _time(info.written), "model": info.model,
            "reward": info.reward}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def prune_runs(given: Path | None, *, checkpoints: bool, failed: bool, keep_best: bool,
               older_than: str | None, dry_run: bool, yes: bool, as_json: bool) -> None:
    """List what can be deleted, ask, and delete it.

    Args:
        given: the folder that holds the runs, or a run.
        checkpoints, failed, keep_best: as in :func:`ppocli.runs.pruning.plan_pruning`; with neither
            of the first two, ``checkpoints`` is meant.
        older_than: ``7d``, ``12h``.
        dry_run: only list.
        yes: don't ask.
        as_json: what was (or would be) deleted as JSON; nothing else on standard output.

    Raises:
        ConfigError: there is no terminal to ask on, or ``older_than`` can't be read.
        InputError: the folder that was named does not exist.
        PpocliError: something could not be deleted; the rest was.
    """
    root = _root(given)
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
        print(json.dumps([_removal_json(removal) for removal in deleted], indent=2,
                         ensure_ascii=False))
    if not dry_run:
        say(f"{format_bytes(sum(removal.size for removal in deleted))} given back.")
    if problems:
        raise problems[0]


def _print_plan(plan: list[Removal], root: Path) -> None:
    rows = [("run", "because", "delete", "size")]
    for removal in plan:
        name = removal.run.name if removal.run == root else \
            removal.run.relative_to(root).as_posix()
        rows.append((name, removal.why, _shown_parts(removal), format_bytes(removal.size)))
    print_table(rows, right=frozenset({3}))


def _shown_parts(removal: Removal) -> str:
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


def _removal_json(removal: Removal) -> dict[str, Any]:
    return {"run": str(removal.run.absolute()), "kind": removal.kind, "because": removal.why,
            "paths": [str(part.absolute()) for part in removal.parts], "bytes": removal.size}
