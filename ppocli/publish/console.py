"""What a person sees of a run: one line per step, warnings, and a closing table.

Lines go to stdout and to ppocli.log, warnings to stderr and to ppocli.log. On a terminal a live
view (:mod:`ppocli.publish.live_view`) stays below the lines. A display that dies (a closed pipe) is
dropped; the run goes on.
"""

import logging
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from ppocli.config.secrets import safe_text
from ppocli.config.text import clean, figure
from ppocli.distributed.standard_output import result_stream
from ppocli.publish import live_view
from ppocli.runs import run_folder, run_logs
from ppocli.runs.episode import transcript_turns

log = logging.getLogger("ppocli")

_NOT_ITS_OWN = ("time/", "cpu/", "tokens_per_second/", "memory/", "eval/")
"""prefixes of figures that are not a task's own"""
_MAIN = ("reward_mean", "kl_mean", "response_tokens_mean", "distinct_2", "turns_mean", "done_share")
"""figures of PPO's evaluations in the closing table"""

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
        self.board = live_view.Dashboard(folder.name)
        """the contents of the live view; training updates its phases and samples"""
        self._metrics = run_folder.RunFolder(folder).metrics
        self._mode = mode
        self._out, self._err = live_view.Outlet(out), live_view.Outlet(err)
        self._started_by = started_by
        self._view: live_view.LiveView | None = None

    def start(self, done: int, total: int) -> None:
        """Open the live view, if one is to be shown, at ``done`` of ``total`` steps."""
        if self._mode != "auto" or not self._out.can_live:
            return
        # the rows of a resumed run up to the step it resumes from
        self.board.begin(total, (row for row in run_logs.read_metrics(self._metrics)
                                 if row["step"] <= done))
        self._view = live_view.LiveView(self._out, self.board, self._started_by)
        self._view.start()

    def listen(self) -> None:
        """Make this display receive log messages when several runs are open in this process."""
        _listening[1:] = sorted(_listening[1:], key=lambda listener: self in listener[2])
        _listen()

    def emit(self, record: logging.LogRecord) -> None:
        """Print a log message, unless it is for the file only, or is printed once by the caller
        that started the run."""
        if getattr(record, "for_file", False) or getattr(record, "ends_run", False):
            return
        text = safe_text(record.getMessage())
        if record.levelno >= logging.WARNING:
            above = self._view is not None and live_view.is_terminal(self._err.file)
            (self._out if above else self._err).print(
                Text(f"{record.levelname.lower()}: {text}"), soft_wrap=True)
        elif self._mode != "quiet":
            self._out.print(Text(text), soft_wrap=True)

    def step(self, row: dict[str, Any], total: int) -> None:
        """Show and log the figures of a finished step."""
        self.board.add_row(row)
        for line in row_lines(row, total):
            log.info(line)

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
    """Attach the run's output to the ``ppocli`` logger; the log file lies in the run's folder.
    ``started_by``: see :class:`Display`."""
    display = Display(log_file.parent, mode, result_stream(), sys.stderr, started_by)
    with closing(_LogFile(log_file)) as file, logging_to(logging.INFO, display, file), \
            closing(display):
        yield display


