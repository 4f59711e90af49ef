"""One run from its folder to its end: ``run_worker(DIR)``.

Also ``python -m ppocli.launching.worker DIR``.

Reads the resolved ``config.yaml`` (it never composes), builds the session, resumes if asked to,
trains, and leaves the trained model, a summary and checkpoints behind, whatever ended it.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import time
from typing import Any, NoReturn

from ppocli.config.resolved import CONFIG_FILE, next_config, read_config
from ppocli.config.sayable import sayable
from ppocli.config.schema import TrainConfig, planned_episodes
from ppocli.display.console import (
    DISPLAY_MODES,
    Display,
    DisplayMode,
    open_display,
    open_silence,
)
from ppocli.display.figures import closing_table
from ppocli.errors import (
    DivergedError,
    InputError,
    OutOfMemoryError,
    PpocliError,
    StoppedError,
)
from ppocli.launching.opening import noted_products, open_run, quiet_libraries
from ppocli.parallel.heap import keep_freed_memory
from ppocli.parallel.ranks import is_lost_neighbour
from ppocli.parallel.stop import StopFlag, StopRequested, catch_signals, stop_when_closed
from ppocli.runs.resumed import accept_settings
from ppocli.storage.publishing import publish_folder
from ppocli.storage.rank_outcomes import (
    OUTCOMES,
    RankOutcome,
    announce,
    hold_lifeline,
    my_rank,
    note_phase,
    read_phase,
    write_outcome,
)
from ppocli.storage.run_folder import RunFolder, lock, write_summary
from ppocli.storage.run_logs import read_jsonl
from ppocli.tasks.ppo.session import PythonObjects
from ppocli.train.clock import Moment, in_words, of_training, profile
from ppocli.train.loop import Run, run_training, save

log = logging.getLogger("ppocli")
_UNTOLD = "unknown phase"
"""of a process that nobody here has started, which keeps no file of its phases"""


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a finished run left."""

    run_dir: Path
    model_dir: Path
    summary: dict[str, Any]


def run_worker(run_dir: Path, *, objects: PythonObjects | None = None, resume: bool = False,
               display: DisplayMode = "auto", reserved_by: int | None = None,
               joined: bool = False, own_process: bool = False, started_by: int | None = None
               ) -> RunResult:
    """Train in this process.

    Args:
        run_dir: holds ``config.yaml``.
        objects: Python objects in place of config keys.
        resume: go on from the newest valid checkpoint.
        display: what a person is shown.
        reserved_by: the process that keeps the folder for this one.
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
    run_dir = run_dir.resolve()
    folder = RunFolder(run_dir)
    cfg = read_config(next_config(run_dir) if resume else folder.config)
    settle = 2.0 if joined else 0.0
    if my_rank() > 0:  # rank 0 alone holds the folder and speaks
        with open_silence() as shown, catch_signals(settle) as stop:
            return _run(cfg, folder, PythonObjects(), resume, shown, stop, began)
    with lock(run_dir, reserved_by=reserved_by), \
            open_display(folder.log, display, started_by) as shown, catch_signals(settle) as stop:
        return _run(cfg, folder, objects or PythonObjects(), resume, shown, stop, began)


def _run(cfg: TrainConfig, folder: RunFolder, objects: PythonObjects, resume: bool,
         display: Display, stop: StopFlag, began: Moment) -> RunResult:
    from ppocli.parallel.backend import open_ranks

    if (early := announce()) is not None:
        stop.request(early)
    note_phase("meeting the other ranks")
    quiet_libraries()
    with open_ranks(cfg, noted_products(folder) if resume else None) as backend:
        ranks = stop.ranks = backend.ranks
        if resume and (done := ranks.first_does(lambda: _already_finished(cfg, folder))):
            return done
        with open_run(cfg, folder, objects, backend, stop, display, resume=resume,
                      began=began) as run:
            return _train(run)


def _already_finished(cfg: TrainConfig, folder: RunFolder) -> RunResult | None:
    """The result of a run that has drawn all its episodes and left a whole model; else None."""
    from ppocli.storage.model_files import check_folder

    try:
        summary = json.loads(folder.summary.read_text())
        complete = summary["status"] == "finished"
        episodes = int(summary["episodes"])
        check_folder(folder.model, key="model", adapters=True)
    except (OSError, ValueError, KeyError, TypeError, InputError):
        return None
    if not complete or episodes < planned_episodes(cfg.ppo):
        return None
    accept_settings(folder.path, int(summary["steps"]))
    log.info("already finished (%d/%d steps): %s", summary["steps"], summary["steps"], folder.model)
    return RunResult(folder.path, folder.model, summary)


def _train(run: Run) -> RunResult:
    """Train, then publish the model; on a stop or an error save what is sound."""
    import torch

    try:
        run_training(run)
        note_phase("writing the model")
    except StopRequested as stop:
        where, resumable = _save_what_is_sound(run)
        write_summary_of(run, "stopped")
        raise StoppedError(
            f"stopped by {stop} at step {run.state.step} of {run.session.total_steps()}; {where}",
            signal_number=stop.signal_number,
            fix=f"resume with: ppocli resume {run.folder.path}" if resumable else
            "start again; checkpoint.every_steps=1 or checkpoint.every_minutes=5 saves more often"
        ) from None
    except torch.OutOfMemoryError as error:  # not in a pass, which is made anew with fewer rows
        # of several ranks this one alone is here: it can't save, which takes all of them
        single = run.session.backend.ranks.world == 1
        where, _ = _save_what_is_sound(run) if single else _last_checkpoint(run)
        write_summary_of(run, "failed", error=str(error))
        raise OutOfMemoryError(
            f"{_place(run, f'Out of memory in step {run.state.step + 1}', 'out of memory')}; "
            f"{where}", where="ppo.micro_batch_size, ppo.chunk_size, reward.fn",
            fix="set ppo.micro_batch_size (the gradient stays the same) or ppo.chunk_size lower, "
                f"then: ppocli resume {run.folder.path} ppo.micro_batch_size=N") from error
    except PpocliError as error:
        if isinstance(error, OutOfMemoryError) and error.alone:
            _tell_shortage(run, error)
            raise
        where, _ = _last_checkpoint(run) if isinstance(error, DivergedError) \
            else _save_what_is_sound(run)
        write_summary_of(run, "failed", error=str(error))
        error.what = f"{error.what} ({where})"
        log.error(error.what, extra={"ends_run": True})
        raise
    except BaseException:
        write_summary_of(run, "failed", error="unexpected error")
        raise
    return publish(run)


def _place(run: Run, single: str, of_several: str) -> str:
    """What happened, with rank and phase where there are several."""
    if run.session.backend.ranks.world == 1:
        return single
    return f"rank {my_rank()}, {_where(run)}: {of_several}"


def _tell_shortage(run: Run, error: OutOfMemoryError) -> None:
    """Complete the message of a rank whose pass was too much: where the run stands, what to do. It
    can't save, which takes all of them."""
    where, resumable = _last_checkpoint(run)
    what = f"{_where(run)}: {error.what}"
    write_summary_of(run, "failed", error=what)
    error.what = f"{_place(run, what, error.what)}; {where}"
    if error.word is not None:
        error.fix = (f"ppocli resume {run.folder.path} {error.word}" if resumable else
                     f"the same command with {error.word} run_name={run.folder.path.name} "
                     "resume=auto") + " (the result stays the same)"


