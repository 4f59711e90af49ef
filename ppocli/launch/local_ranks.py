"""A run in other processes: one, or the ranks of this machine, started, watched, and how they end.

torch's elastic agent starts the ranks, from a thread of this process, and ends them all when one
fails. Signals go to the ranks, which stop together; the agent only waits. Each rank reports its
pid, its phase and its outcome in files. It stops by itself when this process ends.
"""

import logging
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from time import monotonic
from typing import Any

from ppocli.config import resume_policy, schema
from ppocli.config.text import pasted
from ppocli.distributed import launchers, stop
from ppocli.distributed.launchers import RankOutcome
from ppocli.errors import PpocliError, StoppedError
from ppocli.launch.start import RunOutcome, Start
from ppocli.runs.atomic import read_json
from ppocli.runs.run_folder import RunFolder

_MODULE = ("-P", "-m", "ppocli.launch.worker")


@dataclass(slots=True)
class LocalRanks:
    """The processes of a run on this machine, and what this process has observed of them."""

    hardware: schema.HardwareConfig
    """with the number of this node"""
    reports: Path = Path()
    """folder of their reports"""
    failed: dict[int, int] = field(default_factory=dict)
    """exit codes (negative: a signal) of ranks that failed before the agent ended the others"""
    agent_error: str | None = None
    """error of torch's agent itself: another node, or the store on this machine, is gone or never
    answered"""
    hung: set[int] = field(default_factory=set)
    """ranks that had to be killed long after another one, or another node, had failed"""

    @property
    def ranks(self) -> range:
        """Numbers of the ranks that run here."""
        first = self.hardware.node_rank * self.hardware.num_processes
        return range(first, first + self.hardware.num_processes)

    @property
    def several_nodes(self) -> bool:
        """Whether other machines take part."""
        return self.hardware.num_nodes > 1

    @property
    def grace(self) -> int:
        """Seconds that ranks have to leave by themselves when another one has failed."""
        return min(self.hardware.timeout_seconds, 20)


def run_child(start: Start) -> RunOutcome:
    """Run in a new process; everything else as :func:`run_ranks`."""
    local = LocalRanks(schema.HardwareConfig())

    def run(command: list[str]) -> None:
        if code := subprocess.call(command, process_group=0, stdin=subprocess.DEVNULL):
            local.failed[0] = code

    return _run(start, local, run)


