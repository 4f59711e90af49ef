"""What one job of a sweep does, called by Hydra: train in this terminal, or, under a launcher
plugin, in a process of its own that outlives the plugin's worker until it has saved.
"""

import fcntl
import os
import select
import shutil
import signal
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ppocli import errors
from ppocli.cli import job as job_process
from ppocli.cli import output
from ppocli.config import compose, config_yaml, schema, secrets
from ppocli.config.hydra_sweep import BASIC, SweepJob
from ppocli.distributed.stop import StopRequested, heeded, signal_handlers
from ppocli.launch.launch import Caller, launch
from ppocli.runs import atomic, environment, run_folder, sweeps

STOP = ".stop"
"""a file in the sweep's folder: its jobs save and end, and no other job starts"""
_PAUSE = 0.2
"""seconds between two looks at a job and at its sweep"""
_SETTLE = 1.0
"""seconds in which further signals are the same request to stop"""


@dataclass(frozen=True)
class JobRunner:
    """Runs a job of a sweep. Under a launcher plugin it is pickled and called elsewhere."""

    folder: Path
    """the sweep's"""
    launcher: str
    note: Callable[[sweeps.JobRecord], None]
    """gets the record of the job whenever it changes"""
    kept: Mapping[int, sweeps.JobRecord] = field(default_factory=dict)
    """jobs that are finished and don't run again, by number"""
    gpus: tuple[str, ...] = ()
    """values of ``CUDA_VISIBLE_DEVICES``, one for each job that runs at a time"""
    variables: Mapping[str, str] = field(default_factory=dict)
    """other environment variables of jobs"""
    cwd: str = field(default_factory=os.getcwd)

    def __call__(self, job: SweepJob) -> float | None:
        """``checkpoint.metric`` of the job; None if it has no such figure.

        Raises:
            StopRequested: a signal has stopped the job that ran in this terminal.
        """
        if (kept := self.kept.get(job.number)) is not None:
            return kept.objective
        if self.launcher != BASIC:
            _ignore_signals()
        with self._gpus(job.number) as variables:
            if self.launcher != BASIC and self._is_over():
                return None
            record = self._run(job, variables)
        if self.launcher == "joblib" and run_folder.live_owner(self.folder) is None:
            os._exit(0)  # joblib's workers would wait five minutes for a sweep that was killed
        return record.objective

    def _run(self, job: SweepJob, variables: Mapping[str, str]) -> sweeps.JobRecord:
        started, config, stopped_by = time.monotonic(), None, None
        try:
            checked = compose.check(job.composed)
            config = checked.config
            self.note(sweeps.JobRecord(job.number, job.words, job.varied, "running",
                                       folder=str(job.folder)))
            if self.launcher == BASIC:
                record, stopped_by = _run_here(job, checked, started)
            else:
                record = self._run_elsewhere(job, config, started, variables)
        except errors.PpocliError as problem:
            error = secrets.safe_text(str(problem))
            if self.launcher == BASIC:
                output.complain(f"Error: {error}")
            with suppress(OSError):
                job.folder.rmdir()  # Hydra made it; nothing came into it
            record = record_of(job, "failed", problem.exit_code, None, started, config, error)
        except Exception:  # a plugin would end the other jobs
            if self.launcher == BASIC:
                raise
            record = record_of(job, "failed", 1, None, started, config, traceback.format_exc())
        self.note(record)
        if stopped_by is not None:
            raise StopRequested(stopped_by)  # Hydra's sweeper goes on after an Exception of a job
        return record

    def _is_over(self) -> bool:
        """Whether the sweep was stopped or its process has died. The process of a sweep on another
        machine counts as alive."""
        return (self.folder / STOP).exists() or (
            run_folder.live_owner(self.folder) is None
            and run_folder.other_host(self.folder) is None)

    def _run_elsewhere(self, job: SweepJob, config: schema.TrainConfig, started: float,
                       variables: Mapping[str, str]) -> sweeps.JobRecord:
        """Run a job as a command whose output goes to ``N.log``, and wait for its end."""
        log = self.folder / f"{job.number}.log"
        place = (f"output_dir={config_yaml.quoted(str(self.folder))}",
                 f"run_name={config_yaml.quoted(job.folder.name)}", "resume=auto")
        words = job.typed.without("resume", "output_dir", "--multirun").adding(*place)
        before = log.stat().st_size if log.exists() else 0
        code = self._exit_code(job_process.start(words.argv(), log, self.cwd,
                                                 {**self.variables, **variables}))
        status = "finished" if code == 0 else \
            "stopped" if code in (128 + signal.SIGINT, 128 + signal.SIGTERM) else "failed"
        summary = atomic.read_json(run_folder.RunFolder(job.folder).summary)
        return record_of(job, status, code, summary, started, config,
                         None if code == 0 else _last_error(log, before))

    def _exit_code(self, process: job_process.Process) -> int:
        """Wait for a job, which is stopped once the sweep is over."""
        try:
            with _saving_before_requeue(process):
                while not select.select([process.ended], [], [], _PAUSE)[0]:
                    if self._is_over():
                        process.stop()
        finally:  # submitit leaves by SystemExit when Slurm takes its job back
            process.stop()
            code = process.exit_code()
        return code

    @contextmanager
    def _gpus(self, number: int) -> Iterator[dict[str, str]]:
        """Wait for GPUs that no other job of the sweep uses: by its number, or the next ones."""
        while self.gpus and not self._is_over():
            for place in (each % len(self.gpus) for each in range(number,
                                                                  number + len(self.gpus))):
                with (self.folder / f".gpus-{place}").open("a") as file:
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        continue
                    yield {"CUDA_VISIBLE_DEVICES": self.gpus[place]}
                    return
            time.sleep(_PAUSE)
        yield {}


