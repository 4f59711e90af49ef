"""One job of a sweep in a separate process, whose output goes into a file.

``python -m ppocli.cli.job LIFELINE RESULT WORDS...`` is ``ppocli train WORDS...``, which stops and
saves when the pipe LIFELINE closes. It detaches itself, so that nobody who ends the tree of its
parent's processes ends it before it has saved; its exit code comes through the pipe RESULT.
"""

import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(slots=True)
class Process:
    """A job at work."""

    ended: int
    """descriptor that can be read once the job has ended"""
    _lifeline: int | None

    def stop(self) -> None:
        """Let the job save and end; as does our death, by which the kernel closes the pipe."""
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    def exit_code(self) -> int:
        """Wait for the end; 128 + N for signal N."""
        code = os.read(self.ended, 1)
        os.close(self.ended)
        return code[0] if code else 128 + signal.SIGKILL


def start(words: Sequence[str], log: Path, cwd: str, variables: Mapping[str, str]) -> Process:
    """Start ``ppocli train`` with these words; what it prints is added to ``log``.

    Args:
        variables: added to the environment.
    """
    lifeline, holding = os.pipe()
    ended, result = os.pipe()
    try:
        with log.open("ab") as file:
            subprocess.run(
                # -P: a calendar.py of the current folder isn't Python's own
                [sys.executable, "-P", "-m", "ppocli.cli.job", str(lifeline), str(result), *words],
                cwd=cwd, start_new_session=True, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                pass_fds=(lifeline, result), env={**os.environ, **variables}, check=True)
    except BaseException:
        os.close(holding)
        os.close(ended)
        raise
    finally:
        os.close(lifeline)
        os.close(result)
    return Process(ended, holding)


def main() -> None:
    """Train, in a grandchild of the process that was started, which ends at once."""
    lifeline, result = int(sys.argv[1]), int(sys.argv[2])
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    if os.fork():
        os._exit(0)
    if worker := os.fork():  # this process waits, so that a killed job, too, has an exit code
        _, status = os.waitpid(worker, 0)
        code = os.waitstatus_to_exitcode(status)
        with suppress(OSError):  # nobody may be there any more
            os.write(result, bytes([code if code >= 0 else 128 - code]))
        os._exit(0)
    os.close(result)
    for number in signals[:3]:  # a plugin's worker may ignore them
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # Slurm's warning reaches all processes
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    from ppocli.distributed.stop import stop_when_closed

    stop_when_closed(lifeline)
    sys.argv = ["ppocli", "train", *sys.argv[3:]]
    runpy.run_module("ppocli", run_name="__main__")


if __name__ == "__main__":
    main()
