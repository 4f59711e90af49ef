"""Train in this process: build the task, resume, train, write checkpoints and the trained model.

``python -m ppocli.launch.worker RUN_DIR HOW`` is a process that :mod:`ppocli.launch.local_ranks`
has started; it reads the resolved ``config.yaml`` and never composes.
"""

import hashlib
import json
import logging
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from time import monotonic
from typing import Any

import torch

from ppocli.config import config_yaml, deepspeed, resume_policy, schema, tasks
from ppocli.config.import_guard import limit
from ppocli.distributed import host_memory, launchers
from ppocli.distributed.backend import Backend, open_ranks
from ppocli.distributed.ranks import (
    StopFlag,
    announce,
    my_phase,
    note_phase,
    outcome_of,
    report_to,
    write_outcome,
)
from ppocli.distributed.stop import catch_signals, leave_at_once, stop_when_orphaned
from ppocli.errors import CheckpointError, InputError
from ppocli.launch.exit_handling import publish, save_on_exit
from ppocli.launch.local_ranks import RunOutcome, Start
from ppocli.models.loading.tokenizer import present, tells_date
from ppocli.publish.live_view import open_display
from ppocli.publish.trackers import check_trackers, open_trackers
from ppocli.runs import atomic, environment, model_files, retention, run_folder
from ppocli.runs.record import accept_settings, begin_record, first_start, settle, whole
from ppocli.training import loop
from ppocli.training.console import Display, open_silence
from ppocli.training.state import (
    Generators,
    Moment,
    PhaseClock,
    TrainState,
    seed_generators,
    torch_versions,
)
from ppocli.training.task import PythonObjects, Task, TaskSetup

log = logging.getLogger("ppocli")

_MEETING = "meeting the other ranks"
"""the phase in which a rank waits for the others to arrive"""


def run_worker(start: Start, *, objects: PythonObjects | None = None, store: Any = None,
               own_process: bool = False) -> RunOutcome:
    """Train in this process.

    Args:
        objects: Python objects in place of config keys.
        store: of ranks that another launcher has started, as of :func:`open_ranks`. It may restart
            them, and forward a signal that the terminal sends as well.
        own_process: this process was started for the run: the run's time counts from there, and the
            process decides how memory is freed.

    Raises:
        PpocliError: with its exit code; checkpoints are kept, and the message says how to go on.
    """
    began = Moment.of_process_start() if own_process else Moment.now()
    if start.parent is not None:
        stop_when_orphaned(start.parent, lambda: _patience(start.config))
    folder, cfg = run_folder.RunFolder(start.run_dir.resolve()), start.config
    if own_process:
        host_memory.settle_freed_memory(sharded=cfg.hardware.zero_stage > 0)
    limit(start.limited)
    # a launcher forwards signals that its processes may have received already; at a job's time
    # limit Slurm sends one to all of them
    twice = store is not None or "SLURM_JOB_ID" in os.environ
    with _held(start, folder) as display, catch_signals(2.0 if twice else 0.0) as stop:
        announce()
        note_phase(_MEETING)
        model_files.quiet_transformers()
        with open_ranks(cfg, folder.path if start.resume else None, store) as backend:
            ranks = stop.ranks = backend.ranks
            if start.resume and (done := ranks.first_does(lambda: _already_finished(cfg, folder))):
                return done
            with _open_run(start, folder, objects, backend, stop, display, began) as run:
                with save_on_exit(run):
                    loop.run_training(run)
                    note_phase("writing the model")
                return publish(run)


@contextmanager
def run_for_loop(start: Start, objects: PythonObjects, store: Any = None) -> Iterator[loop.Run]:
    """A run in this process that is ready for the next step of a user's own loop.

    Args:
        store: as of :func:`open_ranks`.
    """
    began, stop = Moment.now(), StopFlag()
    folder, cfg = run_folder.RunFolder(start.run_dir.resolve()), start.config
    limit(start.limited)
    model_files.quiet_transformers()
    with _held(replace(start, display="quiet"), folder) as display, \
            open_ranks(cfg, folder.path if start.resume else None, store) as backend, \
            _open_run(start, folder, objects, backend, stop, display, began) as run:
        stop.ranks = backend.ranks
        run.state = replace(run.state, pending=None)  # the loop itself evaluates at the start
        run.clock.mark("startup")
        yield run


@contextmanager
def _held(start: Start, folder: run_folder.RunFolder) -> Iterator[Display]:
    """Hold the run's folder and yield its display; ranks other than 0 hold nothing and show
    nothing."""
    if launchers.my_rank() > 0:
        with open_silence() as shown:
            yield shown
    else:
        run_folder.refuse_links(folder.path)
        with run_folder.lock(folder.path, reserved_by=start.reserved_by), \
                open_display(folder.log, start.display, start.parent) as shown:
            try:
                yield shown
            except FileNotFoundError as error:
                if str(error.filename).startswith(str(folder.path)):
                    raise run_folder.gone(folder.path) from error
                raise


@contextmanager
def _open_run(start: Start, folder: run_folder.RunFolder, objects: PythonObjects | None,
              backend: Backend, stop: StopFlag, display: Display, began: Moment
              ) -> Iterator[loop.Run]:
    """A run that is ready for its next step: everything is loaded, its files are open.

    Args:
        began: the moment from which its time counts.

    Raises:
        PpocliError: something can't be loaded, or the checkpoint does not fit.
    """
    task, state, run_id = _load(start, folder, objects, backend)
    digest = hashlib.sha256(folder.config.read_bytes()).hexdigest()
    with ExitStack() as ending:
        recorder: Any = None
        if backend.ranks.first:
            _describe(task, folder)
            trackers = ending.enter_context(open_trackers(task.cfg.tracking, folder))
            recorder = ending.enter_context(loop.open_recorder(folder, trackers))
        state = replace(state, generators=Generators.now(backend.device))
        run = loop.Run(task, folder, folder.path.stat(), run_id, digest, torch_versions(), stop,
                       recorder, display, state, saved_at=monotonic(),
                       clock=PhaseClock(backend.device, began))
        for close in (task.trained.close, task.close):  # the last is first
            ending.callback(close)
        yield run


