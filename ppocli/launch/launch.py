"""From a checked configuration to the end of its run: the folder, then the processes; or, for a
user's own loop, to a run that is ready for its next step. Read this first.

    words ─ read_words ─► Words ─ compose ─► Composed ─ check ─► Checked        ppocli/config
    Checked ─ open_folder ─► Start ─ run_processes ─► RunOutcome                here
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ppocli.config import algorithm, config_yaml, schema
from ppocli.config.import_guard import join_working_directory
from ppocli.distributed.launchers import find_launch, launched_world
from ppocli.distributed.torch_modes import own_modes
from ppocli.errors import ConfigError, InputError, PpocliError
from ppocli.launch import adopted_ranks, open_run_folder, target_config
from ppocli.launch.child_process import RunOutcome, Start, run_process
from ppocli.runs.atomic import read_json

if TYPE_CHECKING:
    from ppocli.config.compose import Checked
    from ppocli.publish.console import DisplayMode
    from ppocli.training.loop import Run
    from ppocli.training.task import PythonObjects

log = logging.getLogger("ppocli")


@dataclass(frozen=True, slots=True)
class Caller:
    """How a run is started, and the objects that the caller hands over."""

    process: Literal["shared", "own", "fresh"] = "shared"
    """where a single process trains: in this one, which goes on afterwards; in this one, which was
    started for the run, so that its time counts from there; in a new one"""
    display: DisplayMode = "auto"
    """what a person is shown of the run"""
    say: Callable[[str], None] = log.info
    """where notes for the user go"""
    objects: PythonObjects | None = None
    """Python objects in place of config keys; for this process only"""
    meeting: adopted_ranks.Meeting | None = None
    """where the ranks of a launcher meet; this process is the first of them"""


def launch(checked: Checked, caller: Caller = Caller()) -> RunOutcome:
    """Run one configuration to its end.

    Raises:
        ConfigError: a launcher has started several processes, and the caller doesn't take part; or
            Python objects are combined with several processes.
        CheckpointError, DiskError, InputError: as :func:`open_folder`.
        PpocliError: whatever ends a run in this process.
    """
    launched = find_launch(os.environ)
    if caller.meeting is None and launched is not None and launched.world > 1:
        raise ConfigError(
            f"{launched.by} has started {launched.world} processes, and this starts its own.",
            where="WORLD_SIZE or srun's number of tasks",
            fix="start one process, with hardware.num_processes; or use the command, which takes "
                "its place among them: torchrun ... -m ppocli train ...")
    for note in checked.notes:
        caller.say(note)
    hardware = checked.config.hardware
    if hardware.node_rank > 0:
        return join_node(checked, caller)
    with open_run_folder.open_folder(checked, caller.objects, caller.say) as start:
        return run_processes(replace(start, display=caller.display), hardware, caller)


def needs_launcher(hardware: schema.HardwareConfig) -> bool:
    """Whether torch's elastic launcher has to start the run: for several processes, or for
    DeepSpeed, which expects a launcher even for one."""
    return hardware.num_processes * hardware.num_nodes > 1 or hardware.zero_stage > 0


def run_processes(start: Start, hardware: schema.HardwareConfig, caller: Caller) -> RunOutcome:
    """Run the run in a folder to its end. The only place that decides in which processes.

    Raises:
        ConfigError: Python objects and several processes.
        PpocliError: whatever ends a run in this process.
    """
    if (meeting := caller.meeting) is not None:
        # the launcher's one process per node is either a rank, or starts several
        as_nodes = meeting.launched.on_each_node and hardware.num_processes > 1
        meeting.tell(replace(start, reserved_by=None, node_rank=0 if as_nodes else None))
        if not as_nodes:
            return run_here(start, caller)
    if not needs_launcher(hardware):
        return (_run_module("worker", start) if caller.process == "fresh"
                else run_here(start, caller))
    if caller.objects is not None:
        raise ConfigError("Python objects can't be handed to several processes.",
                          where="hardware.num_processes, hardware.zero_stage",
                          fix="name the reward by an import path, the prompts by a file")
    return _run_module("elastic", start)


def join_node(checked: Checked, caller: Caller) -> RunOutcome:
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
    return _run_module("elastic", Start(run_dir, resume, caller.display,
                                        node_rank=hardware.node_rank, limited=limited))


def follow(meeting: adopted_ranks.Meeting) -> None:
    """As a rank other than 0, take part in the run that rank 0 publishes at the meeting.

    Raises:
        PpocliError: whatever ended the run.
        SystemExit: with the exit code of the ranks that were started on this node.
    """
    if (start := meeting.wait()) is None:
        return
    if start.node_rank is None:
        run_here(replace(start, display="quiet"), Caller("own", meeting=meeting))
        return
    done = _run_module("elastic", replace(start, node_rank=meeting.launched.rank))
    if done.exit_code:
        raise SystemExit(done.exit_code)


def run_here(start: Start, caller: Caller) -> RunOutcome:
    """Run in this process, as one of a launcher's ranks where they have a meeting.

    Raises:
        PpocliError: whatever ended the run.
    """
    join_working_directory()
    from ppocli.launch.worker import run_worker

    with own_modes():
        return run_worker(start, objects=caller.objects, own_process=caller.process == "own",
                          store=caller.meeting and caller.meeting.store)


def _run_module(name: str, start: Start) -> RunOutcome:
    """Run a module of ours on a run's folder in a new process, which stops when this one ends, even
    by ``kill -9``: the pipe between them closes then. Our end closes on exec, so that no other
    child keeps it open."""
    reading, writing = os.pipe()
    try:
        code, stopped_by = run_process(
            [sys.executable, "-P", "-m", f"ppocli.launch.{name}",
             *replace(start, lifeline=reading).argv()], passed=(reading,))
    finally:
        os.close(reading)
        os.close(writing)
    model = start.run_dir / "model"
    return RunOutcome(start.run_dir, code, model if code == 0 and model.is_dir() else None,
                      read_json(start.run_dir / "summary.json"), stopped_by)


class LoopScores:
    """A reward function that returns the scores that the loop was given."""

    told_as = "your loop"
    scores: Any = None

    def __call__(self, **columns: Any) -> Any:
        return self.scores


def checked_words(overrides: Sequence[str] | Mapping[str, Any], objects: PythonObjects) -> Checked:
    """The checked configuration of command-line words, and of objects in place of some.

    Raises:
        ConfigError: they are wrong.
    """
    from ppocli.config.command_words import given_words, read_words
    from ppocli.config.compose import check, compose

    words = read_words(given_words(overrides))
    if words.value("resume") in (None, "never", "auto"):  # the folder of a run has its models
        words = words.adding(*(f"{key}={config_yaml.quoted(config_yaml.PYTHON_OBJECT)}"
                               for name, key in config_yaml.MODEL_KEYS.items()
                               if getattr(objects, name) is not None))
    composed = compose(words)
    refuse_objects(composed.config, objects)
    if composed.config.env.fn is not None:
        raise ConfigError("PPOTrainer plays no environment: each sample of a loop of your own is "
                          "one response.", where="env.fn",
                          fix="ppocli.train() and ppocli train play it")
    checked = check(composed, adopted_ranks.PROVIDED | {"reward.fn"} | (
        {"prompts.path"} if objects.prompts is not None else set()))
    return checked if words.value("recipe") else replace(checked, name="loop")


def refuse_objects(config: schema.TrainConfig, objects: PythonObjects) -> None:
    """Refuse Python objects that don't fit together or don't fit the configuration.

    Raises:
        ConfigError: they don't.
    """
    wrong = [text for broken, text in (
        *((model is not None and "PreTrainedModel" not in [k.__name__ for k in type(model).__mro__],
           f"{name}: a {type(model).__name__} is no language model of transformers; give the one "
           "below a value head (.pretrained_model), or the base of an adapter, and model.peft")
          for name, model in (("model", objects.model), ("ref_model", objects.ref_model))),
        (config.ppo.dynamic_sampling is not None, "ppo.dynamic_sampling: the loop chooses and "
         "scores its samples itself; leave it out"),
        (config.ppo.staleness > 0 or config.ppo.old_logprobs == "sampler"
         or algorithm.corrects(config),
         "ppo.staleness, ppo.old_logprobs, ppo.importance: a loop of one's own brings samples that "
         "don't say which policy they are of; use ppocli train"),
        (config.hardware.zero_stage > 0,
         "hardware.zero_stage: PPOTrainer holds whole weights on each process (DDP); for ZeRO, "
         "which shards them, use ppocli train")) if broken]
    if wrong:
        raise ConfigError("PPOTrainer can't work with this:\n  " + "\n  ".join(wrong),
                          where="PPOTrainer", fix="change or leave out what is named")


_loops = itertools.count()


@contextmanager
def opened(overrides: Sequence[str] | Mapping[str, Any], objects: PythonObjects) -> Iterator[Run]:
    """A run that is ready for the next step, its folder held. The processes that a launcher has
    started call it together.

    Raises:
        ConfigError: several processes are asked for, and no launcher has started them.
    """
    from ppocli.launch.worker import run_for_loop
    from ppocli.publish.console import logging_as_found  # another open loop may listen to the log

    launched, meeting = find_launch(os.environ), None
    if launched is None or launched.world == 1:
        checked = checked_words(overrides, objects)
        if needs_launcher(checked.config.hardware) or launched_world() > 1:
            raise ConfigError("PPOTrainer starts no other processes.",
                              where="hardware.num_processes, WORLD_SIZE",
                              fix="torchrun --nproc-per-node=N loop.py does; for one process: "
                              "hardware.num_processes=1")
        start_context: Any = open_run_folder.open_folder(checked, objects, log.info)
    else:
        meeting = adopted_ranks.open_meeting(launched, f"loop-{next(_loops)}")
        start_context = (_first_opens(overrides, objects, meeting) if launched.first
                         else nullcontext(meeting.wait()))
    with logging_as_found(), start_context as start:
        if start is None:
            raise PpocliError("Rank 0 could not open the run.", where="RANK=0",
                              fix="see what it says")
        with run_for_loop(start, objects, meeting and meeting.store) as run:
            yield run


@contextmanager
def _first_opens(overrides: Sequence[str] | Mapping[str, Any], objects: PythonObjects,
                 meeting: adopted_ranks.Meeting) -> Iterator[Start]:
    """Open rank 0's folder of a run, and publish it to the other ranks."""
    with ExitStack() as stack:
        try:
            checked = adopted_ranks.placed(checked_words(overrides, objects), meeting.launched,
                                           meeting.environ)
            hardware = checked.config.hardware
            if hardware.num_processes * hardware.num_nodes != meeting.launched.world:
                raise ConfigError("PPOTrainer starts no other processes on a node.",
                                  where="hardware.num_processes", fix="leave it out, and let "
                                  f"{meeting.launched.by} start one process a GPU")
            start = stack.enter_context(open_run_folder.open_folder(checked, objects, log.info))
        except BaseException:
            meeting.tell(None)
            raise
        meeting.tell(replace(start, reserved_by=None))
        yield start
