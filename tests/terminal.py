"""A real pseudo terminal with a command in it, and what its screen would show."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from helpers import environment
from warm import begin_on_terminal

_TOKEN = re.compile(r"\x1b\[(?P<args>[0-9;?]*)(?P<end>[A-Za-z])|\x1b[^\[]|[\r\n\b\x07]|[^\x1b\r\n]")
_UNFINISHED = re.compile(r"\x1b(\[[0-9;?]*)?\Z")


class Screen:
    """The rows of a terminal that wraps long lines, and wraps them anew when its width changes.

    Knows what a live view needs: line ends, moving up, erasing lines, colours (which it drops).
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.rows: list[tuple[str, bool]] = [("", False)]  # text, goes on in the next row
        self.row = self.column = 0
        self.unknown: set[str] = set()
        self._pending = ""

    def feed(self, text: str) -> None:
        """Take what a program has written; the beginning of a sequence waits for its end."""
        text = self._pending + text
        cut = _UNFINISHED.search(text)
        self._pending = cut[0] if cut else ""
        text = text.removesuffix(self._pending)
        for token in _TOKEN.finditer(text):
            if token["end"]:
                self._control(token["end"], token["args"])
            elif token[0] == "\r":
                self.column = 0
            elif token[0] == "\n":
                self._down()
                self.column = 0
            elif token[0].isprintable():
                self._put(token[0])

    @property
    def lines(self) -> list[str]:
        """The rows, from the first that was ever written."""
        return [text.rstrip() for text, _ in self.rows]

    def _control(self, end: str, args: str) -> None:
        if end == "A":
            self.row = max(0, self.row - int(args or 1))
        elif end == "K" and args == "2":
            self.rows[self.row] = ("", False)
            if not any(text for text, _ in self.rows[self.row:]):  # as if never written
                del self.rows[self.row + 1:]
        elif end != "m":
            self.unknown.add(args + end)

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self.rows):
            self.rows.append(("", False))

    def _put(self, char: str) -> None:
        if self.column == self.width:
            self.rows[self.row] = (self.rows[self.row][0], True)
            self._down()
            self.column = 0
        text = self.rows[self.row][0].ljust(self.column)
        self.rows[self.row] = (text[:self.column] + char + text[self.column + 1:],
                               self.rows[self.row][1])
        self.column += 1


class Terminal:
    """The command on a pseudo terminal of its own, in a session of its own.

    A context manager: whatever becomes of a test, nothing of the command is left running.
    """

    def __init__(self, *words: str, cwd: Path, columns: int = 80, rows: int = 30, **env: str
                 ) -> None:
        self._ours, theirs = pty.openpty()
        self._set_size(columns, rows)
        self.screen = Screen(columns)
        self.raw = ""
        variables = {**environment(TERM="xterm-256color"), **env}
        del variables["COLUMNS"]
        self.process = begin_on_terminal(["-m", "ppocli", *words], cwd=cwd, env=variables,
                                         terminal=theirs)
        os.close(theirs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.returncode is not None:
            return
        os.close(self._ours)  # hangs up
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def wait_for(self, condition: Callable[[], bool], seconds: float = 120) -> None:
        """Read until the screen is as wanted."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.raw[-3000:]
            assert self._read(), self.raw[-3000:]

    def type(self, keys: bytes) -> None:
        """Press keys."""
        os.write(self._ours, keys)

    def press_until(self, keys: bytes, text: str, seconds: float = 120) -> None:
        """Press keys every two seconds until a text is shown."""
        deadline = time.monotonic() + seconds
        while text not in self.raw:
            assert time.monotonic() < deadline, self.raw[-3000:]
            self.type(keys)
            again = time.monotonic() + 2
            while text not in self.raw and (left := again - time.monotonic()) > 0:
                if select.select([self._ours], [], [], left)[0]:
                    assert self._read(), self.raw[-3000:]

    def end(self, seconds: float = 120) -> int:
        """Read to the command's end; its exit code."""
        deadline = time.monotonic() + seconds
        while self._read():
            assert time.monotonic() < deadline, self.raw[-3000:]
        code = self.process.wait(timeout=30)
        os.close(self._ours)
        return code

    def _read(self) -> bool:
        if not select.select([self._ours], [], [], 1.0)[0]:
            return True
        try:
            data = os.read(self._ours, 1 << 16)
        except OSError:  # the other side has closed it
            return False
        # whole characters only
        while data and len(data.decode("utf-8", "ignore").encode()) < len(data):
            data += os.read(self._ours, 1)
        text = data.decode()
        self.raw += text
        self.screen.feed(text)
        return bool(data)

    def _set_size(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
