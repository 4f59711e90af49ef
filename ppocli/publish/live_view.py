"""The live view: a few lines that stay at the bottom of a terminal while everything else scrolls by
above them, drawn by ``rich.live``.

The cursor is never hidden and waits below them, so that a process that is killed leaves a usable
terminal. Nothing is drawn for a job in the background.
"""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout, suppress
from threading import RLock
from typing import Any, Self

from rich.cells import cell_len
from rich.console import Console, ConsoleRenderable
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType
from rich.text import Text

_DRAWINGS = 2
"""drawings a second, of a few milliseconds each: less than 1 % of a core"""
_PLAIN_WIDTH = 110
"""columns without a terminal"""


class Outlet(Console):
    """A Rich console for threads that print around a live view. Characters that its stream can't
    encode are escaped; once the reader has left, output is dropped.

    Args:
        stream: where to print to.
    """

    def __init__(self, stream: Any) -> None:
        self._printing = RLock()
        with suppress(AttributeError, OSError, ValueError):  # not a file, or a closed one
            stream.reconfigure(errors="backslashreplace")
        super().__init__(file=stream, highlight=False, markup=False, safe_box=True,
                         width=None if is_terminal(stream) else _PLAIN_WIDTH)

    def __enter__(self) -> Self:
        """Print atomically: erasing and drawing belong together."""
        self._printing.acquire()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        except (OSError, ValueError):  # ValueError: it was closed
            self.quiet = True
        finally:
            self._printing.release()

    def on_broken_pipe(self) -> None:
        """Go on in silence, where Rich itself would end the process."""
        self.quiet = True

    def show_cursor(self, show: bool = True) -> bool:
        """Leave the cursor visible: it is needed after a kill."""
        return False

    @property
    def can_live(self) -> bool:
        """Whether a live view can be drawn: on a terminal whose cursor moves."""
        # FORCE_COLOR makes is_terminal true for a pipe
        return is_terminal(self.file) and self.is_terminal and not self.is_dumb_terminal \
            and bool(os.environ.get("TERM"))


class LiveView(Live):
    """Lines at the bottom of a terminal, from ``start`` to ``stop``. What is printed to the console
    meanwhile, and what is written to standard streams that are terminals, goes above them.

    Args:
        console: of the terminal.
        render: the lines, of one row each, for (columns, rows, ascii_only=...).
        started_by: the process in the user's foreground that has started this one in another
            process group.
    """

    def __init__(self, console: Outlet, render: Callable[..., Sequence[Text]],
                 started_by: int | None = None) -> None:
        super().__init__(console=console, refresh_per_second=_DRAWINGS, transient=True,
                         redirect_stdout=False, redirect_stderr=False)
        self._render = render
        self._redirections = ExitStack()
        self._groups = {os.getpgrp()}
        if started_by is not None:
            with suppress(OSError):
                self._groups.add(os.getpgid(started_by))
        self._lines: Sequence[Text] = ()
        self._on_screen: list[int] = []  # cells of each line that is drawn
        self._size = (0, 0)
        self.trouble: Exception | None = None
        """the exception that ended drawing, if any"""

    def start(self, refresh: bool = True) -> None:
        """Draw, and keep drawing in a thread."""
        super().start(refresh)
        for stream, redirect in ((sys.stdout, redirect_stdout), (sys.stderr, redirect_stderr)):
            if is_terminal(stream):
                above = self._redirections.enter_context(redirect(Above(stream, self.console)))
                self._redirections.callback(above.close_line)

    def stop(self) -> None:
        """Erase the lines; what is printed from now on goes to the terminal alone."""
        self._redirections.close()
        super().stop()

    def refresh(self) -> None:
        """Draw if something has changed."""
        lines: Sequence[Text] = ()
        size = self.console.size
        if self.is_started and self.trouble is None:
            try:
                lines = self._render(max(10, size.width - 1), max(1, size.height - 1),
                                     ascii_only=self.console.options.ascii_only)
            except Exception as error:  # a view that fails must not end a training
                self.trouble = error
        if lines != self._lines or size != self._size or not self._on_screen:
            self._lines, self._size = lines, size
            self.console.print(Control())

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Printed output between erasing the lines and drawing them again: output of the training
        doesn't wait for new lines."""
        line_widths, self._on_screen = self._on_screen, []
        if not self._in_foreground():  # the lines on the screen are someone else's
            return renderables
        # a terminal that has become narrower has broken long lines into several
        width = max(1, self.console.width)
        rows = sum(max(1, -(-cells // width)) for cells in line_widths)
        erase = Control(ControlType.CARRIAGE_RETURN,
                        *((ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)) * rows)
        self._on_screen = [cell_len(line.plain) for line in self._lines]
        return [*([erase] if rows else []), *renderables, *self._lines]

    def _in_foreground(self) -> bool:
        with suppress(OSError, ValueError, AttributeError):
            return os.tcgetpgrp(self.console.file.fileno()) in self._groups
        return True  # no terminal of this session: nobody else writes there


class Above:
    """A standard stream whose whole lines go above a live view (``print`` in a reward function),
    without the control sequences of other things than colours."""

    def __init__(self, stream: Any, console: Console) -> None:
        self._stream, self._console, self._rest = stream, console, ""
        self._process = os.getpid()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Print complete lines, and keep the rest."""
        if os.getpid() != self._process:  # a fork: the console's lock may be held for ever there
            return int(self._stream.write(text))
        *lines, self._rest = (self._rest + text).split("\n")
        if lines:
            complete_lines = (Text.from_ansi(line.rstrip("\r")) for line in lines)
            self._console.print(Text("\n").join(complete_lines), soft_wrap=True)
        return len(text)

    def flush(self) -> None:
        """Do nothing: complete lines are printed, and half a line would break the view."""

    def close_line(self) -> None:
        """Write the rest that had no newline."""
        if self._rest:
            self.write("\n")


def is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal."""
    with suppress(AttributeError, ValueError):  # none at all, or a closed one
        return bool(stream.isatty())
    return False
