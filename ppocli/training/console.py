"""What a person sees of a run: one line per step, and warnings.

    step 12/100  reward 0.430±0.200  kl 3.10  len 38.0  loss -0.020/0.310  clip 0.11  lr 1.0e-05
    12.4 s (rollout 3.1 reward 0.2 scoring 1.0 optimize 8.1, 980 tokens/s)

Lines go to stdout and to ppocli.log, warnings to stderr and to ppocli.log. A display that dies (a
closed pipe) is dropped; the run goes on. :mod:`ppocli.publish.live_view` adds a live view below the
lines, and a closing table.
"""

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, Literal, Self

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ppocli.config.secrets import safe_text
from ppocli.config.text import figure

if TYPE_CHECKING:
    from ppocli.publish.live_view import Dashboard

log = logging.getLogger("ppocli")

_NOT_ITS_OWN = ("time/", "cpu/", "tokens_per_second/", "memory/", "eval/")
"""prefixes of figures that are not a task's own"""
_PLAIN_WIDTH = 110
"""columns without a terminal"""

DisplayMode = Literal["auto", "lines", "quiet"]
"""a live view where standard output is a terminal; lines only; warnings only"""


class LogFile(logging.FileHandler):
    """ppocli.log, which reports quote and people publish. A full disk must not end the run or print
    tracebacks."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, delay=True, encoding="utf-8")
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))

    def format(self, record: logging.LogRecord) -> str:
        return safe_text(super().format(record))

    def handleError(self, record: logging.LogRecord) -> None:
        """Drop the record."""


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
        """Whether a live view can be drawn: on a terminal with Unicode whose cursor moves."""
        # FORCE_COLOR makes is_terminal true for a pipe
        return is_terminal(self.file) and self.is_terminal and not self.is_dumb_terminal \
            and bool(os.environ.get("TERM")) and self.encoding.startswith("utf")


def is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal."""
    with suppress(AttributeError, ValueError):  # none at all, or a closed one
        return bool(stream.isatty())
    return False


class Display(logging.Handler):
    """The lines of one run; prints what is logged.

    Args:
        mode: what is shown.
        out, err: streams for lines and for warnings.
    """

    board: "Dashboard | None" = None
    """contents of the live view, where one is drawn: training updates its phases and samples"""

    def __init__(self, mode: DisplayMode, out: Any, err: Any) -> None:
        super().__init__()
        self._mode = mode
        self._out, self._err = Outlet(out), Outlet(err)

    def start(self, done: int, total: int) -> None:
        """The run begins, or goes on, at ``done`` of ``total`` steps."""

    def listen(self) -> None:
        """Make this display receive log messages when several runs are open in this process."""
        _listening[1:] = sorted(_listening[1:], key=lambda listener: self in listener[2])
        _listen()

    def emit(self, record: logging.LogRecord) -> None:
        """Print a log message, unless it is for the file only, or the run's caller prints it."""
        if getattr(record, "for_file", False) or getattr(record, "ends_run", False):
            return
        text = safe_text(record.getMessage())
        if record.levelno >= logging.WARNING:
            self._warn(f"{record.levelname.lower()}: {text}")
        elif self._mode != "quiet":
            self._out.print(Text(text), soft_wrap=True)

    def _warn(self, text: str) -> None:
        """Print to standard error; above a live view, where it would be drawn over that."""
        above = self.board is not None and is_terminal(self._err.file)
        (self._out if above else self._err).print(Text(text), soft_wrap=True)

    def step(self, row: dict[str, Any], total: int) -> None:
        """Show and log the figures of a finished step."""
        if self.board is not None:
            self.board.add_row(row)
        for line in row_lines(row, total):
            log.info(line)

    def table(self, table: Table) -> None:
        """Print a Rich table."""
        if self._mode != "quiet":
            self._out.print(table)


@contextmanager
def open_silence() -> Iterator[Display]:
    """The display of ranks other than 0, which print nothing: rank 0 prints the same."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere, logging_to(logging.CRITICAL + 1):
        yield Display("quiet", nowhere, nowhere)


_listening: list[tuple[int, bool, tuple[logging.Handler, ...]]] = []
"""level, propagation and handlers of the ``ppocli`` logger: the original ones, then those of each
listener since; the last ones apply"""


@contextmanager
def logging_to(level: int, *handlers: logging.Handler) -> Iterator[None]:
    """Send messages of the ``ppocli`` logger from this level on to these handlers in place of
    earlier listeners'. Runs that are open at once may end in any order."""
    if not _listening:
        _listening.append((log.level, log.propagate, tuple(log.handlers)))
    listener = (level, False, (*_listening[0][2], *handlers))
    _listening.append(listener)
    _listen()
    try:
        yield
    finally:
        _listening.remove(listener)
        _listen()
        if len(_listening) == 1:
            _listening.clear()


