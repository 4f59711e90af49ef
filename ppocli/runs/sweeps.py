"""A sweep's folder: ``sweep.json`` lists the jobs, and the run folder of each says what came of it.
No torch here."""

import json
import os
import shlex
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ppocli.config import tasks
from ppocli.config.import_guard import TRUST
from ppocli.config.text import did_you_mean, finite_number, printable, short_path
from ppocli.errors import CheckpointError, ConfigError
from ppocli.runs import atomic, environment, run_folder, trust
from ppocli.runs.record import RunRecord, is_run, read_run
from ppocli.runs.target import RUNS, list_runs, run_named

SWEEP_FILE = "sweep.json"


@dataclass(frozen=True, slots=True)
class SweepRecord:
    """What a sweep's folder holds beside the runs of its jobs."""

    folder: Path
    words: tuple[str, ...]
    """the command line after ``train``"""
    cwd: str
    """the folder the command was given in"""
    jobs: tuple[tuple[str, ...], ...]
    """the words that differ between jobs, job by job"""
    search: Mapping[str, Any] | None = None
    """metrics and ranges of a search, see :class:`ppocli.runs.search.Search`"""

    @property
    def content(self) -> dict[str, Any]:
        """The contents of ``sweep.json``, without the trust."""
        return {"words": list(self.words), "cwd": self.cwd, "search": self.search,
                "jobs": [{"varied": list(varied)} for varied in self.jobs]}


def write_sweep(sweep: SweepRecord) -> None:
    """Replace ``sweep.json``, atomically.

    Raises:
        DiskError: the disk is full, read-only, or refuses.
    """
    atomic.write_json_atomic(sweep.folder / SWEEP_FILE, trust.signed(
        sweep.content, SWEEP_FILE, json.dumps(sweep.content)))


def read_sweep(folder: Path) -> SweepRecord:
    """Read a sweep's folder.

    Raises:
        CheckpointError: its sweep.json is damaged.
    """
    path = folder / SWEEP_FILE
    try:
        data = json.loads(path.read_bytes())
        return SweepRecord(folder.resolve(), tuple(map(str, data["words"])), str(data["cwd"]),
                           tuple(tuple(map(str, job["varied"])) for job in data["jobs"]),
                           data.get("search"))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}", where=str(path), fix="restore it from "
                              "a copy; the runs of its jobs are untouched") from error


def check_own(sweep: SweepRecord, trusts: bool) -> None:
    """Refuse to type the words of somebody else's sweep once more.

    Raises:
        CheckpointError: its sweep.json is not signed, and ``--trust`` was not typed.
    """
    path = sweep.folder / SWEEP_FILE
    if not trusts and not trust.is_signed(atomic.read_json(path), SWEEP_FILE,
                                              json.dumps(sweep.content)):
        raise CheckpointError(
            f"{short_path(str(sweep.folder))} is not signed with your key, and going on with it "
            f"runs its command: {printable(shlex.join(['ppocli', 'train', *sweep.words]))}",
            where=str(path), fix=f"read that command, and if you trust it add {TRUST}; for a sweep "
            f"that you started with another key, {trust.KEY_VARIABLE}=FILE")


def is_sweep(folder: Path) -> bool:
    """Whether a folder is a sweep's."""
    return os.path.isfile(folder / SWEEP_FILE)


def find_sweep(name: str | None) -> Path:
    """The folder of a sweep: a path, a name below ``runs/``, or by default the newest there.

    Raises:
        ConfigError: no name, and there is no sweep.
        CheckpointError: there is no sweep of that name.
    """
    sweeps = sorted(list_runs(RUNS, is_sweep), key=lambda each: (each / SWEEP_FILE).stat().st_mtime)
    if name is None:
        if not sweeps:
            raise ConfigError(f"There is no sweep in {RUNS} yet.", where=str(RUNS.absolute()),
                              fix="name a sweep's folder; or make one: "
                              "ppocli train -m +recipe=quickstart seed=1,2")
        return sweeps[-1]
    path = run_named(name, is_match=is_sweep)
    if not is_sweep(path):
        names = [text for each in sweeps for text in (str(each), each.name)]
        raise CheckpointError(
            f"{name} is no sweep (it holds no {SWEEP_FILE}).", where=str(path.absolute()),
            fix=f"name a folder that ppocli train -m made{did_you_mean(name, names)}; the newest "
            f"in {RUNS}: {', '.join(map(str, sweeps[:-9:-1])) or 'none'}")
    return path


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job as its run folder shows it."""

    number: int
    varied: dict[str, str]
    """value of each swept key"""
    folder: Path
    status: str
    """of its run; ``planned`` if there is none"""
    run: RunRecord | None = None
    figures: dict[str, float | None] = field(default_factory=dict)
    """the figures of the newest evaluation that say most of what it trained, by their labels"""
    rank: float | None = None
    """``checkpoint.metric`` of that evaluation, negative where more is better: lowest for the best
    job"""


def jobs_now(sweep: SweepRecord) -> list[JobRecord]:
    """Every job as it is now."""
    return [job_now(sweep, number) for number in range(len(sweep.jobs))]


def job_now(sweep: SweepRecord, number: int) -> JobRecord:
    """One job as it is now."""
    folder, varied = sweep.folder / str(number), varied_values(sweep.jobs[number])
    run = None
    with suppress(CheckpointError):  # a damaged configuration
        run = read_run(folder) if is_run(folder) else None
    if run is None:
        starting = run_folder.live_owner(folder) is not None
        return JobRecord(number, varied, folder, "running" if starting else "planned")
    figures, rank = figures_of(run)
    return JobRecord(number, varied, folder, run.status, run, figures, rank)


def figures_of(run: RunRecord) -> tuple[dict[str, float | None], float | None]:
    """The ``figures`` and ``rank`` of a :class:`JobRecord`."""
    newest = {name.removeprefix("eval/"): points[-1][1] for name in run.names
              if name.startswith("eval/") and (points := run.series(name))}
    kind = tasks.kind_of(run.config, environment.lower_is_better(run.folder.path))
    metric = run.config.checkpoint.metric
    named = dict(kind.evaluations)
    if metric not in kind.names:
        named[metric.rpartition("/")[2]] = metric
    best = newest.get(metric)
    return ({label: newest.get(name) for label, name in named.items()},
            best if best is None or metric in kind.lower_is_better else -best)


def labels_of(jobs: Iterable[JobRecord]) -> list[str]:
    """The columns of a table of jobs: labels of what was evaluated."""
    return list(dict.fromkeys(label for job in jobs for label in job.figures))


def varied_values(varied: Iterable[str]) -> dict[str, str]:
    """Key -> value of the words that differ between jobs: ``{"seed": "1"}``."""
    parts = (word.lstrip("+~").partition("=") for word in varied)
    return {key: value for key, _, value in parts}


def finished_figures(job: JobRecord) -> dict[str, float | None] | None:
    """The figures of the evaluation after training by name; None for a job that isn't finished."""
    if job.run is None or job.status != "finished":
        return None
    after = (job.run.summary or {}).get("eval_after") or {}
    return {name: finite_number(value) for name, value in after.items()}
