"""Work that may never end, such as a call into a dead network, beside what waits for it."""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")
LOOK = 0.2
"""seconds between two looks at whether the run is to stop"""


def in_daemon(work: Callable[[], T], name: str) -> Future[T]:
    """What ``work`` comes to in a daemon thread: a call that never ends can't keep the process."""
    future: Future[T] = Future()

    def body() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=body, name=name, daemon=True).start()
    return future


def in_loop(work: Coroutine[Any, Any, T]) -> Future[T]:
    """What ``work`` comes to in the event loop that all async code of this process shares: a lock
    or a connection that is kept from one call to the next belongs to the loop of the first."""
    return asyncio.run_coroutine_threadsafe(work, _loop(os.getpid()))


@cache
def _loop(_process: int) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()

    def body() -> None:
        while True:
            with suppress(BaseException):  # a task's SystemExit is that of its caller
                loop.run_forever()

    threading.Thread(target=body, name="event loop", daemon=True).start()
    return loop


def outcome_of(begun: Future[T], poll: Callable[[], None]) -> T:
    """What begun work comes to, waited for here.

    Args:
        poll: called meanwhile; what it raises ends the waiting, not the work.
    """
    while not wait([begun], LOOK).done:
        poll()
    return begun.result()
