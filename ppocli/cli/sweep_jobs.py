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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from ppocli import errors
from ppocli.cli import job as job_process
from ppocli.cli import output
from ppocli.config import compose, resolved, schema, secrets
from ppocli.config.sweep import SweepJob
from ppocli.launching.launch import Caller, launch
from ppocli.parallel.stop import StopRequested, signal_handlers
from ppocli.runs import search, sweeps
from ppocli.storage import atomic, environment, run_folder
from ppocli.text import finite_number, short_path

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


class Jobs(Protocol):
    """The jobs of a sweep at work. Its methods raise :class:`StopRequested` once all jobs have
    ended that a signal has stopped."""

    def wait_for_place(self) -> None:
        """Wait until another job can be started."""

    def start(self, job: SweepJob) -> None:
        """Start a job, for which there is a place."""

    def wait(self, number: int | None = None) -> None:
        """Wait for the end of a job, or of all."""


@contextmanager
def jobs_of(config: schema.TrainConfig, folder: Path, ended: Ended) -> Iterator[Jobs]:
    """What runs the jobs of a sweep. Its jobs end with the block.

    Args:
        config: what all jobs share.

    Raises:
        ConfigError: there are too few devices, or Slurm or submitit is missing.
    """
    plan = config.sweep
    if plan.launcher == "slurm":
        with _AtATime(plan.jobs, _Slurm(plan, folder).start, ended).handing_on() as jobs:
            yield jobs
    elif plan.jobs > 1:
        places = _Places(plan.jobs, config.hardware)
        with _AtATime(plan.jobs, places.start, ended).handing_on() as jobs:
            yield jobs
    else:
        yield _InTurn(ended)


def record_of(job: SweepJob, status: str, code: int, summary: dict[str, Any] | None, seconds: float,
              config: schema.TrainConfig | None, error: str | None = None) -> sweeps.JobRecord:
    """What is written down of a job that has ended; ``seconds`` on the clock."""
    after = (summary or {}).get("eval_after") or {}
    figures = {} if config is None else sweeps.figures_of(
        config, job.folder, lambda name: finite_number(after.get(name)))
    if status == "failed" and search.was_pruned(job.folder):
        status = search.PRUNED
    return sweeps.JobRecord(job.number, job.words, job.varied, status, code, **figures,
                            seconds=round(seconds, 1), folder=str(job.folder),
                            error=error or (summary or {}).get("error"))


def _checked(job: SweepJob, started: float) -> compose.Checked | sweeps.JobRecord:
    """The configuration of a job; its record if something is wrong with it."""
    try:
        return compose.check(job.compose())
    except errors.PpocliError as problem:
        return _failed(job, problem, started, None)


def _failed(job: SweepJob, problem: errors.PpocliError, started: float,
            config: schema.TrainConfig | None) -> sweeps.JobRecord:
    error = secrets.safe_text(str(problem))
    output.complain(f"Error: {error}")
    with suppress(OSError):
        job.folder.rmdir()  # Hydra made it; nothing came into it
    return record_of(job, "failed", problem.exit_code, None, time.monotonic() - started, config,
                     error)


@dataclass(slots=True)
class _InTurn:
    """One after another, each shown as a single run is."""

    ended: Ended

    def wait_for_place(self) -> None:
        pass

    def start(self, job: SweepJob) -> None:
        started = time.monotonic()
        checked = _checked(job, started)
        if isinstance(checked, sweeps.JobRecord):
            self.ended(checked)
            return
        place = {"output_dir": str(job.folder.parent), "run_name": job.folder.name}
        here = replace(checked, config=resolved.with_values(checked.config, place))
        try:
            outcome = launch(here, Caller("fresh", output.display_mode(), output.say))
        except errors.PpocliError as problem:
            self.ended(_failed(job, problem, started, checked.config))
            return
        code, stopped_by = outcome.exit_code, outcome.stopped_by
        status = "finished" if code == 0 else "stopped" if stopped_by is not None else "failed"
        self.ended(record_of(job, status, code, outcome.summary, time.monotonic() - started,
                             checked.config))
        if stopped_by is not None:
            # Hydra's sweeper goes on after an Exception of a job
            raise StopRequested(stopped_by)

    def wait(self, number: int | None = None) -> None:
        pass


class _Running(Protocol):
    """A job that was started elsewhere."""

    def code(self) -> int | None:
        """Its exit code; None while it runs."""

    def send(self, number: int) -> None:
        """Send a signal to it."""


