"""A run in several processes: their arguments, how they are started and watched, how they end.

torch's elastic agent starts the ranks, from a thread of this process, and ends them all when one
fails. Signals go to the ranks, which stop together; the agent only waits. Each rank reports its
pid, its phase and its outcome in files. It stops by itself when this process ends.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from ppocli.config import config_yaml, resume_policy, schema
from ppocli.config.text import pasted
from ppocli.distributed import ranks, stop
from ppocli.distributed.ranks import RankOutcome
from ppocli.errors import PpocliError, StoppedError
from ppocli.runs.atomic import read_json
from ppocli.runs.run_folder import RunFolder

if TYPE_CHECKING:
    from ppocli.training.console import DisplayMode

_MODULE = ("-P", "-m", "ppocli.launch.worker")


@dataclass(frozen=True, slots=True)
class Start:
    """The arguments of a process that trains: the run and its configuration, and how to start."""

    run_dir: Path
    config: schema.TrainConfig
    """other processes read it from the run's folder"""
    resume: bool = False
    """go on from the newest valid checkpoint"""
    display: DisplayMode = "auto"
    """what the user sees"""
    reserved_by: int | None = None
    """the process that keeps the folder for this one"""
    parent: int | None = None
    """the process that has started this one; when it ends, the run stops and saves"""
    reports: str | None = None
    """folder in which this process writes its pid, phase and outcome for its parent"""
    limited: tuple[str, ...] = ()
    """import paths that recipes name, see :mod:`ppocli.config.import_guard`"""

    def argv(self) -> list[str]:
        """The same as command-line arguments: the run's folder, and the rest as JSON."""
        how = {name: getattr(self, name) for name in self.__slots__
               if name not in ("run_dir", "config")}
        return [str(self.run_dir), json.dumps(how)]

    @classmethod
    def read(cls, argv: Sequence[str]) -> Start:
        """The start with the arguments of :meth:`argv`; raises as :meth:`of_folder`."""
        return cls.of_folder(Path(argv[0]), **json.loads(argv[1]))

    @classmethod
    def of_folder(cls, run_dir: Path, *, resume: bool = False, **how: Any) -> Start:
        """The start of a run with the configuration in its folder.

        Raises:
            CheckpointError: there is none, or it is damaged.
        """
        config = config_yaml.read_config(config_yaml.next_config(run_dir) if resume
                                         else run_dir / config_yaml.CONFIG_FILE)
        return cls(run_dir, config, resume, **how)


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """What a finished run has left."""

    run_dir: Path
    model_dir: Path | None
    summary: dict[str, Any] | None


@dataclass(slots=True)
class LocalRanks:
    """The processes of a run on this machine, and what this process has observed of them."""

    hardware: schema.HardwareConfig
    reports: Path = Path()
    """folder of their reports"""
    failed: dict[int, int] = field(default_factory=dict)
    """exit codes (negative: a signal) of ranks that failed before the agent ended the others"""
    agent_error: str | None = None
    """error of torch's agent itself: its store is gone or never answered"""
    hung: set[int] = field(default_factory=set)
    """ranks that had to be killed long after another one had failed"""

    @property
    def grace(self) -> int:
        """Seconds that ranks have to leave by themselves when another one has failed."""
        return min(self.hardware.timeout_seconds, 20)


def run_ranks(start: Start, hardware: schema.HardwareConfig) -> RunOutcome:
    """Run as several ranks on this machine.

    Raises:
        PpocliError: what ended the run, with its exit code.
    """
    local = LocalRanks(hardware)
    added = {"OMP_NUM_THREADS": str(hardware.num_threads or 1)}
    if hardware.zero_stage == 0 and hardware.num_processes > 2:
        # ranks would warn of a DDP setting that is deliberate
        added["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    added = {name: value for name, value in added.items() if name not in os.environ}
    os.environ.update(added)
    signals = list[int]()
    try:
        with tempfile.TemporaryDirectory(prefix="ppocli-ranks-") as reports:
            local.reports = Path(reports)
            words = replace(start, parent=os.getpid(), reports=reports).argv()
            handlers = dict.fromkeys(stop.heeded(), lambda number, frame: signals.append(number))
            # in the main thread torch's agent would handle signals itself
            with stop.signal_handlers(handlers), ThreadPoolExecutor(1) as executor:
                ending = executor.submit(_launch, local, start, words)
                _attend(local, ending, signals)
            try:
                ending.result()
            except OSError as error:
                raise PpocliError(f"A process of the run couldn't be started: {error}",
                                  where=sys.executable) from error
            failure = conclude(local, ranks.read_outcomes(local.reports),
                               ranks.read_reports(local.reports, "phase"), _go_on(start))
    finally:
        for name in added:
            os.environ.pop(name, None)
    if failure is not None:
        raise failure
    model = start.run_dir / "model"
    return RunOutcome(start.run_dir, model if model.is_dir() else None,
                      read_json(start.run_dir / "summary.json"))


def _attend(local: LocalRanks, ending: Future[None], signals: list[int]) -> None:
    """Forward signals to ranks as long as they run, also to those that come later. Kill those that
    still run some time after another rank has failed: they hang.

    Args:
        signals: those that this process has received so far.
    """
    num_sent = Counter[int]()
    failed_at: float | None = None
    while not ending.done():
        wait([ending], timeout=0.1)
        pids = {rank: int(text) for rank, text in
                ranks.read_reports(local.reports, "pid").items() if text}
        for rank, pid in pids.items():
            for number in signals[num_sent[rank]:]:
                num_sent[rank] += 1
                _send(pid, number)
        outcomes = ranks.read_outcomes(local.reports)
        if failed_at is None and any(0 < outcome.code < 128 for outcome in outcomes):
            failed_at = monotonic()
        if failed_at is not None and monotonic() > failed_at + local.grace:
            for rank in pids.keys() - {outcome.rank for outcome in outcomes}:
                if _send(pids[rank], signal.SIGKILL):
                    local.hung.add(rank)


def _send(pid: int, number: int) -> bool:
    """Send a signal; False if there is no such process."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _launch(local: LocalRanks, start: Start, words: list[str]) -> None:
    """Run the ranks to their end, and record which ones torch's agent saw fail."""
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # the error of a failed rank is printed once, by whoever called
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # torch before 2.12 has no such field, and gives the other ranks 30 seconds
    # this process ends them first, and knows that they hung
    grace: dict[str, Any] = {"shutdown_timeout": local.grace + 5} if any(
        one.name == "shutdown_timeout" for one in fields(LaunchConfig)) else {}
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=local.hardware.num_processes,
        run_id=start.run_dir.name, role="rank", rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        rdzv_configs={"timeout": local.hardware.timeout_seconds}, max_restarts=0,
        monitor_interval=0.1,
        # without it the agent leaves a temporary folder behind
        logs_specs=DefaultLogsSpecs(log_dir=str(local.reports / "torch")), **grace)
    try:
        elastic_launch(config, sys.executable)(*_MODULE, *words)
    except ChildFailedError as error:
        local.failed.update({rank: failure.exitcode for rank, failure in error.failures.items()})
    except (DistError, RendezvousError, TimeoutError) as error:
        local.agent_error = f"{type(error).__name__}: {error}".splitlines()[0]


