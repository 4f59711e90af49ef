"""The policy or run that a command's argument names: a run, a checkpoint, a model folder or a Hub
name."""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ppocli.builtin.names import BUILTIN_PREFIX
from ppocli.config.text import Say, did_you_mean, pasted
from ppocli.errors import CheckpointError, ConfigError, InputError
from ppocli.runs import checkpoints, model_files, retention, run_folder
from ppocli.runs.record import RunRecord, is_run, read_run, subfolders, whole

RUNS = Path("runs")
"""the folder of runs, relative to the current folder"""


@dataclass(frozen=True, slots=True)
class Target:
    """A policy that a command can load, and the run it came from, if any."""

    name: str
    """its name in messages: ``runs/quickstart, step 24``"""
    model: str
    """checked plain Hugging Face folder (absolute), or a Hub name"""
    run_dir: Path | None = None
    """absolute; its config.yaml says how the policy was trained"""
    step: int | None = None
    """steps the policy has been trained for; None for a model that came from elsewhere"""
    checkpoint: Path | None = None
    """verified step folder, with value head and optimizer state, if the policy is of a
    checkpoint"""

    @property
    def label(self) -> str:
        """A short name for files and folders: ``step-000024``, or the model's own name."""
        if self.step is not None:
            return f"step-{self.step:06d}"
        return Path(self.model).name or "model"


def find_target(name: str | None, *, say: Say, step: int | None = None, best: bool = False,
                asked_by: str = "RUN", also: Sequence[str] = ()) -> Target:
    """The target that ``name`` names, checked so that a policy can be loaded from it.

    A folder or anything that begins with ``.``, ``/``, ``~`` or a folder that exists is a path;
    ``NAME`` and ``SWEEP/JOB`` may be a run below ``runs/``; everything else is a Hub name. A name
    of both a path and another run is refused. A run stands for its final model, an unfinished one
    for its newest valid checkpoint. A model folder inside a run belongs to that run.

    Args:
        name: as the user typed it; None takes the newest run below ``runs/``.
        say: prints what was chosen where the user left it open.
        step, best: choose a checkpoint of a run.
        asked_by: the argument or option that gave ``name``, for messages.
        also: names besides runs that the user might have meant.

    Raises:
        ConfigError: as :func:`run_named`; nothing was given and there is no run, or
            ``step``/``best`` don't apply.
        CheckpointError: the run has no valid checkpoint, or not the one asked for.
        InputError: no such folder, or no model in it.
    """
    path = newest_run(say) if name is None else run_named(name, here=os.path.lexists)
    if name is None or is_run(path):
        return _of_run(path.resolve(), str(path), say, step, best)
    inside, first = _inside_checkpoint(path), name.partition("/")[0]
    if inside is None and not path.exists() and (name.startswith((".", "/", "~")) or (
            first != name and ((RUNS / first).is_dir() or Path(first).is_dir()))):
        raise InputError(f"{name} does not exist (looked in {Path.cwd()}).", where=asked_by,
                         fix="name a run, a checkpoint, a model folder or a Hub name"
                         + did_you_mean(name, known_names()), code="no-such-run")
    if step is not None or best:
        raise ConfigError(f"{'--best' if best else '--step'} chooses a checkpoint of a run, and "
                          f"{name} is no run.", fix="leave it out, or name the run's folder")
    if inside is not None:
        opened = checkpoints.open_checkpoint(inside)
        run_dir = opened.path.parent.parent
        return Target(name, str(opened.path / model_files.POLICY),
                      run_dir if is_run(run_dir) else None, opened.step, opened.path)
    return _of_model(name, path, say, asked_by, also)


def run_named(name: str, is_match: Callable[[Path], bool] = is_run,
              here: Callable[[Path], bool] | None = None) -> Path:
    """The folder that ``name`` names: a path, or else what ``runs list`` calls a run, its place
    below ``runs`` (``NAME``, ``SWEEP/JOB``). Where neither will do, the path.

    Args:
        is_match: whether a folder below ``runs`` can be meant.
        here: whether a path can be meant (default: ``is_match``).

    Raises:
        ConfigError: both match, and are not the same.
    """
    path, below = Path(name).expanduser(), RUNS / name
    if not name or name.startswith((".", "/", "~")) or ".." in path.parts or not is_match(below):
        return path
    if not (here or is_match)(path):
        return below
    if path.resolve() != below.resolve():
        raise ConfigError(f"{name} is both ./{name} and {below}.", code="ambiguous-name",
                          fix=f"write ./{name} or {below}")
    return path


def known_names(is_match: Callable[[Path], bool] = is_run) -> list[str]:
    """All names of runs below ``runs``, for hints: their folders, and their names in ``runs
    list``."""
    return [name for run in list_runs(RUNS, is_match)
            for name in (str(run), run.relative_to(RUNS).as_posix())]


