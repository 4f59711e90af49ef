"""The training loop: collect, optimize, evaluate, save; and what remains after a stop or a failure.

A step is committed when its optimize phase ends: the state then carries the step's figures as
``pending`` until evaluation has been added and the metrics row is written, so that a stop at any
point resumes without losing or repeating a row.
"""

import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from ppocli.distributed import backend
from ppocli.distributed.ranks import StopFlag, note_phase
from ppocli.errors import ConfigError, DiskError, DivergedError
from ppocli.runs import atomic, checkpoints, retention, run_folder, run_logs
from ppocli.training import checkpoint_writing
from ppocli.training.console import Display
from ppocli.training.optimize import diverged, optimize
from ppocli.training.state import Best, Generators, Pace, PhaseClock, TrainState
from ppocli.training.task import Evaluation, StepContext, Task

if TYPE_CHECKING:
    from ppocli.publish.trackers import Tracker

log = logging.getLogger("ppocli")
EVAL_ROW = "eval"
"""``kind`` of rows of samples.jsonl that an evaluation writes"""


@dataclass(frozen=True, slots=True)
class Recorder:
    """Open metrics.jsonl and samples.jsonl of a run, and its trackers."""

    metrics: run_logs.JsonlWriter
    samples: run_logs.JsonlWriter
    trackers: "Sequence[Tracker]"

    def row(self, row: dict[str, Any]) -> None:
        """Append one step's figures to metrics.jsonl and hand them to the trackers."""
        self.metrics.append([row])
        for tracker in self.trackers:
            tracker.row(row)

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Append an evaluation's samples to samples.jsonl, and hand them to the trackers."""
        self.samples.append([{"step": step, "kind": EVAL_ROW, **row} for row in evaluation.samples])
        for tracker in self.trackers:
            tracker.samples(step, evaluation.samples)


@contextmanager
def open_recorder(folder: run_folder.RunFolder, trackers: "Sequence[Tracker]"
                  ) -> Iterator[Recorder]:
    """The recorder of a run; closes its files, but not the trackers."""
    with (run_logs.JsonlWriter(folder.metrics) as metrics,
          run_logs.JsonlWriter(folder.samples) as samples):
        yield Recorder(metrics, samples, trackers)


@dataclass(slots=True)
class Run:
    """One run in progress: its task, its files, and the newest committed state."""

    task: Task
    folder: run_folder.RunFolder
    place: os.stat_result
    """of the folder when it was opened"""
    run_id: str
    config_digest: str
    versions: dict[str, str]
    stop: StopFlag
    recorder: Recorder
    """of rank 0, which alone writes; None on the others"""
    display: Display
    state: TrainState
    saved_at: float
    """monotonic time of the last checkpoint"""
    clock: PhaseClock
    """books all time since the run was started; each commit takes what it has"""
    intact: bool = True
    """false while the weights are between two steps and must not be saved"""

    def enter(self, phase: str, report: str) -> None:
        """A phase begins: tell the live view, and with ``report`` the process that started this."""
        note_phase(report)
        if self.display.board is not None:
            self.display.board.enter(phase)


def initial_state(task: Task) -> TrainState:
    """The state before the first step; the evaluation at the start, if any, is pending."""
    numbers, tensors = task.initial()
    state = TrainState(digests=task.resume.digests(), judged_by=task.resume.eval_fingerprint(),
                       task=numbers, tensors=tensors, pace=Pace(task.length.samples_per_step))
    return replace(state, pending=state.counters()) if task.cfg.eval.at_start else state


def run_training(run: Run) -> None:
    """Train until all samples are drawn.

    Raises:
        StopRequested: at a safe point; ``run.state`` and ``run.intact`` say what can be saved.
        PpocliError: reward, divergence, disk.
    """
    task, length = run.task, run.task.length
    run.display.start(run.state.step, length.total_steps)
    run.clock.mark("startup")
    finish_step(run)
    while run.state.episodes < length.total_samples:
        run.stop.meet()
        run.clock.mark("between")
        run.enter("rollout", f"step {run.state.step + 1}, rollout")
        learn(run, task.collect(run.state, context_of(task, run.state.step, run.stop, run.clock)))
        finish_step(run)