def _where(run: Run) -> str:
    phase = _my_phase()
    return f"step {run.state.step + 1}" if phase == _UNTOLD else phase


def _my_phase() -> str:
    return read_phase(Path(os.environ.get(OUTCOMES, "")), my_rank()) or _UNTOLD


def _last_checkpoint(run: Run) -> tuple[str, bool]:
    """Words about the newest checkpoint, and whether there is one."""
    from ppocli.storage.checkpoints import find_latest

    run.saving.settle()
    found = find_latest(run.folder.checkpoints, run_id=run.run_id, verify="size").found
    if found is None:
        return "no checkpoint was saved yet", False
    return f"last healthy: step {found.step} in {found.path}", True


def _save_what_is_sound(run: Run) -> tuple[str, bool]:
    """Save the committed state if the weights belong to it.

    Returns:
        words about what is on the disk, and whether the run can be resumed from it.
    """
    run.clock.mark("other")  # what is left of the phase that was broken off
    run.saving.settle()
    if not run.intact:
        return _last_checkpoint(run)
    try:
        with run.stop.defer():
            save(run)
        run.clock.mark("saving")
    except PpocliError as error:
        log.error("%s", error)
        return _last_checkpoint(run)
    return f"saved step {run.state.step}", True


def _summary(run: Run, status: str) -> dict[str, Any]:
    run.clock.mark("between")
    run.state = state = run.state.book(run.clock.take())
    speed = {name: state.tokens[name] / max(seconds, 1e-9)
             for name, seconds in state.seconds.items() if state.tokens.get(name)}
    best = None
    if state.best is not None:
        path = run.folder.checkpoints / f"step-{state.best.step:06d}"
        best = {"step": state.best.step, "metric": state.best.metric,
                "name": run.session.cfg.checkpoint.metric,
                "path": str(path) if path.is_dir() else None}
    after = state.eval_last if state.eval_step == state.step and state.step > 0 else None
    return {
        "status": status, "run_id": run.run_id, "steps": state.step, "episodes": state.episodes,
        "updates": state.updates, "eval_before": state.eval_before, "eval_after": after,
        "best": best, "kl_coef": state.kl_coef, "seconds": of_training(state.seconds),
        "tokens_per_second": speed,
        "profile": profile(state.seconds, state.cpu_seconds, state.tokens),
        "peak_memory_mib": run.session.backend.peak_memory_mib(), "versions": run.versions,
    }


