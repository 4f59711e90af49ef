"""A run's folder and configuration to a run that is ready for its next step."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from time import monotonic

from ppocli.config.deepspeed import DEEPSPEED_FILE, deepspeed_config
from ppocli.config.schema import TrainConfig
from ppocli.display.console import Display, keep_log
from ppocli.errors import CheckpointError
from ppocli.parallel.backend import Backend
from ppocli.parallel.rank_outcomes import note_phase
from ppocli.parallel.stop import StopFlag
from ppocli.runs.record import RUN_FILE, accept_settings
from ppocli.storage.atomic import read_json, sha256_file, write_json_atomic
from ppocli.storage.environment import ENV_FILE, describe
from ppocli.storage.run_folder import RunFolder
from ppocli.tracking.trackers import check_trackers
from ppocli.training.clock import Moment, PhaseClock
from ppocli.training.loop import Run, initial_state
from ppocli.training.task import PythonObjects, TaskSetup

_PRODUCTS = "linear_layers"
"""key of env.json"""


@contextmanager
def open_run(cfg: TrainConfig, folder: RunFolder, objects: PythonObjects, backend: Backend,
             stop: StopFlag, display: Display, *, resume: bool, began: Moment) -> Iterator[Run]:
    """A run ready for its next step: everything loaded, its files open.

    Args:
        began: from when on its time is counted.

    Raises:
        PpocliError: something can't be loaded, or the checkpoint does not fit.
    """
    from ppocli.tasks.select import build_task
    from ppocli.training import random_state as generators
    from ppocli.training.recorder import open_recorder, silent_recorder, torch_versions
    from ppocli.training.resume import restore

    ranks = backend.ranks
    # rewards draw from these: ranks must not draw alike
    generators.seed(cfg.seed + ranks.rank)
    note_phase("loading")
    ranks.first_does(lambda: check_trackers(cfg.tracking))
    task = build_task(TaskSetup(cfg, backend, objects))
    state = fresh = initial_state(task)
    run_id = ranks.first_does(lambda: _run_id(folder))
    if resume:
        state = restore(task, folder, run_id, fresh)
        since = None if state is fresh else state.step
        ranks.first_does(lambda: accept_settings(folder.path, since))
    if ranks.first:
        keep_log()
        write_json_atomic(folder.path / ENV_FILE, {
            "started": datetime.now(UTC).isoformat(timespec="seconds"), **describe(),
            _PRODUCTS: "oneDNN" if backend.onednn else "torch"})
        if cfg.hardware.zero_stage > 0:
            write_json_atomic(folder.path / DEEPSPEED_FILE, deepspeed_config(cfg, ranks.world))
    digest = sha256_file(folder.config)
    with open_recorder(folder, cfg.tracking) if ranks.first else silent_recorder() as recorder:
        run = Run(task, folder, run_id, digest, torch_versions(), stop, recorder, display,
                  state, generators.capture(backend.device), saved_at=monotonic(),
                  clock=PhaseClock(backend.device, began, display.board.marked))
        try:
            yield run
        finally:
            try:
                run.saving.settle()
            finally:
                task.close()
                task.trained.close()


def noted_products(folder: RunFolder) -> bool | None:
    """Whether linear layers of a run that goes on multiplied through oneDNN; None where nothing
    says so."""
    noted = (read_json(folder.path / ENV_FILE) or {}).get(_PRODUCTS)
    return None if noted is None else noted == "oneDNN"


def _run_id(folder: RunFolder) -> str:
    """The run's identity, made at its first start; checkpoints of other runs are refused."""
    path = folder.path / RUN_FILE
    if path.is_file():
        run_id = (read_json(path) or {}).get("run_id")
        if run_id is None:
            raise CheckpointError(f"{path} is damaged.", where=str(path),
                                  fix="restore it from a copy, or start a new run")
        return str(run_id)
    run_id = secrets.token_hex(8)
    write_json_atomic(path, {"run_id": run_id})
    return run_id
