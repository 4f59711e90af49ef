"""``ppocli train -m``: the jobs of a sweep, each in a clean process, run by Hydra's launchers.

``sweep.json`` lists all planned jobs from the start, and the result of each job once it has ended,
so that a sweep that was killed can be shown and resumed.
"""

import os
import signal
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path

from ppocli import errors
from ppocli.cli import output, sweep_jobs
from ppocli.config import compose, config_yaml
from ppocli.config.command_words import Words, read_setting, read_words
from ppocli.config.gone import gone_key
from ppocli.config.hydra_sweep import (
    BASIC,
    Begin,
    Grid,
    MakeJob,
    Ranges,
    RunJob,
    SweepJob,
    run_sweep_jobs,
    sweep_dir,
)
from ppocli.config.resume_policy import keeping_settled
from ppocli.config.rules import LENGTHS
from ppocli.config.schema import SweepConfig
from ppocli.config.text import first_line, pasted, short_path
from ppocli.distributed.stop import StopRequested
from ppocli.launch.open_run_folder import new_folder
from ppocli.runs import search, sweeps
from ppocli.runs.model_files import check_folder
from ppocli.runs.record import is_run, read_run
from ppocli.runs.run_folder import LOCK, live_owner, lock


class _Book:
    """``sweep.json`` of a sweep at work, and the lock on its folder."""

    def __init__(self, words: Words, going_on: sweeps.SweepRecord | None) -> None:
        self.words, self.going_on = words, going_on
        self.written = words.typed if going_on is None else going_on.words
        """the words in the file; a resumed sweep keeps its own until a job runs with the new ones
        """
        self.folder: Path | None = None
        self.grid = False
        self.before: dict[int, sweeps.JobRecord] = {}
        """records of an earlier call"""
        self.jobs: dict[int, sweeps.JobRecord] = {}
        self.total: int | None = None
        self.begun: set[int] = set()
        self.kept: dict[int, sweeps.JobRecord] = {}
        """finished jobs, which don't run again"""
        self.watch: sweep_jobs.Watch | None = None
        """there is one where a launcher plugin runs the jobs"""
        self.held = ExitStack()
        """the folder's lock"""
        self._new_folder = self._new_file = False

    @property
    def ended(self) -> list[sweeps.JobRecord]:
        """Jobs that this call has run, or that were finished already."""
        return [job for job in self.jobs.values() if job.status not in ("planned", "running")]

    def open(self, grid: Grid | None, base: str) -> Path:
        """Lock the folder, ``hydra.sweep.dir`` or a new ``sweep-DATE-TIME`` in ``base``, and write
        the planned jobs.

        Raises:
            CheckpointError: it holds a sweep that isn't to be resumed, or that still runs.
            ConfigError: the plan isn't that of the sweep to resume.
            DiskError: it can't be made.
        """
        folder, self._new_folder = _sweep_folder(self.words, base)
        refuse_running(folder)
        self.held.enter_context(lock(folder))
        self.folder = folder
        self._new_file = not (folder / sweeps.SWEEP_FILE).exists()
        if not self._new_file:
            self._take_over(sweeps.read_sweep(folder), grid)
        self.grid = grid is not None
        for number, varied in enumerate(grid or ()):
            before = self.before.get(number)
            self.jobs[number] = before if before is not None and before.varied == varied else \
                sweeps.JobRecord(number, (), varied, "planned")
        self._write()
        for file in (folder / sweep_jobs.STOP, *sweeps.job_files(folder)):
            file.unlink(missing_ok=True)
        return folder

    def _take_over(self, left: sweeps.SweepRecord, grid: Grid | None) -> None:
        if self.words.value("resume") != "auto":
            raise errors.CheckpointError(
                f"{self.folder} holds a sweep already; nothing is overwritten.",
                where="hydra.sweep.dir", fix="go on with it: ppocli sweep resume "
                f"{pasted(self.folder)}; or choose another hydra.sweep.dir")
        if self.going_on is not None and not left.is_search \
                and grid != tuple(job.varied for job in left.jobs):
            raise errors.ConfigError("The words no longer give the jobs of this sweep.",
                                     where=str(left.folder / sweeps.SWEEP_FILE),
                                     fix="put back the values that were swept, or start another "
                                     "sweep")
        self.before = {job.number: job for job in left.jobs}
        if left.is_search:
            self.jobs |= self.before

    def note(self, job: sweeps.JobRecord, kept: bool = False) -> None:
        """Write down the record of a job, and say what is new."""
        self.jobs[job.number] = job
        refused = job.exit_code in (errors.ConfigError.exit_code, errors.CheckpointError.exit_code)
        if self.going_on is not None and not (kept or refused):
            self.written = _without_place(self.words.typed)
        self._write()
        if job.number not in self.begun:
            self.begun.add(job.number)
            output.say(f"job {job.number}{'' if self.total is None else f' of {self.total}'}: "
                       f"{' '.join(job.varied or job.overrides)}")
        if kept:
            output.say(f"job {job.number}: finished already, kept")
        elif job.status != "running":
            if job.error and self.watch is not None:  # nobody has seen what a job printed
                output.complain(f"job {job.number}: {job.error}")
            output.say(f"job {job.number}: {_result(job)}")

    def _write(self) -> None:
        assert self.folder is not None
        jobs = tuple(self.jobs[number] for number in sorted(self.jobs))
        sweeps.write_sweep(sweeps.SweepRecord(self.folder, self.written, str(Path.cwd()), self.grid,
                                              jobs))

    def begin(self, facts: Begin) -> tuple[Path, RunJob]:
        """Open the folder; returns it, and the function that runs one job."""
        folder = self.open(facts.grid, facts.shared.output_dir)
        plan, launcher, hardware = facts.shared.sweep, facts.launcher, facts.shared.hardware
        self.total = plan.trials if plan.search != "grid" else \
            None if facts.grid is None else len(facts.grid)
        self._keep_finished(facts.make_job(folder, *each) for each in enumerate(facts.grid or ()))
        if launcher.name == BASIC:
            return folder, sweep_jobs.JobRunner(folder, BASIC, self.note, self.kept)
        self.watch = sweep_jobs.Watch(folder, self.note)
        self.held.enter_context(self.watch.running())
        on_this_machine = launcher.name in ("joblib", "submitit_local")
        at_a_time = min(launcher.at_a_time or self.total or 1, self.total or 1)
        return folder, sweep_jobs.JobRunner(
            folder, launcher.name, partial(sweeps.write_job, folder), self.kept,
            sweep_jobs.gpu_shares(hardware) if on_this_machine else (),
            sweep_jobs.core_share(at_a_time, hardware.num_processes) if on_this_machine else {})

    def _keep_finished(self, jobs: Iterable[SweepJob]) -> None:
        for job in jobs:
            if (record := _finished_before(job, self)) is not None:
                self.kept[job.number] = record
                self.note(record, kept=True)

    def run_search(self, plan: SweepConfig, ranges: Ranges, folder: Path, batch_size: int,
                   make_job: MakeJob, launch: Callable[[Sequence[SweepJob]], None]) -> None:
        """Run the jobs of a search, which ``launch`` hands to Hydra's launcher."""
        def run_batch(jobs: Sequence[SweepJob]) -> None:
            self._keep_finished(jobs)
            launch(jobs)
            if self.watch is not None:
                self.watch.read_records()
            self.leave_if_stopped()

        search.run_search(plan, ranges, folder, batch_size, make_job, run_batch,
                          self.jobs.__getitem__)

    def leave_if_stopped(self) -> None:
        """Raise StopRequested where a signal came while a launcher plugin ran the jobs."""
        if self.watch is not None and self.watch.stopped_by is not None:
            raise StopRequested(self.watch.stopped_by)

    def close(self) -> None:
        """Remove what only a sweep at work needs, and a new sweep none of whose jobs has begun."""
        if self.folder is not None:
            for file in (self.folder / sweep_jobs.STOP, *self.folder.glob(".gpus-*"),
                         *sweeps.job_files(self.folder)):
                file.unlink(missing_ok=True)
        if self.folder is not None and not self.begun and self._new_file:
            (self.folder / sweeps.SWEEP_FILE).unlink(missing_ok=True)
            if self._new_folder:
                with suppress(OSError):
                    (self.folder / LOCK).unlink()
                    self.folder.rmdir()