def context_of(task: Task, step: int, stop: StopFlag, clock: PhaseClock) -> StepContext:
    """What the step after ``step``, or an evaluation, needs of its caller."""
    pace = task.length.pace
    samples = pace.episodes + (step - pace.step) * pace.num_rollouts
    passes = samples / task.samples_per_pass if task.samples_per_pass else 0.0
    return StepContext(stop, clock, (step, task.length.total_steps, passes))


def learn(run: Run, batch: Any) -> None:
    """The optimize phase on a batch; commits the new state, whose row is pending. A RewardError for
    too few valid scores, a DivergedError where what is trained is no longer finite."""
    task, state, step = run.task, run.state, run.state.step + 1
    if (board := run.display.board) is not None:
        board.show(task.preview(batch), step)
    plan = task.plan(state, batch)
    run.clock.mark("other")
    run.intact = False
    run.enter("optimize", f"step {step}, optimize")
    try:
        result = optimize(task, plan, state, run.stop,
                          None if board is None else partial(board.enter, "optimize"))
        if not task.trained.is_finite():
            raise diverged(task, f"The policy's weights became non-finite in step {step}.")
    except DivergedError as error:
        error.where = _dump(run, batch, step)
        raise
    run.clock.mark("optimize")
    finished = task.finish(state, batch, plan, result)
    for message in finished.warnings:
        log.warning(message)
    after = replace(state, step=step, episodes=state.episodes + len(batch),
                    updates=state.updates + result.updates, nonfinite=result.nonfinite,
                    task=finished.state, tensors=finished.tensors)
    if task.cfg.tracking.log_rollouts:
        rows = task.sample_rows(batch, step)
        task.backend.ranks.first_does(lambda: run.recorder.samples.append(rows))
    run.clock.mark("other")
    spent, tokens = run.clock.take(), {**finished.tokens, "optimize": result.tokens}
    row = {**after.counters(), **finished.row, **spent.figures(tokens),
           "memory/peak_mib": task.backend.peak_memory_mib()}
    if task.passes.reduced:
        row |= task.passes.figures()
    commit(run, replace(after.book(spent, tokens), pending=row))
    run.intact = True


def settle(run: Run) -> None:
    """Commit that nothing of the newest step is pending any more."""
    run.task.on_step_end(run.state)
    commit(run, replace(run.state, pending=None))


def commit(run: Run, state: TrainState) -> None:
    """Commit a state: a stop saves it, and work after it is repeated on resume."""
    run.state = replace(state, generators=Generators.now(run.task.backend.device))


def _dump(run: Run, batch: Any, step: int) -> str | None:
    """Save the samples on which the run diverged, for finding the cause; returns the folder."""
    target, task = run.folder.nonfinite_dump / f"step-{step:06d}", run.task

    def write(folder: Path) -> None:
        with run_logs.JsonlWriter(folder / "samples.jsonl") as lines:
            lines.append(task.sample_rows(batch, step))

    try:
        if task.backend.ranks.first:
            atomic.publish_folder(write, target)
    except DiskError as error:
        log.error("%s", error)
        return None
    return str(target)


def finish_step(run: Run) -> None:
    """Evaluate if it is time, write the step's row, save if it is time."""
    step, task, cfg = run.state.step, run.task, run.task.cfg
    if (row := run.state.pending) is None:
        return
    improved, is_last = False, run.state.episodes >= task.length.total_samples
    if step == 0 or is_last or _due(cfg.eval.every_steps, step):
        run.clock.mark("between")
        row, improved = _evaluate(run, row)

    def record() -> None:
        check_place(run)
        run.recorder.row(row)

    task.backend.ranks.first_does(record)  # what the disk refuses rank 0 must stop all in step
    run.display.step(row, task.length.total_steps)
    settle(run)
    if step > 0 and (improved or is_last or _due(cfg.checkpoint.every_steps, step)
                     or (cfg.checkpoint.every_minutes is not None and _is_overdue(run))
                     or task.resume.kept_step(run.state) == step):
        run.clock.mark("between")
        save(run)
        run.clock.mark("saving")


