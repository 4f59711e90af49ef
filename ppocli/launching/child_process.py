"""A process of ours beside this one: its signals, its output, and its end when we end."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from ppocli.errors import PpocliError


def run_process(command: list[str], *, lifeline: bool = False) -> tuple[int, int | None]:
    """Run a command to its end, its standard output on our standard error.

    The child has its own process group, so that a Ctrl-C reaches it once, through us, and it can
    save before it leaves; a second Ctrl-C is handed on as well. With ``lifeline`` the command gets
    a last word ``--lifeline=FD``, a pipe that closes when we end, even by ``kill -9``.

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

    with _handling(hand_on), _lifeline(lifeline) as (passed, words):
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


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    wanted = [number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
              if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, handler) for number in wanted}
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)
