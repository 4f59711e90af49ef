"""Several processes of one run on this machine.

``python -m ppocli.launch.elastic RUN_DIR HOW``.

torch's elastic agent starts the ranks and ends them all when one fails. Signals go to the ranks,
which stop together; the agent only waits. Each rank writes its outcome into a file.
"""

import logging
import os
import secrets
import signal
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from time import sleep
from typing import Any

from ppocli.config import config_yaml, resume_policy, schema
from ppocli.config.text import pasted
from ppocli.distributed import launchers
from ppocli.distributed.launchers import RankOutcome
from ppocli.errors import DiskError
from ppocli.launch.child_process import Start
from ppocli.publish.console import note_in_log
from ppocli.runs.run_folder import RunFolder, write_config

_GO_ON = "  fix:   go on from the last checkpoint: ppocli resume RUN\n"


@dataclass(slots=True)
class Job:
    """The ranks of this machine, and what this process observed of them."""

    hardware: schema.HardwareConfig
    node_rank: int = 0
    failed: dict[int, int] = field(default_factory=dict)
    """exit codes (negative: a signal) of ranks that failed before the agent ended the others"""
    agent_error: str | None = None
    """error of torch's agent itself: another node, or the store on this machine, is gone or never
    answered"""
    hung: list[int] = field(default_factory=list)
    """ranks that had to be killed long after another one had failed"""

    @property
    def ranks(self) -> range:
        """Numbers of the ranks that run here."""
        first = self.node_rank * self.hardware.num_processes
        return range(first, first + self.hardware.num_processes)

    @property
    def grace(self) -> int:
        """Seconds that ranks have to leave by themselves when another one has failed."""
        return min(self.hardware.timeout_seconds, 20)


def run_ranks(start: Start) -> int:
    """Start the ranks, wait for them, print what ended them, and return the exit code.

    If memory runs out in a pass that all ranks make together, they start again with half the rows,
    from the last checkpoint or the beginning, as often as rows can be halved.
    """
    # this function prints a failed rank's error itself, once
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    run_dir, folders = start.run_dir, list[Path]()
    with tempfile.TemporaryDirectory(prefix="ppocli-ranks-") as name:
        while True:
            folder = Path(name) / str(len(folders))
            folder.mkdir()
            folders.append(folder)
            if len(folders) == 1:
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    signal.signal(number, lambda got, _: launchers.hand_on(folders[-1], got))
            elif launchers.asked_to_stop(folders[-2]):
                break
            cfg = start.config()
            job = Job(cfg.hardware, cfg.hardware.node_rank if start.node_rank is None
                      else start.node_rank)
            outcomes = _run_job(cfg, job, start, folder)
            phases = {rank: launchers.read_phase(folder, rank) for rank in job.ranks}
            code, message = conclude(job, outcomes, phases)
            failed_rank = next((outcome for outcome in outcomes if outcome.code == code), None)
            if failed_rank is None or not failed_rank.retry or cfg.hardware.num_nodes > 1:
                break
            try:
                _settle_smaller(run_dir, cfg, start.resume, failed_rank)
            except DiskError:  # the disk has no room for the settings: report the failure
                break
            start = replace(start, resume=True)
    if cfg.hardware.num_nodes > 1 and code not in (0, 128 + signal.SIGINT, 128 + signal.SIGTERM):
        with suppress(OSError):
            (run_dir / launchers.NODE_FAILED).write_text(f"{secrets.token_hex(4)} {job.node_rank}")
    sys.stderr.write(message.replace(_GO_ON, _go_on(cfg, run_dir)))
    return code


def _go_on(cfg: schema.TrainConfig, run_dir: Path) -> str:
    """The fix that replaces :data:`_GO_ON`, for this run."""
    if any(RunFolder(run_dir).checkpoints.glob("step-*")):
        resume = resume_policy.how_to_resume(cfg, run_dir)
        return f"  fix:   go on from the last checkpoint: {resume}\n"
    return ("  fix:   nothing is saved yet: start again, the same words with "
            f"{pasted(f'run_name={run_dir.name}')} resume=auto\n")


