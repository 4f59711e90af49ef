"""Work that may never end, such as a call into a dead network, beside what waits for it."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


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