def _sweep_folder(words: Words, base: str) -> tuple[Path, bool]:
    """The sweep's folder, made, and whether it is new."""
    try:
        name = words.value("run_name")
        if name is not None and (name[:1] in ("", ".") or {",", "(", "/", "{"} & {*name}):
            raise errors.ConfigError(f"run_name={name}: a sweep has one name, and its jobs have "
                                     "numbers.", where="run_name", fix="give one name, or none")
        place = sweep_dir(words) or (name and f"{base}/{name}")
        if place is not None:
            folder = Path(place).expanduser().absolute()
            if is_run(folder):
                raise errors.CheckpointError(f"{folder} is a run's; nothing is overwritten.",
                                             where=str(folder), fix="choose another name")
            new = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            return folder, new
        name = f"sweep-{datetime.now():%Y%m%d-%H%M%S}"
        return new_folder(Path(base).expanduser().absolute(), name), True
    except OSError as error:
        raise errors.DiskError(f"the sweep's folder can't be made: {error.strerror}",
                               where=str(error.filename),
                               fix="choose another with hydra.sweep.dir=FOLDER") from error


def run_sweep(words: Words, going_on: sweeps.SweepRecord | None = None) -> None:
    """Run every job, say what came of each, and print a table at the end.

    Args:
        words: the command line after ``train``. With ``resume=auto`` and the folder of a sweep,
            jobs that are finished, and whose settings are the same, keep their figures.
        going_on: the sweep whose words these are: its finished jobs are kept whatever has changed.

    Raises:
        SweepError: every job ran, but some failed.
        StoppedError: a signal ended the sweep.
        CheckpointError: the folder holds a sweep that isn't to be gone on with, or still runs.
        ConfigError: something is wrong with all jobs alike; none was started.
    """
    book = _Book(words, going_on)
    try:
        with book.held:
            try:
                run_sweep_jobs(words, book.begin, book.run_search)
            except (RuntimeError, ValueError, TypeError, NameError) as error:
                if book.watch is None:
                    raise
                book.leave_if_stopped()  # submitit fails for jobs that were cancelled
                raise errors.ConfigError(
                    f"Hydra's launcher could not run the jobs: {first_line(error)}",
                    where="hydra/launcher", fix="correct hydra.launcher.NAME, or choose "
                    "another launcher: joblib, submitit_local") from error
        book.leave_if_stopped()
    except (StopRequested, KeyboardInterrupt) as stop:
        number = stop.signal_number if isinstance(stop, StopRequested) else signal.SIGINT
        _print_table(book.ended)
        raise errors.StoppedError(
            f"the sweep was stopped by {signal.Signals(number).name} after {len(book.ended)} jobs; "
            "no other job was started", signal_number=number,
            fix=f"ppocli sweep resume {pasted(book.folder)}" if book.folder is not None
            and book.begun and sweeps.read_sweep(book.folder).goes_on else None) from None
    finally:
        book.close()
    _print_table(book.ended)
    if failed := [job for job in book.ended if job.status != "finished"]:
        raise errors.SweepError(f"{len(failed)} of {len(book.ended)} jobs failed",
                                where=f"{book.folder}/{sweeps.SWEEP_FILE}",
                                fix="correct what they say" + (
                                    f", then: ppocli sweep resume {pasted(book.folder)}; "
                                    "finished jobs are kept" if book.grid else ""))


