"""The runs below a folder: facts about each for one line of a list; and pruning, which deletes what
they no longer need while holding their locks. No torch here."""

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppocli.config import config_yaml, schema, tasks
from ppocli.config.text import Say
from ppocli.errors import CheckpointError, ConfigError, PpocliError
from ppocli.runs import atomic, environment, model_files, retention, run_folder
from ppocli.runs.checkpoints import best_step
from ppocli.runs.record import RunRecord, is_run, read_run
from ppocli.runs.target import list_runs, written


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Facts about one run in a list."""

    name: str
    """relative to the folder that was listed: ``first``, ``sweep-20260131-120000/0``"""
    path: Path
    status: str
    """as ``RunRecord.status``, or ``damaged``: its config.yaml can't be read"""
    pid: int | None
    """of the process that writes it"""
    step: int
    total_steps: int | None
    kind: str
    """``ppo``, ``sft``, ``reward_model``, ``own``; or ``?``"""
    reward_mean: float | None
    """mean score of the newest rollout; only PPO has one"""
    loss: float | None
    """of the newest step; not of PPO"""
    metric: str
    """``checkpoint.metric``"""
    best: float | None
    """the best evaluation so far, by that"""
    best_step: int | None
    bytes: int
    """of everything in the folder"""
    model: str
    reward: str
    """what scores the responses; of trainings on a data set, the data"""
    written: float
    """seconds since the epoch"""


def run_infos(root: Path) -> list[RunInfo]:
    """The runs below ``root``, including those of sweeps, the most recently written first; ``root``
    may be a run itself."""
    folders = [root] if is_run(root) else list_runs(root)
    return sorted((run_info(folder, root) for folder in folders),
                  key=lambda info: (-info.written, info.name))


def run_info(folder: Path, root: Path) -> RunInfo:
    """Facts about one run in a list of the runs below ``root``."""
    name = folder.name if folder == root else folder.relative_to(root).as_posix()
    size, when, pid = atomic.folder_size(folder), written(folder), None
    try:
        owner = run_folder.live_owner(folder)
        pid = None if owner is None else owner.pid
        run = read_run(folder)
    except (CheckpointError, OSError):
        return RunInfo(name, folder, "damaged", pid, 0, None, "?", None, None, "", None, None, size,
                       "?", "?", when)
    kind, (best_step, best) = tasks.task_name(run.config), best_evaluation(run)
    row: dict[str, Any] = next(filter(tasks.curves_of, reversed(run.rows)), {})
    newest = {label: row.get(figure) for label, figure in tasks.curves_of(row)}
    return RunInfo(name, folder, run.status, pid, run.step, run.total_steps, kind,
                   newest.get("reward"), newest.get("loss"), run.config.checkpoint.metric, best,
                   best_step, size, last_part(run.config.model.path), source_names(run.config),
                   when)


def best_evaluation(run: RunRecord) -> tuple[int, float] | tuple[None, None]:
    """(step, figure) of the evaluation with the best ``checkpoint.metric``, the first of several:
    the lowest loss, else the highest figure; Nones without evaluations."""
    metric = run.config.checkpoint.metric
    kind = tasks.kind_of(run.config, environment.lower_is_better(run.folder.path))
    sign = -1 if metric in kind.lower_is_better else 1
    return max(run.series(f"eval/{metric}"), key=lambda point: (sign * point[1], -point[0]),
               default=(None, None))


def source_names(config: schema.TrainConfig) -> str:
    """What the run learns from: its data, or for PPO its rewards: ``score``, ``sentiment +
    brevity``."""
    if tasks.task_name(config) in tasks.DATA_TASKS:
        return last_part(config.data.path or "?")
    return " + ".join(config.reward.fns) or last_part(config.reward.fn or config.env.fn or "?")


def data_name(config: schema.TrainConfig) -> str:
    """The data or prompts of a run, in words."""
    if config.prompts.mix:
        return "a mix of " + ", ".join(config.prompts.mix)
    path = (config.data if tasks.task_name(config) in tasks.DATA_TASKS else config.prompts).path
    return "given inline" if path in (None, config_yaml.PYTHON_OBJECT) else last_part(str(path))


