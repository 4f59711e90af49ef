"""What a person sees of a run: one line a step, warnings, and a closing table.

Lines go to stdout and to ppocli.log, warnings to stderr and to ppocli.log. On a terminal a progress
bar with the remaining time stays below the lines. A display that dies (a closed pipe) is dropped;
the run goes on.
"""

from __future__ import annotations

import logging
import logging.handlers
import math
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

log = logging.getLogger("ppocli")

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


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
    """Writes messages to a Rich console."""

    def __init__(self, console: Console, prefix: bool) -> None:
        super().__init__()
        self.console = console
        self.prefix = prefix

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if self.prefix:
            text = f"{record.levelname.lower()}: {text}"
        self.console.print(Text(text), soft_wrap=True)
        self.console.file.flush()


class _FileHandler(logging.FileHandler):
    """ppocli.log; a disk that refuses it must not end the run or print tracebacks."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Drop the record."""


class Display:
    """The lines, the bar and the closing table of one run."""

    def __init__(self, out: Console, progress: Progress | None) -> None:
        self.out = out
        self.progress = progress
        self._task: Any = None

    def start(self, done: int, total: int) -> None:
        """Show the bar, if there is one, at ``done`` of ``total`` steps."""
        if self.progress is not None:
            self._task = self.progress.add_task("training", total=total, completed=done)

    def step(self, row: dict[str, Any], total: int) -> None:
        """One line for the figures of a finished step."""
        if "reward/mean" in row:
            log.info(step_line(row, total))
        if "eval/reward_mean" in row:
            log.info(eval_line(row))
        if self.progress is not None and self._task is not None:
            self.progress.update(self._task, completed=row["step"])

    def table(self, table: Table) -> None:
        """Print a Rich table."""
        self.out.print(table)
        self.out.file.flush()


def figure(value: float | None, digits: int) -> str:
    """A figure with so many decimals; ``-`` for one that isn't there or isn't finite."""
    if value is None or not math.isfinite(value):
        return "-"
    text = f"{value:.{digits}f}"
    return text.removeprefix("-") if float(text) == 0 else text  # no minus before a rounded zero


def step_line(row: dict[str, Any], total: int) -> str:
    """``step 12/100  reward 0.43±0.20  kl 3.1  len 38.0  loss -0.02/0.31  clip 0.11  lr 1.0e-05
    12.4 s (rollout 3.1 reward 0.2 scoring 1.0 optimize 8.1, 980 tokens/s)``"""
    phases = " ".join(f"{name} {row[f'time/{name}']:.1f}"
                      for name in ("rollout", "reward", "scoring", "optimize")
                      if f"time/{name}" in row)
    return (f"step {row['step']}/{total}  reward {figure(row['reward/mean'], 3)}"
            f"±{figure(row['reward/std'], 3)}  kl {figure(row['objective/kl'], 2)}  "
            f"len {figure(row['rollout/response_tokens_mean'], 1)}  "
            f"loss {figure(row['loss/policy_avg'], 3)}/{figure(row['loss/value_avg'], 3)}  "
            f"clip {figure(row['policy/clipfrac_avg'], 2)}  lr {row['lr']:.1e}  "
            f"{row['time/step']:.1f} s ({phases}, "
            f"{row['tokens_per_second/rollout']:.0f} tokens/s)")


def eval_line(row: dict[str, Any]) -> str:
    """The evaluation of a step in one line."""
    metrics = "".join(f"  {name.removeprefix('eval/metrics/')} {figure(value, 3)}"
                      for name, value in row.items() if name.startswith("eval/metrics/"))
    return (f"eval at step {row['step']}  reward {figure(row['eval/reward_mean'], 3)}"
            f"±{figure(row['eval/reward_std'], 3)}  kl {figure(row['eval/kl_mean'], 2)}  "
            f"len {figure(row['eval/response_tokens_mean'], 1)}{metrics}")


def _console(stream: Any, *, plain_width: int = 110) -> Console:
    terminal = bool(getattr(stream, "isatty", lambda: False)())
    return Console(file=cast(IO[str], _Outlet(stream)), highlight=False, safe_box=True,
                   width=None if terminal else plain_width)


@contextmanager
def open_display(log_file: Path) -> Iterator[Display]:
    """Attach the run's output to the ``ppocli`` logger; ``keep_log`` starts the log file."""
    out = _console(sys.stdout)
    err = _console(sys.stderr)
    lines = _StreamHandler(out, prefix=False)
    lines.addFilter(lambda record: record.levelno < logging.WARNING)
    warnings = _StreamHandler(err, prefix=True)
    warnings.setLevel(logging.WARNING)
    # what ends the run is said once, by whoever started it
    warnings.addFilter(lambda record: not getattr(record, "ends_run", False))
    file = _FileHandler(log_file, delay=True, encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    # a run that fails before it starts leaves no file behind
    buffer = logging.handlers.MemoryHandler(10**6, flushLevel=logging.CRITICAL + 1, target=file,
                                            flushOnClose=False)
    handlers = [lines, warnings, buffer]
    level, propagate = log.level, log.propagate
    log.setLevel(logging.INFO)
    log.propagate = False
    for handler in handlers:
        log.addHandler(handler)
    progress = _progress(out) if out.is_terminal else None
    try:
        if progress is not None:
            progress.start()
        yield Display(out, progress)
    finally:
        if progress is not None:
            progress.stop()
        for handler in handlers:
            log.removeHandler(handler)
        buffer.close()
        file.close()
        log.setLevel(level)
        log.propagate = propagate


def keep_log() -> None:
    """Write what was said so far, and everything from now on, to the log file."""
    for handler in list(log.handlers):
        if isinstance(handler, logging.handlers.MemoryHandler) and handler.target is not None:
            handler.flush()
            log.removeHandler(handler)
            log.addHandler(handler.target)


def _progress(console: Console) -> Progress:
    return Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
                    TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
                    console=console, transient=True)


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