def go_on(name: str, words: Sequence[str], trusts: bool = False) -> None:
    """``ppocli sweep resume``: run the jobs of a grid that aren't finished, in the same folders.

    Args:
        name: the sweep's folder or name.
        words: settings with which these jobs continue.
        trusts: run its words, whoever wrote them.

    Raises:
        ConfigError: it is no grid, or a word is no setting of a job or one that is swept.
        CheckpointError: there is no such sweep, it still runs, or it is somebody else's.
        PpocliError: as :func:`run_sweep`.
    """
    folder, words = output.split_words(name, words)
    if folder is None:
        raise errors.ConfigError(f"{name} is a setting, not a sweep.", where="command line",
                                 fix="name the sweep's folder first: ppocli sweep resume FOLDER "
                                 f"{name}")
    sweep = sweeps.read_sweep(sweeps.find_sweep(folder))
    if not sweep.goes_on:
        raise errors.ConfigError(f"{sweep.folder} is no grid: its sweeper chose the jobs as it "
                                 "went, and can't be asked again.", fix="start another sweep",
                                 where=str(sweep.folder / sweeps.SWEEP_FILE))
    sweeps.check_own(sweep, trusts)
    swept = {_key(word) for job in sweep.jobs for word in job.varied}
    typed = {_key(word) or "" for word in words}
    for key in sorted(typed):
        if key in {*swept, "resume", "run_name", "output_dir"} or (
                key.startswith("hydra") and not _is_of_launcher(key)):
            raise errors.ConfigError(f"{key} can't be changed: " + (
                "its values make the jobs of this sweep." if key in swept else
                "a sweep goes on where it is."), where="command line",
                fix="start another sweep" if key in swept else "leave it out")
    refuse_running(sweep.folder)
    if sweep.grid:
        unfinished = [job for job, _ in sweeps.jobs_now(sweep) if job.status != "finished"]
        output.say(f"{sweep.folder}: {len(unfinished)} of {len(sweep.jobs)} jobs to run")
    if sweep.cwd and Path(sweep.cwd).is_dir():
        os.chdir(sweep.cwd)  # the words may name files from there
    decided = {_key(word) for word in words if not word.endswith("=null")}
    for section, names in LENGTHS.items():
        lengths = {f"{section}.{name}" for name in names}
        typed |= lengths if lengths & decided else set()
    kept = [word for word in _without_place(sweep.words) if _key(word) not in typed
            and gone_key(_key(word) or "") is None
            and not (_is_of_launcher(_key(word) or "") and "hydra/launcher" in typed)]
    place = f"hydra.sweep.dir={config_yaml.quoted(str(sweep.folder))}"
    run_sweep(read_words([*kept, *words, "resume=auto", place]), going_on=sweep)