def find_run(name: str | None, *, say: Say = lambda text: None) -> Path:
    """The run folder that the argument of a command that only reads names, as the user would type
    it.

    Args:
        name: a run's folder, or its name below ``runs/``; its model folder, a checkpoint, or
            another part of a run stands for the run. None takes the newest run there.
        say: prints which run was taken if the user named none.

    Raises:
        ConfigError: nothing was given and there is no run.
        InputError: ``name`` is no run.
    """
    if name is None:
        return newest_run(say, "a run's folder")
    path = run_named(name)
    exists = os.path.exists(path)
    for folder in (path, *list(path.absolute().parents)[:3]) if exists else ():
        if is_run(folder):
            return folder
    what = "is not a run folder" if exists else f"does not exist (looked in {Path.cwd()})"
    raise InputError(f"{name} {what}.", where="RUN", fix="name a run's folder: ppocli runs list"
                     + did_you_mean(name, known_names()), code="no-such-run")


def read_runs(names: Sequence[str]) -> list[RunRecord]:
    """The runs of these folders or names, each of them once.

    Raises:
        CheckpointError, ConfigError, InputError: as :func:`find_run`.
    """
    runs = {run.folder.path: run for run in (read_run(find_run(each)) for each in names)}
    return list(runs.values())


def newest_run(say: Say, takes: str = "a run, a checkpoint, a model folder or a Hub name") -> Path:
    """The run below ``runs/`` that was written to last; ``say`` prints it. ``takes`` says what may
    be named instead.

    Raises:
        ConfigError: there is none.
    """
    runs = list_runs(RUNS)
    if not runs:
        raise ConfigError(f"There is no run in {RUNS} yet.", where=str(RUNS.absolute()),
                          fix=f"name {takes}; or train one first: ppocli train +recipe=quickstart")
    newest = max(runs, key=written)
    say(f"using {newest} (the newest run)")
    return newest


def list_runs(root: Path, is_match: Callable[[Path], bool] = is_run) -> list[Path]:
    """Folders below ``root`` that match, those of sweeps (one folder deeper) too, by name;
    unreadable ones are skipped."""
    return [run for folder in subfolders(root)
            for run in ([folder] if is_match(folder) else filter(is_match, subfolders(folder)))]


def written(folder: Path) -> float:
    """Time of the last write to a run's folder, in seconds since the epoch."""
    run = run_folder.RunFolder(folder)
    times = [0.0]
    for path in (run.metrics, run.config, run.summary, run.log):
        with suppress(OSError):  # it may not be there, or be gone by now
            times.append(path.stat().st_mtime)
    return max(times)


def _of_run(run_dir: Path, shown: str, say: Say, step: int | None, best: bool) -> Target:
    record = read_run(run_dir)
    run = record.folder
    if best and step is not None:
        raise ConfigError("--best and --step name two checkpoints.", fix="leave one of them out")
    if best and (step := checkpoints.best_step(run.checkpoints)) is None:
        raise CheckpointError(f"{run.path} keeps no best checkpoint.", where=str(run.checkpoints),
                              fix="choose a step: --step N; or train with "
                              "checkpoint.keep_best=true and eval.every_steps=N")
    complete = record.status == "finished" and run.model.is_dir()
    final = whole(record.summary, "steps")
    if complete and step in (None, final):
        model_files.check_folder(run.model, key="RUN", adapters=True)
        return Target(f"{shown}, step {final}", str(run.model), run_dir, final)
    if step is not None:
        chosen = checkpoints.open_checkpoint(run.checkpoints / retention.step_name(step))
    else:
        search = checkpoints.find_latest(run.checkpoints, run_id=None)
        for line in search.skipped:
            say(line)
        if search.checkpoint is None:
            raise CheckpointError(f"{shown} holds no valid checkpoint.", where=str(run.checkpoints),
                                  fix=f"go on with the run: ppocli resume {pasted(shown)}")
        chosen = search.checkpoint
        say(f"the run is {record.status}: taking its newest checkpoint, step {chosen.step}")
    return Target(f"{shown}, step {chosen.step}", str(chosen.path / model_files.POLICY), run_dir,
                  chosen.step, chosen.path)


def _inside_checkpoint(path: Path) -> Path | None:
    """The step folder that ``path`` is, links to, or is the policy folder of."""
    for folder in (path, path.parent if path.name == model_files.POLICY else path):
        is_pointer = folder.name in retention.POINTERS and folder.is_symlink()
        if (folder / retention.MANIFEST).is_file() or is_pointer:
            return folder
    return None


def _of_model(name: str, path: Path, say: Say, asked_by: str, also: Sequence[str]) -> Target:
    if not path.exists() or name.startswith(BUILTIN_PREFIX):
        try:
            return Target(name, model_files.find_model(name, key=asked_by, adapters=True))
        except InputError as error:
            error.fix = (error.fix or "") + did_you_mean(name, [*also, *known_names()])
            raise
    model_files.check_folder(path, key=asked_by, adapters=True)
    folder = path.resolve()
    run_dir = folder.parent
    if folder.name == "model" and is_run(run_dir):
        return _of_run(run_dir, name, say, None, False)
    return Target(name, str(folder))
