"""From a checked configuration to the end of its run: the folder, then the processes. Read this
first.

    words ─ read_words ─► Words ─ compose ─► Composed ─ check ─► Checked        ppocli/config
    Checked ─ open_folder ─► Start ─ run_processes ─► RunOutcome                here
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ppocli.config import config_yaml, schema
from ppocli.config.import_guard import join_working_directory
from ppocli.distributed.launchers import find_launch
from ppocli.distributed.torch_settings import default_modes
from ppocli.errors import ConfigError, InputError
from ppocli.launch import external_launch, local_ranks, open_run_folder, target_config
from ppocli.launch.start import RunOutcome, Start

if TYPE_CHECKING:
    from ppocli.config.compose import Checked
    from ppocli.publish.console import DisplayMode
    from ppocli.training.task import PythonObjects

log = logging.getLogger("ppocli")


@dataclass(frozen=True, slots=True)
class Caller:
    """How a run is started, and the objects that the caller hands over."""

    process: Literal["shared", "own", "fresh"] = "shared"
    """where a single process trains: in this one, which goes on afterwards; in this one, which was
    started for the run, so that its time counts from there; in a new one"""
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
    if checked.config.hardware.node_rank > 0:
        return _join_node(checked, caller)
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
        return (local_ranks.run_child(start) if caller.process == "fresh"
                else run_here(start, caller))
    if caller.objects is not None:
        raise ConfigError("Python objects can't be handed to several processes.",
                          where="hardware.num_processes, hardware.zero_stage",
                          fix="name the reward by an import path, the prompts by a file")
    return local_ranks.run_ranks(start, hardware)


def _join_node(checked: Checked, caller: Caller) -> RunOutcome:
    """Take part in a run whose folder, shared by all nodes, is made by node 0.

    Raises:
        InputError: there is no such folder within ``hardware.timeout_seconds``.
    """
    limited = target_config.allow_code(checked)
    config = config_yaml.with_absolute_paths(checked.config)
    hardware = config.hardware
    run_dir = checked.resume_from or Path(config.output_dir) / str(config.run_name)
    deadline = time.monotonic() + hardware.timeout_seconds
    caller.say(f"node {hardware.node_rank}: waiting for node 0 in {run_dir}")
    while not (run_dir / config_yaml.CONFIG_FILE).is_file():
        if time.monotonic() > deadline:
            raise InputError(f"Node 0 has not made {run_dir} within {hardware.timeout_seconds} "
                             "seconds.", where=str(run_dir),
                             fix="start the same command with hardware.node_rank=0 on node 0; "
                             "output_dir must lie on a file system that all nodes share")
        time.sleep(0.2)
    resume = checked.resume_from is not None or config.resume == "auto"
    return local_ranks.run_ranks(
        Start(run_dir, config, resume, caller.display, limited=limited), hardware)


def run_here(start: Start, caller: Caller) -> RunOutcome:
    """Run in this process, perhaps as one of the ranks that a launcher has started.

    Raises:
        PpocliError: whatever ended the run.
    """
    join_working_directory()
    from ppocli.launch.worker import run_worker

    with default_modes():
        return run_worker(start, objects=caller.objects, own_process=caller.process == "own",
                          store=caller.store)
