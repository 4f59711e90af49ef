"""What a person sees of a run: one line a step, warnings, and a closing table.

Lines go to stdout and to ppocli.log, warnings to stderr and to ppocli.log. On a terminal a live
view (:mod:`ppocli.display.live_view`) stays below the lines. A display that dies (a closed pipe) is
dropped; the run goes on.
"""

from __future__ import annotations

import logging
import logging.handlers
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, cast

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ppocli.config.secrets import CONTROL, printable
from ppocli.storage.run_logs import read_jsonl

if TYPE_CHECKING:
    from ppocli.display.live_view import Dashboard
    from ppocli.display.pane import Pane

log = logging.getLogger("ppocli")

_LINE = "%(asctime)s %(levelname)s %(message)s"
"""of ppocli.log"""

DisplayMode = Literal["auto", "lines", "quiet"]
"""a live view where standard output is a terminal; lines only; warnings only"""
DISPLAY_MODES: tuple[DisplayMode, ...] = ("auto", "lines", "quiet")


def clean(text: str) -> str:
    """Model text without control characters, on one line: it may hold terminal escapes."""
    return CONTROL.sub("?", text.replace("\n", " ⏎ "))


class _Outlet:
    """A stream whose reader may leave: from then on all that is written to it is dropped.

    Rich itself ends the process when a pipe breaks, and its progress bar draws in a thread.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._alive = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write to the stream as long as it takes it."""
        if self._alive:
            try:
                self._stream.write(text)
            except UnicodeEncodeError as error:
                self.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
            except (OSError, ValueError):  # ValueError: it was closed
                self._alive = False
        return len(text)

    def flush(self) -> None:
        """Flush the stream as long as it takes it."""
        if self._alive:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._alive = False


class _StreamHandler(logging.Handler):
    """Writes messages to a Rich console, or above a pane."""

    def __init__(self, console: Console, prefix: bool) -> None:
        super().__init__()
        self.console = console
        self.prefix = prefix
        self.pane: Pane | None = None

    def emit(self, record: logging.LogRecord) -> None:
        text = printable(record.getMessage())
        if self.prefix:
            text = f"{record.levelname.lower()}: {text}"
        if self.pane is not None:
            self.pane.print(Text(text), soft_wrap=True)
            return
        self.console.print(Text(text), soft_wrap=True)
        self.console.file.flush()


class _FileFormatter(logging.Formatter):
    """Lines of ppocli.log, which reports quote and people publish."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class _FileHandler(logging.FileHandler):
    """ppocli.log; a disk that refuses it must not end the run or print tracebacks."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Drop the record."""


class Display:
    """The lines, the live view and the closing table of one run."""

    def __init__(self, out: Console, lines: list[_StreamHandler], mode: DisplayMode,
                 folder: Path) -> None:
        self._out = out
        self._lines = lines
        self._mode = mode
        self._folder = folder
        self.board: Dashboard | None = None
        """what the live view shows; None without one"""
        self._pane: Pane | None = None
        self._undo: Callable[[], None] = _nothing

    def start(self, done: int, total: int, memory: Callable[[], float | None]) -> None:
        """Open the live view, if there is to be one, at ``done`` of ``total`` steps.

        ``memory`` tells the MiB in use now.
        """
        if self._mode != "auto" or not can_live(self._out):
            return
        from ppocli.display.live_view import Dashboard
        from ppocli.display.pane import Pane, put_above

        self.board = board = Dashboard(self._folder.name, memory)
        board.begin(total, _rows(self._folder / "metrics.jsonl", done))
        narrow = not self._out.encoding.lower().startswith("utf")
        self._pane = Pane(self._out, lambda width, height: board.lines(width, height,
                                                                       ascii_only=narrow))
        for handler in self._lines:
            if handler.console is self._out or _is_terminal(handler.console.file):
                handler.pane = self._pane
        log.addHandler(_Counting(board))
        self._undo = put_above(self._pane)
        self._pane.start()

    def step(self, row: dict[str, Any], total: int) -> None:
        """One line for the figures of a finished step."""
        if self.board is not None:
            self.board.add_row(row)
        for line in row_lines(row, total):
            log.info(line)
        self._changed()

    def phase(self, name: str, *parts: tuple[str, int, int]) -> None:
        """The run enters a phase, or gets further in it: (word, number, of how many)."""
        if self.board is not None:
            self.board.enter(name, *parts)
            self._changed()

    def marked(self, name: str) -> None:
        """A phase of one chunk of the rollout has ended."""
        if self.board is not None:
            self.board.marked(name)
            self._changed()

    def samples(self, samples: list[tuple[str, str, float | None]], step: int) -> None:
        """Show (prompt, response, score) of the step in progress."""
        if self.board is not None:
            from ppocli.display.live_view import Sample

            self.board.show([Sample(*sample) for sample in samples], step)
            self._changed()

    def table(self, table: Table) -> None:
        """Print a Rich table."""
        if self._mode == "quiet":
            return
        if self._pane is not None:
            self._pane.print(table)
            return
        self._out.print(table)
        self._out.file.flush()

    def close(self) -> None:
        """Take the live view away, for what is printed next."""
        if self._pane is not None:
            for handler in self._lines:
                handler.pane = None
            for counting in [one for one in log.handlers if isinstance(one, _Counting)]:
                log.removeHandler(counting)
            self._undo()
            self._pane.stop()
            if self._pane.trouble is not None:
                log.warning("the live view ended early: %r", self._pane.trouble)
            self._pane = self.board = None

    def _changed(self) -> None:
        if self._pane is not None:
            self._pane.changed()


