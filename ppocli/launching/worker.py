"""The process of a run, or one of several: ``python -m ppocli.launching.worker RUN_DIR ...``.

Reads the resolved ``config.yaml`` (it never composes), builds the session, resumes if asked to,
trains, and leaves the trained model, a summary and checkpoints behind, whatever ended it.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import replace
from typing import NoReturn

from ppocli.config.resolved import next_config, read_config
from ppocli.config.schema import TrainConfig, planned_episodes
from ppocli.config.secrets import safe_text
from ppocli.display.console import Display, open_display, open_silence
from ppocli.errors import InputError, PpocliError
from ppocli.launching.child_process import Start, leave_at_once, outcome_of
from ppocli.launching.ending import RunResult, ending_well, my_phase, publish
from ppocli.launching.opening import noted_products, open_run
from ppocli.parallel.host_memory import keep_freed_memory
from ppocli.parallel.launchers import my_rank
from ppocli.parallel.rank_outcomes import (
    OUTCOMES,
    announce,
    hold_lifeline,
    note_phase,
    write_outcome,
)
from ppocli.parallel.stop import StopFlag, catch_signals, stop_when_closed
from ppocli.runs.record import accept_settings
from ppocli.storage.atomic import read_json
from ppocli.storage.model_files import quiet_transformers
from ppocli.storage.run_folder import RunFolder, lock
from ppocli.training.clock import Moment
from ppocli.training.loop import run_training
from ppocli.training.task import PythonObjects

log = logging.getLogger("ppocli")


def run_worker(start: Start, *, objects: PythonObjects | None = None, joined: bool = False,
               own_process: bool = False, started_by: int | None = None) -> RunResult:
    """Train in this process.

    Args:
        objects: Python objects in place of config keys.
        joined: one of the ranks of somebody else's launcher, which may hand a signal on that the
            terminal sends as well.
        own_process: this process was started for the run: its time is counted from there on, and
            its memory is kept.
        started_by: the process that has started this one in a process group of its own: what is
            shown to its user is shown by this one.

    Raises:
        PpocliError: with the exit code of its kind; checkpoints are kept and the message says how
            to go on.
    """
    if own_process:
        keep_freed_memory()
    began = Moment.of_process_start() if own_process else Moment.now()
    folder = RunFolder(start.run_dir.resolve())
    cfg = config_of(start)
    settle = 2.0 if joined else 0.0
    if my_rank() > 0:  # rank 0 alone holds the folder and speaks
        with open_silence() as shown, catch_signals(settle) as stop:
            return _run(cfg, folder, PythonObjects(), start.resume, shown, stop, began)
    with lock(folder.path, reserved_by=start.reserved_by), \
            open_display(folder.log, start.display, started_by) as shown, \
            catch_signals(settle) as stop:
        return _run(cfg, folder, objects or PythonObjects(), start.resume, shown, stop, began)


def config_of(start: Start) -> TrainConfig:
    """The configuration that a run starts or goes on with.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    folder = RunFolder(start.run_dir)
    return read_config(next_config(folder.path) if start.resume else folder.config)


def _run(cfg: TrainConfig, folder: RunFolder, objects: PythonObjects, resume: bool,
         display: Display, stop: StopFlag, began: Moment) -> RunResult:
    from ppocli.parallel.backend import open_ranks

    if (early := announce()) is not None:
        stop.request(early)
    note_phase("meeting the other ranks")
    quiet_transformers()
    with open_ranks(cfg, noted_products(folder) if resume else None) as backend:
        ranks = stop.ranks = backend.ranks
        if resume and (done := ranks.first_does(lambda: _already_finished(cfg, folder))):
            return done
        with open_run(cfg, folder, objects, backend, stop, display, resume=resume,
                      began=began) as run:
            with ending_well(run):
                run_training(run)
                note_phase("writing the model")
            return publish(run)


def _already_finished(cfg: TrainConfig, folder: RunFolder) -> RunResult | None:
    """The result of a run that has drawn all its episodes and left a whole model; else None."""
    from ppocli.storage.model_files import check_folder

    summary = read_json(folder.summary) or {}
    try:
        complete = (summary["status"] == "finished"
                    and int(summary["episodes"]) >= planned_episodes(cfg.ppo))
        check_folder(folder.model, key="model", adapters=True)
    except (ValueError, KeyError, TypeError, InputError):
        return None
    if not complete:
        return None
    accept_settings(folder.path, int(summary["steps"]))
    log.info("already finished (%d/%d steps): %s", summary["steps"], summary["steps"], folder.model)
    return RunResult(folder.path, folder.model, summary)


def main(argv: list[str]) -> int:
    """Train as ``argv`` tells (:class:`Start`); returns the exit code."""
    start = Start.read(argv)
    if start.lifeline is not None:
        stop_when_closed(start.lifeline)
    if OUTCOMES in os.environ:
        _as_rank(start)
    try:
        run_worker(start, own_process=True, started_by=os.getppid())
    except PpocliError as error:
        sys.stderr.write(safe_text(f"error: {error}\n"))
        return error.exit_code
    return 0


def _as_rank(start: Start) -> NoReturn:
    """One of several processes: what it came to is left for the one that started them.

    A stop is no failure to that one, which would end the ranks that are still saving.
    """
    lifeline = hold_lifeline()
    if lifeline is not None:
        # ranks that nobody watches any more have this long to come to a stop together
        stop_when_closed(lifeline, leave_after=float(config_of(start).hardware.timeout_seconds))
    outcome = outcome_of(my_rank(), lambda: run_worker(start, own_process=True,
                                                       started_by=os.getppid()))
    write_outcome(replace(outcome, phase=my_phase() or "unknown phase"))
    leave_at_once(0 if outcome.code > 128 else outcome.code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