def _settle_smaller(run_dir: Path, cfg: schema.TrainConfig, resumed: bool, failed_rank: RankOutcome
                    ) -> None:
    """Write the settings that a rank asks for into the next start's configuration; print and log
    them.

    Raises:
        DiskError: they can't be written.
    """
    smaller = config_yaml.with_values(
        cfg, {**failed_rank.retry, "resume": cfg.resume if resumed else "auto"})
    write_config(smaller, run_dir / config_yaml.NEXT_CONFIG_FILE)
    words = " ".join(f"{key}={value}" for key, value in failed_rank.retry.items())
    text = f"{failed_rank.message.splitlines()[0]}; all ranks start again with {words}"
    sys.stderr.write(f"warning: {text}\n")
    note_in_log(RunFolder(run_dir).log, text)


def _run_job(cfg: schema.TrainConfig, job: Job, start: Start, folder: Path) -> list[RankOutcome]:
    """Run the ranks to their end; return their outcomes, the earliest first.

    Args:
        folder: for their outcomes.
    """
    mark = start.run_dir / launchers.NODE_FAILED
    os.environ.setdefault("OMP_NUM_THREADS", str(cfg.hardware.num_threads or 1))
    lifelines = launchers.open_lifelines(folder)
    os.environ[launchers.OUTCOMES] = str(folder)
    if job.node_rank == 0:
        mark.unlink(missing_ok=True)  # of an earlier start
    _watch(job, mark, folder)
    if cfg.hardware.num_nodes > 1 and cfg.hardware.rdzv_endpoint is not None:
        launchers.let_gloo_use(cfg.hardware.rdzv_endpoint.rpartition(":")[0])
    elif cfg.hardware.zero_stage == 0 and cfg.hardware.num_processes > 2:
        # ranks would warn of a DDP setting that is deliberate
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    _launch(cfg, job, replace(start, node_rank=None, lifeline=None).argv(), folder)
    os.close(lifelines)
    for path in folder.glob("pid-*"):  # their pids may belong to other processes later
        path.unlink()
    return launchers.read_outcomes(folder)


def _launch(cfg: schema.TrainConfig, job: Job, words: list[str], folder: Path) -> None:
    """Run the workers to their end, and record in ``job`` which ones the agent saw fail."""
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    hardware = cfg.hardware
    several = hardware.num_nodes > 1
    # torch before 2.12 has no such field, and gives the other ranks 30 seconds
    grace: dict[str, Any] = {"shutdown_timeout": job.grace} if any(
        one.name == "shutdown_timeout" for one in fields(LaunchConfig)) else {}
    config = LaunchConfig(min_nodes=hardware.num_nodes, max_nodes=hardware.num_nodes,
                          nproc_per_node=hardware.num_processes, run_id=str(cfg.run_name),
                          role="rank", rdzv_backend="static" if several else "c10d",
                          rdzv_endpoint=hardware.rdzv_endpoint or "localhost:0",
                          rdzv_configs={"timeout": hardware.timeout_seconds}
                          | ({"rank": job.node_rank} if several else {}), max_restarts=0,
                          monitor_interval=0.1, **grace,
                          # without it the agent leaves a temporary folder behind
                          logs_specs=DefaultLogsSpecs(log_dir=str(folder / "torch")))
    try:
        # signals go to the ranks: in the main thread torch's agent would handle them itself
        with ThreadPoolExecutor(1) as executor:
            executor.submit(elastic_launch(config, sys.executable), "-P", "-m",
                            "ppocli.launch.worker", *words).result()
    except ChildFailedError as error:
        job.failed.update({rank: failure.exitcode for rank, failure in error.failures.items()})
    except (DistError, RendezvousError, TimeoutError) as error:
        job.agent_error = f"{type(error).__name__}: {error}".splitlines()[0]


def _watch(job: Job, mark: Path, folder: Path) -> None:
    """Kill ranks of this machine that still run some time after one of them, or another node, has
    failed: they hang, and would keep this machine waiting for as long as torch's agent does, or for
    ever.

    Args:
        mark: the file that a failed node writes; empty or ``before`` as long as none has.
    """
    before = _content(mark)  # of an earlier start

    def watch() -> None:
        while _content(mark) in ("", before) and not any(
                0 < outcome.code < 128 for outcome in launchers.read_outcomes(folder)):
            sleep(0.2)
        sleep(job.grace)
        reported = {outcome.rank for outcome in launchers.read_outcomes(folder)}
        job.hung.extend(rank for rank in job.ranks
                        if rank not in reported and launchers.send(folder, rank, 0))
        for rank in job.hung:
            launchers.send(folder, rank, signal.SIGKILL)

    threading.Thread(target=watch, name="ppocli-watch", daemon=True).start()


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        # a run that made nothing deletes its folder
        return "" if path.parent.is_dir() else "gone"