@dataclass(frozen=True, slots=True)
class _Begun:
    """A job that runs, and what is needed when it has ended."""

    job: SweepJob
    process: _Running
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


@dataclass(slots=True)
class _AtATime:
    """Several jobs at a time, in processes that are looked at every now and then."""

    places: int
    start_process: Callable[[SweepJob, list[str], Path], _Running]
    """gets the words after ``ppocli train``, and the file for what it prints"""
    ended: Ended
    _running: dict[int, _Begun] = field(default_factory=dict, init=False)
    _received: list[int] = field(default_factory=list, init=False)

    @contextmanager
    def handing_on(self) -> "Iterator[_AtATime]":
        """Hand signals on to the jobs meanwhile, and stop what still runs at the end."""
        def hand_on(number: int, frame: object) -> None:
            self._received.append(number)
            for begun in [*self._running.values()]:
                begun.process.send(number)

        wanted = [number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
                  if signal.getsignal(number) is not signal.SIG_IGN]
        with signal_handlers(dict.fromkeys(wanted, hand_on)):
            try:
                yield self
            except StopRequested:
                raise
            except BaseException:
                for begun in self._running.values():
                    begun.process.send(signal.SIGTERM)
                while self._running:
                    self._look()
                raise

    def wait_for_place(self) -> None:
        while len(self._running) >= self.places:
            self._look()
        self._leave_if_stopped()

    def start(self, job: SweepJob) -> None:
        started = time.monotonic()
        checked = _checked(job, started)
        if isinstance(checked, sweeps.JobRecord):
            self.ended(checked)
            return
        log = job.folder.with_name(f"{job.number}.log")
        place = (f"output_dir={resolved.quoted(str(job.folder.parent))}",
                 f"run_name={resolved.quoted(job.folder.name)}", "resume=auto")
        words = job.typed.without("resume", "output_dir", "--multirun").adding(*place)
        before, size = len(self._received), log.stat().st_size if log.exists() else 0
        try:
            process = self.start_process(job, words.argv(whole=True), log)
        except errors.PpocliError as problem:
            self.ended(_failed(job, problem, started, checked.config))
            return
        self._running[job.number] = _Begun(job, process, checked.config, started, log, size)
        for number in self._received[before:]:  # which came before it was among those that run
            process.send(number)
        output.say(f"job {job.number}: output in {short_path(str(log))}")

    def wait(self, number: int | None = None) -> None:
        while self._running if number is None else number in self._running:
            self._look()
        self._leave_if_stopped()

    def _leave_if_stopped(self) -> None:
        if self._received:
            while self._running:
                self._look()
            raise StopRequested(self._received[0])

    def _look(self) -> None:
        """Tell of the jobs that have ended; wait a moment if none has."""
        found = [(number, code) for number, begun in self._running.items()
                 if (code := begun.process.code()) is not None]
        for number, code in found:
            begun = self._running.pop(number)
            job, seconds = begun.job, time.monotonic() - begun.started
            stopped = code in (128 + signal.SIGINT, 128 + signal.SIGTERM)
            status = "finished" if code == 0 else \
                "stopped" if stopped and not search.was_pruned(job.folder) else "failed"
            summary = atomic.read_json(run_folder.RunFolder(job.folder).summary)
            error = None if code == 0 else begun.last_error()
            if error is not None:
                output.complain(f"job {number}: {error}")
            self.ended(record_of(job, status, code, summary, seconds, begun.config, error))
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

    def start(self, job: SweepJob, words: Sequence[str], log: Path) -> _Running:
        """Start a job at a free place."""
        variables = self._free.popleft()
        process, lifeline = job_process.start(words, log, variables=variables)

        def left() -> None:
            os.close(lifeline)
            self._free.append(variables)

        return _Local(process, left)


@dataclass(slots=True)
class _Local:
    process: subprocess.Popen[bytes]
    left: Callable[[], None]
    """called once, when it has ended"""

    def code(self) -> int | None:
        if (code := self.process.poll()) is None:
            return None
        self.left()
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
        try:
            import submitit
        except ImportError:
            raise errors.ConfigError("Jobs on Slurm need submitit, which is not installed.",
                                     where="sweep.launcher",
                                     fix="pip install 'ppocli[slurm]'") from None
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

    def start(self, job: SweepJob, words: Sequence[str], log: Path) -> _Running:
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
