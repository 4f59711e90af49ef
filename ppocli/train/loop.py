"""The training loop: rollout, optimize, evaluate, save; and what a stop or a failure leaves behind.

A step is committed when its optimize phase ends: the state then carries the step's figures as
``pending`` until evaluation has been added and the metrics row is written, so that a stop at any
point resumes without losing or repeating a row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any

from ppocli.config.algorithm import kl_in
from ppocli.display.console import Display
from ppocli.errors import ConfigError, DiskError, DivergedError
from ppocli.parallel.backend import made_on
from ppocli.parallel.rank_outcomes import note_phase
from ppocli.parallel.stop import StopFlag
from ppocli.ppo.noise import ROLLOUT
from ppocli.rewards.check import check_invalid_share
from ppocli.storage.checkpoints import save_checkpoint
from ppocli.storage.publishing import publish_folder
from ppocli.storage.retention import prune, update_pointers
from ppocli.storage.run_folder import RunFolder, finite_or_null
from ppocli.tasks.ppo.digests import judge_digest, session_digests
from ppocli.tasks.ppo.evaluate import (
    Evaluation,
    better,
    evaluate,
    policy_is_finite,
    reference_responses,
)
from ppocli.tasks.ppo.experience import next_kl_coef, sequence_kl, to_experience, update_moments
from ppocli.tasks.ppo.health import watch
from ppocli.tasks.ppo.records import Best, Experience, Rollout, TrainState
from ppocli.tasks.ppo.rollout import collect_rollout
from ppocli.tasks.ppo.session import Session
from ppocli.train.background_saving import Saving
from ppocli.train.checkpoint_contents import write_contents
from ppocli.train.checkpoint_io import save_together, write_experience
from ppocli.train.clock import PhaseClock
from ppocli.train.metrics import (
    Recorder,
    optimize_figures,
    penalty_figures,
    rollout_figures,
    rollout_samples,
    speed_figures,
    state_figures,
)
from ppocli.train.optimize import optimize
from ppocli.train.random_state import Generators, capture

log = logging.getLogger("ppocli")


@dataclass(slots=True)
class Run:
    """One run in progress: its parts, its files, and the newest committed state."""

    session: Session
    folder: RunFolder
    run_id: str
    config_digest: str
    versions: dict[str, str]
    stop: StopFlag
    recorder: Recorder
    display: Display
    state: TrainState
    generators: Generators
    """of user code, when ``state`` was committed"""
    saved_at: float
    """monotonic time of the last checkpoint"""
    clock: PhaseClock
    """books all time since the run was started; each commit takes what it has"""
    intact: bool = True
    """false while the weights are between two steps and must not be saved"""
    saving: Saving = field(default_factory=Saving)
    """the checkpoint that is being written while training goes on"""
    ref_responses: list[str] | None = None
    """the reference's responses at every evaluation (``eval.ref_responses``), once they are made"""


def initial_state(session: Session) -> TrainState:
    """The state before the first step; the evaluation at the start, if any, is pending."""
    coef = session.cfg.ppo.init_kl_coef
    state = TrainState(kl_coef=coef, init_kl_coef=coef, digests=session_digests(session),
                       judged_by=judge_digest(session.cfg))
    if session.cfg.eval.at_start:
        state = replace(state, pending=state_figures(state))
    return state


def run_training(run: Run) -> TrainState:
    """Train until all episodes are drawn; returns the final state.

    Raises:
        StopRequested: at a safe point; ``run.state`` and ``run.intact`` say what can be saved.
        PpocliError: reward, divergence, disk.
    """
    session = run.session
    run.display.start(run.state.step, session.total_steps(), session.backend.memory_mib)
    run.clock.mark("startup")
    finish_step(run)
    while run.state.episodes < session.total_episodes():
        run.stop.meet()
        run.saving.meet()
        train_step(run)
        finish_step(run)
    return run.state


