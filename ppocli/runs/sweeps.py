"""Reading and writing a sweep's folder: its words and the results of its jobs. No torch here."""

import json
import os
import shlex
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from ppocli.config import config_yaml, schema, size_limited, tasks
from ppocli.config.import_guard import TRUST
from ppocli.config.text import did_you_mean, finite_number, printable, short_path
from ppocli.errors import CheckpointError, ConfigError
from ppocli.runs import atomic, environment, run_folder, signature
from ppocli.runs.record import RunRecord, is_run, read_changes, read_run, subfolders
from ppocli.runs.target import RUNS, run_named

SWEEP_FILE = "sweep.json"
JOURNAL = "search.journal"
"""what optuna keeps of a search, beside ``sweep.json``"""


@dataclass(frozen=True, slots=True)
class JobRecord:
    """The result of one job. ``varied`` are the overrides that differ between jobs; the figures are
    those of the evaluation after training."""

    number: int
    overrides: tuple[str, ...]
    """all its words; empty before it is started"""
    varied: tuple[str, ...]
    status: str
    """``planned``, ``running``, ``finished``, ``failed``, ``stopped``"""
    exit_code: int | None = None
    reward_mean: float | None = None
    kl_mean: float | None = None
    seconds: float = 0.0
    folder: str = ""
    """absolute, or empty before the job has begun"""
    error: str | None = None
    figures: dict[str, float | None] = field(default_factory=dict)
    """the figures that say most of what it trained, by their labels"""
    objective: float | None = None
    """``checkpoint.metric``, which is returned to Hydra's sweepers"""
    lower_is_better: bool = False
    """of the objective"""

    @property
    def shown(self) -> dict[str, float | None]:
        """Its figures; a record of an earlier version has those of PPO alone."""
        return self.figures or {"reward": self.reward_mean, "KL": self.kl_mean}

    @property
    def rank(self) -> float | None:
        """Lowest for the best job."""
        best = self.objective if self.figures else self.reward_mean
        return best if best is None or self.lower_is_better else -best


def figures_of(config: schema.TrainConfig, folder: Path, evaluation: Mapping[str, Any]
               ) -> dict[str, Any]:
    """The fields of a :class:`JobRecord` that hold figures, for a job in ``folder`` with these
    figures of its evaluation by name."""
    finite = {name: finite_number(value) for name, value in evaluation.items()}
    kind = tasks.kind_of(config, environment.lower_is_better(folder))
    metric = config.checkpoint.metric
    named = dict(kind.evaluations)
    if metric not in kind.names:
        named[metric.rpartition("/")[2]] = metric
    return {"reward_mean": finite.get("reward_mean"), "kl_mean": finite.get("kl_mean"),
            "figures": {label: finite.get(name) for label, name in named.items()},
            "objective": finite.get(metric), "lower_is_better": metric in kind.lower_is_better}


def labels_of(jobs: Iterable[JobRecord]) -> list[str]:
    """The columns of a table of jobs: labels of what those have that were evaluated."""
    jobs = list(jobs)
    evaluated = [job for job in jobs if any(value is not None for value in job.shown.values())]
    return list(dict.fromkeys(label for job in evaluated or jobs for label in job.shown))


@dataclass(frozen=True, slots=True)
class SweepRecord:
    """One sweep, read from its folder."""

    folder: Path
    words: tuple[str, ...]
    """the command line after ``train``"""
    cwd: str
    """the folder the command was given in"""
    grid: bool
    """whether all jobs were known beforehand"""
    jobs: tuple[JobRecord, ...]

    @property
    def is_search(self) -> bool:
        """Whether its jobs are chosen one after another, on a journal."""
        return (self.folder / JOURNAL).is_file()

    @property
    def goes_on(self) -> bool:
        """Whether it can be resumed."""
        return self.grid or self.is_search


def write_sweep(sweep: SweepRecord) -> None:
    """Replace ``sweep.json``, atomically.

    Raises:
        DiskError: the disk is full, read-only, or refuses.
    """
    words = {"words": list(sweep.words), "cwd": sweep.cwd}
    atomic.write_json_atomic(sweep.folder / SWEEP_FILE, run_folder.finite_or_null({
        **words, "dir": str(sweep.folder), "grid": sweep.grid,
        "jobs": [asdict(job) for job in sweep.jobs],
        **signature.signed({}, SWEEP_FILE, json.dumps(words))}))