def _load(start: Start, folder: run_folder.RunFolder, objects: PythonObjects | None,
          backend: Backend) -> tuple[Task, TrainState, str]:
    """The task, its state at the start or at the newest checkpoint, and the run's identity."""
    from ppocli.training.resume import restore
    from ppocli.training.task import build_task, check_own_classes

    cfg, ranks = start.config, backend.ranks
    # rewards use these generators: ranks must not share a seed
    seed_generators(cfg.seed + ranks.rank)
    note_phase("loading")
    ranks.first_does(lambda: check_trackers(cfg.tracking))
    ranks.first_does(lambda: check_own_classes(cfg))
    date = cfg.model.chat_template_date or ranks.first_does(
        lambda: (first_start(folder.path) if start.resume else None) or present())
    dated = {"model.chat_template_date": date}
    task = build_task(TaskSetup(config_yaml.with_values(cfg, dated), backend,
                                objects or PythonObjects()))
    state = fresh = loop.initial_state(task)
    run_id = ranks.first_does(lambda: _run_id(folder))
    if start.resume:
        state = restore(task, folder, run_id, fresh)
        since = None if state is fresh else state.step
        ranks.first_does(lambda: accept_settings(folder.path, since))
    # how rewards are called and prompts are rendered, so that a resumed run does the same
    settled = replace(cfg, reward=task.cfg.reward, prompts=task.cfg.prompts)
    if cfg.model.chat_template_date is None and any(
            map(tells_date, (task.saved.tokenizer, *task.judging))):
        settled = config_yaml.with_values(settled, dated)
    if settled != cfg:
        ranks.first_does(lambda: settle(folder.path, settled))
    return task, state, run_id


def _describe(task: Task, folder: run_folder.RunFolder) -> None:
    """Write what the run computes on, and DeepSpeed's configuration."""
    backend, cfg = task.backend, task.cfg
    atomic.write_json_atomic(folder.path / environment.ENV_FILE, {
        "started": datetime.now(UTC).isoformat(timespec="seconds"), **environment.describe(),
        environment.PRODUCTS: backend.products,
        environment.THREADS: torch.get_num_threads() if backend.device.type == "cpu" else None,
        environment.LOWER: sorted(task.lower_is_better),
        **({} if task.examples is None else {environment.EXAMPLES: task.examples})})
    if cfg.hardware.zero_stage > 0:
        atomic.write_json_atomic(folder.path / deepspeed.DEEPSPEED_FILE,
                                 deepspeed.deepspeed_config(cfg, backend.ranks.world))


def _run_id(folder: run_folder.RunFolder) -> str:
    """The run's identity, made at its first start; checkpoints of other runs are refused."""
    path = folder.path / resume_policy.RUN_FILE
    if path.is_file():
        run_id = (atomic.read_json(path) or {}).get("run_id")
        if not isinstance(run_id, str):
            raise CheckpointError(f"{path} is damaged.", where=str(path),
                                  fix="restore it from a copy, or start a new run")
        return run_id
    if sound := retention.sound_steps(folder.checkpoints):
        log.warning("%s was gone; the run's identity is that of its checkpoints", path)
    run_id = sound[-1].run_id if sound else secrets.token_hex(8)
    begin_record(folder.path, run_id)
    return run_id


def _already_finished(cfg: schema.TrainConfig, folder: run_folder.RunFolder) -> RunOutcome | None:
    """The result of a run that is complete and whose model is whole; else None."""
    summary = atomic.read_json(folder.summary) or {}
    steps, target_steps = whole(summary, "steps"), tasks.steps_asked(cfg)
    planned = tasks.planned_samples(cfg, environment.examples_of(folder.path))
    # without a target for steps, samples count: steps may have been of another size
    done = (steps >= target_steps if target_steps is not None else
            planned is not None and whole(summary, "episodes") >= planned)
    if summary.get("status") != "finished" or steps <= 0 or not done:
        return None
    try:
        model_files.check_folder(folder.model, key="model", adapters=True)
    except InputError:
        return None
    log.info("already finished (%d/%d steps), nothing was changed: %s", steps, steps, folder.model)
    return RunOutcome(folder.path, folder.model, summary)


def _patience(cfg: schema.TrainConfig) -> float:
    """Seconds in which ranks stop together after their parent has ended; 0: any time. Ranks that
    haven't met never will: their parent held the store they meet at."""
    if launchers.launched_world() == 1:
        return 0.0
    return 5.0 if my_phase() == _MEETING else float(cfg.hardware.timeout_seconds)


def main(argv: list[str]) -> int:
    """Train with the arguments of a :class:`Start` and report the outcome to the parent process;
    return the exit code.

    A stop exits with 0: after a failure torch's agent would end ranks that are still saving.
    """
    report_to(json.loads(argv[1])["reports"])
    outcome = outcome_of(launchers.my_rank(), lambda: run_worker(
        Start.read(argv), own_process=True))
    write_outcome(replace(outcome, phase=my_phase()))
    return 0 if outcome.code > 128 else outcome.code


if __name__ == "__main__":
    result = main(sys.argv[1:])
    if "RANK" in os.environ:
        leave_at_once(result)
    sys.exit(result)