def last_part(value: str) -> str:
    """The last part of a path; other names as they are."""
    return Path(value).name if value.startswith(("/", ".", "~")) else value


def age(written_at: float, now: float | None = None) -> str:
    """How long ago something was: ``12 s``, ``3 min``, ``5 h``, ``9 d``."""
    seconds = max(0.0, (time.time() if now is None else now) - written_at)
    unit = next((unit for unit in ("d", "h", "min") if seconds >= _SECONDS[unit]), "s")
    return f"{int(seconds // _SECONDS[unit])} {unit}"


_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d|w)")
_SECONDS = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400, "w": 604800}


@dataclass(frozen=True, slots=True)
class Removal:
    """What can be deleted of one finished run."""

    run: Path
    parts: tuple[Path, ...]
    """what is deleted, each with all it holds"""
    size: int
    """bytes given back"""
    written: float
    """when the run was last written to, at the time of planning"""


def parse_age(text: str) -> float:
    """``7d``, ``12h``, ``30min``, ``2w`` in seconds.

    Raises:
        ConfigError: it is none of these.
    """
    if (match := _AGE.fullmatch(text.strip())) is None:
        raise ConfigError(f"--older-than {text}: must be a number with s, min, h, d or w",
                          where="command line", fix="e.g. --older-than 7d")
    return float(match[1]) * _SECONDS[match[2]]


def plan_pruning(root: Path, *, keep_best: bool = False, older_than: float | None = None,
                 say: Say = lambda text: None) -> list[Removal]:
    """What can be deleted below ``root``: of finished runs, everything under ``checkpoints/`` and
    ``nonfinite-dump/``. Model, summary, metrics, samples and log stay.

    Args:
        root: holds runs and sweeps, or is a run.
        keep_best: the checkpoint of the best evaluation stays.
        older_than: only runs last written to more seconds ago than that.
        say: prints which runs were skipped, and why.
    """
    removals = []
    for folder in [root] if is_run(root) else list_runs(root):
        if folder.is_symlink() or (
                older_than is not None and time.time() - written(folder) < older_than):
            continue
        try:
            run = read_run(folder)
            if (host := run_folder.other_host(folder)) is not None:
                say(f"{folder} is left alone: it may be running on {host} ({run_folder.LOCK} says "
                    "so)")
            elif removal := _checkpoints(run, folder, keep_best):
                removals.append(removal)
        except (CheckpointError, OSError) as damage:
            say(f"{folder} is left alone: {getattr(damage, 'what', damage)}")
    return removals


def carry_out(removal: Removal) -> None:
    """Delete a planned removal, holding the run's lock.

    Raises:
        CheckpointError: the run is in use, or has been written to since the planning.
        DiskError: the disk refuses.
        OSError: something could not be deleted.
    """
    if not removal.run.is_dir():  # taking the lock would make it again
        return
    with run_folder.lock(removal.run):
        if written(removal.run) != removal.written:
            raise CheckpointError(f"{removal.run} has been written to meanwhile and is left alone.",
                                  where=str(removal.run), fix="look again: ppocli runs list")
        for part in removal.parts:
            with atomic.disk_errors(part):
                if os.path.lexists(part):
                    retention.discard(part)


def _checkpoints(run: RunRecord, folder: Path, keep_best: bool) -> Removal | None:
    """Everything below ``checkpoints/`` of a run whose model is whole."""
    if run.status != "finished":
        return None
    try:
        model_files.check_folder(run.folder.model, key="model", adapters=True)
    except PpocliError:
        return None
    place = folder / "checkpoints"
    if place.is_symlink():
        return None
    best = best_step(place) if keep_best else None
    kept = () if best is None else (retention.step_name(best), "best")
    parts = [part for part in sorted(place.glob("*")) if part.name not in kept]
    parts += folder.glob("nonfinite-dump")
    size = sum(atomic.folder_size(part) for part in parts if not part.is_symlink())
    return Removal(folder, tuple(parts), size, written(folder)) if parts else None