class _Counting(logging.Handler):
    """Tells a live view of warnings."""

    def __init__(self, board: Dashboard) -> None:
        super().__init__(logging.WARNING)
        self._board = board

    def emit(self, record: logging.LogRecord) -> None:
        self._board.warn(printable(record.getMessage()))


def _nothing() -> None:
    pass


def _rows(metrics: Path, done: int) -> Iterator[dict[str, Any]]:
    """What a resumed run has recorded up to the step it goes on from."""
    for row in read_jsonl(metrics):
        step = row.get("step")
        if isinstance(step, int) and step <= done:
            yield row


def can_live(console: Console) -> bool:
    """Whether a live view can be drawn: on a terminal whose cursor moves."""
    # not console.is_terminal, which FORCE_COLOR makes true for a pipe
    return _is_terminal(console.file) and os.environ.get("TERM", "").lower() not in (
        "", "dumb", "unknown")


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # none at all, or a closed one
        return False


def figure(value: object, digits: int, kind: Literal["f", "e"] = "f") -> str:
    """A figure with so many decimals; ``-`` for one that isn't there or isn't finite, and for what
    is no number: a damaged file may hold anything."""
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return "-"
    text = f"{value:.{digits}{kind}}"
    return text.removeprefix("-") if float(text) == 0 else text  # no minus before a rounded zero


def row_lines(row: dict[str, Any], total: int) -> list[str]:
    """What is said of a row of metrics.jsonl."""
    return ([step_line(row, total)] if "reward/mean" in row else []) + (
        [eval_line(row)] if "eval/reward_mean" in row else [])


def step_line(row: dict[str, Any], total: int) -> str:
    """``step 12/100  reward 0.43±0.20  kl 3.1  len 38.0  loss -0.02/0.31  clip 0.11  lr 1.0e-05
    12.4 s (rollout 3.1 reward 0.2 scoring 1.0 optimize 8.1, 980 tokens/s)``"""
    def shown(name: str, digits: int) -> str:
        return figure(row.get(name), digits)

    phases = " ".join(f"{name} {shown(f'time/{name}', 1)}"
                      for name in ("rollout", "reward", "scoring", "optimize")
                      if f"time/{name}" in row)
    return (f"step {row['step']}/{total}  reward {shown('reward/mean', 3)}"
            f"±{shown('reward/std', 3)}  kl {shown('objective/kl', 2)}  "
            f"len {shown('rollout/response_tokens_mean', 1)}  "
            f"loss {shown('loss/policy_avg', 3)}/{shown('loss/value_avg', 3)}  "
            f"clip {shown('policy/clipfrac_avg', 2)}  lr {figure(row.get('lr'), 1, 'e')}  "
            f"{shown('time/step', 1)} s ({phases}, "
            f"{shown('tokens_per_second/rollout', 0)} tokens/s)")


def eval_line(row: dict[str, Any]) -> str:
    """The evaluation of a step in one line."""
    metrics = "".join(f"  {name.removeprefix('eval/metrics/')} {figure(value, 3)}"
                      for name, value in row.items() if name.startswith("eval/metrics/"))
    return (f"eval at step {row['step']}  reward {figure(row.get('eval/reward_mean'), 3)}"
            f"±{figure(row.get('eval/reward_std'), 3)}  kl {figure(row.get('eval/kl_mean'), 2)}  "
            f"len {figure(row.get('eval/response_tokens_mean'), 1)}{metrics}")


