"""``ppocli train -m`` and ``ppocli sweep resume``: the jobs of a sweep, each in a clean process."""

import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from ppocli import errors
from ppocli.cli import output, sweep_jobs
from ppocli.cli.sweep_show import print_jobs
from ppocli.config.command_words import Words, read_setting, read_words
from ppocli.config.compose import compose
from ppocli.config.hydra_sweep import BASIC, SweepPlan, launch_jobs, read_plan
from ppocli.config.keys import schema_keys
from ppocli.config.text import first_line, pasted
from ppocli.runs import sweeps
from ppocli.runs.atomic import make_dirs
from ppocli.runs.record import is_run
from ppocli.runs.run_folder import lock, new_folder
from ppocli.runs.search import Search
from ppocli.runs.sweeps import SweepRecord


def run_sweep(words: Words) -> None:
    """Run every job of a new sweep, and print a table at the end.

    Args:
        words: the command line after ``train``.

    Raises:
        SweepError: every job ran, but some failed.
        StoppedError: a signal ended the sweep.
        CheckpointError: the folder holds a sweep or a run.
        ConfigError: something is wrong with all jobs alike; none was started.
    """
    plan = read_plan(words)
    search = _search_of(plan)
    for number, varied in enumerate(plan.grid):
        # a group or recipe that doesn't exist ends the sweep before its first job, not at its last
        if any(_key(word).lstrip("+") not in schema_keys() for word in varied):
            compose(plan.job(Path("sweep"), number, varied).words)
    base, name = Path(plan.shared.output_dir).expanduser().absolute(), words.value("run_name")
    place = words.value("hydra.sweep.dir")
    if place is None and name is None:
        folder = new_folder(base, f"sweep-{datetime.now():%Y%m%d-%H%M%S}")
    else:
        folder = Path(place).expanduser().absolute() if place else base / str(name)
        make_dirs(folder)
    if sweeps.is_sweep(folder) or is_run(folder):
        what, fix = ("a sweep", f"go on with it: ppocli sweep resume {pasted(folder)}; or ") \
            if sweeps.is_sweep(folder) else ("a run", "")
        raise errors.CheckpointError(f"{folder} holds {what} already; nothing is overwritten.",
                                     where="hydra.sweep.dir", fix=f"{fix}choose another folder")
    _run(plan, SweepRecord(folder, words.typed, str(Path.cwd()), plan.grid, search))


def go_on(name: str, words: Sequence[str], trusts: bool = False) -> None:
    """``ppocli sweep resume``: run the jobs that aren't finished, in the same folders.

    Args:
        name: the sweep's folder or name.
        words: settings with which these jobs continue.
        trusts: run its words, whoever wrote them.

    Raises:
        ConfigError: a word is no setting of a job or one that is swept.
        CheckpointError: there is no such sweep, it still runs, or it is somebody else's.
        PpocliError: as :func:`run_sweep`.
    """
    folder, words = output.split_words(name, words)
    sweep = sweeps.read_sweep(sweeps.find_sweep(folder or name))
    sweeps.check_own(sweep, trusts)
    typed = {_key(word) for word in words}
    if wrong := typed & {"resume", "run_name", "output_dir", "hydra.sweep.dir"}:
        raise errors.ConfigError(f"{min(wrong)} can't be changed: a sweep goes on where it is.",
                                 where="command line", fix="leave it out")
    for job in sweeps.jobs_now(sweep):
        if job.status == "running":
            raise errors.CheckpointError(f"Job {job.number} of the sweep in {sweep.folder} is "
                                         "still running.", where=str(job.folder), code="in-use",
                                         fix="wait for it to end, or stop it")
    if os.path.isdir(sweep.cwd):
        os.chdir(sweep.cwd)  # the words may name files from there
    kept = [word for word in sweep.words if (_key(word) or word) not in typed and not (
        _key(word).startswith("hydra.launcher.") and "hydra/launcher" in typed)]
    plan = read_plan(read_words([*kept, *words]))
    search = _search_of(plan)
    if (search or {}).get("ranges") != (sweep.search or {}).get("ranges") or (
            search is None and plan.grid != sweep.jobs):
        raise errors.ConfigError("The words no longer give the jobs of this sweep.",
                                 where=str(sweep.folder / sweeps.SWEEP_FILE),
                                 fix="leave out keys that are swept, or start another sweep")
    _run(plan, replace(sweep, words=(*kept, *words), search=search))


