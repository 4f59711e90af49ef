"""From a checked configuration to the end of its run: the folder, then the processes. Read this
first.

    words ─ read_words ─► Words ─ compose ─► Composed ─ check ─► Checked        ppocli/config
    Checked ─ open_folder ─► Start ─ run_processes ─► RunOutcome                here
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ppocli.config import schema
from ppocli.config.import_guard import join_working_directory
from ppocli.distributed.launchers import find_launch
from ppocli.distributed.torch_settings import default_modes
from ppocli.errors import ConfigError
from ppocli.launch import external_launch, local_ranks, open_run_folder
from ppocli.launch.local_ranks import RunOutcome, Start

if TYPE_CHECKING:
    from ppocli.config.compose import Checked
    from ppocli.training.console import DisplayMode
    from ppocli.training.task import PythonObjects

log = logging.getLogger("ppocli")


@dataclass(frozen=True, slots=True)
class Caller:
    """How a run is started, and the objects that the caller hands over."""

    own_process: bool = False
    """this process was started for the run, so that its time counts from there"""
    display: DisplayMode = "auto"
    """what the user sees of the run"""
    say: Callable[[str], None] = log.info
    """where notes for the user go"""
    objects: PythonObjects | None = None
    """Python objects in place of config keys; for this process only"""
    store: Any = None
    """of the launcher that has started this process as rank 0 of several"""


def launch(checked: Checked, caller: Caller = Caller()) -> RunOutcome:
    """Run one configuration to its end.

    Raises:
        ConfigError: a launcher has started several processes, and the caller doesn't take part; or
            Python objects are combined with several processes.
        CheckpointError, DiskError, InputError: as :func:`open_folder`.
        PpocliError: whatever ends a run.
    """
    launched = find_launch(os.environ)
    if caller.store is None and launched is not None and launched.world > 1:
        raise ConfigError(
            f"{launched.by} has started {launched.world} processes, and this starts its own.",
            where="WORLD_SIZE or srun's number of tasks",
            fix="start one process, with hardware.num_processes; or use the command, which takes "
                "its place among them: torchrun ... -m ppocli train ...")
    for note in checked.notes:
        caller.say(note)
    with open_run_folder.open_folder(checked, caller.objects, caller.say) as start:
        return _run_processes(replace(start, display=caller.display), caller)


def needs_launcher(hardware: schema.HardwareConfig) -> bool:
    """Whether torch's elastic agent has to start the run: for several processes, or for DeepSpeed,
    which expects a launcher even for one."""
    return hardware.num_processes * hardware.num_nodes > 1 or hardware.zero_stage > 0


def _run_processes(start: Start, caller: Caller) -> RunOutcome:
    """Run the run in a folder to its end. The only place that decides in which processes."""
    hardware = start.config.hardware
    if caller.store is not None:
        external_launch.publish_start(caller.store, replace(start, reserved_by=None))
        return run_here(start, caller)
    if not needs_launcher(hardware):
        return run_here(start, caller)
    if hardware.num_nodes > 1:
        raise ConfigError(
            f"{hardware.num_nodes} machines need a launcher on each.", where="hardware.num_nodes",
            fix=f"torchrun --nnodes={hardware.num_nodes} --nproc-per-node={hardware.num_processes} "
            "--rdzv-backend=c10d --rdzv-endpoint=HOST:29400 -m ppocli train ... (or srun); on this "
            "machine alone: hardware.num_nodes=1")
    if caller.objects is not None:
        raise ConfigError("Python objects can't be handed to several processes.",
                          where="hardware.num_processes, hardware.zero_stage",
                          fix="name the reward by an import path, the prompts by a file")
    return local_ranks.run_ranks(start, hardware)


def run_here(start: Start, caller: Caller) -> RunOutcome:
    """Run in this process, perhaps as one of the ranks that a launcher has started.

    Raises:
        PpocliError: whatever ended the run.
    """
    join_working_directory()
    from ppocli.launch.worker import run_worker

    with default_modes():
        return run_worker(start, objects=caller.objects, own_process=caller.own_process,
                          store=caller.store)