def open_console(stream: Any, *, plain_width: int = 110) -> Console:
    """A Rich console of a stream whose reader may leave; ``plain_width`` holds off a terminal."""
    terminal = _is_terminal(stream)
    return Console(file=cast(IO[str], _Outlet(stream)), highlight=False, safe_box=True,
                   width=None if terminal else plain_width)


@contextmanager
def open_display(log_file: Path, mode: DisplayMode = "auto") -> Iterator[Display]:
    """Attach the run's output to the ``ppocli`` logger; ``keep_log`` starts the log file, which
    lies in the run's folder."""
    out = open_console(sys.stdout)
    err = open_console(sys.stderr)
    lines = _StreamHandler(out, prefix=False)
    lines.addFilter(lambda record: record.levelno < logging.WARNING)
    warnings = _StreamHandler(err, prefix=True)
    warnings.setLevel(logging.WARNING)
    # what ends the run is said once, by whoever started it
    warnings.addFilter(lambda record: not getattr(record, "ends_run", False))
    file = _FileHandler(log_file, delay=True, encoding="utf-8")
    file.setFormatter(_FileFormatter(_LINE))
    # a run that fails before it starts leaves no file behind
    buffer = logging.handlers.MemoryHandler(10**6, flushLevel=logging.CRITICAL + 1, target=file,
                                            flushOnClose=False)
    handlers = [warnings, buffer] if mode == "quiet" else [lines, warnings, buffer]
    level, propagate = log.level, log.propagate
    log.setLevel(logging.INFO)
    log.propagate = False
    for handler in handlers:
        log.addHandler(handler)
    display = Display(out, [lines, warnings], mode, log_file.parent)
    try:
        yield display
    finally:
        display.close()
        for handler in handlers:
            log.removeHandler(handler)
        buffer.close()
        file.close()
        log.setLevel(level)
        log.propagate = propagate


@contextmanager
def open_silence() -> Iterator[Display]:
    """The display of ranks other than 0, which say nothing: rank 0 says the same."""
    level, propagate = log.level, log.propagate
    log.setLevel(logging.CRITICAL + 1)
    log.propagate = False
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        try:
            yield Display(open_console(nowhere), [], "quiet", Path(os.devnull))
        finally:
            log.setLevel(level)
            log.propagate = propagate


def keep_log() -> None:
    """Write what was said so far, and everything from now on, to the log file."""
    for handler in list(log.handlers):
        if isinstance(handler, logging.handlers.MemoryHandler) and handler.target is not None:
            handler.flush()
            log.removeHandler(handler)
            log.addHandler(handler.target)


def note_in_log(log_file: Path, text: str) -> None:
    """A warning in a run's log file, from a process that is not the run."""
    file = _FileHandler(log_file, delay=True, encoding="utf-8")
    file.setFormatter(_FileFormatter(_LINE))
    with suppress(OSError):
        file.handle(logging.LogRecord(log.name, logging.WARNING, __file__, 0, text, None, None))
    file.close()


def closing_table(before: dict[str, Any] | None, after: dict[str, Any],
                  samples: list[tuple[dict[str, Any] | None, dict[str, Any]]]) -> Table:
    """Figures and a few samples before and after training.

    Args:
        before, after: figures of the first and last evaluation.
        samples: (before, after) rows of the same prompts.
    """
    table = Table(title="before and after", show_lines=True, title_justify="left")
    for name in ("", "before", "after"):
        table.add_column(name, overflow="fold")
    shown = ["reward_mean", "kl_mean", "response_tokens_mean", "distinct_2"]
    shown += [name for name in after if name.startswith("metrics/")]
    for name in shown:
        old = "" if before is None else figure(before.get(name), 3)
        table.add_row(name.removeprefix("metrics/"), old, figure(after[name], 3))
    for old_row, new_row in samples:
        table.add_row(Text(clean(new_row["prompt"])), _sample(old_row), _sample(new_row))
    return table


def _sample(row: dict[str, Any] | None) -> Text:
    if row is None:
        return Text("")
    score = "none" if row["score"] is None else f"{row['score']:.2f}"
    return Text(f"[{score}] {clean(row['response'])}")