def _run_here(job: SweepJob, checked: compose.Checked, started: float
              ) -> tuple[sweeps.JobRecord, int | None]:
    """Run a job as a single run is shown. Returns its record and the signal that stopped it."""
    place = {"output_dir": str(job.folder.parent), "run_name": job.folder.name}
    here = replace(checked, config=config_yaml.with_values(checked.config, place))
    try:
        outcome = launch(here, Caller("fresh", output.display_mode(), output.say))
    except errors.StoppedError as stopped:
        summary = atomic.read_json(run_folder.RunFolder(job.folder).summary)
        output.complain(f"Stopped: {stopped}")
        return (record_of(job, "stopped", stopped.exit_code, summary, started, checked.config),
                stopped.exit_code - 128)
    return record_of(job, "finished", 0, outcome.summary, started, checked.config), \
        outcome.stopped_by


def record_of(job: SweepJob, status: str, code: int, summary: dict[str, Any] | None, started: float,
              config: schema.TrainConfig | None, error: str | None = None) -> sweeps.JobRecord:
    """The record of a job that has ended; ``started`` is on the monotonic clock."""
    refused = code == errors.CheckpointError.exit_code  # the folder's figures may be of another
    after = {} if refused else (summary or {}).get("eval_after") or {}
    figures = {} if config is None else sweeps.figures_of(config, job.folder, after)
    return sweeps.JobRecord(job.number, job.words, job.varied, status, code, **figures,
                            seconds=round(time.monotonic() - started, 1), folder=str(job.folder),
                            error=error or (summary or {}).get("error"))


def _last_error(log: Path, before: int) -> str | None:
    """The last error in a log, of which earlier attempts have written ``before`` bytes."""
    with suppress(OSError):
        text = b"\n" + log.read_bytes()[before:]
        _, separator, error = text.decode(errors="replace").rpartition("\nError: ")
        return error.strip() if separator else None
    return None


