"""A few lines that stay at the bottom of a terminal while everything else scrolls by above them.

The cursor is never hidden and waits below the pane, so that a process that is killed leaves a
usable terminal. A thread redraws when something has changed, and once a second for the clocks; it
takes at most a hundredth of a core.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

_SHORTEST_PAUSE = 0.25
_CLOCK = 1.0
_SHARE = 0.01
"""of a core, at most, goes into drawing"""


_STARTED_BY: set[int] = set()


def draw_for(process: int) -> None:
    """Draw also while the group of this process is in the foreground: it has started us in a group
    of our own, and the user looks at it."""
    with suppress(OSError):
        _STARTED_BY.add(os.getpgid(process))


class Pane:
    """The pane of one terminal.

    Args:
        console: of the terminal; its stream survives a reader that leaves.
        render: the pane's lines for (width, height) in cells.
    """

    def __init__(self, console: Console, render: Callable[[int, int], Sequence[Text]]) -> None:
        self._console = console
        self._render = render
        self._lock = threading.RLock()
        self._changed = threading.Event()
        self._closing = threading.Event()
        self._frame = ""
        self._cells: list[int] = []  # how long each line of the frame is
        self._shown = False
        self._size = (0, 0)
        self._thread: threading.Thread | None = None
        self.trouble: Exception | None = None
        """what drawing ended with, if it had to"""

    def start(self) -> None:
        """Draw, and keep drawing in a thread."""
        self.draw()
        self._thread = threading.Thread(target=self._keep_drawing, name="ppocli-live-view",
                                        daemon=True)
        self._thread.start()

    def changed(self) -> None:
        """Something is to be drawn anew, soon."""
        self._changed.set()

    def stop(self) -> None:
        """Remove the pane; what is printed from now on goes to the terminal alone."""
        self._closing.set()
        self._changed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=2.0)  # a terminal that takes nothing must not hold us up
        if self._lock.acquire(timeout=2.0):
            try:
                self._put("")
            finally:
                self._lock.release()

    def print(self, *things: Any, **how: Any) -> None:
        """Print above the pane, as ``Console.print`` does."""
        with self._console.capture() as captured:
            self._console.print(*things, **how)
        self.write(captured.get())

    def write(self, text: str) -> None:
        """Put whole lines above the pane."""
        with self._lock:
            if self._size == self._measure():
                self._put(text)  # what was drawn last will do: this is the training's own time
            else:
                self.draw(text)

    def draw(self, text: str = "") -> None:
        """Draw the pane anew, below ``text``."""
        with self._lock:
            if self._is_over():
                self._put(text)
                return
            width, height = self._size = self._measure()
            lines = self._render(max(10, width - 1), max(1, height - 1))
            with self._console.capture() as captured:
                for line in lines:
                    self._console.print(line, soft_wrap=True)
            frame = captured.get()
            if text or frame != self._frame or not self._shown:
                self._put(text, (frame, [cell_len(line.plain) for line in lines]))

    def _is_over(self) -> bool:
        return self._closing.is_set() or self.trouble is not None

    def _put(self, text: str, new: tuple[str, list[int]] | None = None) -> None:
        """In one go: erase the pane, write ``text``, and draw the frame, a new one if given."""
        visible = _in_foreground(self._console.file)
        erase = ""
        if self._shown and visible:
            # a terminal that has become narrower has broken long lines into several
            width = max(1, self._measure()[0])
            rows = sum(max(1, -(-cells // width)) for cells in self._cells)
            erase = f"\r\x1b[{rows}A\x1b[J"
        if new is not None:
            self._frame, self._cells = new
        # in the background the lines on the screen are someone else's
        self._shown = visible and bool(self._frame) and not self._is_over()
        if everything := erase + text + (self._frame if self._shown else ""):
            self._console.file.write(everything)
            self._console.file.flush()

    def _measure(self) -> tuple[int, int]:
        with suppress(OSError, ValueError, AttributeError):
            size = os.get_terminal_size(self._console.file.fileno())
            if size.columns > 0 and size.lines > 0:
                return size.columns, size.lines
        return self._console.width, self._console.height

    def _keep_drawing(self) -> None:
        while not self._closing.is_set():
            self._changed.wait(_CLOCK)
            self._changed.clear()
            started = time.thread_time()
            try:
                self.draw()
            except Exception as error:  # a view that fails must not end a training
                self.trouble = error
                self.draw()
                return
            cost = time.thread_time() - started
            self._closing.wait(max(_SHORTEST_PAUSE, cost / _SHARE))


def _in_foreground(stream: Any) -> bool:
    """Whether what we draw is what the user looks at: not so for a job that a shell has put into
    the background."""
    try:
        return os.tcgetpgrp(stream.fileno()) in (os.getpgrp(), *_STARTED_BY)
    except (OSError, ValueError, AttributeError):
        return True  # no terminal of this session: nobody else writes there


class Above:
    """A standard stream whose whole lines go above a pane (``print`` in a reward function)."""

    def __init__(self, stream: Any, pane: Pane) -> None:
        self._stream = stream
        self._pane = pane
        self._rest = ""
        self._process = os.getpid()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Keep what is no whole line yet."""
        if os.getpid() != self._process:  # a fork: the pane's lock may be held for ever there
            return int(self._stream.write(text))
        lines, newline, rest = (self._rest + text).rpartition("\n")
        self._rest = rest
        if newline:
            self._pane.write(lines + newline)
        return len(text)

    def flush(self) -> None:
        """Nothing: whole lines have gone out, and half a line would break the pane."""

    def close_line(self) -> None:
        """Write what was left without a newline."""
        if self._rest:
            self._pane.write(self._rest + "\n")
            self._rest = ""


def put_above(pane: Pane) -> Callable[[], None]:
    """Send what is written to standard streams that are terminals above the pane.

    Returns:
        a function that undoes it.
    """
    replaced: list[tuple[str, Any, Above]] = []
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if bool(getattr(stream, "isatty", lambda: False)()):
            above = Above(stream, pane)
            setattr(sys, name, above)
            replaced.append((name, stream, above))

    def undo() -> None:
        for name, stream, above in replaced:
            above.close_line()
            if getattr(sys, name) is above:
                setattr(sys, name, stream)

    return undo