def write_summary_of(run: Run, status: str, error: str | None = None) -> dict[str, Any]:
    """Write and return ``summary.json``; a disk that refuses is only reported."""
    summary = _summary(run, status)
    if error is not None:
        summary["error"] = sayable(error)
    if not run.session.backend.ranks.first:
        return summary
    try:
        write_summary(run.folder, summary)
    except PpocliError as disk:
        log.error("%s", disk)
    return summary


def publish(run: Run) -> RunResult:
    """Write ``model/`` and the summary of a finished run, and show what came out."""
    from ppocli.export.trained_card import write_card
    from ppocli.train.checkpoint_io import save_policy, whole_policy

    summary = _summary(run, "finished")

    def write(folder: Path) -> None:
        save_policy(run.session, folder, weights)
        write_card(folder, run.session.cfg, summary)

    def publish() -> None:
        publish_folder(write, run.folder.model)
        run.clock.mark("saving")
        summary.update(_summary(run, "finished"))  # with the time that writing took
        write_summary(run.folder, summary)

    backend = run.session.backend
    with run.stop.defer(), whole_policy(run.session) as weights:
        backend.ranks.first_does(publish)
    if backend.ranks.first:
        _show(run)
    return RunResult(run.folder.path, run.folder.model, summary)


def _show(run: Run) -> None:
    """The closing table: figures and samples before and after, and where things are."""
    rows: dict[int, list[dict[str, Any]]] = {0: [], run.state.step: []}
    for row in read_jsonl(run.folder.samples):
        if row.get("kind") == "eval" and row.get("step") in rows:
            rows[row["step"]].append(row)
    after = rows[run.state.step]
    before: list[Any] = rows[0] if len(rows[0]) == len(after) else [None] * len(after)
    chosen = list(zip(before, after, strict=True))[:4]
    if run.state.eval_last is not None:
        run.display.table(closing_table(run.state.eval_before, run.state.eval_last, chosen))
    log.info("time         %s", in_words(run.state.seconds, run.state.cpu_seconds))
    log.info("run folder   %s", run.folder.path)
    log.info("metrics      %s", run.folder.metrics)
    log.info("checkpoints  %s", run.folder.checkpoints)
    more = "total_episodes" if run.session.cfg.ppo.total_episodes else "num_steps"
    log.info("go on        ppocli resume %s ppo.%s=N", run.folder.path, more)
    log.info("model        %s", run.folder.model)


def main(argv: list[str]) -> int:
    """``python -m ppocli.launching.worker RUN_DIR [--resume] [--display=MODE] [--lifeline=FD]
    [--reserved-by=PID]``; returns the exit code.

    ``FD`` is the reading end of a pipe; when its other end closes, the run stops and saves. ``PID``
    is the process that keeps the folder for this one.
    """
    options = [word for word in argv if word.startswith("--")]
    folder = next(word for word in argv if word not in options)
    for option in options:
        if option.startswith("--lifeline="):
            stop_when_closed(int(option.partition("=")[2]))
    display: DisplayMode = next((mode for mode in DISPLAY_MODES if f"--display={mode}" in options),
                                "auto")
    reserved_by = next((int(option.partition("=")[2]) for option in options
                        if option.startswith("--reserved-by=")), None)
    if OUTCOMES in os.environ:
        _as_rank(Path(folder), "--resume" in options, display, reserved_by)
    try:
        run_worker(Path(folder), resume="--resume" in options, display=display,
                   reserved_by=reserved_by, own_process=True, started_by=os.getppid())
    except PpocliError as error:
        sys.stderr.write(sayable(f"error: {error}\n"))
        return error.exit_code
    return 0


def _patience(folder: Path, resume: bool) -> float:
    """Seconds in which ranks that nobody watches any more have to come to a stop together."""
    config = next_config(folder) if resume else folder / CONFIG_FILE
    return float(read_config(config).hardware.timeout_seconds)


def _as_rank(folder: Path, resume: bool, display: DisplayMode, reserved_by: int | None
             ) -> NoReturn:
    """One of several processes: what it came to is left for the one that started them.

    A stop is no failure to that one, which would end the ranks that are still saving.
    """
    code, message, trace, lost, word = 0, "", "", False, ""
    lifeline = hold_lifeline()
    if lifeline is not None:
        stop_when_closed(lifeline, leave_after=_patience(folder, resume))
    try:
        run_worker(folder, resume=resume, display=display, reserved_by=reserved_by,
                   own_process=True, started_by=os.getppid())
    except PpocliError as error:
        code, message = error.exit_code, str(error)
        word = getattr(error, "word", None) or ""
    except Exception as error:
        code, message, trace = 1, f"{type(error).__name__}: {error}", traceback.format_exc()
        lost = is_lost_neighbour(error)
    write_outcome(RankOutcome(my_rank(), code, message, trace, time(), _my_phase(), lost, word))
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    # the threads of a process group can abort an interpreter that takes itself down
    os._exit(0 if code > 128 else code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
