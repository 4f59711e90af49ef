"""Output of commands, how they end (messages, exit codes, stops at safe points), and terminals that
have closed."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn

from ppocli.config.text import clean, printable, user_line
from ppocli.distributed.ranks import StopFlag, StopRequested
from ppocli.distributed.standard_output import put, reserve_stdout, result_stream
from ppocli.distributed.stop import catch_signals
from ppocli.errors import ConfigError, DiskError, PpocliError, StoppedError

if TYPE_CHECKING:
    from ppocli.training.console import DisplayMode

BROKEN_PIPE = 128 + signal.SIGPIPE


class _Manner:
    """Settings of this process from the options before the command, and ``--no-progress``."""

    quiet = False
    plain = False
    alone = False
    """whether the process runs nothing but this command"""


def set_manner(*, quiet: bool = False, verbose: bool = False, no_color: bool = False,
               plain: bool = False) -> None:
    """Set how much this process, and those it starts, print.

    Args:
        quiet: results, warnings and errors only.
        verbose: errors with their tracebacks.
        no_color: no colours, whatever the terminal can show.
        plain: lines in place of a live view.
    """
    _Manner.quiet, _Manner.plain = quiet or _Manner.quiet, plain or _Manner.plain
    if verbose:
        os.environ["PPOCLI_DEBUG"] = "1"
    if no_color:
        os.environ["NO_COLOR"] = "1"


def begin_command() -> None:
    """Reserve standard output for the command's results, if the process runs nothing else."""
    if _Manner.alone:
        reserve_stdout()


def display_mode() -> DisplayMode:
    """The display mode of a run that is started now."""
    return "quiet" if _Manner.quiet else "lines" if _Manner.plain else "auto"


def say(text: str) -> None:
    """Print a note for the user on standard error, unless ``--quiet`` is set."""
    if not _Manner.quiet:
        complain(text)


def complain(text: str) -> None:
    """Print a warning or an error on standard error; a closed terminal is no reason to stop."""
    from ppocli.config.secrets import safe_text

    with suppress(OSError, ValueError, AttributeError):
        print(safe_text(text), file=sys.stderr, flush=True)


def has_colours() -> bool:
    """Whether output may have colours."""
    return result_stream().isatty() and not os.environ.get("NO_COLOR")


def print_json(value: Any, indent: int | None = 2) -> None:
    """Print a value as JSON on standard output; NaN and infinities, which JSON lacks, become
    null."""
    import json

    from ppocli.runs.run_logs import finite_or_null

    put(json.dumps(finite_or_null(value), indent=indent))


def show_text(text: str, end: str = "\n") -> None:
    """Print a text that may contain foreign names, such as a folder's, a metric's or a model's.
    Control characters, which may be terminal escapes, are spelled out, also for a pipe, which may
    end on a terminal. Newlines and tabs stay."""
    put(printable(text), end=end)