def write_job(sweep: Path, job: JobRecord) -> None:
    """Leave the record of a job for the sweep's process, which adds it to ``sweep.json``. The job
    runs in another process, perhaps on another machine.

    Raises:
        DiskError: the disk is full, read-only, or refuses.
    """
    atomic.write_json_atomic(sweep / f"{job.number}.json",
                             run_folder.finite_or_null(asdict(job)))


def job_files(sweep: Path) -> list[Path]:
    """The files of :func:`write_job`."""
    return [path for path in sweep.glob("*.json") if path.stem.isdigit()]


def job_records(sweep: Path) -> dict[int, JobRecord]:
    """The records that jobs have left, by number; a damaged file is left out."""
    records = {}
    for path in job_files(sweep):
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
            job = _job(size_limited.read_json(path), sweep, sweep)
            records[job.number] = job
    return records


def check_own(sweep: SweepRecord, trusts: bool) -> None:
    """Refuse to type the words of somebody else's sweep once more.

    Raises:
        CheckpointError: its sweep.json is not signed, and ``--trust`` was not typed.
    """
    path = sweep.folder / SWEEP_FILE
    content = json.dumps({"words": list(sweep.words), "cwd": sweep.cwd})
    if not trusts and not signature.is_signed(atomic.read_json(path), SWEEP_FILE, content):
        raise CheckpointError(
            f"{short_path(str(sweep.folder))} is not signed with your key, and going on with it "
            f"runs its command: {printable(shlex.join(['ppocli', 'train', *sweep.words]))}",
            where=str(path), fix=f"read that command, and if you trust it add {TRUST}; for a sweep "
            f"that you started with another key, {signature.KEY_VARIABLE}=FILE")


def is_sweep(folder: Path) -> bool:
    """Whether a folder is a sweep's."""
    return os.path.isfile(folder / SWEEP_FILE)


def read_sweep(folder: Path) -> SweepRecord:
    """Read a sweep's folder; folders of its jobs are given where they lie now.

    Raises:
        CheckpointError: its sweep.json is damaged.
    """
    path, folder = folder / SWEEP_FILE, folder.resolve()
    try:
        data = size_limited.read_json(path)
        home = Path(data.get("dir") or folder)
        jobs = {job.number: job for job in (_job(each, home, folder) for each in data["jobs"])}
        # jobs in other processes may have ended after the sweep's process was killed
        jobs |= job_records(folder)
        return SweepRecord(folder, tuple(str(word) for word in data["words"]),
                           str(data.get("cwd") or ""), bool(data.get("grid")),
                           tuple(jobs[number] for number in sorted(jobs)))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{path} is damaged: {error}", where=str(path), fix="restore it from "
                              "a copy; the runs of its jobs are untouched") from error


def _job(entry: dict[str, Any], home: Path, folder: Path) -> JobRecord:
    place = str(entry["folder"] or "")
    if place:
        relative = Path(os.path.relpath(place, home))
        place = str(folder / relative if ".." not in relative.parts else Path(place))
    words = {name: tuple(map(str, entry[name])) for name in ("overrides", "varied")}
    numbers = {name: finite_number(entry.get(name)) for name in (
        "reward_mean", "kl_mean", "objective")}
    figures = {label: finite_number(value)
               for label, value in (entry.get("figures") or {}).items()}
    return JobRecord(**{**entry, **words, **numbers, "figures": figures, "folder": place,
                        "number": int(entry["number"]), "status": str(entry["status"]),
                        "seconds": finite_number(entry.get("seconds")) or 0.0})


def find_sweep(name: str | None) -> Path:
    """The folder of a sweep: a path, a name below ``runs/``, or by default the newest there.

    Raises:
        ConfigError: no name, and there is no sweep.
        CheckpointError: there is no sweep of that name.
    """
    if name is not None:
        path = run_named(name, is_match=is_sweep)
        if not is_sweep(path):
            raise CheckpointError(f"{name} is no sweep (it holds no {SWEEP_FILE}).",
                                  where=str(path.absolute()), fix=_instead(name))
        return path
    sweeps = _list_sweeps()
    if not sweeps:
        raise ConfigError(f"There is no sweep in {RUNS} yet.", where=str(RUNS.absolute()),
                          fix="name a sweep's folder; or make one: "
                          "ppocli train -m +recipe=quickstart seed=1,2")
    return sweeps[-1]


def _list_sweeps() -> list[Path]:
    """Folders of sweeps below ``runs/``, the one written to last at the end."""
    changed = []
    for folder in subfolders(RUNS):
        with suppress(OSError):  # no sweep, not readable, or gone by now
            changed.append(((folder / SWEEP_FILE).stat().st_mtime, folder))
    return [folder for _, folder in sorted(changed)]


