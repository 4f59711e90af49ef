"""The live view: what a run is doing, in a few lines at the bottom of a terminal, drawn by
``rich.live``; what is printed meanwhile goes above them.

The training loop or a reader of a run's folder supplies rows of metrics, samples and phases. The
cursor is never hidden, so that a process that is killed leaves a usable terminal. Nothing is drawn
for a job in the background.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import (
    ExitStack,
    closing,
    contextmanager,
    redirect_stderr,
    redirect_stdout,
    suppress,
)
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleRenderable, Group
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ppocli.config import tasks
from ppocli.config.text import clean, figure, finite_number, sparkline
from ppocli.distributed.standard_output import result_stream
from ppocli.runs import run_logs
from ppocli.runs.episode import POLICY, Sample, transcript_turns
from ppocli.runs.run_folder import RunFolder
from ppocli.training.console import (
    Display,
    DisplayMode,
    LogFile,
    Outlet,
    error_of,
    is_terminal,
    logging_to,
    without_errors,
)

RECENT = 8
"""steps whose mean duration gives the remaining time"""
SAMPLES = 4
"""samples that the view has room for"""
_WIDE = 60
"""maximum width of curves in columns"""
_DRAWINGS = 2
"""drawings a second, of a few milliseconds each: less than 1 % of a core"""
_MAIN = ("reward_mean", "kl_mean", "response_tokens_mean", "distinct_2", "turns_mean", "done_share")
"""figures of PPO's evaluations in the closing table"""

log = logging.getLogger("ppocli")