def aligned(rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset()) -> list[str]:
    """Rows as lines with aligned columns; control characters are removed from texts.

    Args:
        rows: all of the same length; the first is usually the heading.
        right: columns that are aligned to the right, for numbers.
    """
    cells = [[clean(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    sides = [str.rjust if number in right else str.ljust for number in range(len(widths))]
    return ["  ".join(side(cell, width) for side, cell, width in
                      zip(sides, row, widths, strict=True)).rstrip() for row in cells]


def print_table(rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset(), *,
                fit: bool = True) -> None:
    """Print :func:`aligned` rows, columns without a single entry left out.

    Args:
        fit: cut lines to the width of the terminal, if there is one.
    """
    kept = [number for number, column in enumerate(zip(*rows, strict=True))
            if not rows[1:] or any(cell not in ("", "-") for cell in column[1:])]
    width = shutil.get_terminal_size().columns if fit and result_stream().isatty() else None
    for line in aligned([[row[number] for number in kept] for row in rows],
                        frozenset(kept.index(number) for number in right if number in kept)):
        put(line if width is None or len(line) <= width else line[:width - 1] + "…")


def shown_figure(value: float | None, digits: int = 4) -> str:
    """A figure with so many significant digits, ``-`` for none; mere rounding errors become 0."""
    if value is None:
        return "-"
    return "0" if abs(value) < 5e-7 else f"{value:.{digits}g}"


def survive_any_terminal() -> None:
    """Make the standard streams usable: closed ones are replaced, and characters that an encoding
    lacks are escaped."""
    _Manner.alone = True
    if sys.stdin is None:
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_RDONLY), encoding="utf-8")
    for name in ("stdout", "stderr"):
        if (stream := getattr(sys, name)) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
        elif hasattr(stream, "reconfigure"):
            with suppress(ValueError, OSError):
                stream.reconfigure(errors="backslashreplace")


def code_of(run: Callable[[], object]) -> int:
    """Run a command, print what went wrong, and return its exit code.

    A ``PpocliError`` is one short message (with its traceback under ``PPOCLI_DEBUG=1``), Ctrl-C is
    130, a reader that has left 141; any other exception keeps its traceback and is 1.
    """
    try:
        run()
        result_stream().flush()
    except PpocliError as error:
        if os.environ.get("PPOCLI_DEBUG", "") not in ("", "0"):
            complain(traceback.format_exc().rstrip())
        label = "Stopped" if isinstance(error, StoppedError) else "Error"
        complain(f"{label}: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        complain("Interrupted")
        return 128 + signal.SIGINT
    except BrokenPipeError:
        return BROKEN_PIPE
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            complain(f"Error: the disk is full: {error}")
            return DiskError.exit_code
        complain(traceback.format_exc().rstrip())
        origin = user_line(error)
        complain(("This is" if origin is None else "It came through code that ppocli was given: "
                  f"{origin}. If that is right, this is")
                 + " a bug in ppocli; please report it with the lines above.")
        return 1
    return 0


def leave(code: int) -> NoReturn:
    """Flush the streams and exit; a closed pipe must not cause further messages."""
    for stream in {id(each): each for each in (result_stream(), sys.stdout, sys.stderr)}.values():
        try:
            stream.flush()
        except (OSError, ValueError) as error:
            if isinstance(error, BrokenPipeError) and code == 0:
                code = BROKEN_PIPE
            # Python would try to write the buffer again at shutdown, and print an error
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(code)


_WORD = re.compile(r"[+~]{0,2}[A-Za-z_][\w.@/]*=")


@contextmanager
def working(fix: str | None = None) -> Iterator[StopFlag]:
    """A flag that Ctrl-C and SIGTERM set. The engine's notes go to standard error; transformers'
    progress bars and reports are silenced.

    Args:
        fix: how to go on after a stop, for the message.

    Raises:
        StoppedError: a signal asked to stop and the work reached a safe point.
    """
    import logging

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                complain(f"{record.levelname.lower()}: {record.getMessage()}")
            else:
                say(record.getMessage())

    from ppocli.config.import_guard import join_working_directory
    from ppocli.runs.model_files import quiet_transformers
    from ppocli.training.console import logging_to

    quiet_transformers()
    join_working_directory()
    try:
        with logging_to(logging.INFO, Notes()), catch_signals() as stop:
            yield stop
    except StopRequested as stopped:
        raise StoppedError(f"stopped by {stopped}", signal_number=stopped.signal_number,
                           fix=fix) from None


def split_words(run: str | None, words: Sequence[str] | None) -> tuple[str | None, list[str]]:
    """RUN and the words after it; if the first word is KEY=VALUE, RUN was left out.

    Raises:
        ConfigError: something among the words is neither.
    """
    from ppocli.runs.target import RUNS, is_run

    rest = list(words or [])
    if run and _WORD.match(run) and not (os.path.exists(run) or is_run(RUNS / run)):
        rest, run = [run, *rest], None
    if wrong := [word for word in rest if not _WORD.match(word)]:
        raise ConfigError(f"{wrong[0]!r} is neither an option nor a setting KEY=VALUE.",
                          where="command line", fix="ppocli COMMAND --help lists the options")
    return run, rest