def train_step(run: Run) -> None:
    """One rollout and its optimize phase; commits the new state."""
    session, state = run.session, run.state
    count = min(session.cfg.ppo.num_rollouts, session.total_episodes() - state.episodes)
    run.clock.mark("between")
    note_phase(f"step {state.step + 1}, rollout")
    run.display.phase("rollout", ("chunk", 1, -(-count // session.chunk_size)))
    prompts = session.next_prompts(state.episodes, count)
    run.clock.mark("other")
    learn(run, collect_rollout(session, prompts, ROLLOUT, run.stop, run.clock))


def learn(run: Run, rollout: Rollout) -> None:
    """The optimize phase on a scored rollout; commits the new state, whose row is pending.

    Raises:
        RewardError: too few samples have a valid score.
        DivergedError: the policy stopped being finite.
    """
    session, state = run.session, run.state
    _show_samples(run, rollout)
    check_invalid_share(int((~rollout.valid).sum()), len(rollout))
    scored = update_moments(state, rollout, session.cfg)
    experience = to_experience(rollout, scored, session.cfg)
    run.clock.mark("other")
    run.intact = False
    note_phase(f"step {state.step + 1}, optimize")
    try:
        result = optimize(session, experience, scored, run.stop, lambda done, total: _tell_updates(
            run, done, total))
        if not policy_is_finite(session):
            raise DivergedError(f"The policy's weights became non-finite in step {state.step + 1}.",
                                fix="lower ppo.optimizer.lr or raise ppo.init_kl_coef")
    except DivergedError as error:
        error.where = _dump(run, rollout, experience, state.step + 1)
        raise
    run.clock.mark("optimize")
    after = replace(scored, step=state.step + 1, episodes=state.episodes + len(rollout),
                    updates=state.updates + result.updates, nonfinite=result.nonfinite,
                    kl_coef=next_kl_coef(scored, rollout, session.cfg))
    tokens = {"rollout": int(rollout.response_mask.sum()), "optimize": result.tokens}
    after, messages = watch(session, rollout, after, sequence_kl(rollout))
    for message in messages:
        log.warning(message)
    ppo = session.cfg.ppo
    row = {**state_figures(after),
           **rollout_figures(rollout, state.kl_coef, in_reward=kl_in(ppo) == "reward"),
           **penalty_figures(rollout, session.cfg),
           **optimize_figures(result, experience, ppo),
           **session.fits.figures()}
    _log_rollout(run, rollout, after.step)
    run.clock.mark("other")
    spent = run.clock.take()
    row |= speed_figures(spent.in_step(), tokens, session.backend.peak_memory_mib())
    _commit(run, replace(after.book(spent, tokens), pending=row))
    run.intact = True


def _show_samples(run: Run, rollout: Rollout) -> None:
    shown = range(min(4, len(rollout)))
    run.display.samples([(rollout.prompts.texts[i], rollout.responses[i],
                          rollout.scores[i] if bool(rollout.valid[i]) else None) for i in shown],
                        run.state.step + 1)


def _tell_updates(run: Run, done: int, total: int) -> None:
    epochs = run.session.cfg.ppo.ppo_epochs
    run.display.phase("optimize", ("epoch", done * epochs // total + 1, epochs),
                      ("update", done + 1, total))


def _commit(run: Run, state: TrainState) -> None:
    """From here on a stop saves this state; work after it is done again on resume."""
    run.state = state
    run.generators = capture(run.session.backend.device)


def _dump(run: Run, rollout: Rollout, experience: Experience, step: int) -> str | None:
    """Keep what the policy diverged on, for whoever looks for the cause; says where."""
    target = run.folder.nonfinite_dump / f"step-{step:06d}"
    if not run.session.backend.ranks.first:
        return str(target)
    samples = rollout_samples(rollout, step, run.session.cfg)
    try:
        publish_folder(lambda folder: write_experience(folder, experience, samples), target)
    except DiskError as error:
        log.error("%s", error)
        return None
    return str(target)


def _log_rollout(run: Run, rollout: Rollout, step: int) -> None:
    if run.session.cfg.tracking.log_rollouts:
        rows = rollout_samples(rollout, step, run.session.cfg)
        run.session.backend.ranks.first_does(lambda: run.recorder.samples.append(rows))


def _is_last(run: Run) -> bool:
    return run.state.episodes >= run.session.total_episodes()


def _due(every: int | None, step: int) -> bool:
    return every is not None and step > 0 and step % every == 0


def finish_step(run: Run) -> None:
    """Evaluate if it is time, write the step's row, save if it is time."""
    row = run.state.pending
    if row is None:
        return
    step, cfg = run.state.step, run.session.cfg
    improved = False
    if step == 0 or _due(cfg.eval.every_steps, step) or _is_last(run):
        run.clock.mark("between")
        row, improved = _evaluate(run, row)
    # what the disk refuses rank 0 must stop all of them in step
    run.session.backend.ranks.first_does(lambda: run.recorder.row(row))
    run.display.step(row, run.session.total_steps())
    _commit(run, replace(run.state, pending=None))
    minutes = cfg.checkpoint.every_minutes
    overdue = minutes is not None and run.session.backend.ranks.broadcast(
        monotonic() - run.saved_at >= 60 * minutes)  # clocks of ranks differ
    if step > 0 and (improved or overdue or _due(cfg.checkpoint.every_steps, step)
                     or _is_last(run)):
        run.clock.mark("between")
        save(run, going_on=not _is_last(run))
        run.clock.mark("saving")


def _evaluate(run: Run, row: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The row with evaluation figures, and whether this is a best to keep. Commits the state."""
    note_phase(f"evaluation after step {run.state.step}")
    run.display.phase("evaluation")
    if run.session.cfg.eval.ref_responses and run.ref_responses is None:
        run.ref_responses = reference_responses(run.session, run.stop)
    found = evaluate(run.session, run.stop)
    run.clock.mark("eval")
    spent, step = run.clock.take(), run.state.step
    state = run.state.book(spent, {"eval": found.tokens})
    run.session.backend.ranks.first_does(lambda: _record_samples(run, step, found))
    if step == 0:
        state = replace(state, eval_before=found.figures)
    metric = run.session.cfg.checkpoint.metric
    if metric not in found.figures:
        raise ConfigError(f"checkpoint.metric={metric} is not among the evaluation's figures: "
                          f"{', '.join(found.figures)}.", where="checkpoint.metric",
                          fix="name one of them")
    figure = found.figures[metric]
    improved = step > 0 and better(figure, state.best.metric if state.best else None)
    if improved:
        state = replace(state, best=Best(step, figure))
    run.state = replace(state, eval_last=found.figures, eval_step=step)
    row = {**row, **{f"eval/{name}": value for name, value in found.figures.items()},
           **{f"eval/{name}@{sampling}": value for sampling, figures in found.swept.items()
              for name, value in figures.items()},
           "time/eval": spent.seconds["eval"], "cpu/eval": spent.cpu_seconds["eval"]}
    return row, improved and run.session.cfg.checkpoint.keep_best


def _record_samples(run: Run, step: int, found: Evaluation) -> None:
    """An evaluation's samples, with the reference's responses beside them where they are kept."""
    samples = found.samples
    if run.ref_responses is not None:
        samples = [{**sample, "ref_response": text}
                   for sample, text in zip(samples, run.ref_responses, strict=True)]
    run.recorder.evaluated(step, samples)
    if found.swept_samples:
        run.recorder.swept(step, found.swept_samples)


def save(run: Run, *, going_on: bool = False) -> None:
    """Save the committed state as a checkpoint, then prune. A failed prune is a warning.

    Args:
        going_on: training goes on: where there is room for a copy the checkpoint is only begun, to
            be written meanwhile. Otherwise it is there when this returns.

    Raises:
        DiskError: the disk is full, or was when the checkpoint before was written; older
            checkpoints are untouched.
    """
    run.saving.wait()
    session, state = run.session, run.state
    note_phase(f"saving step {state.step}")
    run.display.phase("saving")
    saved = finite_or_null(state.to_json())

    def put(write: Callable[[Path], None]) -> None:
        save_checkpoint(run.folder.checkpoints, state.step, run_id=run.run_id, write=write,
                        state=saved, config_digest=run.config_digest,
                        versions=run.versions | made_on(session.backend))

    contents = (run.saving.copy(session, run.generators, run.folder.checkpoints) if going_on
                else None)
    if contents is None:
        save_together(session, run.generators, put)
        _tidy(run, state)
    else:
        copied = contents

        def write() -> None:
            put(lambda folder: write_contents(session, copied, folder))
            _tidy(run, state)

        run.saving.begin(write)
    run.saved_at = monotonic()


def _tidy(run: Run, saved: TrainState) -> None:
    """What follows a checkpoint that is on the disk: older ones are pruned, then links moved."""
    cfg = run.session.cfg.checkpoint
    if not run.session.backend.ranks.first:
        return
    best = saved.best.step if saved.best and cfg.keep_best else None
    pruned = prune(run.folder.checkpoints, cfg.keep_last, best)
    complaints = list(pruned.warnings)
    complaints += update_pointers(run.folder.checkpoints, latest=saved.step, best=best)
    for complaint in complaints:
        log.warning(complaint)
