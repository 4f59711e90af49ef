"""Whole commands in processes of their own: what they took, and what they said when they failed."""

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PPOCLI = str(Path(sys.executable).with_name("ppocli"))
"""the installed console command"""


class CommandFailedError(RuntimeError):
    """A command that ended with another code than 0; the message ends with what it said last."""


class TimeLimitError(CommandFailedError):
    """A command that was killed because its time was over."""


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


def run(command: Sequence[str], log: Path, env: Mapping[str, str], *, limit: float | None = None,
        watch: Callable[[float], bool] | None = None) -> Finished:
    """Run a command to its end; ``log`` receives both of its streams.

    A child's peak counts from that of the process which spawned it, so this one must stay small:
    nothing here imports torch.

    Args:
        limit: seconds after which it is killed, with what it started in its process group.
        watch: called ten times a second with the seconds so far; the command is killed when this
            returns true, which is no failure.

    Raises:
        CommandFailedError: it can't be started, or ended with another code than 0.
        TimeLimitError: of its own ``limit``.
    """
    group: dict[str, int] = {} if limit is None else {"setpgroup": 0}
    started = time.perf_counter()
    with log.open("w", encoding="utf-8") as out:
        try:
            pid = os.posix_spawnp(command[0], list(command), env, file_actions=[
                (os.POSIX_SPAWN_DUP2, out.fileno(), number) for number in (1, 2)], **group)
        except OSError as error:
            raise CommandFailedError(f"{command[0]} can't be started: {error.strerror}") from error
        killed = False
        if limit is not None:
            killed = _killed(pid, started, limit, watch)
        _, status, usage = os.wait4(pid, 0)
    wall = time.perf_counter() - started
    code = os.waitstatus_to_exitcode(status)
    if limit is not None and wall > limit and code == -signal.SIGKILL:
        raise TimeLimitError(f"{Path(command[0]).name} was killed after {limit:.0f} s")
    if code and not killed:
        said = log.read_text(encoding="utf-8", errors="replace")[-2000:]
        raise CommandFailedError(f"{Path(command[0]).name} ended with code {code}:\n{said}")
    return Finished(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def _killed(pid: int, started: float, limit: float, watch: Callable[[float], bool] | None) -> bool:
    """Wait until a process has ended, which is left to be reaped, or has to; whether ``watch`` had
    it killed."""
    try:
        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            seconds = time.perf_counter() - started
            ends = watch is not None and watch(seconds)
            if ends or seconds > limit:
                os.killpg(pid, signal.SIGKILL)
                return ends
            time.sleep(0.1)
    except BaseException:  # Ctrl-C doesn't reach a group of its own
        os.killpg(pid, signal.SIGKILL)
        raise
    return False
