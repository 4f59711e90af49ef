"""From a checked configuration to a running job: the run folder, and the process that fills it.

The only place that decides where a run lies and names the command of a worker process.
"""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppocli.config.changes import classify_change, config_differences
from ppocli.config.deepspeed import deepspeed_config
from ppocli.config.problems import shown
from ppocli.config.resolved import (
    CONFIG_FILE,
    NEXT_CONFIG_FILE,
    PYTHON_OBJECT,
    next_config,
    read_config,
    with_absolute_paths,
    write_config,
)
from ppocli.config.schema import HardwareConfig, TrainConfig
from ppocli.errors import CheckpointError, ConfigError, InputError
from ppocli.launching.adopted_ranks import start_of
from ppocli.launching.child_process import run_process
from ppocli.launching.preflight import check_inputs
from ppocli.parallel.launchers import find_launch
from ppocli.parallel.rank_outcomes import NODE_FAILED
from ppocli.storage.atomic import disk_errors, read_json
from ppocli.storage.run_folder import probe_writable, reserved

if TYPE_CHECKING:
    from ppocli.display.console import DisplayMode
    from ppocli.launching.adopted_ranks import Meeting
    from ppocli.train.task import PythonObjects

log = logging.getLogger("ppocli")

# a run that left no more than these made nothing worth keeping
_TRACES = frozenset({CONFIG_FILE, ".lock", "ppocli.log", NODE_FAILED})


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """What came of a run. ``model_dir`` and ``summary`` are None where the run didn't get there;
    ``stopped_by`` is the signal that this process got, and handed on, while it waited."""

    run_dir: Path
    exit_code: int
    model_dir: Path | None
    summary: dict[str, Any] | None
    stopped_by: int | None = None


def launch(config: TrainConfig, *, fresh_process: bool = False,
           objects: PythonObjects | None = None, resume_from: Path | None = None,
           name_hint: str = "run", say: Callable[[str], None] = log.info,
           display: DisplayMode = "auto", meeting: Meeting | None = None,
           own_process: bool = False) -> RunOutcome:
    """Run one configuration to its end.

    Args:
        config: checked values; ``output_dir``, ``run_name`` and ``resume`` decide the folder.
        fresh_process: run in a clean Python process, whose exit code is the outcome's, instead of
            in this one.
        objects: Python objects in place of config keys; this process only.
        resume_from: the folder of the run to go on with.
        name_hint: what a run without ``run_name`` is called, before its time stamp.
        say: where notes for the user go.
        display: what a person is shown of the run.
        meeting: where the ranks that a launcher has started meet, of which this is the first.
        own_process: this process was started for the run, whose time is counted from there on.

    Raises:
        ConfigError: a launcher has started this process among others, and there is no meeting.
        CheckpointError: the folder is in use or holds another run, or a changed key forbids to
            resume.
        DiskError: the folder can't be written.
        PpocliError: whatever ends a run in this process.
    """
    if fresh_process and objects is not None:
        raise ValueError("Python objects can't be handed to a fresh process")
    if meeting is None:
        _refuse_ranks()
    config = noting_objects(with_absolute_paths(config, Path.cwd()), objects)
    if config.hardware.node_rank > 0:
        return _join(config, resume_from, say, display)
    with open_folder(config, objects=objects, resume_from=resume_from, name_hint=name_hint,
                     say=say) as (run_dir, resume):
        return _run(run_dir, resume, fresh_process, objects, display, meeting, own_process)


