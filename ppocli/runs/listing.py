"""The runs below a folder, one line's worth of facts about each. No torch here."""

from __future__ import annotations

import os
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ppocli.config.schema import TrainConfig
from ppocli.errors import CheckpointError
from ppocli.runs.record import RunRecord, is_run, read_run
from ppocli.runs.target import list_runs, written
from ppocli.storage.run_folder import live_owner


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a list of runs shows of one."""

    name: str
    """relative to the folder that was listed: ``first``, ``sweep-20260131-120000/0``"""
    path: Path
    status: str
    """as ``RunRecord.status``, or ``damaged``: its config.yaml can't be read"""
    pid: int | None
    """of the process that writes it"""
    step: int
    total_steps: int | None
    last_reward: float | None
    """mean score of the newest rollout"""
    best: float | None
    """largest evaluation figure so far, by ``checkpoint.metric``"""
    best_step: int | None
    size: int
    """bytes of everything in the folder"""
    written: float
    """seconds since the epoch"""
    model: str
    reward: str


def run_infos(root: Path) -> list[RunInfo]:
    """The runs below ``root``, those of sweeps too, the one written to last first; ``root`` may be
    a run itself."""
    folders = [root] if is_run(root) else list_runs(root)
    infos = [_info(folder, root) for folder in folders if not folder.name.startswith(".")]
    return sorted(infos, key=lambda info: (-info.written, info.name))


def _info(folder: Path, root: Path) -> RunInfo:
    name = folder.name if folder == root else folder.relative_to(root).as_posix()
    size, when = folder_size(folder), written(folder)
    owner = live_owner(folder)
    pid = None if owner is None else owner.pid
    try:
        run = read_run(folder)
    except CheckpointError:
        return RunInfo(name, folder, "damaged", pid, 0, None, None, None, None, size, when, "?",
                       "?")
    rewards, best = run.series("reward/mean"), best_evaluation(run)
    return RunInfo(name, folder, run.status, pid, run.step, run.total_steps,
                   rewards[-1][1] if rewards else None, best[1] if best else None,
                   best[0] if best else None, size, when, last_part(run.config.model.path),
                   reward_names(run.config))


def best_evaluation(run: RunRecord) -> tuple[int, float] | None:
    """(step, figure) of the evaluation with the largest ``checkpoint.metric``, the first of
    several; None without evaluations."""
    found = run.series(f"eval/{run.config.checkpoint.metric}")
    return max(found, key=lambda point: (point[1], -point[0])) if found else None


def reward_names(config: TrainConfig) -> str:
    """What scores the responses: ``classifier``, ``sentiment + brevity``, ``score``."""
    if config.reward.fns:
        return " + ".join(config.reward.fns)
    return last_part(config.reward.fn or "?")


def last_part(value: str) -> str:
    """The last part of a path; other names as they are."""
    return Path(value).name if value.startswith(("/", ".", "~")) else value


def folder_size(folder: Path) -> int:
    """Bytes of all files below ``folder``; links count nothing, what vanishes meanwhile neither."""
    total = 0
    for base, _, files in os.walk(folder, followlinks=False):
        for name in files:
            with suppress(OSError):
                entry = os.lstat(os.path.join(base, name))
                total += 0 if stat.S_ISLNK(entry.st_mode) else entry.st_size
    return total


def age(written_at: float, now: float | None = None) -> str:
    """How long ago something was: ``12 s``, ``3 min``, ``5 h``, ``9 d``."""
    seconds = max(0.0, (time.time() if now is None else now) - written_at)
    for unit, length, limit in (("s", 1, 60), ("min", 60, 3600), ("h", 3600, 86400)):
        if seconds < limit:
            return f"{int(seconds // length)} {unit}"
    return f"{int(seconds // 86400)} d"