def _ignore_signals() -> None:
    """Let a plugin's worker outlive Ctrl-C, which the terminal sends to it as well, until its job
    has saved; handlers of the plugin stay."""
    with suppress(ValueError):  # outside the main thread, where Python allows no handlers
        for number in heeded():
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                signal.signal(number, signal.SIG_IGN)


@contextmanager
def _saving_before_requeue(process: job_process.Process) -> Iterator[None]:
    """Let a job save before submitit has Slurm queue it again, which ends all its processes."""
    requeue = signal.getsignal(signal.SIGUSR2)
    if not callable(requeue):
        yield
        return

    def save_first(number: int, frame: Any) -> None:
        process.stop()
        select.select([process.ended], [], [])
        requeue(number, frame)

    with signal_handlers({signal.SIGUSR2: save_first}):
        yield


# In the process of the sweep ----------------------------------------------------------------------

class Watch:
    """While a plugin runs the jobs: a signal makes a :data:`STOP` file rather than an exception,
    at which the plugin would kill its workers; the records of jobs are read.

    Args:
        note: gets each record that a job has left.
    """

    def __init__(self, folder: Path, note: Callable[[sweeps.JobRecord], None]) -> None:
        self.folder, self._note = folder, note
        self.stopped_by: int | None = None
        self._settled = 0.0
        self._over = threading.Event()
        self._records: dict[int, sweeps.JobRecord] = {}
        self._lock = threading.Lock()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch inside the block."""
        signals = heeded()
        thread = threading.Thread(target=self._watch, args=(signals,), name="ppocli-sweep",
                                  daemon=True)
        # workers inherit the mask: Ctrl-C reaches this process alone
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        try:
            with signal_handlers(dict.fromkeys(signals, self._stop)):
                thread.start()
                try:
                    yield
                finally:
                    self._over.set()
                    thread.join()
                    self.read_records()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def read_records(self) -> None:
        """Note what jobs have left since the last time."""
        with self._lock:
            for number, record in sorted(sweeps.job_records(self.folder).items()):
                if self._records.get(number) != record:
                    self._records[number] = record
                    self._note(record)

    def _stop(self, number: int, frame: object = None) -> None:
        number = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        if self.stopped_by is None:
            self.stopped_by, self._settled = number, time.monotonic() + _SETTLE
            (self.folder / STOP).touch()
            _cancel_pending(self.folder)
        elif time.monotonic() > self._settled:
            os._exit(128 + number)  # as kill -9 would: the jobs save and end without us

    def _watch(self, signals: list[signal.Signals]) -> None:
        while not self._over.is_set():
            if (received := signal.sigtimedwait(signals, _PAUSE)) is not None:
                self._stop(received.si_signo)
            self.read_records()


def _cancel_pending(sweep: Path) -> None:
    """Take jobs out of Slurm's queue that have not started."""
    numbers = {folder.name.partition("_")[0] for folder in (sweep / ".submitit").glob("[0-9]*")}
    if numbers and shutil.which("scancel"):
        subprocess.run(["scancel", "--state=PENDING", *sorted(numbers)], check=False,
                       stderr=subprocess.DEVNULL, timeout=60)


def gpu_shares(hardware: schema.HardwareConfig) -> tuple[str, ...]:
    """GPUs for as many jobs as there are GPUs for, as values of ``CUDA_VISIBLE_DEVICES``; empty
    where none compute."""
    if hardware.device == "cpu":
        return ()
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        gpus = [name for name in visible.split(",") if name.strip() not in ("", "-1")]
    else:
        import torch

        gpus = [str(number) for number in range(torch.cuda.device_count())]
    each = hardware.num_processes
    return tuple(",".join(gpus[start:start + each])
                 for start in range(0, len(gpus) - each + 1, each))


def core_share(jobs: int, processes: int) -> dict[str, str]:
    """``OMP_NUM_THREADS`` for jobs that share the cores, unless it is set already."""
    if "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, environment.usable_cores() // (jobs * processes)))}