@contextmanager
def open_folder(config: TrainConfig, *, objects: PythonObjects | None = None,
                resume_from: Path | None = None, name_hint: str = "run",
                say: Callable[[str], None] = log.info) -> Iterator[tuple[Path, bool]]:
    """The folder of a run, with its configuration in it, and whether a run in it is resumed.

    Args:
        config: with absolute paths; the rest as for :func:`launch`.

    Raises:
        CheckpointError, DiskError: as :func:`launch`.
        InputError: something that the configuration names is missing.
    """
    run_dir = resume_from.absolute() if resume_from else _run_to_go_on_with(config, say)
    if run_dir is not None:
        # an explicit folder must hold a checkpoint; "auto" may have been killed before its first
        config = replace(config, run_name=run_dir.name, output_dir=str(run_dir.parent),
                         resume="never" if resume_from else "auto")
        _check_resumed(run_dir, config, objects, say)
        # loading takes seconds, in which nobody else may delete or resume what is here
        with reserved(run_dir):
            try:
                with disk_errors(run_dir / NEXT_CONFIG_FILE):
                    write_config(config, run_dir / NEXT_CONFIG_FILE)
                say(f"{run_dir}: loading {config.model.path}")
                yield run_dir, True
            finally:
                # still there only if the run did not go on: its own configuration stays as it was
                (run_dir / NEXT_CONFIG_FILE).unlink(missing_ok=True)
        return
    check_inputs(config)
    check_deepspeed(config)
    base = Path(config.output_dir)
    new_parents = [folder for folder in (base, *base.parents) if not folder.exists()]
    with _removed_if_empty(new_parents):
        run_dir = _fresh_folder(config, name_hint)
        with _removed_if_nothing_came(run_dir):
            settled = replace(config, run_name=run_dir.name, output_dir=str(run_dir.parent))
            with disk_errors(run_dir / CONFIG_FILE):
                write_config(settled, run_dir / CONFIG_FILE)
            # the libraries alone take seconds to load
            say(f"{run_dir}: loading {config.model.path}")
            yield run_dir, False


def _join(config: TrainConfig, resume_from: Path | None, say: Callable[[str], None],
          display: DisplayMode) -> RunOutcome:
    """Take part in a run whose folder, which all nodes share, node 0 makes and watches over.

    Raises:
        InputError: there is no such folder within ``hardware.timeout_seconds``.
    """
    run_dir = resume_from or Path(config.output_dir) / str(config.run_name)
    deadline = time.monotonic() + config.hardware.timeout_seconds
    say(f"node {config.hardware.node_rank}: waiting for node 0 in {run_dir}")
    while not (run_dir / CONFIG_FILE).is_file():
        if time.monotonic() > deadline:
            raise InputError(f"Node 0 has not made {run_dir} within "
                             f"{config.hardware.timeout_seconds} seconds.", where=str(run_dir),
                             fix="start the same command with hardware.node_rank=0 on node 0; "
                             "output_dir must lie on a file system that all nodes share")
        time.sleep(0.2)
    resume = resume_from is not None or config.resume == "auto"
    return _start(run_dir, "ppocli.launching.elastic", resume, display,
                  [f"--node-rank={config.hardware.node_rank}"])


def follow(meeting: Meeting) -> None:
    """Take part, as another rank than 0, in the run that rank 0 tells of at the meeting.

    Raises:
        PpocliError: whatever ended the run.
        SystemExit: with the exit code of ranks that were started here, on a node of its own.
    """
    start = meeting.wait()
    if start is None:
        return
    if not start.as_nodes:
        _work(Path(start.run_dir), None, start.resume, "quiet", joined=True, own_process=True)
        return
    done = _start(Path(start.run_dir), "ppocli.launching.elastic", start.resume, start.display,
                  [f"--node-rank={meeting.launched.rank}"])
    if done.exit_code:
        raise SystemExit(done.exit_code)


def _refuse_ranks() -> None:
    launched = find_launch(os.environ)
    if launched is not None and launched.world > 1:
        raise ConfigError(
            f"{launched.by} has started {launched.world} processes, and this starts its own.",
            where="WORLD_SIZE or srun's number of tasks",
            fix="start one process, with hardware.num_processes; or use the command, which takes "
                "its place among them: torchrun ... -m ppocli train ...")


def _start(run_dir: Path, module: str, resume: bool, display: DisplayMode,
           words: list[str]) -> RunOutcome:
    """Run a module of ours on a run's folder, in a process of its own."""
    command = [sys.executable, "-m", module, str(run_dir), f"--display={display}", *words]
    code, stopped_by = run_process(command + ["--resume"] * resume, lifeline=True)
    model = run_dir / "model"
    return RunOutcome(run_dir, code, model if code == 0 and model.is_dir() else None,
                      _read_summary(run_dir), stopped_by)


