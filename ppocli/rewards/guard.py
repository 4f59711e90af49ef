"""What must not come through a call of the user's code: exceptions that end a process, modes of
torch's and parts of Python that are left changed, and threads that keep a process from ending."""

import json
import logging
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import thread as executors
from contextlib import ExitStack, contextmanager, suppress
from io import BufferedWriter, FileIO, TextIOWrapper
from time import monotonic
from typing import Any

from ppocli.distributed.stop import StopRequested
from ppocli.errors import RewardError

log = logging.getLogger(__name__)

LAST_WAIT = 10.0
"""seconds that threads have to end in when their process wants to"""
_DTYPE, _DEVICE = "torch's default dtype", "torch's default device"
_INFERENCE, _GRAD = "torch's inference mode", "torch's grad mode"
_SETTINGS = {"number of threads": "num_threads",
             "precision of products": "float32_matmul_precision"}
"""of torch, which others of the process compute with too: they are put back"""
_started: weakref.WeakKeyDictionary[threading.Thread, str] = weakref.WeakKeyDictionary()
"""threads that would keep the process -> the function that has started them"""


def is_its_own(error: BaseException) -> bool:
    """Whether the code raised it by itself, be it ``SystemExit``: a stop that was asked for is
    neither the code's nor its error."""
    if isinstance(error, KeyboardInterrupt):
        # Ctrl-C raises it in the main thread alone, and nowhere while a handler of ours is set
        return (signal.getsignal(signal.SIGINT) is not signal.default_int_handler
                or threading.current_thread() is not threading.main_thread())
    return not isinstance(error, StopRequested)


@contextmanager
def contained(label: str, key: str, samples: str) -> Iterator[None]:
    """Code of the user's own runs in the block; torch's modes and settings, and what the program
    needs of Python, are as before when it has ended.

    Args:
        label: of the function.
        key: config key it came from.
        samples: words for what it was given.

    Raises:
        RewardError: it has left one of torch's modes changed.
    """
    changed: list[str] = []
    settings, python = _settings(), _Python()
    there, before = set(threading.enumerate()), _modes()
    try:
        with ExitStack() as stack:
            if torch := sys.modules.get("torch"):
                # leaving these ends what was entered inside of them and not left
                stack.enter_context(torch.inference_mode(before[_INFERENCE]))
                stack.enter_context(torch.set_grad_enabled(before[_GRAD]))
            try:
                yield
            finally:
                changed = [name for name, value in _modes().items() if value != before[name]]
    finally:
        loaded: Any = sys.modules.get("torch")
        for what in python.put_back():
            log.warning("%s %s; it is put back, for the run goes on with it", label, what)
        for name, value in _settings().items():
            if value != settings.get(name, value):
                getattr(loaded, f"set_{_SETTINGS[name]}")(settings[name])
                log.warning("%s changed torch's %s from %s to %s; it is put back, for the numbers "
                            "of the run depend on it", label, name, settings[name], value)
        if _DTYPE in changed:
            loaded.set_default_dtype(getattr(loaded, before[_DTYPE].removeprefix("torch.")))
        if _DEVICE in changed:
            loaded.set_default_device(None)
            if str(loaded.get_default_device()) != before[_DEVICE]:
                loaded.set_default_device(before[_DEVICE])
        # those of executors end by themselves
        _started.update({thread: label for thread in threading.enumerate() if thread not in there
                         and not thread.daemon and not _of_executor(thread)})
    if changed:
        raise RewardError(f"{label} left {' and '.join(changed)} changed\n  {samples}", where=key,
                          fix="put it back before it returns, or use it as a context manager: "
                          "with torch.inference_mode(): ...")


def _of_executor(thread: threading.Thread) -> bool:
    return thread in executors._threads_queues or thread in getattr(
        sys.modules.get("concurrent.futures.process"), "_threads_wakeups", ())


def _modes() -> dict[str, Any]:
    """What torch computes in now, or would if the block were the first to load it."""
    if torch := sys.modules.get("torch"):
        return {_DTYPE: str(torch.get_default_dtype()), _DEVICE: str(torch.get_default_device()),
                _GRAD: torch.is_grad_enabled(), _INFERENCE: torch.is_inference_mode_enabled()}
    return {_DTYPE: "torch.float32", _DEVICE: "cpu", _INFERENCE: False, _GRAD: True}


def _settings() -> dict[str, Any]:
    """Torch's settings as they are, if it is loaded."""
    torch = sys.modules.get("torch")
    return {} if torch is None else {
        name: getattr(torch, f"get_{key}")() for name, key in _SETTINGS.items()}


class _Python:
    """What the program needs of Python itself after the user's code, as it is now."""

    def __init__(self) -> None:
        self.path, self.hook, self.json = list(sys.path), sys.excepthook, dict(vars(json))
        self.streams = [(name, stream, descriptor, stream.encoding, stream.errors,
                         stream.line_buffering) for name in ("stdout", "stderr")
                        if isinstance(stream := getattr(sys, name), TextIOWrapper)
                        and (descriptor := _descriptor(stream)) is not None]

    def put_back(self) -> list[str]:
        """Mend what has gone, and tell what that was. What was added to it stays."""
        told = []
        if lost := [folder for folder in self.path if folder not in sys.path]:
            sys.path.extend(lost)
            told.append(f"took {len(lost)} folders out of sys.path")
        if not callable(sys.excepthook):  # no thread can start without it
            sys.excepthook = self.hook
            told.append("took sys.excepthook away")
        if other := [name for name, value in self.json.items()
                     if vars(json).get(name) is not value]:
            vars(json).update(self.json)
            told.append(f"replaced {', '.join(f'json.{name}' for name in other)}")
        for name, stream, descriptor, encoding, errors, by_line in self.streams:
            if _descriptor(stream) is None:
                # the same object again, which the display and handlers of logging hold as well;
                # Python leaves the descriptors of its standard streams open
                raw = FileIO(descriptor, "w", closefd=False)
                TextIOWrapper.__init__(stream, BufferedWriter(raw), encoding, errors,
                                       line_buffering=by_line)
                told.append(f"closed sys.{name}")
        return told


def _descriptor(stream: TextIOWrapper) -> int | None:
    """None: it is closed or detached, or in memory (a notebook's, a test's)."""
    with suppress(ValueError, OSError):
        return stream.fileno()
    return None


def unended_threads(seconds: float = 0.0) -> list[tuple[threading.Thread, str]]:
    """Threads of the user's code that keep this process, and what started each; they have so long
    to end."""
    until = monotonic() + seconds
    for thread in list(_started):
        thread.join(max(0.0, until - monotonic()))
    return [(thread, label) for thread, label in _started.items() if thread.is_alive()]


def check_threads() -> None:
    """Refuse to end with a thread that would keep the process for ever.

    Raises:
        RewardError: names the thread and the function that started it.
    """
    for thread, label in unended_threads(LAST_WAIT):
        raise RewardError(
            f"{label} started the thread {thread.name!r}, which has not ended {LAST_WAIT:g} s "
            "after everything else: it would keep the process for ever.", where=label,
            fix="end it, or make it a daemon: threading.Thread(..., daemon=True)")
