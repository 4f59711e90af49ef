"""What must not come through a call of the user's code: exceptions that end a process, modes of
torch's that are left changed, and threads that keep a process from ending."""

import logging
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import thread as executors
from contextlib import ExitStack, contextmanager
from time import monotonic
from typing import Any

from ppocli.distributed.stop import StopRequested
from ppocli.errors import RewardError

log = logging.getLogger(__name__)

LAST_WAIT = 10.0
"""seconds that threads have to end in when their process is about to end"""
_DTYPE, _DEVICE = "default dtype", "default device"
_INFERENCE, _GRAD = "inference mode", "grad mode"
_SETTINGS = {"number of threads": "num_threads",
             "precision of products": "float32_matmul_precision"}
"""of torch, which the rest of the process computes with too: they are put back with a warning"""
_started: weakref.WeakKeyDictionary[threading.Thread, str] = weakref.WeakKeyDictionary()
"""threads that started during a call -> label of the function"""


def is_own_error(error: BaseException) -> bool:
    """Whether the user's code raised ``error`` itself, ``SystemExit`` included: false for a stop
    that was requested from outside."""
    if isinstance(error, KeyboardInterrupt):
        # Ctrl-C raises it in the main thread alone, and nowhere while a handler of ours is set
        return (signal.getsignal(signal.SIGINT) is not signal.default_int_handler
                or threading.current_thread() is not threading.main_thread())
    return not isinstance(error, StopRequested)


@contextmanager
def contained(label: str, key: str, samples: Callable[[], str]) -> Iterator[None]:
    """Run the user's code in the block; torch's modes and settings are the same after it.

    Args:
        label: of the function.
        key: config key that names it.
        samples: describes what it was called with, for the error.

    Raises:
        RewardError: it has left one of torch's modes changed.
    """
    before, threads = _torch_state(), set(threading.enumerate())
    after = before
    try:
        with ExitStack() as stack:
            if torch := sys.modules.get("torch"):
                # leaving these ends what was entered inside of them and not left
                stack.enter_context(torch.inference_mode(before[_INFERENCE]))
                stack.enter_context(torch.set_grad_enabled(before[_GRAD]))
            try:
                yield
            finally:
                after = _torch_state()
    finally:
        if after != before:
            _put_back(label, before, after)
        _started.update(dict.fromkeys(set(threading.enumerate()) - threads, label))
    if after != before and (changed := [
            f"torch's {name}" for name in (_DTYPE, _DEVICE, _INFERENCE, _GRAD)
            if after[name] != before[name]]):
        raise RewardError(f"{label} left {' and '.join(changed)} changed\n  {samples()}", where=key,
                          fix="put it back before it returns, or use it as a context manager: "
                          "with torch.inference_mode(): ...")


def _torch_state() -> dict[str, Any]:
    """Modes and settings of torch; the modes that it starts with if it isn't loaded."""
    if torch := sys.modules.get("torch"):
        return {_DTYPE: str(torch.get_default_dtype()), _DEVICE: str(torch.get_default_device()),
                _INFERENCE: torch.is_inference_mode_enabled(), _GRAD: torch.is_grad_enabled(),
                "number of threads": torch.get_num_threads(),
                "precision of products": torch.get_float32_matmul_precision()}
    return {_DTYPE: "torch.float32", _DEVICE: "cpu", _INFERENCE: False, _GRAD: True}


def _put_back(label: str, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Restore what a context manager can't."""
    torch: Any = sys.modules["torch"]
    if after[_DTYPE] != before[_DTYPE]:
        torch.set_default_dtype(getattr(torch, before[_DTYPE].removeprefix("torch.")))
    if after[_DEVICE] != before[_DEVICE]:
        torch.set_default_device(None)
        if str(torch.get_default_device()) != before[_DEVICE]:
            torch.set_default_device(before[_DEVICE])
    for name, setting in _SETTINGS.items():
        if after[name] != before.get(name, after[name]):
            getattr(torch, f"set_{setting}")(before[name])
            log.warning("%s changed torch's %s from %s to %s; it is put back, because the numbers "
                        "of the run depend on it", label, name, before[name], after[name])


def unended_threads(seconds: float = 0.0) -> list[tuple[threading.Thread, str]]:
    """Threads of the user's code that keep this process from ending, each with the label of the
    function that started it. Waits up to ``seconds`` for them."""
    until = monotonic() + seconds
    # those of executors end by themselves
    waiting = {*executors._threads_queues, *getattr(
        sys.modules.get("concurrent.futures.process"), "_threads_wakeups", ())}
    started = [(thread, label) for thread, label in list(_started.items())
               if not thread.daemon and thread not in waiting]
    for thread, _ in started:
        thread.join(max(0.0, until - monotonic()))
    return [(thread, label) for thread, label in started if thread.is_alive()]


def check_threads() -> None:
    """Refuse to end while a thread would keep the process for ever.

    Raises:
        RewardError: names the thread and the function that started it.
    """
    for thread, label in unended_threads(LAST_WAIT):
        raise RewardError(
            f"{label} started the thread {thread.name!r}, which has not ended {LAST_WAIT:g} s "
            "after everything else: it would keep the process for ever.", where=label,
            fix="end it, or make it a daemon: threading.Thread(..., daemon=True)")