def check_deepspeed(config: TrainConfig) -> None:
    """Contradictions between settings and a DeepSpeed file, told before any process starts.

    Raises:
        ConfigError: the file can't be read or says something else than a setting.
    """
    if config.hardware.zero_stage > 0:
        deepspeed_config(config)


def noting_objects(config: TrainConfig, objects: PythonObjects | None) -> TrainConfig:
    """A copy that notes ``<python object>`` at the keys whose place a Python object takes."""
    if objects is None:
        return config
    reward, prompts = config.reward, config.prompts
    if objects.reward_fn is not None:
        # arguments of the reward that is replaced are not for the function that replaces it
        own = reward.fn in (None, PYTHON_OBJECT) and not reward.fns
        reward = replace(reward, fn=PYTHON_OBJECT, fns={}, kwargs=reward.kwargs if own else {})
    if objects.metric_fn is not None:
        reward = replace(reward, metric_fn=PYTHON_OBJECT)
    if objects.prompts is not None:
        prompts = replace(prompts, path=PYTHON_OBJECT, items=None)
    if objects.eval_prompts is not None:
        prompts = replace(prompts, eval=replace(prompts.eval, path=PYTHON_OBJECT, items=None))
    return replace(config, reward=reward, prompts=prompts)


def _run_to_go_on_with(config: TrainConfig, say: Callable[[str], None]) -> Path | None:
    """The folder that ``resume=auto`` finds, or None for a fresh run."""
    if config.resume == "never":
        return None
    if config.resume != "auto" or config.run_name is None:
        raise ConfigError(f"resume: {shown(config.resume)} must be never or auto, with run_name",
                          fix="a run folder goes into resume_from")
    run_dir = Path(config.output_dir) / config.run_name
    if (run_dir / CONFIG_FILE).is_file():
        return run_dir
    say(f"resume=auto: there is no run in {run_dir} yet, starting afresh")
    return None


def _fresh_folder(config: TrainConfig, name_hint: str) -> Path:
    """Make the run's folder for this run alone and check that it can be written."""
    base = Path(config.output_dir)
    probe_writable(base)
    if config.run_name is not None:
        run_dir = base / config.run_name
        if not _made(run_dir) and not (run_dir.is_dir() and not any(run_dir.iterdir())):
            if not run_dir.is_dir():
                probe_writable(run_dir)  # raises: it is a file
            raise CheckpointError(
                f"{run_dir} exists already and isn't empty; nothing is overwritten",
                where=f"run_name={config.run_name}",
                fix=f"go on with that run: ppocli resume {run_dir}; or choose another run_name")
    else:
        stamp = f"{name_hint}-{datetime.now():%Y%m%d-%H%M%S}"
        run_dir = next(folder for number in itertools.count(1)
                       if _made(folder := base / (stamp if number == 1 else f"{stamp}-{number}")))
    probe_writable(run_dir)
    return run_dir


def _made(folder: Path) -> bool:
    """Make a folder that nobody else has; False if there is one."""
    with disk_errors(folder):
        try:
            folder.mkdir()
        except FileExistsError:
            return False
    return True


def changes_on_resume(run_dir: Path, config: TrainConfig, objects: PythonObjects | None = None
                      ) -> list[tuple[str, str]]:
    """(key, ``key: before -> after``) of what ``config`` changes in a run.

    Raises:
        CheckpointError: a changed key forbids to resume, or Python objects are missing.
    """
    old = read_config(run_dir / CONFIG_FILE)
    _ask_for_objects(config, objects, run_dir)
    changes = [(key, f"{key}: {shown(before)} -> {shown(after)}")
               for key, before, after in config_differences(old, config)]
    refused = [line for key, line in changes if classify_change(key) == "refused"]
    if refused:
        raise CheckpointError(
            "\n".join(["these settings can't change when a run is resumed:",
                       *(f"  {line}" for line in refused)]), where=str(run_dir),
            fix="leave them as they were, or start another run with them (another run_name)")
    return changes


