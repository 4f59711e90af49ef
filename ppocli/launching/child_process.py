"""Processes of a run: what one is told when it is started, and how it is waited for.

A child gets our signals, its output goes where ours goes, and it ends when we end.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
import traceback
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from ppocli.errors import PpocliError
from ppocli.parallel.rank_outcomes import RankOutcome
from ppocli.parallel.stop import signal_handlers

if TYPE_CHECKING:
    from ppocli.display.console import DisplayMode


@dataclass(frozen=True, slots=True)
class Start:
    """What a process of a run is told: which run it takes part in, and how."""

    run_dir: Path
    resume: bool = False
    """go on from the newest valid checkpoint"""
    display: DisplayMode = "auto"
    """what a person is shown"""
    reserved_by: int | None = None
    """the process that keeps the folder for this one"""
    node_rank: int | None = None
    """of the machine, where the configuration, which is node 0's, doesn't say it"""
    lifeline: int | None = None
    """the reading end of a pipe; when its other end closes, the run stops and saves"""

    def argv(self) -> list[str]:
        """The words of a command line that say it."""
        numbers = {"--reserved-by": self.reserved_by, "--node-rank": self.node_rank,
                   "--lifeline": self.lifeline}
        return [str(self.run_dir), f"--display={self.display}", *["--resume"] * self.resume,
                *(f"{name}={value}" for name, value in numbers.items() if value is not None)]

    @classmethod
    def read(cls, argv: Sequence[str]) -> Start:
        """What such words say."""
        parser = ArgumentParser(allow_abbrev=False)
        parser.add_argument("run_dir", type=Path)
        parser.add_argument("--resume", action="store_true")
        parser.add_argument("--display", default="auto")
        for name in ("--reserved-by", "--node-rank", "--lifeline"):
            parser.add_argument(name, type=int)
        return cls(**vars(parser.parse_args(argv)))


def outcome_of(rank: int, work: Callable[[], object]) -> RankOutcome:
    """What ``work`` comes to: errors of all kinds become an outcome, and its value nothing."""
    code, message, trace, lost = 0, "", "", False
    retry: dict[str, int] = {}
    try:
        work()
    except PpocliError as error:
        code, message, retry = error.exit_code, str(error), getattr(error, "retry", {})
    except KeyboardInterrupt:
        code, message = 128 + signal.SIGINT, "interrupted"
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except Exception as error:
        from ppocli.parallel.ranks import is_lost_neighbour

        code, message, trace = 1, f"{type(error).__name__}: {error}", traceback.format_exc()
        lost = is_lost_neighbour(error)
    return RankOutcome(rank, code, message, trace, time.time(), lost=lost, retry=retry)


def leave_at_once(code: int) -> NoReturn:
    """End this process: the threads of a process group can abort an interpreter that takes itself
    down."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def run_process(command: list[str], *, lifeline: bool = False) -> tuple[int, int | None]:
    """Run a command to its end, its standard output on our standard error.

    The child has its own process group, so that a Ctrl-C reaches it once, through us, and it can
    save before it leaves; a second Ctrl-C is handed on as well. With ``lifeline`` the command gets
    a last word ``--lifeline=FD``, a pipe that closes when we end, even by ``kill -9``
    (:class:`Start`).

    Returns:
        its exit code (128 + n if signal n killed it), and the first signal that we got meanwhile.

    Raises:
        PpocliError: the process couldn't be started.
    """
    received: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def hand_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if process is not None and process.poll() is None:
            process.send_signal(number)

    wanted = [number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
              if signal.getsignal(number) is not signal.SIG_IGN]
    with signal_handlers(dict.fromkeys(wanted, hand_on)), _lifeline(lifeline) as (passed, words):
        try:
            process = subprocess.Popen([*command, *words], process_group=0, pass_fds=passed,
                                       stdin=subprocess.DEVNULL, stdout=_standard_error())
        except OSError as error:
            if error.errno in (errno.ENOMEM, errno.EAGAIN, errno.ENOENT, errno.EACCES):
                raise PpocliError(f"the worker process couldn't be started: {error.strerror}",
                                  where=command[0]) from error
            raise
        if received:
            process.send_signal(received[0])
        code = _wait(process)
    return (code if code >= 0 else 128 - code), (received[0] if received else None)


@contextmanager
def _lifeline(wanted: bool) -> Iterator[tuple[tuple[int, ...], list[str]]]:
    """The end of a pipe that a child inherits, and the word that tells it. Our end is closed on
    exec, so that no other child of ours keeps it open."""
    if not wanted:
        yield (), []
        return
    reading, writing = os.pipe()
    try:
        yield (reading,), [f"--lifeline={reading}"]
    finally:
        os.close(reading)
        os.close(writing)


def _wait(process: subprocess.Popen[bytes]) -> int:
    """The child's exit code. Waits in short turns: a signal that comes just before a blocking wait
    would have its handler run only when the child has ended by itself."""
    while True:
        try:
            return process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            continue


def _standard_error() -> int:
    try:
        return sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        return subprocess.DEVNULL
