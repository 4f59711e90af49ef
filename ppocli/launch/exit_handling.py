"""How a run ends, finished, stopped or failed: what is saved, written and printed."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ppocli import errors
from ppocli.config import resume_policy, secrets, tasks
from ppocli.config.text import pasted
from ppocli.distributed.launchers import my_rank
from ppocli.distributed.ranks import StopRequested, my_phase
from ppocli.launch.local_ranks import RunOutcome
from ppocli.publish.live_view import closing_table
from ppocli.runs import atomic, checkpoints, run_logs
from ppocli.runs.record import eval_samples
from ppocli.training import loop
from ppocli.training.state import in_words, of_training, profile

log = logging.getLogger("ppocli")


@contextmanager
def save_on_exit(run: loop.Run) -> Iterator[None]:
    """On a stop or an error inside the block, save the committed state and report where the run
    stands.

    Raises:
        PpocliError: what ended the run, with the step that was saved and how to go on.
    """
    import torch

    try:
        with loop.naming_lost_place(run):
            try:
                yield
            except errors.RewardError as error:
                if run.stop.requested is not None:
                    log.warning("%s", error)
                # several ranks can stop together only once none of them waits for a reward
                run.stop.meet()
                raise
    except errors.RunGoneError:
        raise
    except StopRequested as stop:
        where, resumable = _save_what_is_sound(run)
        write_summary_of(run, "stopped")
        raise errors.StoppedError(
            f"stopped by {stop} at step {run.state.step} of {run.task.length.total_steps}; "
            f"{where}",
            signal_number=stop.signal_number,
            fix=f"resume with: {_go_on(run)}" if resumable else f"start again: {_same(run)}; "
            "checkpoint.every_steps=1 or checkpoint.every_minutes=5 saves more often") from None
    except torch.OutOfMemoryError as error:  # outside of passes, which are repeated with fewer rows
        section = tasks.updates_section(run.task.cfg)
        rows = f"{section}.micro_batch_size"
        raise _failed(run, errors.OutOfMemoryError(
            "out of memory", alone=run.task.backend.ranks.world > 1,
            where=f"{rows}, ppo.chunk_size, reward.fn" if section == "ppo" else rows,
            fix=f"set smaller values, then: {_go_on(run)}")) from error
    except errors.PpocliError as error:
        raise _failed(run, error) from error
    except BaseException:
        write_summary_of(run, "failed", error="unexpected error")
        raise


def _failed(run: loop.Run, error: errors.PpocliError) -> errors.PpocliError:
    """The error with what is saved and how to go on; writes the summary.

    One of several ranks that runs out of memory can't save alone: saving takes all of them.
    """
    oom = error if isinstance(error, errors.OutOfMemoryError) else None
    alone = oom is not None and oom.alone
    where, resumable = _last_checkpoint(run) if alone or isinstance(error, errors.DivergedError) \
        else _save_what_is_sound(run)
    fix, what = error.fix, error.what
    if oom is not None and oom.retry:
        words = [f"{key}={value}" for key, value in oom.retry.items()]
        fix = (f"{_go_on(run, *words) if resumable else _same(run, *words)} "
               "(the result stays the same)")
    if alone:
        what = f"rank {my_rank()}, {my_phase()}: {what}"
    located = error.reworded(what=f"{what} ({where})", fix=fix)
    write_summary_of(run, "failed", error=str(error.reworded(what=what)))
    log.error(located.what, extra={"ends_run": True})
    return located


def _last_checkpoint(run: loop.Run) -> tuple[str, bool]:
    """A phrase about the newest checkpoint, and whether there is one."""
    latest = checkpoints.find_latest(run.folder.checkpoints, run_id=run.run_id,
                                     verify="size").checkpoint
    if latest is None:
        return "no checkpoint was saved yet", False
    return f"last healthy: step {latest.step} in {latest.path}", True


def _save_what_is_sound(run: loop.Run) -> tuple[str, bool]:
    """Save the committed state if the weights belong to it.

    Returns:
        a phrase about what is on the disk, and whether the run can be resumed from it.
    """
    run.clock.mark("other")  # the rest of the interrupted phase
    if run.task.backend.ranks.first:
        loop.check_place(run)
    if not run.intact:
        return _last_checkpoint(run)
    try:
        with run.stop.defer():
            loop.save(run)
        run.clock.mark("saving")
    except errors.PpocliError as error:
        log.error("%s", error)
        return _last_checkpoint(run)
    return f"saved step {run.state.step}", True


def _summary(run: loop.Run, status: str) -> dict[str, Any]:
    run.clock.mark("between")
    run.state = state = run.state.book(run.clock.take())
    speed = {name: state.tokens[name] / max(seconds, 1e-9)
             for name, seconds in state.seconds.items() if state.tokens.get(name)}
    best = None
    if state.best is not None:
        path = run.folder.checkpoints / f"step-{state.best.step:06d}"
        best = {**asdict(state.best), "name": run.task.cfg.checkpoint.metric,
                "path": str(path) if path.is_dir() else None}
    after = state.eval_last if state.eval_step == state.step and state.step > 0 else None
    return {
        "status": status, "run_id": run.run_id, "steps": state.step, "episodes": state.episodes,
        "updates": state.updates, "eval_before": state.eval_before, "eval_after": after,
        "best": best, **run.task.summary(state), "seconds": of_training(state.seconds),
        "tokens_per_second": speed,
        "profile": profile(state.seconds, state.cpu_seconds, state.tokens),
        "peak_memory_mib": run.task.backend.peak_memory_mib(), "versions": run.versions}


def write_summary_of(run: loop.Run, status: str, error: str | None = None) -> None:
    """Write ``summary.json``; a disk that refuses is only reported."""
    summary = _summary(run, status)
    if error is not None:
        summary["error"] = secrets.safe_text(error)
    if not run.task.backend.ranks.first:
        return
    try:
        atomic.write_json_atomic(run.folder.summary, run_logs.finite_or_null(summary))
    except errors.PpocliError as disk:
        log.error("%s", disk)


def publish(run: loop.Run) -> RunOutcome:
    """Write ``model/`` and the summary of a finished run, and show the results."""
    from ppocli.publish.card import write_card
    from ppocli.training.checkpoint_writing import whole_weights, within

    if closing := run.task.closing():
        run.clock.mark("eval")
    summary = _summary(run, "finished") | closing

    def write(folder: Path) -> None:
        run.task.saved.write(folder, within("lm", whole))
        write_card(folder, run.task.cfg, summary)

    def publish() -> None:
        loop.check_place(run)
        atomic.publish_folder(write, run.folder.model)
        run.clock.mark("saving")
        summary.update(_summary(run, "finished"))  # with the time that writing took
        atomic.write_json_atomic(run.folder.summary, run_logs.finite_or_null(summary))

    backend = run.task.backend
    with run.stop.defer(), whole_weights(run.task) as whole:
        backend.ranks.first_does(publish)
    if backend.ranks.first:
        _show(run)
    return RunOutcome(run.folder.path, run.folder.model, summary)


def _show(run: loop.Run) -> None:
    """Show the closing table of figures and samples before and after, and where files are."""
    first, after = eval_samples(run.folder, 0, run.state.step)
    before: list[Any] = first if len(first) == len(after) else [None] * len(after)
    chosen = list(zip(before, after, strict=True))[:4]
    if run.state.eval_last and run.state.eval_step == run.state.step:
        run.display.table(closing_table(run.state.eval_before, run.state.eval_last, chosen))
    log.info("time         %s", in_words(run.state.seconds, run.state.cpu_seconds))
    log.info("run folder   %s (metrics.jsonl, checkpoints/, model/)", run.folder.path)
    updates, section = tasks.updates_of(run.task.cfg), tasks.updates_section(run.task.cfg)
    more = next((name for name in ("total_episodes", "num_updates", "epochs")
                 if getattr(updates, name, None)), "num_steps" if section == "ppo" else "epochs")
    log.info("go on        %s", _go_on(run, f"{section}.{more}=N"))


def _same(run: loop.Run, *words: str) -> str:
    more = " ".join([*words, pasted(f"run_name={run.folder.path.name}")])
    return f"the same words with {more} resume=auto"


def _go_on(run: loop.Run, *words: str) -> str:
    return resume_policy.how_to_resume(run.task.cfg, run.folder.path, *words)