def _check_resumed(run_dir: Path, config: TrainConfig, objects: PythonObjects | None,
                   say: Callable[[str], None]) -> None:
    """Compare with the run's own configuration, and refuse or list what changed."""
    changes = changes_on_resume(run_dir, config, objects)
    check_inputs(config)
    check_deepspeed(config)
    for key, line in changes:
        say(f"changed on resume: {line}" + ("" if classify_change(key) == "harmless" else
                                           " (from here on the run differs)"))
    probe_writable(run_dir)


def _ask_for_objects(config: TrainConfig, objects: PythonObjects | None, run_dir: Path) -> None:
    given = noting_objects(TrainConfig(), objects)
    wanted = {"reward_fn": (config.reward.fn, given.reward.fn),
              "metric_fn": (config.reward.metric_fn, given.reward.metric_fn),
              "prompts": (config.prompts.path, given.prompts.path),
              "eval_prompts": (config.prompts.eval.path, given.prompts.eval.path)}
    missing = [name for name, (noted, now) in wanted.items()
               if noted == PYTHON_OBJECT and now != PYTHON_OBJECT]
    if missing:
        raise CheckpointError(
            f"this run was started from Python with {', '.join(missing)}, which can't be read "
            "from its folder", where=str(run_dir),
            fix="resume it from Python: ppocli.train([\"resume=" + str(run_dir) + "\"], "
                + ", ".join(f"{name}=..." for name in missing) + ")")


@contextmanager
def _removed_if_empty(folders: list[Path]) -> Iterator[None]:
    """Remove folders that this run made and left empty, the innermost first."""
    try:
        yield
    finally:
        for folder in folders:
            with suppress(OSError):
                folder.rmdir()


@contextmanager
def _removed_if_nothing_came(run_dir: Path) -> Iterator[None]:
    """Remove a new run's folder again when the run ended before it made anything."""
    try:
        yield
    finally:
        names = {entry.name for entry in run_dir.iterdir()} if run_dir.is_dir() else set()
        if names <= _TRACES:
            shutil.rmtree(run_dir, ignore_errors=True)


def _run(run_dir: Path, resume: bool, fresh_process: bool,
         objects: PythonObjects | None, display: DisplayMode, meeting: Meeting | None,
         own_process: bool) -> RunOutcome:
    config = read_config(next_config(run_dir))
    several = needs_launcher(config.hardware)
    if meeting is not None:
        start = start_of(run_dir, resume, display, config, meeting.launched)
        meeting.tell(start)
        if not start.as_nodes:
            return _work(run_dir, objects, resume, display, joined=True, own_process=own_process)
    if several and objects is not None:
        raise ConfigError("Python objects can't be handed to several processes.",
                          where="hardware.num_processes, hardware.zero_stage",
                          fix="name the reward by an import path, the prompts by a file")
    if fresh_process or several:
        module = "ppocli.launching." + ("elastic" if several else "worker")
        return _start(run_dir, module, resume, display, [f"--reserved-by={os.getpid()}"] * resume)
    return _work(run_dir, objects, resume, display, own_process=own_process)


def _work(run_dir: Path, objects: PythonObjects | None, resume: bool, display: DisplayMode,
          joined: bool = False, own_process: bool = False) -> RunOutcome:
    """Run in this process, as one of a launcher's ranks if ``joined``."""
    # `python -m` has the current folder on its path, a console script hasn't
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    from ppocli.launching.worker import run_worker

    result = run_worker(run_dir, objects=objects, resume=resume, display=display,
                        reserved_by=os.getpid() if resume else None, joined=joined,
                        own_process=own_process)
    return RunOutcome(run_dir, 0, result.model_dir, result.summary)


def needs_launcher(hardware: HardwareConfig) -> bool:
    """Whether torch's elastic launcher has to start the run: several processes, or DeepSpeed, which
    wants to be one of several even if there is one."""
    return hardware.num_processes * hardware.num_nodes > 1 or hardware.zero_stage > 0


def _read_summary(run_dir: Path) -> dict[str, Any] | None:
    return read_json(run_dir / "summary.json")