def refuse_running(folder: Path) -> None:
    """Refuse a sweep whose process, or one of whose jobs, still runs.

    Raises:
        CheckpointError: names the process.
    """
    owner, what, place = live_owner(folder), f"The sweep in {folder}", folder
    jobs = sweeps.read_sweep(folder).jobs if sweeps.is_sweep(folder) else ()
    running = sweeps.running_job(jobs)
    if owner is None and running is not None:
        job, owner = running
        what, place = f"Job {job.number} of the sweep in {folder}", Path(job.folder)
    if owner is not None:
        raise errors.CheckpointError(
            f"{what} is still running: process {owner.pid} on {owner.host}.",
            where=str(place / LOCK), fix=f"wait for it to end, or stop it: kill {owner.pid}")


def _without_place(words: Sequence[str]) -> tuple[str, ...]:
    """The words of a sweep without those that say where it lies and whether it goes on."""
    return tuple(word for word in words if _key(word) not in ("resume", "hydra.sweep.dir"))


def _is_of_launcher(key: str) -> bool:
    return key.startswith(("hydra/launcher", "hydra.launcher."))


def _key(word: str) -> str | None:
    """The key that a word sets; None for Hydra's flags and their values."""
    return None if word.startswith("-") or "=" not in word else read_setting(word).key


def _finished_before(job: SweepJob, book: _Book) -> sweeps.JobRecord | None:
    """The record of a job that an earlier call has finished; nothing of it is loaded."""
    if not book.before or not is_run(job.folder):
        return None
    before = book.before.get(job.number)
    is_same = before is not None and before.status == "finished" and before.varied == job.varied
    try:
        run = read_run(job.folder)
        if run.status != "finished":
            return None
        check_folder(run.folder.model, key="model", adapters=True)
        # another job's run may lie there, where the words of the sweep have changed
        if book.going_on is None or not (is_same or sweeps.has_values(run.config, job.varied)):
            now = config_yaml.with_absolute_paths(compose.check(job.composed).config)
            if config_yaml.config_differences(run.config, keeping_settled(now, run.config)):
                return None
    except errors.PpocliError:
        return None  # the job itself will say what is wrong
    if before is not None and is_same:
        before = replace(before, folder=str(job.folder))
        if not sweeps.changed_on_resume(before):
            return before
    seconds = ((run.summary or {}).get("seconds") or {}).values()
    return replace(sweep_jobs.record_of(job, "finished", 0, run.summary, 0.0, run.config),
                   seconds=round(sum(seconds), 1))


def _result(record: sweeps.JobRecord) -> str:
    if record.status != "finished":
        return f"{record.status} with exit code {record.exit_code}"
    figures = [f"{name} {value:.4g}" for name, value in record.shown.items() if value is not None]
    return ", ".join([f"finished in {record.seconds:.0f} s", *figures])


def _print_table(records: list[sweeps.JobRecord]) -> None:
    if not records:
        return
    labels = sweeps.labels_of(records)
    rows = [("job", "status", "exit", *labels, "folder", "overrides")]
    rows += [(str(r.number), r.status, str(r.exit_code),
              *(output.shown_figure(r.shown.get(label)) for label in labels),
              short_path(r.folder) if Path(r.folder).exists() else "-",
              " ".join([*r.varied, *(f"{key}: {sweeps.format_changes(changes)}" for key, changes in
                                     sweeps.changed_on_resume(r).items())])) for r in records]
    output.print_table(rows)