def _go_on(start: Start) -> str:
    """How to go on after a failure of which no rank could say more."""
    if any(RunFolder(start.run_dir).checkpoints.glob("step-*")):
        return ("go on from the last checkpoint: "
                f"{resume_policy.how_to_resume(start.config, start.run_dir)}")
    return ("nothing is saved yet: start again, the same words with "
            f"{pasted(f'run_name={start.run_dir.name}')} resume=auto")


def conclude(local: LocalRanks, outcomes: list[RankOutcome], phases: dict[int, str], go_on: str
             ) -> PpocliError | None:
    """The error that ended the processes; None if there was none.

    Causes come before consequences: first an error that a rank reports, then what killed a rank,
    then ranks that are silent, and last that a connection broke. The traceback of an unexpected
    exception is printed.

    Args:
        outcomes: of the ranks, the earliest first.
        phases: the last phase seen of each rank. A phase in its outcome takes precedence.
        go_on: how to go on, where no rank says it.
    """
    bad = [outcome for outcome in outcomes if outcome.code != 0]
    phases = phases | {outcome.rank: outcome.phase for outcome in outcomes}
    if failed := next((outcome for outcome in bad if not outcome.trace), None):
        if failed.code > 128:
            return StoppedError(failed.message, signal_number=failed.code - 128)
        return PpocliError(failed.message, exit_code=failed.code, code=failed.error_code)
    silent = sorted({*range(local.hardware.num_processes)} - {one.rank for one in outcomes})
    ends = {rank: code for rank, code in local.failed.items()
            if rank in silent and rank not in local.hung}
    # a rank that was killed for memory takes precedence over the errors this caused in others
    if -signal.SIGKILL in ends.values():
        rank = next(rank for rank, code in ends.items() if code == -signal.SIGKILL)
        return PpocliError(
            f"{_place(rank, phases)}: killed by SIGKILL (exit -9): probably out of memory"
            f"{'; the other ranks were ended' * (local.hardware.num_processes > 1)}.",
            where="ppo.micro_batch_size, ppo.chunk_size, hardware.num_processes", fix=go_on)
    if cause := next((outcome for outcome in bad if not outcome.lost), None):
        sys.stderr.write(cause.trace)
        return PpocliError(f"{_place(cause.rank, phases)}: {cause.message}", exit_code=cause.code)
    if ends:
        rank, code = next(iter(ends.items()))
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return PpocliError(f"{_place(rank, phases)}: {how} without an error message.", fix=go_on)
    return _unanswered(local, bad, silent, phases, go_on)


def _place(rank: int, phases: dict[int, str]) -> str:
    return f"rank {rank}, {phases.get(rank) or 'before its first phase'}"


def _unanswered(local: LocalRanks, lost: list[RankOutcome], silent: list[int],
                phases: dict[int, str], go_on: str) -> PpocliError | None:
    """As :func:`conclude`, where ranks only report that another one didn't answer."""
    waited = f"within {local.hardware.timeout_seconds} seconds (hardware.timeout_seconds)"
    if silent and (lost or local.hung):
        who = "; ".join(_place(rank, phases) for rank in silent)
        return PpocliError(f"{who}: no answer {waited}; all ranks were ended.", fix=go_on)
    if lost:
        places = "; ".join(_place(one.rank, phases) for one in lost)
        return PpocliError(f"{places}: no answer of each other {waited}, though no rank had ended "
                           "before.", where=lost[0].message.splitlines()[0], fix=go_on)
    return None if local.agent_error is None else PpocliError(
        f"The ranks of this machine did not meet {waited}.", where=local.agent_error, fix=go_on)
