"""Work that may never end, such as a call into a dead network, in threads that don't keep the
process."""

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
"""by process, since a fork has none of its parent's threads, and owner"""
LOOK = 0.2
"""seconds between checks whether the run should stop"""


def in_daemon(work: Callable[[], T], name: str) -> Future[T]:
    """Run ``work`` in a daemon thread, so that a call that never ends can't keep the process."""
    future: Future[T] = Future()

    def body() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=body, name=name, daemon=True).start()
    return future


def in_loop(work: Coroutine[Any, Any, T], owner: str) -> Future[T]:
    """Run ``work`` in the one event loop of an owner in this process, since a lock or a connection
    that outlives a call belongs to the loop of its first use. Called within that loop, whose thread
    may wait for the result, it runs in another loop.

    Args:
        owner: name of the loop; code that blocks its loop doesn't block others.
    """
    key = os.getpid(), owner
    with _ONE_AT_A_TIME:
        loop = _loops[key] = _loops.get(key) or _started_loop(owner)
    if asyncio._get_running_loop() is loop:
        return in_daemon(partial(asyncio.run, work), f"within {owner}")
    return asyncio.run_coroutine_threadsafe(work, loop)


def awaited(work: Coroutine[Any, Any, T], owner: str) -> T:
    """The result of :func:`in_loop`; an exception while waiting cancels the work."""
    begun = in_loop(work, owner)
    try:
        return begun.result()
    except BaseException:
        begun.cancel()
        raise


def leave_loop(owner: str) -> None:
    """Give up a loop that work blocks, after it took too long; later calls get another one."""
    key, answered = (os.getpid(), owner), threading.Event()
    if (loop := _loops.get(key)) is not None:
        loop.call_soon_threadsafe(answered.set)
        if not answered.wait(LOOK):
            _loops.pop(key, None)


def _started_loop(owner: str) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()

    def body() -> None:
        while True:
            with suppress(BaseException):  # the caller gets a task's SystemExit
                loop.run_forever()

    threading.Thread(target=body, name=f"event loop of {owner}", daemon=True).start()
    return loop


def outcome_of(begun: Future[T], poll: Callable[[], None]) -> T:
    """Wait for the result of ``begun``.

    Args:
        poll: called while waiting; an exception ends the waiting, not the work.
    """
    while not wait([begun], LOOK).done:
        poll()
    return begun.result()