def _listen() -> None:
    level, log.propagate, handlers = _listening[-1]
    log.setLevel(level)
    log.handlers[:] = handlers


def row_lines(row: dict[str, Any], total: int) -> list[str]:
    """A row of metrics.jsonl as lines: the step's, and the evaluation's if there was one."""
    def shown(name: str, digits: int) -> str:
        return figure(row.get(name), digits)

    if "reward/mean" not in row:
        return [*_lines_of_task(row, total), *_lines_of_evaluation(row)]
    phases = [f"{name} {shown(f'time/{name}', 1)}"
              for name in ("rollout", "reward", "scoring", "optimize") if f"time/{name}" in row]
    line = (f"step {row['step']}/{total}  reward {shown('reward/mean', 3)}±{shown('reward/std', 3)}"
            f"  kl {shown('objective/kl', 2)}  len {shown('rollout/response_tokens_mean', 1)}"
            f"  loss {shown('loss/policy_avg', 3)}/{shown('loss/value_avg', 3)}"
            f"  clip {shown('policy/clipfrac_avg', 2)}  lr {figure(row.get('lr'), 1, 'e')}"
            f"  {shown('time/step', 1)} s ({' '.join(phases)}, "
            f"{shown('tokens_per_second/rollout', 0)} tokens/s)")
    return [line, *_lines_of_evaluation(row)] if "eval/reward_mean" in row else [line]


def _lines_of_task(row: dict[str, Any], total: int) -> Iterator[str]:
    """Of a step of a task without rewards."""
    if "lr" in row or any(name.startswith("loss/") for name in row):
        names = [name for name in row if "/" in name and not name.startswith(_NOT_ITS_OWN)]
        named = _named(row, sorted(names, key=lambda name: name != "loss/total"))
        yield (f"step {row['step']}/{total}  {named}  lr {figure(row.get('lr'), 1, 'e')}  "
               f"{figure(row.get('time/step'), 1)} s "
               f"({figure(row.get('tokens_per_second/optimize'), 0)} tokens/s)")


def _lines_of_evaluation(row: dict[str, Any]) -> Iterator[str]:
    """Of an evaluation, where there was one."""
    def shown(name: str, digits: int) -> str:
        return figure(row.get(f"eval/{name}"), digits)

    evaluated = [name for name in row if name.startswith("eval/")]
    if "eval/reward_mean" in row:
        metrics = "".join(f"  {name.removeprefix('eval/metrics/')} {figure(row[name], 3)}"
                          for name in evaluated if name.startswith("eval/metrics/"))
        yield (f"eval at step {row['step']}  reward {shown('reward_mean', 3)}±"
               f"{shown('reward_std', 3)}  kl {shown('kl_mean', 2)}"
               f"  len {shown('response_tokens_mean', 1)}{metrics}")
    elif evaluated:
        yield f"eval at step {row['step']}  {_named(row, evaluated)}"


def _named(row: dict[str, Any], names: Iterable[str]) -> str:
    """The first six figures of those names: ``loss 0.693  accuracy 0.812±0.020 of 64``."""
    return "  ".join(f"{'loss' if name == 'loss/total' else name.rpartition('/')[2]} "
                     f"{_count_or(row[name])}{error_of(row, name)}"
                     for name in without_errors(names)[:6])


def without_errors(names: Iterable[str]) -> list[str]:
    """Names without those of standard errors and pair counts, which are shown next to their
    figures."""
    return [name for name in names if not name.endswith(("_stderr", "_pairs"))]


def error_of(row: dict[str, Any], name: str) -> str:
    """The standard error and the number of pairs of a figure, where a row has them."""
    error, pairs = row.get(f"{name}_stderr"), row.get(f"{name}_pairs")
    return ("" if error is None else f"±{figure(error, 3)}") + (
        "" if pairs is None else f" of {figure(pairs, 0)}")


def _count_or(value: Any) -> str:
    """A count without decimals, any other figure with three."""
    return figure(value, 0 if isinstance(value, float) and value.is_integer() and value > 1 else 3)
