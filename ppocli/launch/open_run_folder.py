"""From a checked configuration to a run folder that holds it: a new folder, or one to resume.

The only place that decides where a run lies.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppocli.config import config_yaml, resume_policy, schema
from ppocli.config.text import pasted, shown
from ppocli.errors import CheckpointError
from ppocli.launch.input_checks import check_inputs
from ppocli.launch.local_ranks import Start
from ppocli.launch.target_config import allow_code
from ppocli.runs import atomic, retention, run_folder

if TYPE_CHECKING:
    from ppocli.config.compose import Checked
    from ppocli.training.task import PythonObjects

# a run with no other files made nothing worth keeping
_TRACES = frozenset({config_yaml.CONFIG_FILE, run_folder.LOCK, "ppocli.log",
                     config_yaml.STARTED_FROM})


@contextmanager
def open_folder(checked: Checked, objects: PythonObjects | None, say: Callable[[str], None]
                ) -> Iterator[Start]:
    """Open the folder of a run with its configuration in it, and yield the arguments of a process
    that trains.

    Args:
        checked: ``output_dir``, ``run_name`` and ``resume`` decide the folder.
        objects: Python objects in place of config keys; the configuration says which.
        say: where notes for the user go.

    Raises:
        CheckpointError: the folder is in use or holds another run, a changed key forbids to resume,
            or the run is somebody else's and names code.
        DiskError: the folder can't be written.
        PpocliError: something that the configuration names is missing.
    """
    limited = allow_code(replace(checked, config=noting_objects(checked.config, objects)))
    config = noting_objects(config_yaml.with_absolute_paths(checked.config), objects)
    run_dir = checked.resume_from and checked.resume_from.absolute()
    if run_dir is None and config.resume != "never":
        named = Path(config.output_dir) / str(config.run_name)
        if goes_on_with(named):
            run_dir = named
        else:
            say(f"resume=auto: there is no run in {named} yet, starting afresh")
    opened = (_resumed(run_dir, checked, config, objects, say) if run_dir is not None
              else _made(checked.name, config, objects))
    with opened as start:
        # the libraries alone take seconds to load
        say(f"{start.run_dir}: starting from {config.model.path}")
        try:
            yield replace(start, limited=limited)
        finally:
            # it still exists only if the run did not go on, or its ranks did not start again: then
            # the run keeps its configuration
            (start.run_dir / config_yaml.NEXT_CONFIG_FILE).unlink(missing_ok=True)


@contextmanager
def _resumed(run_dir: Path, checked: Checked, config: schema.TrainConfig,
             objects: PythonObjects | None, say: Callable[[str], None]) -> Iterator[Start]:
    run_folder.refuse_links(run_dir)  # before anything is written or printed
    refuse_running(run_dir)
    # an explicit folder must hold a checkpoint; with "auto" a run may have been killed before its
    # first
    config = replace(config, run_name=run_dir.name, output_dir=str(run_dir.parent),
                     resume="never" if checked.resume_from else "auto")
    if not checked.resume_from:  # else the run's own configuration is the base
        config = resume_policy.keeping_settled(config, config_yaml.read_config(
            run_dir / config_yaml.CONFIG_FILE))
    config = config_yaml.in_place(config_yaml.with_values(config, {  # resume=auto
        key: str(path) for key, path in _models_in(run_dir, config)}), run_dir)
    changes = changes_on_resume(run_dir, config, objects, checked.accept_changes)
    check_inputs(config)
    for change in changes:
        say(resume_policy.change_line(*change))
    run_folder.probe_writable(run_dir)
    # loading takes seconds, in which no other process may delete or resume this run
    with run_folder.reserved(run_dir):
        run_folder.write_config(config, run_dir / config_yaml.NEXT_CONFIG_FILE)
        yield Start(run_dir, config, resume=True, reserved_by=os.getpid())


@contextmanager
def _made(name: str, config: schema.TrainConfig, objects: PythonObjects | None) -> Iterator[Start]:
    check_inputs(config)
    base = Path(config.output_dir)
    new_parents = [folder for folder in (base, *base.parents) if not folder.exists()]
    try:
        run_dir = _fresh_folder(config, name)
        config = replace(config, run_name=run_dir.name, output_dir=str(run_dir.parent))
        with run_folder.reserved(run_dir):
            try:
                refuse_taken(run_dir, config)  # another process may have made a run here meanwhile
                atomic.sweep(run_dir)
                run_folder.probe_writable(run_dir)
                for key, path in _models_in(run_dir, config):
                    with atomic.disk_errors(path):
                        getattr(objects, path.name).save_pretrained(path)
                    config = config_yaml.with_values(config, {key: str(path)})
                run_folder.write_config(config, run_dir / config_yaml.CONFIG_FILE)
                yield Start(run_dir, config, reserved_by=os.getpid())
            finally:
                if _made_nothing(run_dir):
                    shutil.rmtree(run_dir, ignore_errors=True)
    finally:
        for folder in new_parents:  # only empty ones, the innermost first
            with suppress(OSError):
                folder.rmdir()


def _made_nothing(run_dir: Path) -> bool:
    """Whether the folder has no run, or one that ended or was killed before it made anything."""
    names = {entry.name for entry in run_dir.iterdir()} if run_dir.is_dir() else set()
    return {name for name in names if not name.startswith(atomic.TEMPORARY_PREFIX)} <= _TRACES


def _models_in(run_dir: Path, config: schema.TrainConfig) -> list[tuple[str, Path]]:
    """(key, folder) of each model that was passed as an object."""
    return [(key, run_dir / config_yaml.STARTED_FROM / name)
            for name, key in config_yaml.MODEL_KEYS.items()
            if attrgetter(key)(config) == config_yaml.PYTHON_OBJECT]


def noting_objects(config: schema.TrainConfig, objects: PythonObjects | None) -> schema.TrainConfig:
    """A copy with ``<python object>`` at the keys that a Python object replaces."""
    noted: dict[str, Any] = {key: config_yaml.PYTHON_OBJECT for name,
                             key in resume_policy.OBJECT_KEYS.items()
                             if getattr(objects, name, None) is not None}
    if "reward.fn" in noted:
        # arguments of a replaced reward are not for the function that replaces it
        keeps_kwargs = (config.reward.fn in (None, config_yaml.PYTHON_OBJECT)
                        and not config.reward.fns)
        noted |= {"reward.fns": {}, "reward.kwargs": config.reward.kwargs if keeps_kwargs else {}}
    noted |= {key.replace(".path", ".items"): None for key in noted if key.startswith("prompts.")}
    return config_yaml.with_values(config, noted)


def goes_on_with(run_dir: Path) -> bool:
    """Whether ``resume=auto`` resumes in that folder; a run that was killed before it made anything
    starts again."""
    return not _made_nothing(run_dir) and any(
        (run_dir / name).is_file() for name in (config_yaml.CONFIG_FILE, resume_policy.RUN_FILE))


def _fresh_folder(config: schema.TrainConfig, name: str) -> Path:
    """Make the run's folder for this run alone and check that it can be written."""
    base = Path(config.output_dir)
    run_folder.probe_writable(base)
    if config.run_name is None:
        return run_folder.new_folder(base, f"{name}-{datetime.now():%Y%m%d-%H%M%S}")
    run_dir = base / config.run_name
    with atomic.disk_errors(run_dir), suppress(FileExistsError):
        run_dir.mkdir()
    if not run_dir.is_dir():
        run_folder.probe_writable(run_dir)  # raises, with what the path is instead
    refuse_taken(run_dir, config)
    return run_dir


