"""What a person sees of a run: one line per step, warnings, and a closing table.

Lines go to stdout and to ppocli.log, warnings to stderr and to ppocli.log. On a terminal a live
view (:mod:`ppocli.publish.live_view`) stays below the lines. A display that dies (a closed pipe) is
dropped; the run goes on.
"""

import logging
import logging.handlers
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from ppocli.config.secrets import safe_text
from ppocli.config.text import clean, figure
from ppocli.distributed.standard_output import result_stream
from ppocli.publish import dashboard, live_view
from ppocli.runs import run_folder, run_logs
from ppocli.runs.episode import transcript_turns

log = logging.getLogger("ppocli")

_NOT_ITS_OWN = ("time/", "cpu/", "tokens_per_second/", "memory/", "eval/")
"""prefixes of figures that are not a task's own"""

DisplayMode = Literal["auto", "lines", "quiet"]
"""a live view where standard output is a terminal; lines only; warnings only"""


class _LogFile(logging.FileHandler):
    """ppocli.log, which reports quote and people publish. A full disk must not end the run or print
    tracebacks."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, delay=True, encoding="utf-8")
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))

    def format(self, record: logging.LogRecord) -> str:
        return safe_text(super().format(record))

    def handleError(self, record: logging.LogRecord) -> None:
        """Drop the record."""


class Display(logging.Handler):
    """The lines, the live view and the closing table of one run; prints what is logged.

    Args:
        folder: the run's.
        mode: what is shown.
        out, err: streams for lines and for warnings.
        started_by: a process that has started this one in a process group of its own.
    """

    def __init__(self, folder: Path, mode: DisplayMode, out: Any, err: Any,
                 started_by: int | None = None) -> None:
        super().__init__()
        self.board = dashboard.Dashboard(folder.name)
        """the contents of the live view; training updates its phases and samples"""
        self._metrics = run_folder.RunFolder(folder).metrics
        self._mode = mode
        self._out, self._err = live_view.Outlet(out), live_view.Outlet(err)
        self._started_by = started_by
        self._view: live_view.LiveView | None = None

    def start(self, done: int, total: int, memory: Callable[[], float | None]) -> None:
        """Open the live view, if one is to be shown, at ``done`` of ``total`` steps.

        ``memory`` returns the MiB in use now.
        """
        if self._mode != "auto" or not self._out.can_live:
            return
        self.board.memory = memory
        # the rows of a resumed run up to the step it resumes from
        self.board.begin(total, (row for row in run_logs.read_metrics(self._metrics)
                                 if row["step"] <= done))
        self._view = live_view.LiveView(self._out, self.board.lines, self._started_by)
        self._view.start()

    def listen(self) -> None:
        """Make this display receive log messages when several runs are open in this process."""
        _listening.sort(key=lambda one: self in one.handlers)
        _listen()

    def emit(self, record: logging.LogRecord) -> None:
        """Print a log message, unless it is for the file only."""
        if getattr(record, "for_file", False):
            return
        text = safe_text(record.getMessage())
        if record.levelno >= logging.WARNING:
            self.board.warnings.append(text)
            # the caller that started the run prints what ended it, once
            if not getattr(record, "ends_run", False):
                above = self._view is not None and live_view.is_terminal(self._err.file)
                (self._out if above else self._err).print(
                    Text(f"{record.levelname.lower()}: {text}"), soft_wrap=True)
        elif self._mode != "quiet":
            self._out.print(Text(getattr(record, "fitted", None) or text), soft_wrap=True)

    def step(self, row: dict[str, Any], total: int) -> None:
        """One line for the figures of a finished step."""
        self.board.add_row(row)
        width_known = live_view.is_terminal(self._out.file) and not self._out.is_dumb_terminal
        width = self._out.width if width_known else None
        for line, fitted in zip(row_lines(row, total), row_lines(row, total, width), strict=True):
            log.info(line, extra={"fitted": fitted})

    def table(self, table: Table) -> None:
        """Print a Rich table."""
        if self._mode != "quiet":
            self._out.print(table)

    def close(self) -> None:
        """Remove the live view before further output."""
        super().close()
        if (view := self._view) is not None:
            view.stop()
            self._view = None
            if view.trouble is not None:
                log.warning("the live view ended early: %r", view.trouble)


@contextmanager
def open_display(log_file: Path, mode: DisplayMode = "auto", started_by: int | None = None
                 ) -> Iterator[Display]:
    """Attach the run's output to the ``ppocli`` logger; ``keep_log`` starts the log file, which
    lies in the run's folder. ``started_by``: see :class:`Display`."""
    display = Display(log_file.parent, mode, result_stream(), sys.stderr, started_by)
    file = _LogFile(log_file)
    # a run that fails before it starts leaves no file behind
    buffer = logging.handlers.MemoryHandler(10**6, flushLevel=logging.CRITICAL + 1, target=file,
                                            flushOnClose=False)
    with closing(file), closing(buffer), logging_to(logging.INFO, display, buffer), \
            closing(display):
        yield display


