"""One job of a sweep in a separate process, whose output goes into a file.

``python -m ppocli.cli.job LIFELINE RESULT WORDS...`` is ``ppocli WORDS...``, which stops and saves
when the pipe LIFELINE closes. It detaches itself, so that nobody who ends the tree of its
parent's processes ends it before it has saved; the pipe RESULT closes when it has ended.
"""

import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
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

    def wait(self) -> None:
        """Wait for the end."""
        os.read(self.ended, 1)
        os.close(self.ended)


def start(words: Sequence[str], log: Path | None, cwd: str, variables: Mapping[str, str]
          ) -> Process:
    """Start ``ppocli`` with these words; what it prints is added to ``log``. Without one, its
    messages go to this process's.

    Args:
        variables: added to the environment.
    """
    lifeline, holding = os.pipe()
    ended, result = os.pipe()
    try:
        with (log or Path(os.devnull)).open("ab") as file:
            subprocess.run(
                # -P: a calendar.py of the current folder isn't Python's own
                [sys.executable, "-P", "-m", "ppocli.cli.job", str(lifeline), str(result), *words],
                cwd=cwd, start_new_session=True, stdin=subprocess.DEVNULL, stdout=file,
                stderr=None if log is None else file, pass_fds=(lifeline, result),
                env={**os.environ, **variables}, check=True)
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
    if worker := os.fork():  # this process holds the pipe: forks of the job would keep it open
        os.waitpid(worker, 0)
        os._exit(0)
    os.close(result)
    for number in signals[:3]:  # a plugin's worker may ignore them
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # Slurm's warning reaches all processes
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    from ppocli.distributed.stop import stop_when_closed

    stop_when_closed(lifeline)
    sys.argv = ["ppocli", *sys.argv[3:]]
    runpy.run_module("ppocli", run_name="__main__")


if __name__ == "__main__":
    main()