@dataclass
class Dashboard:
    """What the live view shows of one run. One thread writes it and another draws it: every value
    is replaced whole or only grows."""

    name: str
    clock: Callable[[], float] = monotonic
    total: int = 0
    row: Mapping[str, Any] = field(default_factory=dict)
    curves: dict[str, list[float | None]] = field(default_factory=dict)
    """label -> value of each step: of PPO reward and KL"""
    evaluation: str = ""
    """the main figure of the newest evaluation and its step"""
    seconds: tuple[float, ...] = ()
    """of the last ``RECENT`` steps, evaluations included"""
    phase: tuple[str, float] = ("", 0.0)
    """what the run is doing, and since when; "" between two steps"""
    samples: tuple[Sample, ...] = ()
    samples_step: int = 0
    begun: float = 0.0
    """when the run was started or resumed"""
    step_begun: float = 0.0

    def begin(self, total: int, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        """Start, or start again, with the rows recorded so far."""
        self.total, self.begun = total, self.clock()
        self.row, self.curves, self.seconds, self.evaluation = {}, {}, (), ""
        for row in rows:
            self.add_row(row)
        self.step_begun = self.begun

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Add a row of metrics.jsonl."""
        if shown := tasks.curves_of(row):
            took = sum(finite_number(row.get(name)) or 0.0 for name in ("time/step", "time/eval"))
            if not self.curves:
                self.curves = {label: [] for label, _ in shown}
            for (_, name), values in zip(shown, self.curves.values(), strict=False):
                values.append(finite_number(row.get(name)))
            self.seconds = (*self.seconds, took)[-RECENT:]
            self.row = row
        if evaluated := tasks.evaluation_of(row):
            label, name = evaluated
            self.evaluation = f"  eval {label}{' ' * bool(label)}{figure(row[name], 3)} (step " \
                              f"{row['step']})"
        self.step_begun, self.phase = self.clock(), ("", 0.0)

    def enter(self, name: str, progress: str = "") -> None:
        """A phase begins, or progresses."""
        text, since = self.phase
        self.phase = (f"{name}{progress}", since if text.startswith(name) else self.clock())

    def show(self, samples: Sequence[Sample], step: int) -> None:
        """Show samples of a step in place of earlier ones."""
        self.samples = tuple(samples[:SAMPLES])
        self.samples_step = step

    @property
    def done(self) -> int:
        """Steps done."""
        return int(self.row.get("step", 0))

    def left(self) -> float | None:
        """Estimated seconds to the end from the pace of the last steps; None before the first
        step."""
        if not self.seconds:
            return None
        pace = sum(self.seconds) / len(self.seconds)
        spent = min(self.clock() - self.step_begun, pace)
        return max(0.0, (self.total - self.done) * pace - spent)

    def lines(self, width: int) -> list[Text]:
        """Lines of at most ``width`` cells."""
        title = f"── training {_end_of(_one_line(self.name), max(1, width - 15))} "
        what, since = self.phase
        if not what:
            what = f"step {self.done + 1}" if self.done < self.total else "finishing"
            since = self.step_begun
        now = Text.assemble("now     ", (what, "bold"), f"  {duration(self.clock() - since)}")
        lines = [Text(title.ljust(width, "─"), style="dim"), self._progress(width), now]
        tails = [f"  {figure(next(reversed(values), None), 3)}" for values in self.curves.values()]
        if tails:
            tails[0] += self.evaluation
        room = min(width - 8 - max(map(len, tails), default=0), _WIDE)
        for (label, values), tail in zip(self.curves.items(), tails, strict=True):
            curve = (sparkline(values, room), "yellow" if label == "KL" else "green")
            lines.append(Text.assemble(f"{label:8}", curve, tail))
        if self.samples:
            usual = finite_number(self.row.get("reward/mean"))
            lines += [Text(f"samples of step {self.samples_step}", style="dim"),
                      *(_sample_line(sample, width, usual) for sample in self.samples)]
        for line in lines:
            line.no_wrap = True
            line.truncate(width, overflow="ellipsis")
        return lines

    def _progress(self, width: int) -> Text:
        share = self.done / self.total if self.total else 0.0
        head = f"step {self.done}/{self.total}  {share:4.0%} "
        left = self.left()
        tail = "" if left is None else f" {duration(left)} left"
        if width - len(head) - len(tail) > 20:
            tail += f"{',' * bool(tail)} {duration(self.clock() - self.begun)} so far"
        room = max(0, min(width - len(head) - len(tail), _WIDE))
        filled = round(share * room)
        return Text.assemble((head, "bold"), ("━" * filled, "green"),
                             ("─" * (room - filled), "dim"), tail)


def _sample_line(sample: Sample, width: int, usual: float | None) -> Text:
    """A sample after its score, which is green from the step's mean on and yellow below it."""
    prompt, response = _one_line(sample[0]), said_by(sample[1])
    value = finite_number(sample[2])
    score = f"{'none' if value is None else f'{value:.2f}':>6}  "
    room = width - len(score) - 3
    # the end of a prompt matters most for its response
    prompt = _end_of(prompt, max(room // 3, room - response.cell_len, 1))
    colour = "cyan" if value is None or usual is None else "green" if value >= usual else "yellow"
    return Text.assemble((score, colour), (f"{prompt} │ ", "dim"), response)


def said_by(response: str | list[tuple[str, str]]) -> Text:
    """A response on one line; the environment's turns of an episode are dim."""
    if isinstance(response, str):
        return Text(_one_line(response))
    return Text(" ").join(Text(f"{who} {_one_line(text)}", "" if who == POLICY else "dim")
                          for who, text in response)


def _one_line(text: str) -> str:
    return clean(text).replace("\t", " ").strip()


def _end_of(text: str, cells: int) -> str:
    """The last ``cells`` cells of a text, with a mark where its beginning is missing."""
    if cell_len(text) <= cells:
        return text
    return "…" + set_cell_size(text[::-1], cells - 1)[::-1].lstrip()


def duration(seconds: float) -> str:
    """``0:07``, ``12:05``, ``3:20:00``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


# How it is drawn ----------------------------------------------------------------------------------

class LiveView(Live):
    """A dashboard at the bottom of a terminal, from ``start`` to ``stop``. What is printed to the
    console meanwhile, and what is written to standard streams that are terminals, goes above it.

    Args:
        console: of the terminal.
        board: what is shown.
        started_by: the process in the user's foreground that has started this one in another
            process group.
    """

    def __init__(self, console: Outlet, board: Dashboard, started_by: int | None = None) -> None:
        self._board, self._groups, self._redirections = board, {os.getpgrp()}, ExitStack()
        self.trouble: Exception | None = None
        """the exception that ended drawing, if any"""
        if started_by is not None:
            with suppress(OSError):
                self._groups.add(os.getpgid(started_by))
        super().__init__(console=console, get_renderable=self._drawing, transient=True,
                         refresh_per_second=_DRAWINGS, vertical_overflow="crop",
                         redirect_stdout=False, redirect_stderr=False)

    def start(self, refresh: bool = True) -> None:
        """Draw, and keep drawing in a thread."""
        super().start(refresh=True)
        for stream, redirect in ((sys.stdout, redirect_stdout), (sys.stderr, redirect_stderr)):
            if is_terminal(stream):
                above: Any = _Above(self.console, stream)
                self._redirections.enter_context(redirect(above))
                self._redirections.callback(above.flush)

    def stop(self) -> None:
        """Erase the lines; what is printed from now on goes to the terminal alone."""
        self._redirections.close()
        self.transient = self._in_foreground()
        super().stop()

    def refresh(self) -> None:
        """Draw."""
        if self._in_foreground():
            super().refresh()

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """What is printed, between erasing the view and drawing it again."""
        return super().process_renderables(renderables) if self._in_foreground() else renderables

    def _in_foreground(self) -> bool:
        with suppress(OSError, ValueError, AttributeError):
            return os.tcgetpgrp(self.console.file.fileno()) in self._groups
        return True  # no terminal of this session: nobody else writes there

    def _drawing(self) -> Group:
        if self.trouble is None:
            try:
                return Group(*self._board.lines(max(10, self.console.width - 1)))
            except Exception as error:  # a view that fails must not end a training
                self.trouble = error
        return Group()


class _Above(FileProxy):
    """A standard stream whose lines go above the view (``print`` in a reward function). A fork
    writes past it: the console's locks may be held for ever there."""

    def __init__(self, console: Console, stream: Any) -> None:
        super().__init__(console, stream)
        self._process = os.getpid()

    def write(self, text: str) -> int:
        """Print complete lines, and keep the rest."""
        if os.getpid() != self._process:
            return int(self.rich_proxied_file.write(text))
        return super().write(text)

    def flush(self) -> None:
        """Print the rest as well."""
        if os.getpid() == self._process:
            super().flush()


# The display of a run -----------------------------------------------------------------------------

class LiveDisplay(Display):
    """The lines of one run above its live view, if one can be drawn; prints what is logged.

    Args:
        folder: the run's.
        mode: what is shown.
        started_by: a process that has started this one in a process group of its own.
    """

    def __init__(self, folder: Path, mode: DisplayMode, started_by: int | None = None) -> None:
        super().__init__(mode, result_stream(), sys.stderr)
        self._folder, self._started_by = folder, started_by
        self._view: LiveView | None = None

    def start(self, done: int, total: int) -> None:
        """Open the live view, if one is to be shown, at ``done`` of ``total`` steps."""
        if self._mode != "auto" or not self._out.can_live:
            return
        self.board = Dashboard(self._folder.name)
        # the rows of a resumed run up to the step it resumes from
        self.board.begin(total, (row for row in run_logs.read_metrics(
            RunFolder(self._folder).metrics) if row["step"] <= done))
        self._view = LiveView(self._out, self.board, self._started_by)
        self._view.start()

    def close(self) -> None:
        """Remove the live view before further output."""
        super().close()
        if (view := self._view) is not None:
            view.stop()
            self._view = self.board = None
            if view.trouble is not None:
                log.warning("the live view ended early: %r", view.trouble)


@contextmanager
def open_display(log_file: Path, mode: DisplayMode = "auto", started_by: int | None = None
                 ) -> Iterator[Display]:
    """Attach the run's output to the ``ppocli`` logger; the log file lies in the run's folder.
    ``started_by``: see :class:`LiveDisplay`."""
    display = LiveDisplay(log_file.parent, mode, started_by)
    with closing(LogFile(log_file)) as file, logging_to(logging.INFO, display, file), \
            closing(display):
        yield display


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
    for name in without_errors(after):
        if not scored or name in _MAIN or name.startswith("metrics/"):
            table.add_row(clean(name.removeprefix("metrics/")), *(
                figure(side.get(name), 3) + error_of(side, name) for side in sides))
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
    return Text.assemble(f"[{score}] ", said_by(transcript_turns(row) or str(row["response"])))
