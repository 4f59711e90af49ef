"""What one job of a sweep does: train in a process of its own, which outlives a launcher plugin's
worker, and the sweep, until it has saved.
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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ppocli.cli import job as job_process
from ppocli.cli import output
from ppocli.config import schema
from ppocli.config.hydra_sweep import BASIC, SweepJob, SweepPlan
from ppocli.distributed.stop import heeded, signal_handlers
from ppocli.runs import environment, run_folder

STOP = ".stop"
"""a file in the sweep's folder: its jobs save and end, and no other job starts"""
_PAUSE = 0.2
"""seconds between two looks at a job and at its sweep"""
_SETTLE = 1.0
"""seconds in which further signals are the same request to stop"""


@dataclass(frozen=True)
class JobRunner:
    """Runs a job of a sweep; a launcher plugin unpickles it elsewhere."""

    folder: Path
    """the sweep's"""
    launcher: str
    gpus: tuple[str, ...] = ()
    """values of ``CUDA_VISIBLE_DEVICES``, one for each job that runs at a time"""
    variables: Mapping[str, str] = field(default_factory=dict)
    """other environment variables of jobs"""
    command: tuple[str, ...] = ("train",)
    """words before the job's own"""
    cwd: str = field(default_factory=os.getcwd)

    def __call__(self, job: SweepJob) -> None:
        """Run a job as a command, and wait for its end; its run folder says what came of it. Its
        output goes to ``N.log``, or without a plugin to this terminal."""
        if self.launcher == "joblib":  # whose start lets signals through again
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        log = None if self.launcher == BASIC else self.folder / f"{job.number}.log"
        words = job.words.adding(*["resume=auto"] * job.folder.exists()).argv()
        try:
            with self._gpus(job.number) as variables:
                if not self._is_over():
                    self._wait(job_process.start([*self.command, *words], log, self.cwd,
                                                 {**self.variables, **variables}))
        except Exception:  # a plugin would end the other jobs
            if log is None:
                raise
            with log.open("a") as file:
                traceback.print_exc(file=file)
        if self.launcher == "joblib" and run_folder.live_owner(self.folder) is None:
            os._exit(0)  # joblib's workers would wait five minutes for a sweep that was killed

    def _is_over(self) -> bool:
        """Whether the sweep was stopped or its process has died. The process of a sweep on another
        machine counts as alive."""
        return (self.folder / STOP).exists() or (
            run_folder.live_owner(self.folder) is None
            and run_folder.other_host(self.folder) is None)

    def _wait(self, process: job_process.Process) -> None:
        """Wait for a job, which is stopped once the sweep is over."""
        try:
            with _saving_before_requeue(process):
                while not select.select([process.ended], [], [], _PAUSE)[0]:
                    if self._is_over():
                        process.stop()
        finally:  # submitit leaves by SystemExit when Slurm takes its job back
            process.stop()
            process.wait()

    @contextmanager
    def _gpus(self, number: int) -> Iterator[dict[str, str]]:
        """Wait for GPUs that no other job of the sweep uses: by its number, or the next ones."""
        while self.gpus and not self._is_over():
            for place in (each % len(self.gpus) for each in range(number, number + len(self.gpus))):
                with (self.folder / f".gpus-{place}").open("a") as file:
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        continue
                    yield {"CUDA_VISIBLE_DEVICES": self.gpus[place]}
                    return
            time.sleep(_PAUSE)
        yield {}


def runner_of(plan: SweepPlan, folder: Path) -> JobRunner:
    """The runner for a plan's launcher: jobs on this machine share its GPUs and cores."""
    if plan.launcher == BASIC:
        return JobRunner(folder, BASIC, command={
            "quiet": ("-q", "train"), "lines": ("train", "--no-progress")}.get(
                output.display_mode(), ("train",)))
    if plan.launcher not in ("joblib", "submitit_local"):
        return JobRunner(folder, plan.launcher)
    total, hardware = len(plan.grid) or plan.shared.sweep.trials, plan.shared.hardware
    jobs = min(plan.at_a_time or total, total)
    cores = max(1, environment.usable_cores() // (jobs * hardware.num_processes))
    variables = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(cores)}
    return JobRunner(folder, plan.launcher, _gpu_shares(hardware), variables)


def _gpu_shares(hardware: schema.HardwareConfig) -> tuple[str, ...]:
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


def last_error(log: Path) -> str | None:
    """The last error in a job's log."""
    with suppress(OSError):
        text = "\n" + log.read_text(encoding="utf-8", errors="replace")
        _, separator, error = text.rpartition("\nError: ")
        return error.strip() if separator else None
    return None


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


class StopWatch:
    """While jobs run, a signal makes a :data:`STOP` file rather than an exception, at which a
    plugin would kill its workers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stopped_by: int | None = None
        self._settled = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch inside the block."""
        signals, over = heeded(), threading.Event()

        def receive() -> None:
            while not over.is_set():
                if (received := signal.sigtimedwait(signals, _PAUSE)) is not None:
                    self._stop(received.si_signo)

        thread = threading.Thread(target=receive, name="ppocli-sweep", daemon=True)
        # submitit's workers inherit the mask: Ctrl-C reaches this process alone
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        try:
            with signal_handlers(dict.fromkeys(signals, self._stop)):
                thread.start()
                try:
                    yield
                finally:
                    over.set()
                    thread.join()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for file in (self.folder / STOP, *self.folder.glob(".gpus-*")):
                file.unlink(missing_ok=True)

    def _stop(self, number: int, frame: object = None) -> None:
        number = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        if self.stopped_by is None:
            self.stopped_by, self._settled = number, time.monotonic() + _SETTLE
            (self.folder / STOP).touch()
            _cancel_pending(self.folder)
        elif time.monotonic() > self._settled:
            os._exit(128 + number)  # as kill -9 would: the jobs save and end without us


def _cancel_pending(sweep: Path) -> None:
    """Take jobs out of Slurm's queue that have not started."""
    numbers = {folder.name.partition("_")[0] for folder in (sweep / ".submitit").glob("[0-9]*")}
    if numbers and shutil.which("scancel"):
        subprocess.run(["scancel", "--state=PENDING", *sorted(numbers)], check=False,
                       stderr=subprocess.DEVNULL, timeout=60)
