"""Resuming a run: the newest valid checkpoint, and files cut back to it."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from ppocli.errors import CheckpointError
from ppocli.parallel.backend import made_on
from ppocli.storage.atomic import repair_published
from ppocli.storage.checkpoints import FoundCheckpoint, find_latest
from ppocli.storage.retention import clean_staging, removed_at, supersede
from ppocli.storage.run_folder import RunFolder
from ppocli.storage.run_logs import truncate_events, truncate_jsonl
from ppocli.training.checkpoint_io import read_checkpoint
from ppocli.training.recorder import EVAL_ROW, SWEEP_ROW
from ppocli.training.state import TrainState
from ppocli.training.task import Task

log = logging.getLogger("ppocli")


def restore(task: Task, folder: RunFolder, run_id: str, fresh: TrainState) -> TrainState:
    """Load the newest valid checkpoint; remove rows and set aside folders of later steps.

    Args:
        fresh: the state a run of this configuration starts with.

    Raises:
        CheckpointError: there is none, or prompts or reference are not those of the run.
    """
    ranks = task.backend.ranks
    place = ranks.first_does(lambda: _newest(task, folder, run_id, fresh))
    if place is None:
        return fresh
    path, state = place
    tensors = read_checkpoint(task, path)
    ranks.first_does(lambda: _tidy(task, folder, path, state))
    return replace(state, tensors=tensors)


def _newest(task: Task, folder: RunFolder, run_id: str, fresh: TrainState
            ) -> tuple[Path, TrainState] | None:
    """The checkpoint to go on from and its state; None starts afresh, where that was allowed."""
    leftovers = (*clean_staging(folder.checkpoints), *repair_published(folder.model))
    search = find_latest(folder.checkpoints, run_id=run_id)
    for line in (*leftovers, *search.skipped):
        log.warning(line)
    if search.found is not None:
        _note_other_place(search.found, task)
        saved = TrainState.from_json(search.found.state)
        return search.found.path, _adopt(task, saved, fresh, folder)
    if (when := removed_at(folder.checkpoints)) is not None:
        # also with resume=auto: starting afresh would remove what was worth keeping
        raise CheckpointError(
            f"The checkpoints of {folder.path.name} were deleted by ppocli runs prune "
            f"({when}): there is nothing to go on from.", where=str(folder.checkpoints),
            fix=f"start another run with its model: model.path={folder.model} run_name=NAME")
    if task.cfg.resume == "auto":
        log.info("No checkpoint in %s: the run starts from the beginning.", folder.checkpoints)
        _forget_after(folder, -1, reopen=None)
        return None
    raise CheckpointError(f"No valid checkpoint in {folder.checkpoints}.", where=str(folder.path),
                          fix="start again under another run_name, or with resume=auto")


def _note_other_place(found: FoundCheckpoint, task: Task) -> None:
    here = made_on(task.backend)
    there = {name: found.versions.get(name, value) for name, value in here.items()}
    if there != here:
        log.warning("the checkpoint was made on %s by %s process(es), this run goes on on %s with "
                    "%s: equal up to rounding, not bit-exact", there["device"],
                    there["processes"], here["device"], here["processes"])


def _tidy(task: Task, folder: RunFolder, path: Path, state: TrainState) -> None:
    """Cut the run's files back to a checkpoint that has been loaded."""
    for step in supersede(folder.checkpoints, state.step):
        log.warning("step %d is later than the resumed step %d: moved to superseded/.", step,
                    state.step)
    _forget_after(folder, state.step, reopen=state.step if state.pending is not None else None)
    if state.episodes < task.total_samples():
        _set_aside_finished(folder)
    log.info("resuming step %d of %d from %s (verified)", state.step, task.total_steps(), path)


def _adopt(task: Task, state: TrainState, fresh: TrainState, folder: RunFolder) -> TrainState:
    """The saved state under the present configuration."""
    changed = [name for name in {**state.digests, **fresh.digests}
               if state.digests.get(name) != fresh.digests.get(name)]
    if changed:
        raise CheckpointError(f"Not what the run was started with: {', '.join(changed)}. The "
                              "files have changed.", where=str(folder.path),
                              fix="put the files back, or start another run (another run_name)")
    state = task.adopt(state, fresh)
    if state.judged_by != fresh.judged_by:
        if state.best is not None:
            log.info("reward, generation or checkpoint.metric have changed: the best evaluation "
                     "so far (step %d) is not comparable and forgotten", state.best.step)
        state = replace(state, best=None, judged_by=fresh.judged_by)
    return state


def _forget_after(folder: RunFolder, step: int, *, reopen: int | None) -> None:
    """Remove rows past ``step``, and those that finishing step ``reopen`` will write again."""
    last_row = step if reopen is None else reopen - 1
    truncate_jsonl(folder.metrics, last_row)
    truncate_jsonl(folder.samples, step,
                   also=lambda row: row.get("kind") in (EVAL_ROW, SWEEP_ROW)
                   and row.get("step") == reopen)
    truncate_events(folder.events, last_row)


def read_summary(folder: RunFolder) -> dict[str, Any] | None:
    """The contents of summary.json; None where there is none that can be read."""
    try:
        summary = json.loads(folder.summary.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return summary if isinstance(summary, dict) else None


def _set_aside_finished(folder: RunFolder) -> None:
    """A run that goes on is not finished any more: its summary goes, its model is kept under the
    number of its last step."""
    summary = read_summary(folder)
    folder.summary.unlink(missing_ok=True)
    if folder.model.is_dir():
        step = summary.get("steps") if summary else None
        target = folder.path / f"model-step-{step if isinstance(step, int) else 0:06d}"
        if not target.exists():
            folder.model.rename(target)
            log.info("the model of the finished run is now %s", target)