@contextmanager
def open_silence() -> Iterator[Display]:
    """The display of ranks other than 0, which print nothing: rank 0 prints the same."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere, logging_to(logging.CRITICAL + 1):
        yield Display(Path(os.devnull), "quiet", nowhere, nowhere)


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
    """A row of metrics.jsonl as lines: the step's, with PPO's figures or those of another task, and
    the evaluation's::

        step 12/100  reward 0.430±0.200  kl 3.10  len 38.0  loss -0.020/0.310  clip 0.11
        lr 1.0e-05  12.4 s (rollout 3.1 reward 0.2 scoring 1.0 optimize 8.1, 980 tokens/s)
    """
    def shown(name: str, digits: int) -> str:
        return figure(row.get(name), digits)

    lines = []
    spent = f"lr {figure(row.get('lr'), 1, 'e')}  {shown('time/step', 1)} s"
    if "reward/mean" in row:
        phases = " ".join(f"{name} {shown(f'time/{name}', 1)}" for name in (
            "rollout", "reward", "scoring", "optimize") if f"time/{name}" in row)
        lines.append(
            f"step {row['step']}/{total}  reward {shown('reward/mean', 3)}±{shown('reward/std', 3)}"
            f"  kl {shown('objective/kl', 2)}  len {shown('rollout/response_tokens_mean', 1)}"
            f"  loss {shown('loss/policy_avg', 3)}/{shown('loss/value_avg', 3)}"
            f"  clip {shown('policy/clipfrac_avg', 2)}  {spent} ({phases}, "
            f"{shown('tokens_per_second/rollout', 0)} tokens/s)")
    elif "lr" in row or any(name.startswith("loss/") for name in row):
        names = [name for name in row if "/" in name and not name.startswith(_NOT_ITS_OWN)]
        named = _named(row, sorted(names, key=lambda name: name != "loss/total"))
        lines.append(f"step {row['step']}/{total}  {named}  {spent} "
                     f"({shown('tokens_per_second/optimize', 0)} tokens/s)")
    evaluated = [name for name in row if name.startswith("eval/")]
    if "eval/reward_mean" in row:
        metrics = "".join(f"  {name.removeprefix('eval/metrics/')} {shown(name, 3)}"
                          for name in evaluated if name.startswith("eval/metrics/"))
        lines.append(
            f"eval at step {row['step']}  reward {shown('eval/reward_mean', 3)}±"
            f"{shown('eval/reward_std', 3)}  kl {shown('eval/kl_mean', 2)}"
            f"  len {shown('eval/response_tokens_mean', 1)}{metrics}")
    elif evaluated:
        lines.append(f"eval at step {row['step']}  {_named(row, evaluated)}")
    return lines


def _named(row: dict[str, Any], names: Iterable[str]) -> str:
    """The first six figures of those names: ``loss 0.693  accuracy 0.812±0.020 of 64``."""
    return "  ".join(f"{'loss' if name == 'loss/total' else name.rpartition('/')[2]} "
                     f"{_count_or(row[name])}{_error(row, name)}"
                     for name in _without_errors(names)[:6])


def _without_errors(names: Iterable[str]) -> list[str]:
    """Names without those of standard errors and pair counts, which are shown next to their
    figures."""
    return [name for name in names if not name.endswith(("_stderr", "_pairs"))]


def _error(row: dict[str, Any], name: str) -> str:
    error, pairs = row.get(f"{name}_stderr"), row.get(f"{name}_pairs")
    return ("" if error is None else f"±{figure(error, 3)}") + (
        "" if pairs is None else f" of {figure(pairs, 0)}")


def _count_or(value: Any) -> str:
    """A count without decimals, any other figure with three."""
    return figure(value, 0 if isinstance(value, float) and value.is_integer() and value > 1 else 3)


def closing_table(before: dict[str, Any] | None, after: dict[str, Any],
                  samples: list[tuple[dict[str, Any] | None, dict[str, Any]]]) -> Table:
    """Figures and a few samples before and after training.

    Args:
        before, after: figures of the first and last evaluation.
        samples: (before, after) rows of the same prompts.
    """
    table = Table(title="before and after", show_lines=True, title_justify="left")
    sides = [after] if before is None else [before, after]
    for name in ("", *("before", "after")[-len(sides):]):
        table.add_column(name, overflow="fold")
    scored = "reward_mean" in after
    for name in _without_errors(after):
        if not scored or name in _MAIN or name.startswith("metrics/"):
            table.add_row(clean(name.removeprefix("metrics/")), *(
                figure(side.get(name), 3) + _error(side, name) for side in sides))
    # without rows of another task
    samples = [pair for pair in samples if {"prompt", "response", "score"} <= pair[1].keys()]
    for pair in samples:
        table.add_row(Text(clean(pair[1]["prompt"])),
                      *(_sample(row, scored) for row in pair[-len(sides):]))
    return table


def _sample(row: dict[str, Any] | None, scored: bool) -> Text:
    """A response behind its score, where there are scores."""
    if row is None or not scored:
        return Text("" if row is None else clean(row["response"]))
    score = "none" if row["score"] is None else figure(row["score"], 2)
    return Text.assemble(f"[{score}] ", live_view.said_by(
        transcript_turns(row) or str(row["response"])))
