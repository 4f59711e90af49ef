"""One job of a sweep in a separate process, whose output goes into a file.

``python -m ppocli.cli.job LIFELINE WORDS...`` is ``ppocli train WORDS...`` that stops when the pipe
with that descriptor closes. A :class:`Command` is the same for a process that Slurm has started;
nothing heavy is imported for it.
"""

import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def start(words: Sequence[str], log: Path, cwd: str | None = None,
          variables: dict[str, str] | None = None) -> "tuple[subprocess.Popen[bytes], int]":
    """Start ``ppocli train`` with these words.

    Args:
        log: its output is appended to this file.
        variables: environment variables in addition to ours.

    Returns:
        the process, in its own process group, and a descriptor: when that closes, which the kernel
        does when we die, the process saves and stops.
    """
    reading, writing = os.pipe()
    try:
        with log.open("ab") as file:
            return subprocess.Popen(
                # -P: modules in the current folder must not hide Python's own
                [sys.executable, "-P", "-m", "ppocli.cli.job", str(reading), *words], cwd=cwd,
                process_group=0, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                pass_fds=(reading,), env={**os.environ, **(variables or {})}), writing
    except BaseException:
        os.close(writing)
        raise
    finally:
        os.close(reading)


@dataclass(slots=True)
class Command:
    """The function that a process of submitit calls. If Slurm ends it, the job saves, and resumes
    when Slurm has started it again."""

    words: tuple[str, ...]
    log: Path
    cwd: str
    _process: "subprocess.Popen[bytes] | None" = None

    def __call__(self) -> int:
        """The exit code of the job."""
        self._process, lifeline = start(self.words, self.log, self.cwd)
        try:
            return self._process.wait()
        finally:
            os.close(lifeline)

    def checkpoint(self) -> Any:
        """Let the job save, and return the call that resumes it."""
        from submitit.helpers import DelayedSubmission

        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            # this runs in a signal handler, and the interrupted code holds Popen's lock
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        return DelayedSubmission(Command(self.words, self.log, self.cwd))


def main() -> None:
    """Train."""
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # Slurm sends submitit's to all processes
    from ppocli.parallel.stop import stop_when_closed

    stop_when_closed(int(sys.argv[1]))
    sys.argv = ["ppocli", "train", *sys.argv[2:]]
    runpy.run_module("ppocli", run_name="__main__")


if __name__ == "__main__":
    main()
