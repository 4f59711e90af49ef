"""One call of user code: synchronous or async, with retries and a time limit."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ppocli.errors import PpocliError, RewardError
from ppocli.rewards.records import RewardRequest
from ppocli.rewards.resolve import BoundCallable, name_own_key
from ppocli.text import error_line
from ppocli.user_code import raised_at, shorten

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CallPolicy:
    """How patient a call is."""

    timeout: float | None = None
    """seconds one attempt may take; None calls in the caller's own thread, without limit"""
    retries: int = 0
    """how often a call that raised is tried again"""


def call_with_request(bound: BoundCallable, request: RewardRequest, policy: CallPolicy) -> Any:
    """What ``bound`` returns for ``request``, not yet checked.

    ``KeyboardInterrupt``, ``SystemExit`` and the program's own errors (a stop request among them)
    pass through. A call past its time limit is not tried again: it may still be running.

    Raises:
        RewardError: the function raised on every attempt, or took longer than the timeout.
    """
    for attempt in range(policy.retries + 1):
        positional, named = bound.arguments(request)  # fresh lists: a failed call may have cut them
        try:
            return _call(bound, positional, named, len(request), policy.timeout)
        except PpocliError as error:
            name_own_key(error, bound.located.key)
            raise
        except Exception as error:
            place = raised_at(error, bound.file)
            if attempt < policy.retries:
                log.warning("%s raised %s at %s; trying again (%d of %d)", bound.label,
                            error_line(error), place, attempt + 1, policy.retries)
                continue
            tries = f", {attempt + 1} times in a row," if attempt else ""
            first = shorten(request.prompts[0] + request.responses[0])
            raise RewardError(
                f"{bound.label} raised{tries} {type(error).__name__}: {error}\n"
                f"  batch: {len(request)} samples, the first is {first}",
                where=place, fix="mend the function; reward.retries=N tries a failed call again",
            ) from error
    raise AssertionError("unreachable: the last attempt returns or raises")


def _call(bound: BoundCallable, positional: list[Any], named: dict[str, Any], count: int,
          timeout: float | None) -> Any:
    def work() -> Any:
        result = bound.call(*positional, **named)
        if bound.is_async:
            result = asyncio.run(_awaited(result))
        # A generator's body runs here, under the same time limit and the same handling of errors.
        if isinstance(result, Mapping):
            return {name: _drained(column, count, bound) for name, column in result.items()}
        return _drained(result, count, bound)

    if timeout is None and not (bound.is_async and _inside_event_loop()):
        return work()
    return _in_thread(work, timeout, bound)


def _drained(result: Any, count: int, bound: BoundCallable) -> Any:
    """The items of an iterator as a list; anything else as it is. An endless one is refused."""
    if not isinstance(result, Iterator):
        return result
    items = list(itertools.islice(result, count + 1))
    if len(items) > count:
        raise RewardError(f"{bound.label} returned more than {count} values for {count} samples.",
                          where=bound.located.key, fix="return exactly one value a sample")
    return items


async def _awaited(result: Any) -> Any:
    return await result


def _inside_event_loop() -> bool:
    """Whether this thread already runs a loop, as a notebook's does; ``asyncio.run`` can't nest."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _in_thread(work: Callable[[], Any], timeout: float | None, bound: BoundCallable) -> Any:
    """Run ``work`` in a daemon thread, so that a call that never ends can't keep the process."""
    outcome: list[Any] = []
    failure: list[BaseException] = []

    def body() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            failure.append(error)

    started = time.monotonic()
    thread = threading.Thread(target=body, name=f"reward {bound.located.spec}", daemon=True)
    thread.start()
    thread.join(timeout)
    if thread.is_alive():
        elapsed = time.monotonic() - started
        raise RewardError(
            f"{bound.label} was still running after {elapsed:.1f} s (reward.timeout={timeout:g}).",
            where="reward.timeout", fix="make it faster, or raise reward.timeout (null: no limit)")
    if failure:
        raise failure[0]
    return outcome[0]