@contextmanager
def open_silence() -> Iterator[Display]:
    """The display of ranks other than 0, which print nothing: rank 0 prints the same."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere, logging_to(logging.CRITICAL + 1):
        yield Display(Path(os.devnull), "quiet", nowhere, nowhere)


@dataclass(frozen=True, slots=True, eq=False)
class _Listeners:
    """Settings of the ``ppocli`` logger for one listener."""

    level: int
    propagate: bool
    handlers: tuple[logging.Handler, ...] = ()


_listening: list[_Listeners] = []
"""the logger's original settings, then those of each listener since; the last ones apply"""


def logging_to(level: int, *handlers: logging.Handler) -> AbstractContextManager[None]:
    """Send messages of the ``ppocli`` logger from this level on to these handlers in place of
    earlier ones. Runs that are open at once may end in any order."""
    return _listening_as(_Listeners(level, False, handlers))


def logging_as_found() -> AbstractContextManager[None]:
    """Restore the original settings of the ``ppocli`` logger for the block."""
    first = _listening[0] if _listening else _Listeners(log.level, log.propagate)
    return _listening_as(replace(first))


@contextmanager
def _listening_as(listeners: _Listeners) -> Iterator[None]:
    if not _listening:
        _listening.append(_Listeners(log.level, log.propagate))
    _listening.append(listeners)
    _listen()
    try:
        yield
    finally:
        for handler in listeners.handlers:
            log.removeHandler(handler)
        _listening.remove(listeners)
        _listen()
        if len(_listening) == 1:
            _listening.clear()


def _listen() -> None:
    *others, last = _listening
    for other in others:
        for handler in other.handlers:
            log.removeHandler(handler)
    log.setLevel(last.level)
    log.propagate = last.propagate
    for handler in last.handlers:
        log.addHandler(handler)


def keep_log() -> None:
    """Write messages so far, and all further ones, to the log file."""
    for handler in log.handlers:
        if isinstance(handler, logging.handlers.MemoryHandler):
            handler.flush()
            handler.capacity = 1  # every message from now on


Parts = list[tuple[str, int]]
"""of a line: a text, and the lowest level of detail that shows it"""
DETAIL = 4


def row_lines(row: dict[str, Any], total: int, width: int | None = None) -> list[str]:
    """A row of metrics.jsonl as lines: PPO's figures, or those of another task. With a ``width``,
    only as much as fits, and at least the five main figures."""
    evaluated = {name: value for name, value in row.items() if name.startswith("eval/")}
    lines = []
    if "reward/mean" in row:
        lines.append(_step_parts(row, total))
    elif "lr" in row or any(name.startswith("loss/") for name in row):
        task_figures = [name for name in row if "/" in name and not name.startswith(_NOT_ITS_OWN)]
        lines.append([(f"step {row['step']}/{total}", 1),
                      *_named(row, sorted(task_figures, key=lambda name: name != "loss/total")),
                      (f"lr {figure(row.get('lr'), 1, 'e')}", 2),
                      (f"{figure(row.get('time/step'), 1)} s", 1),
                      (f"({figure(row.get('tokens_per_second/optimize'), 0)} tokens/s)", 3)])
    if "eval/reward_mean" in row:
        lines.append(_eval_parts(row))
    elif evaluated:
        lines.append([(f"eval at step {row['step']}", 1), *_named(evaluated, list(evaluated))])
    return [_fitting(parts, width) for parts in lines]


def _fitting(parts: Parts, width: int | None) -> str:
    """The line with as much detail as fits into ``width``; neighbouring parentheses are merged."""
    for detail in range(DETAIL, 0, -1):
        line = "  ".join(text for text, least in parts if least <= detail)
        line = line.replace("s  (", "s (").replace(")  (", ", ")
        if width is None or cell_len(line) <= width:
            break
    return line


def _named(row: dict[str, Any], names: list[str]) -> Parts:
    """The first figures of those names, ``loss 0.693``, ``margin 1.200``; the first three matter.
    """
    return [(f"{'loss' if name == 'loss/total' else name.rpartition('/')[2]} "
             f"{_count_or(row[name])}{_error(row, name)}", 1 if place < 3 else 2)
            for place, name in enumerate(_without_errors(names)[:6])]


