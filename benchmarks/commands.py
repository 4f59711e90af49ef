"""Whole commands in processes of their own: what they took, and what they said when they failed."""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PPOCLI = str(Path(sys.executable).with_name("ppocli"))
"""the installed console command"""


class CommandFailedError(RuntimeError):
    """A command that ended with another code than 0; the message ends with what it said last."""


@dataclass(frozen=True, slots=True)
class Finished:
    """What a command took, with all processes that it started and waited for."""

    wall: float
    """seconds from start to end"""
    processor: float
    """seconds of user and system time"""
    peak_mib: float
    """largest resident set of any of its processes"""


def environment(threads: int, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables of a measured process: no network, a fixed number of threads."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false", **(more or {})}


def run(command: Sequence[str], log: Path, env: Mapping[str, str]) -> Finished:
    """Run a command to its end; ``log`` receives both of its streams.

    A child's peak counts from that of the process which spawned it, so this one must stay small:
    nothing here imports torch.

    Raises:
        CommandFailedError: it can't be started, or ended with another code than 0.
    """
    started = time.perf_counter()
    with log.open("w", encoding="utf-8") as out:
        try:
            pid = os.posix_spawnp(command[0], list(command), env, file_actions=[
                (os.POSIX_SPAWN_DUP2, out.fileno(), number) for number in (1, 2)])
        except OSError as error:
            raise CommandFailedError(f"{command[0]} can't be started: {error.strerror}") from error
        _, status, usage = os.wait4(pid, 0)
    wall = time.perf_counter() - started
    code = os.waitstatus_to_exitcode(status)
    if code:
        said = log.read_text(encoding="utf-8", errors="replace")[-2000:]
        raise CommandFailedError(f"{Path(command[0]).name} ended with code {code}:\n{said}")
    return Finished(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)
