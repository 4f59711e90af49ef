"""Work that may never end, such as a call into a dead network, beside what waits for it."""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")
_ONE_AT_A_TIME = threading.Lock()
_loops: dict[tuple[int, str], asyncio.AbstractEventLoop] = {}
"""by process, for a fork has none of its parent's threads, and owner"""
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


def in_loop(work: Coroutine[Any, Any, T], owner: str) -> Future[T]:
    """What ``work`` comes to in the event loop of all calls of an owner in this process: a lock or
    a connection that is kept from one call to the next belongs to the loop of the first. Within
    that loop, whose thread may wait for it, it runs in one of its own.

    Args:
        owner: code that keeps its loop busy doesn't keep others waiting.
    """
    key = os.getpid(), owner
    with _ONE_AT_A_TIME:
        loop = _loops[key] = _loops.get(key) or _started_loop(owner)
    if asyncio._get_running_loop() is loop:
        return in_daemon(partial(asyncio.run, work), f"within {owner}")
    return asyncio.run_coroutine_threadsafe(work, loop)


def awaited(work: Coroutine[Any, Any, T], owner: str) -> T:
    """As :func:`in_loop`, waited for; whatever ends the waiting ends the work."""
    begun = in_loop(work, owner)
    try:
        return begun.result()
    except BaseException:
        begun.cancel()
        raise


def leave_loop(owner: str) -> None:
    """After work that took too long: a loop that it blocks is for no later call."""
    key, answered = (os.getpid(), owner), threading.Event()
    if (loop := _loops.get(key)) is not None:
        loop.call_soon_threadsafe(answered.set)
        if not answered.wait(LOOK):
            _loops.pop(key, None)


def _started_loop(owner: str) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()

    def body() -> None:
        while True:
            with suppress(BaseException):  # a task's SystemExit is that of its caller
                loop.run_forever()

    threading.Thread(target=body, name=f"event loop of {owner}", daemon=True).start()
    return loop


def outcome_of(begun: Future[T], poll: Callable[[], None]) -> T:
    """What begun work comes to, waited for here.

    Args:
        poll: called meanwhile; what it raises ends the waiting, not the work.
    """
    while not wait([begun], LOOK).done:
        poll()
    return begun.result()