def _search_of(plan: SweepPlan) -> dict[str, Any] | None:
    grid = plan.shared.sweep.search == "grid"
    return None if grid else Search.of(plan.shared, plan.ranges).written


def _key(word: str) -> str:
    """The key that a word sets; empty for Hydra's flags and their values."""
    return "" if word.startswith("-") or "=" not in word else read_setting(word).key


def _run(plan: SweepPlan, sweep: SweepRecord) -> None:
    """Run the jobs that aren't finished; raises as :func:`run_sweep`."""
    folder = sweep.folder
    batches: Iterator[tuple[SweepRecord, Sequence[int]]]
    if sweep.search is not None:
        batches = Search.read(sweep.search).batches(sweep, plan.shared.sweep, plan.at_a_time or 1)
    else:
        todo = [job.number for job in sweeps.jobs_now(sweep) if job.status != "finished"]
        output.say(f"{folder}: {len(todo)} of {len(sweep.jobs)} jobs to run")
        batches = iter([(sweep, todo)])
    watch, current = sweep_jobs.StopWatch(folder), sweep
    with lock(folder):
        sweeps.write_sweep(sweep)
        with watch.watching():
            for current, numbers in batches:
                if numbers:
                    _run_jobs(plan, current, numbers, watch)
                if watch.stopped_by is not None:
                    break
    _report(current, watch.stopped_by)


def _run_jobs(plan: SweepPlan, sweep: SweepRecord, numbers: Sequence[int],
              watch: sweep_jobs.StopWatch) -> None:
    run_job = sweep_jobs.runner_of(plan, sweep.folder)
    jobs = [plan.job(sweep.folder, number, sweep.jobs[number]) for number in numbers]
    if plan.launcher == BASIC:
        for job in jobs:
            if watch.stopped_by is None:
                output.say(f"job {job.number}: {' '.join(job.varied)}")
                run_job(job)
        return
    output.say(f"jobs print into {sweep.folder}/N.log")
    try:
        launch_jobs(plan, sweep.folder, jobs, run_job)
    except (RuntimeError, ValueError, TypeError, NameError) as error:
        if watch.stopped_by is not None:
            return  # submitit fails for jobs that were cancelled
        raise errors.ConfigError(
            f"Hydra's launcher could not run the jobs: {first_line(error)}",
            where="hydra/launcher", fix="correct hydra.launcher.NAME, or choose another launcher: "
            "joblib, submitit_local") from error
    for number in numbers:  # nobody has seen what they printed
        if sweeps.job_now(sweep, number).status != "finished" and watch.stopped_by is None:
            output.complain(f"job {number}: "
                            f"{sweep_jobs.last_error(sweep.folder / f'{number}.log')}")


def _report(sweep: SweepRecord, stopped_by: int | None) -> None:
    """Print what came of the jobs; raises as :func:`run_sweep`."""
    jobs, resume = sweeps.jobs_now(sweep), f"ppocli sweep resume {pasted(sweep.folder)}"
    print_jobs(jobs)
    failed = sum(job.status != "finished" for job in jobs)
    if stopped_by is not None:
        raise errors.StoppedError(
            f"the sweep was stopped by {signal.Signals(stopped_by).name}; no other job was started",
            signal_number=stopped_by, fix=resume)
    if failed:
        raise errors.SweepError(f"{failed} of {len(jobs)} jobs failed", where=str(sweep.folder),
                                fix=f"correct what they say, then: {resume}")
