"""How the jobs of a sweep run: in turn, in this terminal; ``sweep.jobs`` of them at a time, each
the command that a person would type for it; or so on Slurm, through submitit.
"""

import logging
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ppocli import errors
from ppocli.cli import job as job_process
from ppocli.cli import output
from ppocli.config import compose, extras, resolved, schema, secrets
from ppocli.config.sweep import SweepJob
from ppocli.launching.launch import Caller, launch
from ppocli.parallel.stop import StopRequested, heeded, signal_handlers
from ppocli.runs import search, sweeps
from ppocli.storage import atomic, environment, run_folder
from ppocli.text import short_path

SLURM_FOLDER = "slurm"
"""what submitit keeps, in the sweep's folder"""
_PAUSE = 0.2
"""seconds between two looks at the jobs that run"""
_ASK = 5.0
"""seconds between two questions to Slurm about a job"""
_MISSED = 3
"""questions in a row after which a job that the queue doesn't know has ended: a result may arrive
a little later on a shared file system"""
Ended = Callable[[sweeps.JobRecord], None]
"""is told what came of each job, in the thread that waits for it"""


class Jobs:
    """The jobs of a sweep at work: one after another, each shown as a single run is. Its methods
    raise :class:`StopRequested` once all jobs have ended that a signal has stopped."""

    def __init__(self, ended: Ended) -> None:
        self._ended = ended
        self._received: list[int] = []
        """signals"""

    def wait_for_place(self) -> None:
        """Wait until another job can be started."""

    def start(self, job: SweepJob) -> None:
        """Start a job, for which there is a place."""
        started, config = time.monotonic(), None
        try:
            checked = compose.check(job.composed)
            config = checked.config
            record = self._begin(job, checked, started)
        except errors.PpocliError as problem:
            error = secrets.safe_text(str(problem))
            output.complain(f"Error: {error}")
            with suppress(OSError):
                job.folder.rmdir()  # Hydra made it; nothing came into it
            record = record_of(job, "failed", problem.exit_code, None, started, config, error)
        if record is not None:
            self._ended(record)
            self._leave_if_stopped()

    def wait(self, number: int | None = None) -> None:
        """Wait for the end of a job, or of all."""

    def end(self, number: int) -> None:
        """Have a job stop that runs on another machine; here there is none."""

    def _begin(self, job: SweepJob, checked: compose.Checked, started: float
               ) -> sweeps.JobRecord | None:
        """The record of a job, or None while it runs."""
        place = {"output_dir": str(job.folder.parent), "run_name": job.folder.name}
        here = replace(checked, config=resolved.with_values(checked.config, place))
        outcome = launch(here, Caller("fresh", output.display_mode(), output.say))
        status = "finished" if outcome.exit_code == 0 else "failed"
        if outcome.stopped_by is not None:
            self._received.append(outcome.stopped_by)
            status = "stopped" if outcome.exit_code else status
        return record_of(job, status, outcome.exit_code, outcome.summary, started, checked.config)

    def _leave_if_stopped(self) -> None:
        if self._received:
            # Hydra's sweeper goes on after an Exception of a job
            raise StopRequested(self._received[0])


@contextmanager
def jobs_of(config: schema.TrainConfig, folder: Path, ended: Ended) -> Iterator[Jobs]:
    """What runs the jobs of a sweep. Signals are handed on to its jobs, which end with the block.

    Args:
        config: what all jobs share.

    Raises:
        ConfigError: there are too few devices, or Slurm or submitit is missing.
    """
    plan = config.sweep
    if plan.launcher != "slurm" and plan.jobs == 1:
        yield Jobs(ended)
        return
    places = _Slurm(plan, folder) if plan.launcher == "slurm" \
        else _Places(plan.jobs, config.hardware)
    jobs = _AtATime(ended, plan.jobs, places.start)
    with signal_handlers(dict.fromkeys(heeded(), jobs.hand_on)):
        try:
            yield jobs
        except StopRequested:
            raise
        except BaseException:
            jobs.stop()
            raise


def record_of(job: SweepJob, status: str, code: int, summary: dict[str, Any] | None, started: float,
              config: schema.TrainConfig | None, error: str | None = None) -> sweeps.JobRecord:
    """What is written down of a job that has ended; ``started`` on the monotonic clock."""
    refused = code == errors.CheckpointError.exit_code  # the folder's figures may be of another
    after = {} if refused else (summary or {}).get("eval_after") or {}
    figures = {} if config is None else sweeps.figures_of(config, job.folder, after)
    if status == "failed" and search.was_pruned(job.folder):
        status = search.PRUNED
    return sweeps.JobRecord(job.number, job.words, job.varied, status, code, **figures,
                            seconds=round(time.monotonic() - started, 1), folder=str(job.folder),
                            error=error or (summary or {}).get("error"))