def refuse_running(run_dir: Path) -> None:
    """Refuse the folder of a running run.

    Raises:
        CheckpointError: names its process.
    """
    owner = run_folder.live_owner(run_dir)
    if owner is not None and owner.pid != os.getpid():
        raise CheckpointError(
            f"{run_dir} is running (pid {owner.pid} on {owner.host}).", where=str(run_dir),
            fix=f"watch it: ppocli watch {pasted(run_dir)}; wait for it to end, or stop it: kill "
            f"{owner.pid}; or choose another run_name", code="in-use")


def refuse_taken(run_dir: Path, config: schema.TrainConfig) -> None:
    """Refuse a folder for a new run if it holds something. Leftovers of a run that made nothing
    don't count.

    Raises:
        CheckpointError: it holds something, or a run is running there.
    """
    refuse_running(run_dir)
    if not _made_nothing(run_dir):
        go_on = ""
        if (run_dir / config_yaml.CONFIG_FILE).is_file():
            saved = retention.list_steps(run_folder.RunFolder(run_dir).checkpoints)
            go_on = "go on with that run: " + (f"ppocli resume {pasted(run_dir)}; or " if saved else
                                               "the same words and resume=auto; or ")
        raise CheckpointError(
            f"{run_dir} exists already and isn't empty; nothing is overwritten.",
            where=f"run_name={config.run_name}", fix=f"{go_on}choose another run_name",
            code="folder-taken")


def changes_on_resume(run_dir: Path, config: schema.TrainConfig,
                      objects: PythonObjects | None = None, accept_changes: bool = False
                      ) -> list[tuple[str, Any, Any]]:
    """(key, before, after) of what ``config`` changes in a run.

    Raises:
        CheckpointError: a changed key forbids to resume, Python objects are missing, or the run's
            config.yaml was changed by hand and this isn't accepted.
    """
    old = resume_policy.settings_before(run_dir, accept_changes=accept_changes)
    _ask_for_objects(config, objects, run_dir)
    changes = config_yaml.config_differences(old, config)
    refused = [f"{key}: {shown(before)} -> {shown(after)}" for key, before, after in changes
               if resume_policy.classify_change(key) == "refused"]
    if refused:
        raise CheckpointError(
            "\n".join(["these settings can't change when a run is resumed:",
                       *(f"  {line}" for line in refused)]), where=str(run_dir),
            fix="leave them as they were, or start another run with them (another run_name)",
            code="changed-setting")
    return changes


def _ask_for_objects(config: schema.TrainConfig, objects: PythonObjects | None, run_dir: Path
                     ) -> None:
    missing = [name for name in resume_policy.objects_of(config) if getattr(objects, name,
                                                                            None) is None]
    if missing:
        raise CheckpointError(f"this run was started from Python with {', '.join(missing)}, "
                              "which can't be read from its folder", where=str(run_dir),
                              fix="resume it from Python: " + resume_policy.how_to_resume(config,
                                                                                          run_dir)
                              + "; a loop of your own with PPOTrainer in its place")