def _without_errors(names: Iterable[str]) -> list[str]:
    """Names without those of standard errors and pair counts, which are shown next to their
    figures."""
    names = list(names)
    return [name for name in names if not name.endswith("_stderr")
            and not (name.endswith("_pairs") and name.removesuffix("_pairs") in names)]


def _error(row: dict[str, Any], name: str) -> str:
    error, pairs = row.get(f"{name}_stderr"), row.get(f"{name}_pairs")
    return ("" if error is None else f"±{figure(error, 3)}") + (
        "" if pairs is None else f" of {figure(pairs, 0)}")


def _count_or(value: Any) -> str:
    """A count without decimals, any other figure with three."""
    return figure(value, 0 if isinstance(value, float) and value.is_integer() and value > 1 else 3)


def _step_parts(row: dict[str, Any], total: int) -> Parts:
    """``step 12/100  reward 0.43±0.20  kl 3.1  len 38.0  loss -0.02/0.31  clip 0.11  lr 1.0e-05
    12.4 s (rollout 3.1 reward 0.2 scoring 1.0 optimize 8.1, 980 tokens/s)``"""
    def shown(name: str, digits: int) -> str:
        return figure(row.get(name), digits)

    phases = " ".join(f"{name} {shown(f'time/{name}', 1)}"
                      for name in ("rollout", "reward", "scoring", "optimize")
                      if f"time/{name}" in row)
    return [(f"step {row['step']}/{total}", 1),
            (f"reward {shown('reward/mean', 3)}±{shown('reward/std', 3)}", 1),
            (f"kl {shown('objective/kl', 2)}", 1),
            (f"len {shown('rollout/response_tokens_mean', 1)}", 1),
            (f"loss {shown('loss/policy_avg', 3)}/{shown('loss/value_avg', 3)}", 2),
            (f"clip {shown('policy/clipfrac_avg', 2)}", 2),
            (f"lr {figure(row.get('lr'), 1, 'e')}", 2), (f"{shown('time/step', 1)} s", 1),
            (f"({phases})", 3), (f"({shown('tokens_per_second/rollout', 0)} tokens/s)", DETAIL)]


def _eval_parts(row: dict[str, Any]) -> Parts:
    """The evaluation of a step."""
    def shown(name: str, digits: int = 3) -> str:
        return figure(row.get(name), digits)

    metrics = [(f"{name.removeprefix('eval/metrics/')} {shown(name)}", 2)
               for name in row if name.startswith("eval/metrics/")]
    return [(f"eval at step {row['step']}", 1),
            (f"reward {shown('eval/reward_mean')}±{shown('eval/reward_std')}", 1),
            (f"kl {shown('eval/kl_mean', 2)}", 1),
            (f"len {shown('eval/response_tokens_mean', 1)}", 1), *metrics]


def closing_table(before: dict[str, Any] | None, after: dict[str, Any],
                  samples: list[tuple[dict[str, Any] | None, dict[str, Any]]]) -> Table:
    """Figures and a few samples before and after training.

    Args:
        before, after: figures of the first and last evaluation.
        samples: (before, after) rows of the same prompts.
    """
    table = Table(title="before and after", show_lines=True, title_justify="left")
    sides = ("before", "after") if before is not None else ("after",)
    for name in ("", *sides):
        table.add_column(name, overflow="fold")
    ours = ("reward_mean", "kl_mean", "response_tokens_mean", "distinct_2", "turns_mean",
            "done_share")
    shown = [name for name in after if name in ours or name.startswith("metrics/")]
    for name in shown if "reward_mean" in after else _without_errors(after):
        figures = ["" if row is None else figure(row.get(name), 3) + _error(row, name)
                   for row in (before, after)]
        table.add_row(clean(name.removeprefix("metrics/")), *figures[-len(sides):])
    scored = "reward_mean" in after
    samples = [pair for pair in samples  # without rows of another task
               if {"prompt", "response", "score"} <= pair[1].keys()]
    for old_row, new_row in samples:
        responses = [_sample(old_row, new_row, scored), _sample(new_row, old_row, scored)]
        table.add_row(Text(clean(new_row["prompt"])), *responses[-len(sides):])
    return table


def _sample(row: dict[str, Any] | None, other: dict[str, Any] | None, scored: bool) -> Text:
    """A response after its score, which is green if it is the higher of the two."""
    if row is None or not scored:
        return Text("" if row is None else clean(row["response"]))
    score, against = row["score"], None if other is None else other["score"]
    style = "" if score is None or against is None or score == against else (
        "green" if score > against else "red")
    return Text.assemble((f"[{'none' if score is None else f'{score:.2f}'}]", style), " ",
                         dashboard.said_by(transcript_turns(row) or str(row["response"])))