def run_ranks(start: Start, hardware: schema.HardwareConfig) -> RunOutcome:
    """Run as the ranks of this machine, which start together with those of other nodes.

    Raises:
        PpocliError: what ended the run, with its exit code.
    """
    local = LocalRanks(hardware)
    variables = {"OMP_NUM_THREADS": str(hardware.num_threads or 1)}
    if local.several_nodes and hardware.rdzv_endpoint is not None:
        host = hardware.rdzv_endpoint.rpartition(":")[0]
        if (interface := launchers.interface_towards(host)) is not None:
            variables["GLOO_SOCKET_IFNAME"] = interface
    elif hardware.zero_stage == 0 and hardware.num_processes > 2:
        # ranks would warn of a DDP setting that is deliberate
        variables["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    with _default_variables(variables):
        return _run(start, local, lambda command: _launch(local, start, command))


@contextmanager
def _default_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, for processes started in the block, that the user has not set."""
    added = [name for name in variables if name not in os.environ]
    os.environ.update({name: variables[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _run(start: Start, local: LocalRanks, run: Callable[[list[str]], None]) -> RunOutcome:
    """Run processes to their end; ``run`` gets the command and waits for them."""
    mark, signals = start.run_dir / launchers.NODE_FAILED, list[int]()
    if local.several_nodes and local.hardware.node_rank == 0:
        mark.unlink(missing_ok=True)  # of an earlier start
    with tempfile.TemporaryDirectory(prefix="ppocli-ranks-") as reports:
        local.reports = Path(reports)
        command = [sys.executable, *_MODULE,
                   *replace(start, parent=os.getpid(), reports=reports).argv()]
        handlers = dict.fromkeys(stop.heeded(), lambda number, frame: signals.append(number))
        # in the main thread torch's agent would handle signals itself
        with stop.signal_handlers(handlers), ThreadPoolExecutor(1) as executor:
            ending = executor.submit(run, command)
            _attend(local, ending, signals, mark)
        try:
            ending.result()
        except OSError as error:
            raise PpocliError(f"A process of the run couldn't be started: {error}",
                              where=command[0]) from error
        failure = conclude(local, launchers.read_outcomes(local.reports),
                           launchers.read_reports(local.reports, "phase"), _go_on(start))
    if failure is None:
        model = start.run_dir / "model"
        return RunOutcome(start.run_dir, model if model.is_dir() else None,
                          read_json(start.run_dir / "summary.json"), next(iter(signals), None))
    if local.several_nodes and not isinstance(failure, StoppedError):
        with suppress(OSError):
            mark.write_text(f"{secrets.token_hex(4)} {local.hardware.node_rank}")
    raise failure


def _attend(local: LocalRanks, ending: Future[None], signals: list[int], mark: Path) -> None:
    """Forward signals to ranks as long as they run, also to those that come later. Kill those that
    still run some time after another rank or another node has failed: they hang.

    Args:
        signals: those that this process has received so far.
        mark: the file that a failed node writes.
    """
    num_sent, mark_before = Counter[int](), _content(mark)  # of an earlier start
    failed_at: float | None = None
    while not ending.done():
        wait([ending], timeout=0.1)
        pids = {rank: int(text) for rank, text in
                launchers.read_reports(local.reports, "pid").items() if text}
        for rank, pid in pids.items():
            for number in signals[num_sent[rank]:]:
                num_sent[rank] += 1
                _send(pid, number)
        outcomes = launchers.read_outcomes(local.reports)
        if failed_at is None and (any(0 < outcome.code < 128 for outcome in outcomes) or (
                local.several_nodes and _content(mark) not in ("", mark_before))):
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


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        # a run that made nothing deletes its folder
        return "" if path.parent.is_dir() else "gone"


def _launch(local: LocalRanks, start: Start, command: list[str]) -> None:
    """Run the ranks to their end, and record which ones torch's agent saw fail."""
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # the error of a failed rank is printed once, by whoever called
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    hardware, several = local.hardware, local.several_nodes
    # torch before 2.12 has no such field, and gives the other ranks 30 seconds
    # this process ends them first, and knows that they hung
    grace: dict[str, Any] = {"shutdown_timeout": local.grace + 5} if any(
        one.name == "shutdown_timeout" for one in fields(LaunchConfig)) else {}
    config = LaunchConfig(
        min_nodes=hardware.num_nodes, max_nodes=hardware.num_nodes,
        nproc_per_node=hardware.num_processes, run_id=start.run_dir.name, role="rank",
        rdzv_backend="static" if several else "c10d",
        rdzv_endpoint=hardware.rdzv_endpoint or "localhost:0",
        rdzv_configs={"timeout": hardware.timeout_seconds}
        | ({"rank": hardware.node_rank} if several else {}), max_restarts=0, monitor_interval=0.1,
        # without it the agent leaves a temporary folder behind
        logs_specs=DefaultLogsSpecs(log_dir=str(local.reports / "torch")), **grace)
    try:
        elastic_launch(config, command[0])(*command[1:])
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
    """The error that ended the processes of this machine; None if there was none.

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
    silent = [rank for rank in local.ranks if rank not in {outcome.rank for outcome in outcomes}]
    ends = {rank: code for rank, code in local.failed.items()
            if rank in silent and rank not in local.hung}
    # a rank that was killed for memory takes precedence over the errors this caused in others
    if -signal.SIGKILL in ends.values():
        rank = next(rank for rank, code in ends.items() if code == -signal.SIGKILL)
        return PpocliError(
            f"{_place(rank, phases)}: killed by SIGKILL (exit -9): probably out of memory"
            f"{'; the other ranks were ended' * (len(local.ranks) > 1)}.",
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
        what = (f"another rank is gone or gave no answer {waited}; see the output of the other "
                "nodes" if local.several_nodes else  # all ranks are here, and each has reported
                f"no answer of each other {waited}, though no rank had ended before")
        return PpocliError(f"{places}: {what}.", where=lost[0].message.splitlines()[0], fix=go_on)
    if local.agent_error is None:
        return None
    endpoint = local.hardware.rdzv_endpoint
    return PpocliError(
        f"node {local.hardware.node_rank}: the nodes lost each other, or did not meet {waited}."
        if local.several_nodes else f"The ranks of this machine did not meet {waited}.",
        where=f"hardware.rdzv_endpoint={endpoint or 'null'} ({local.agent_error})",
        fix="start the same command on all nodes; the address of node 0 must be reachable from each"
        if local.several_nodes else go_on)
