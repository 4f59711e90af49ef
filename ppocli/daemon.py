"""Work that may never end, such as a call into a dead network, beside what waits for it."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

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


def outcome_of(begun: Future[T], poll: Callable[[], None]) -> T:
    """What begun work comes to, waited for here.

    Args:
        poll: called meanwhile; what it raises ends the waiting, not the work.
    """
    while not wait([begun], LOOK).done:
        poll()
    return begun.result()