def _instead(name: str) -> str:
    """A hint for somebody who named something that is no sweep."""
    place = run_named(name)
    if os.path.isdir(place) and is_sweep(place.parent):
        return f"it is a job of a sweep: name {place.parent}"
    sweeps = _list_sweeps()
    if not sweeps:
        return f"name a folder that ppocli train -m made; there is none in {RUNS}"
    hint = did_you_mean(name, [text for each in sweeps for text in (str(each), each.name)])
    return f"name one of {', '.join(map(str, sweeps[:-9:-1]))}{hint}"


def jobs_now(sweep: SweepRecord) -> list[tuple[JobRecord, RunRecord | None]]:
    """Every job as it is now, and its run: the record, set right by what the run's folder says,
    also where the sweep was killed before it could say, or where the job was resumed by itself with
    other values.

    The status may also be ``interrupted`` (ended without a word) or ``gone`` (finished, but its
    folder was deleted); the figures are of the latest evaluation where the job isn't finished.
    """
    alive = run_folder.live_owner(sweep.folder) is not None
    return [_job_now(job, alive) for job in sweep.jobs]


def _job_now(job: JobRecord, sweep_alive: bool) -> tuple[JobRecord, RunRecord | None]:
    folder = Path(job.folder)
    run = None
    with suppress(CheckpointError):  # a damaged configuration: the record alone has to do
        run = read_run(folder) if job.folder and is_run(folder) else None
    now: dict[str, Any] = {"status": _status(job, run, sweep_alive)}
    now["varied"] = tuple(f"{word.partition('=')[0]}={changes[-1]['after']}" if changes else word
                          for word in job.varied
                          for changes in [changed_on_resume(job).get(_key_of(word))])
    if run is not None and now["status"] != "failed":
        newest = {name.removeprefix("eval/"): points[-1][1] for name in run.names
                  if name.startswith("eval/") and (points := run.series(name))}
        if newest:
            now |= figures_of(run.config, folder, newest)
    return replace(job, **now), run


def changed_on_resume(job: JobRecord) -> dict[str, list[dict[str, Any]]]:
    """The settings with which a job was resumed and that differ from its words, by key, as
    :func:`~ppocli.runs.record.read_changes` returns them, without those that change no result."""
    changes: dict[str, list[dict[str, Any]]] = {}
    for change in read_changes(Path(job.folder)) if job.folder else ():
        if config_yaml.classify_change(change["key"]) != "harmless":
            changes.setdefault(change["key"], []).append(change)
    return changes


def format_changes(changes: Iterable[dict[str, Any]]) -> str:
    """``0.001 -> 0.0005 (from step 5)`` of the changes of one key."""
    first, *more = changes
    return " -> ".join([first["before"], *(
        f"{each['after']} (from step {each['step'] + 1})" for each in (first, *more))])


def _key_of(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def has_values(config: schema.TrainConfig, varied: Iterable[str]) -> bool:
    """Whether a run has the values of a job; False, too, where one is a group's, which no
    configuration tells."""
    values = config_yaml.flat(config)
    return all(key in values and values[key] == _parsed(text)
               for key, text in varied_values(varied).items())


def _parsed(text: str) -> Any:
    # omegaconf reads 1e-5 as a number where YAML does not; Hydra's parser is not a worker's to load
    try:
        read = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    except (YAMLError, OmegaConfBaseException):
        return text
    return cast(dict[str, Any], read)["value"]


def _status(job: JobRecord, run: RunRecord | None, sweep_alive: bool) -> str:
    if run is None:
        if job.status == "running":
            working = sweep_alive or run_folder.live_owner(Path(job.folder)) is not None
            return "running" if working else "interrupted"
        return "gone" if job.status == "finished" else job.status
    refused = job.exit_code == CheckpointError.exit_code and not has_values(run.config, job.varied)
    if run.status == "running" or (run.status == "finished" and not refused):
        return run.status
    if job.status == "running" and sweep_alive:
        return "running"  # its process is starting
    return job.status if job.status in ("failed", "stopped") else run.status


def running_job(jobs: Iterable[JobRecord]) -> tuple[JobRecord, run_folder.Owner] | None:
    """A job whose process still runs, and that process."""
    return next(((job, owner) for job in jobs if job.folder
                 and (owner := run_folder.live_owner(Path(job.folder))) is not None), None)


def varied_values(varied: Iterable[str]) -> dict[str, str]:
    """Key -> value of the overrides that differ between jobs: ``{"seed": "1"}``."""
    parts = (word.lstrip("+~").partition("=") for word in varied)
    return {key: value for key, _, value in parts}