def _is_overdue(run: Run) -> bool:
    """Whether the last checkpoint is too old by the clock of rank 0: those of ranks differ."""
    minutes = run.task.cfg.checkpoint.every_minutes or 0.0
    return run.task.backend.ranks.broadcast(monotonic() - run.saved_at >= 60 * minutes)


def _due(every: int | None, step: int) -> bool:
    return every is not None and step > 0 and step % every == 0


def _evaluate(run: Run, row: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The row with evaluation figures, and whether this is a best to keep. Commits the state."""
    task, step = run.task, run.state.step
    run.enter("evaluation", f"evaluation after step {step}")
    evaluation = task.evaluate(context_of(task, step, run.stop, run.clock))
    run.clock.mark("eval")
    spent = run.clock.take()
    state = run.state.book(spent, {"eval": evaluation.tokens})
    task.backend.ranks.first_does(lambda: run.recorder.evaluated(step, evaluation))
    if step == 0:
        state = replace(state, eval_before=evaluation.figures)
    metric = task.cfg.checkpoint.metric
    if evaluation.figures and metric not in evaluation.figures:
        raise ConfigError(f"checkpoint.metric={metric} is not among the evaluation's figures: "
                          f"{', '.join(evaluation.figures)}.", where="checkpoint.metric",
                          fix="name one of them")
    figure = evaluation.figures.get(metric)
    improved = step > 0 and _better(figure, state.best, lowest=metric in task.lower_is_better)
    if improved and figure is not None:
        state = replace(state, best=Best(step, figure))
    run.state = replace(state, eval_last=evaluation.figures, eval_step=step)
    row = {**row, **{f"eval/{name}": value for name, value in evaluation.figures.items()},
           "time/eval": spent.seconds["eval"], "cpu/eval": spent.cpu_seconds["eval"]}
    return row, improved and task.cfg.checkpoint.keep_best


def _better(figure: float | None, best: Best | None, *, lowest: bool) -> bool:
    """Whether a finite figure exceeds the best so far, or falls below it."""
    if figure is None or not math.isfinite(figure):
        return False
    return best is None or (figure < best.metric if lowest else figure > best.metric)


def save(run: Run) -> None:
    """Save the committed state as a checkpoint, then prune. A failed prune is a warning.

    Raises:
        DiskError: the disk is full; older checkpoints are untouched.
    """
    task, state = run.task, run.state
    task.backend.ranks.first_does(lambda: check_place(run))
    run.enter("saving", f"saving step {state.step}")
    saved = run_logs.finite_or_null(state.to_json())

    def put(write: Callable[[Path], None]) -> None:
        checkpoints.save_checkpoint(run.folder.checkpoints, state.step, run_id=run.run_id,
                                    write=write, state=saved, config_digest=run.config_digest,
                                    versions=run.versions | backend.made_on(task.backend))

    checkpoint_writing.save_together(task, state, put)
    if task.backend.ranks.first:
        keep_checkpoints(task, run.folder, state)
    run.saved_at = monotonic()


def check_place(run: Run) -> None:
    """Raise a RunGoneError unless the run's folder is still where it was."""
    with suppress(OSError):
        if os.path.samestat(run.place, run.folder.path.stat()):
            return
    raise run_folder.gone(run.folder.path)


@contextmanager
def naming_lost_place(run: Run) -> Iterator[None]:
    """Where the run's folder is gone, say so in place of what came of that."""
    try:
        yield
    except Exception:
        check_place(run)
        raise


def keep_checkpoints(task: Task, run: run_folder.RunFolder, state: TrainState) -> None:
    """Of what is saved, prune what needn't stay, and let the links for people show where the run
    stands."""
    folder, cfg = run.checkpoints, task.cfg.checkpoint
    best = state.best.step if state.best and cfg.keep_best else None
    for complaint in [*retention.prune(folder, cfg.keep_last, best, task.resume.kept_step(state),
                                       newest=state.step),
                      *retention.update_pointers(folder, latest=state.step, best=best)]:
        log.warning(complaint)