def conclude(job: Job, outcomes: list[RankOutcome], phases: dict[int, str]) -> tuple[int, str]:
    """The exit code and the one message of the ranks of this machine.

    Causes come before consequences: first an error that a rank reports, then what killed a rank,
    then ranks that are silent, and last that a connection broke.

    Args:
        outcomes: of the ranks, the earliest first.
        phases: the last phase seen of each rank; empty if unknown. A phase in its outcome takes
            precedence.
    """
    bad = [outcome for outcome in outcomes if outcome.code != 0]
    phases = phases | {outcome.rank: outcome.phase for outcome in outcomes}
    if failed_rank := next((outcome for outcome in bad if not outcome.trace), None):
        label = "Stopped" if failed_rank.code > 128 else "Error"
        return failed_rank.code, f"{label}: {failed_rank.message}\n"
    silent = [rank for rank in job.ranks if rank not in {outcome.rank for outcome in outcomes}]
    # a rank that was killed for memory takes precedence over the errors this caused in others
    ends = {rank: code for rank, code in job.failed.items()
            if rank in silent and rank not in job.hung}
    if -signal.SIGKILL in ends.values():
        rank = next(rank for rank, code in ends.items() if code == -signal.SIGKILL)
        return 1, (f"Error: {_place(rank, phases)}: killed by SIGKILL (exit -9): probably out of "
                   "memory; the other ranks were ended.\n"
                   "  where: ppo.micro_batch_size, ppo.chunk_size, hardware.num_processes\n"
                   f"{_GO_ON}")
    if root_cause := next((outcome for outcome in bad if not outcome.lost), None):
        return root_cause.code, (f"{root_cause.trace}Error: {_place(root_cause.rank, phases)}: "
                                 f"{root_cause.message}\n")
    if ends:
        rank, code = next(iter(ends.items()))
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return 1, f"Error: {_place(rank, phases)}: {how} and said nothing.\n{_GO_ON}"
    return _unanswered(job, bad, silent, phases)


def _place(rank: int, phases: dict[int, str]) -> str:
    return f"rank {rank}, {phases.get(rank) or 'before its first phase'}"


def _unanswered(job: Job, lost: list[RankOutcome], silent: list[int], phases: dict[int, str]
                ) -> tuple[int, str]:
    """As :func:`conclude`, where ranks only report that another one didn't answer."""
    waited = f"within {job.hardware.timeout_seconds} seconds (hardware.timeout_seconds)"
    if silent and (lost or job.hung):
        who = "; ".join(_place(rank, phases) for rank in silent)
        return 1, f"Error: {who}: no answer {waited}; all ranks were ended.\n{_GO_ON}"
    several = job.hardware.num_nodes > 1
    if lost:
        places = "; ".join(_place(one.rank, phases) for one in (lost[:1] if several else lost))
        what = (f"another rank is gone or gave no answer {waited}; what another node says tells why"
                if several else  # all ranks are here, and each has reported
                f"no answer of each other {waited}, though no rank had ended before")
        return 1, f"Error: {places}: {what}.\n  where: {lost[0].message.splitlines()[0]}\n{_GO_ON}"
    if job.agent_error is not None and several:
        return 1, (f"Error: node {job.node_rank}: the nodes lost each other, or did not meet "
                   f"{waited}.\n  where: hardware.rdzv_endpoint={job.hardware.rdzv_endpoint} "
                   f"({job.agent_error})\n  fix:   start the same command on all nodes; the "
                   "address of node 0 must be reachable from each\n")
    if job.agent_error is not None:
        return 1, (f"Error: The ranks of this machine did not meet {waited}.\n  where: localhost "
                   f"({job.agent_error})\n{_GO_ON}")
    return 0, ""


if __name__ == "__main__":
    sys.exit(run_ranks(Start.read(sys.argv[1:])))
