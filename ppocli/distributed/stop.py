"""Stopping on request: signals set a flag (:class:`~ppocli.distributed.ranks.StopFlag`), which the
work polls at places where stopping is safe.

A handler does nothing but set the flag: no files, no collectives. The second signal leaves at once.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from time import monotonic, sleep
from types import FrameType
from typing import Any, NoReturn

from ppocli.distributed.ranks import StopFlag
from ppocli.distributed.standard_output import result_stream


def stop_when_closed(descriptor: int) -> None:
    """Ask this process to stop, as SIGTERM does, once nobody holds the other end of a pipe.

    However the process at that end dies, ``kill -9`` included, the kernel closes its end.
    """
    def wait() -> None:
        with suppress(OSError):
            while os.read(descriptor, 1):
                pass

    _stop_after(wait)


def stop_when_orphaned(parent: int, leave_after: Callable[[], float] = lambda: 0.0) -> None:
    """Ask this process to stop, as SIGTERM does, once its parent has ended, ``kill -9`` included.

    Args:
        parent: pid of the process that has started this one.
        leave_after: seconds after that at which this process ends even if it has not come to a
            stop; 0: it may take as long as it needs.
    """
    def wait() -> None:
        while os.getppid() == parent:
            sleep(0.5)

    _stop_after(wait, leave_after)


def _stop_after(wait: Callable[[], None], leave_after: Callable[[], float] = lambda: 0.0) -> None:
    """Wait in a thread; the signal goes to the main thread, whose waiting it interrupts."""
    main = threading.main_thread().ident
    assert main is not None

    def stop() -> None:
        wait()
        signal.pthread_kill(main, signal.SIGTERM)
        if seconds := leave_after():
            sleep(seconds)
            os._exit(128 + signal.SIGTERM)

    threading.Thread(target=stop, name="ppocli-lifeline", daemon=True).start()


@contextmanager
def catch_signals(settle_seconds: float = 0.0) -> Iterator[StopFlag]:
    """Make SIGINT, SIGTERM and SIGHUP set the yielded flag; restore the old handlers at the end.

    The second signal flushes the streams and ends the process at once with 128 + its number (130,
    143; a hang-up counts as SIGTERM). A SIGHUP that was already ignored (``nohup``) stays ignored.
    Outside the main thread, where Python allows no handlers, the flag is never set by a signal.

    Args:
        settle_seconds: what comes within this time of the first signal is the same request.
    """
    flag = StopFlag()
    settled_at = [0.0]

    def handle(number: int, frame: FrameType | None) -> None:
        number = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        if flag.requested is not None:
            if monotonic() < settled_at[0]:
                return
            signal.signal(number, signal.SIG_DFL)
            leave_at_once(128 + number)
        settled_at[0] = monotonic() + settle_seconds
        flag.request(number)

    caught = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        caught.append(signal.SIGHUP)
    with signal_handlers(dict.fromkeys(caught, handle)):
        yield flag


def _around_fork(how: int, *, in_child: bool = False) -> None:
    """Let forks, such as workers of a ``multiprocessing.Pool``, end by SIGTERM, which their parent
    relies on. The signal is blocked until our handler is removed, since Python drops signals that
    arrive before a fork."""
    if getattr(signal.getsignal(signal.SIGTERM), "__module__", None) == __name__:
        if in_child:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(how, {signal.SIGTERM})


os.register_at_fork(before=partial(_around_fork, signal.SIG_BLOCK),
                    after_in_parent=partial(_around_fork, signal.SIG_UNBLOCK),
                    after_in_child=partial(_around_fork, signal.SIG_UNBLOCK, in_child=True))


def heeded() -> list[signal.Signals]:
    """The signals that ask a process to end, except those that are ignored here (``nohup``)."""
    return [number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def signal_handlers(handlers: Mapping[signal.Signals, Any]) -> Iterator[None]:
    """Install signal handlers for the block, and restore the old ones after it. Outside the main
    thread, where Python allows no handlers, nothing happens."""
    previous: dict[signal.Signals, Any] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                previous[number] = signal.signal(number, handler)
        yield
    finally:
        for number, handler in previous.items():
            # None: installed by C code, which Python can't put back; the default is the nearest.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def leave_at_once(code: int) -> NoReturn:
    """End this process without Python's own clean-up, in which the threads of a process group can
    abort the interpreter."""
    for stream in (result_stream(), sys.stdout, sys.stderr):
        # a signal may have come in the middle of a write to this very stream
        with suppress(Exception):
            stream.flush()
    os._exit(code)