@dataclass(frozen=True, slots=True)
class _Begun:
    """A job that runs, and what is needed when it has ended."""

    job: SweepJob
    process: "_Local | _Queued"
    config: schema.TrainConfig
    started: float
    log: Path
    said_before: int
    """size of the log, which earlier attempts have written to, in bytes"""

    def last_error(self) -> str | None:
        """What the job has said last of why it failed."""
        with suppress(OSError):
            said = b"\n" + self.log.read_bytes()[self.said_before:]
            _, found, text = said.decode(errors="replace").rpartition("\nError: ")
            return text.strip() if found else None
        return None


class _AtATime(Jobs):
    """Several jobs at a time, in processes that are looked at every now and then.

    Args:
        start_process: gets the words after ``ppocli train``, and the file for what it prints.
    """

    def __init__(self, ended: Ended, places: int, start_process: Callable[
            [SweepJob, list[str], Path], "_Local | _Queued"]) -> None:
        super().__init__(ended)
        self._places, self._start_process = places, start_process
        self._running: dict[int, _Begun] = {}

    def hand_on(self, number: int, frame: object = None) -> None:
        """As a signal's handler: the jobs get it."""
        self._received.append(number)
        for begun in [*self._running.values()]:
            begun.process.send(number)

    def stop(self) -> None:
        """Stop what still runs, and wait for it."""
        for begun in self._running.values():
            begun.process.send(signal.SIGTERM)
        while self._running:
            self._look()

    def end(self, number: int) -> None:
        """As of one at a time."""
        if (begun := self._running.get(number)) is not None:
            begun.process.send(signal.SIGTERM)

    def wait_for_place(self) -> None:
        """As of one at a time."""
        while len(self._running) >= self._places:
            self._look()
        self._leave_if_stopped()

    def _begin(self, job: SweepJob, checked: compose.Checked, started: float) -> None:
        log = job.folder.with_name(f"{job.number}.log")
        place = (f"output_dir={resolved.quoted(str(job.folder.parent))}",
                 f"run_name={resolved.quoted(job.folder.name)}", "resume=auto")
        words = job.typed.without("resume", "output_dir", "--multirun").adding(*place)
        before, size = len(self._received), log.stat().st_size if log.exists() else 0
        process = self._start_process(job, words.argv(whole=True), log)
        self._running[job.number] = _Begun(job, process, checked.config, started, log, size)
        for number in self._received[before:]:  # which came before it was among those that run
            process.send(number)
        output.say(f"job {job.number}: output in {short_path(str(log))}")

    def wait(self, number: int | None = None) -> None:
        """As of one at a time."""
        while self._running if number is None else number in self._running:
            self._look()
        self._leave_if_stopped()

    def _leave_if_stopped(self) -> None:
        while self._received and self._running:
            self._look()
        super()._leave_if_stopped()

    def _look(self) -> None:
        """Tell of the jobs that have ended; wait a moment if none has."""
        found = [(number, code) for number, begun in self._running.items()
                 if (code := begun.process.code()) is not None]
        for number, code in found:
            begun = self._running.pop(number)
            stopped = code in (128 + signal.SIGINT, 128 + signal.SIGTERM)
            status = "finished" if code == 0 else \
                "stopped" if stopped and not search.was_pruned(begun.job.folder) else "failed"
            summary = atomic.read_json(run_folder.RunFolder(begun.job.folder).summary)
            error = None if code == 0 else begun.last_error()
            if error is not None:
                output.complain(f"job {number}: {error}")
            self._ended(record_of(begun.job, status, code, summary, begun.started, begun.config,
                                  error))
        if not found:
            time.sleep(_PAUSE)


# On this machine ----------------------------------------------------------------------------------

class _Places:
    """The places of this machine: GPUs of its own for each, or a share of the cores."""

    def __init__(self, count: int, hardware: schema.HardwareConfig) -> None:
        each, devices = hardware.num_processes, _visible_gpus(hardware)
        if devices and len(devices) < count * each:
            raise errors.ConfigError(
                f"sweep.jobs={count}: each job has GPUs of its own, which takes {count * each} of "
                f"them, and there are {len(devices)}", where="sweep.jobs",
                fix=f"sweep.jobs={max(1, len(devices) // each)}")
        cores = str(max(1, environment.usable_cores() // (count * each)))
        shared = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": cores}
        self._free = deque(shared | ({"CUDA_VISIBLE_DEVICES": ",".join(
            devices[place * each:(place + 1) * each])} if devices else {})
            for place in range(count))

    def start(self, job: SweepJob, words: Sequence[str], log: Path) -> "_Local":
        """Start a job at a free place."""
        variables = self._free.popleft()
        process, lifeline = job_process.start(words, log, variables=variables)
        return _Local(process, lifeline, variables, self._free)


@dataclass(slots=True)
class _Local:
    process: subprocess.Popen[bytes]
    lifeline: int
    place: dict[str, str]
    free: deque[dict[str, str]]
    """gets the place back, once, when the job has ended"""

    def code(self) -> int | None:
        if (code := self.process.poll()) is None:
            return None
        os.close(self.lifeline)
        self.free.append(self.place)
        return code if code >= 0 else 128 - code

    def send(self, number: int) -> None:
        self.process.send_signal(number)  # none is sent to a process that has ended


def _visible_gpus(hardware: schema.HardwareConfig) -> list[str]:
    """What ``CUDA_VISIBLE_DEVICES`` names, or would name, where GPUs compute."""
    if hardware.device == "cpu":
        return []
    if (given := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in given.split(",") if name.strip() not in ("", "-1")]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


# On Slurm -----------------------------------------------------------------------------------------

class _Slurm:
    """Jobs in Slurm's queue, as many at a time as there are places."""

    def __init__(self, plan: schema.SweepConfig, folder: Path) -> None:
        if not extras.installed("submitit"):
            raise errors.ConfigError("Jobs on Slurm need submitit, which is not installed.",
                                     where="sweep.launcher", fix=extras.pip_line("submitit"))
        import submitit

        # a cluster without accounting is no reason to warn each time a job is asked for
        logging.getLogger("submitit").setLevel(logging.ERROR)
        try:
            self._executor = submitit.AutoExecutor(folder / SLURM_FOLDER, cluster="slurm")
            self._executor.update_parameters(name="ppocli", **plan.slurm)
        except (RuntimeError, ValueError, TypeError, NameError) as error:
            raise errors.ConfigError(f"Slurm can't be used: {error}", where="sweep.slurm",
                                     fix="give it parameters of submitit, such as timeout_min, "
                                     "gpus_per_node, slurm_partition, on a machine with sbatch"
                                     ) from None

    def start(self, job: SweepJob, words: Sequence[str], log: Path) -> "_Queued":
        """Put a job into the queue."""
        command = job_process.Command(tuple(words), log, os.getcwd())
        try:
            submitted = self._executor.submit(command)
        except Exception as error:  # sbatch's word, in an exception of submitit's
            raise errors.PpocliError(f"Slurm took no job: {error}", where="sbatch",
                                     fix="see what it says; then: ppocli sweep resume") from error
        output.say(f"job {job.number}: Slurm's job {submitted.job_id}")
        return _Queued(submitted, log)


@dataclass(slots=True)
class _Queued:
    submitted: Any
    """submitit's job"""
    log: Path
    cancelled: bool = False
    _asked: float = 0.0
    _missed: int = 0
    """times in a row that the queue was without it"""

    def code(self) -> int | None:
        # one that was cancelled in the queue leaves no result, and submitit asks seldom
        ask = time.monotonic() - self._asked > _ASK
        if ask:
            self._asked = time.monotonic()
        job = self.submitted
        if not job.done(force_check=ask and self.cancelled):
            if ask and job.state == "UNKNOWN":
                self._missed = self._missed + 1 if self._has_left() else 0
            if self._missed < _MISSED:
                return None
        if job.paths.result_pickle.exists() or not (self.cancelled or self._missed):
            if (error := job.exception()) is None:
                return int(job.result())
            why = f"ended as {job.state}: {error}"
        elif self.cancelled:
            return 128 + signal.SIGTERM
        else:
            why = "left the queue without a result: it was cancelled, or its node failed"
        with self.log.open("a") as file:
            file.write(f"\nError: Slurm's job {job.job_id} {why}\n")
        return 1

    def _has_left(self) -> bool:
        """Whether the queue, all there is to ask on a cluster without accounting, is without it."""
        try:
            done = subprocess.run(["squeue", "--noheader", "--jobs", self.submitted.job_id],
                                  capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return False
        return "Invalid job id" in done.stderr if done.returncode else not done.stdout.strip()

    def send(self, number: int) -> None:
        with suppress(OSError):
            self.submitted.cancel(check=False)
            self.cancelled, self._asked = True, 0.0
