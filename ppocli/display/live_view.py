"""The live view of a run: what it knows, and the lines it shows at any width.

Fed with metrics rows, samples and phases, by the training loop or by whoever reads a run's folder.
Each line is one row of the terminal, cut at its width; a low terminal loses lines from the end.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from ppocli.text import clean, figure

RECENT = 8
"""steps whose mean duration the remaining time is told from"""
SAMPLES = 4
"""samples that the view has room for"""
_BLOCKS, _ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-=+*#@"
_PHASES = ("rollout", "reward", "scoring", "optimize")
_NEXT = {"rollout": "reward", "reward": "scoring"}


@dataclass(frozen=True, slots=True)
class Sample:
    """One response of the policy, as the view shows it."""

    prompt: str
    response: str
    score: float | None


@dataclass(frozen=True, slots=True)
class Phase:
    """What a run is doing: ``name``, how far (word, number, of how many), and since when."""

    name: str
    parts: tuple[tuple[str, int, int], ...]
    since: float


@dataclass
class Dashboard:
    """What there is to show of one run. Written by one thread, drawn by another: every value is
    replaced whole or only grows."""

    name: str
    memory: Callable[[], float | None] = lambda: None
    """MiB in use now; asked at each drawing"""
    clock: Callable[[], float] = monotonic
    total: int = 0
    row: Mapping[str, Any] = field(default_factory=dict)
    rewards: list[float | None] = field(default_factory=list)
    divergences: list[float | None] = field(default_factory=list)
    """``objective/kl`` of each step"""
    evaluation: tuple[int, float | None] | None = None
    """step and mean reward of the newest evaluation"""
    seconds: tuple[float, ...] = ()
    """of the last ``RECENT`` steps, evaluations included"""
    phase: Phase | None = None
    samples: tuple[Sample, ...] = ()
    samples_step: int | None = None
    warnings: int = 0
    warning: str = ""
    """the newest one"""
    begun: float = 0.0
    """when this start of the run began"""
    step_begun: float = 0.0

    def begin(self, total: int, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        """Start, or start again, with what the run has recorded so far."""
        self.total, self.begun = total, self.clock()
        self.row, self.rewards, self.divergences, self.seconds = {}, [], [], ()
        self.evaluation = None
        for row in rows:
            self.add_row(row)
        self.step_begun = self.begun

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Take in a row of metrics.jsonl."""
        duration = sum(value for name in ("time/step", "time/eval")
                       if (value := _number(row.get(name))) is not None)
        if "reward/mean" in row:
            self.rewards.append(_number(row["reward/mean"]))
            self.divergences.append(_number(row.get("objective/kl")))
            self.seconds = (*self.seconds, duration)[-RECENT:]
            self.row = row
        if "eval/reward_mean" in row:
            self.evaluation = (int(row["step"]), _number(row["eval/reward_mean"]))
        self.step_begun = self.clock()
        self.phase = None

    def enter(self, name: str, *parts: tuple[str, int, int]) -> None:
        """A phase begins, or gets further; ``parts`` are (word, number, of how many)."""
        old = self.phase
        since = old.since if old is not None and old.name == name else self.clock()
        self.phase = Phase(name, parts, since)

    def marked(self, name: str) -> None:
        """A phase of one chunk of the rollout has ended: the next one begins."""
        old = self.phase
        if old is None or name not in ("rollout", "reward", "scoring"):
            return
        parts = old.parts
        if name == "scoring":
            parts = tuple((word, number + 1, of) for word, number, of in parts)
            if not parts or parts[0][1] > parts[0][2]:
                return
        self.enter(_NEXT.get(name, "rollout"), *parts)

    def show(self, samples: Sequence[Sample], step: int) -> None:
        """Take samples of a step in place of the earlier ones."""
        self.samples, self.samples_step = tuple(samples[:SAMPLES]), step

    def warn(self, text: str) -> None:
        """Count a warning and show the newest."""
        self.warnings += 1
        self.warning = text

    @property
    def done(self) -> int:
        """Steps done."""
        return int(self.row.get("step", 0))

    def left(self) -> float | None:
        """Seconds to the end at the pace of the last steps; None before the first."""
        if not self.seconds:
            return None
        pace = sum(self.seconds) / len(self.seconds)
        spent = min(self.clock() - self.step_begun, pace)
        return max(0.0, (self.total - self.done) * pace - spent)

    def lines(self, width: int, height: int, *, ascii_only: bool = False) -> list[Text]:
        """At most ``height`` lines of at most ``width`` cells."""
        view = _View(self, width, ascii_only)
        found = []
        for line in view.lines():
            line.no_wrap = True
            line.truncate(width, overflow="crop" if ascii_only else "ellipsis")
            found.append(line)
        return found[:max(1, height)]


def _number(value: Any) -> float | None:
    ok = isinstance(value, (int, float)) and math.isfinite(value)
    return float(value) if ok else None


def resident_mib(pid: int) -> float | None:
    """The memory that a process holds now, in MiB; None where the system doesn't tell."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _last(values: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)


def duration(seconds: float) -> str:
    """``0:07``, ``12:05``, ``3:20:00``, ``2 d 04:00``."""
    whole = int(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24:02d}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def sparkline(values: Sequence[float | None], cells: int, *, ascii_only: bool = False) -> str:
    """The course of a figure in at most ``cells`` characters; each is the mean of its share of
    values, from the lowest to the highest block; a blank where there is none."""
    if cells < 1 or not values:
        return ""
    count = min(cells, len(values))
    means: list[float | None] = []
    for cell in range(count):
        part = [value for value in values[cell * len(values) // count:
                                          (cell + 1) * len(values) // count] if value is not None]
        means.append(math.fsum(part) / len(part) if part else None)
    there = [mean for mean in means if mean is not None]
    if not there:
        return " " * count
    low, high = min(there), max(there)
    blocks = _ASCII_BLOCKS if ascii_only else _BLOCKS
    spread = high - low

    def block(mean: float) -> str:
        share = (mean - low) / spread if spread > 0 else 0.5
        return blocks[min(len(blocks) - 1, int(share * len(blocks)))]

    return "".join(" " if mean is None else block(mean) for mean in means)


def _count(value: float) -> str:
    """A speed in few characters: ``870``, ``9.8k``, ``14k``, ``1.2M``."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.{1 if value < 10 * size else 0}f}{unit}"
    return f"{value:.0f}"


def _mib(value: float) -> str:
    return f"{value / 1024:.1f} GiB" if value >= 10_000 else f"{value:.0f} MiB"


class _View:
    """One drawing of a dashboard."""

    def __init__(self, board: Dashboard, width: int, ascii_only: bool) -> None:
        self.board = board
        self.width = width
        self.ascii = ascii_only
        self.wide = width >= 60

    def lines(self) -> Iterator[Text]:
        yield self._title()
        yield self._progress()
        yield self._now()
        board = self.board
        if board.rewards:
            yield from self._courses()
            yield from self._speed()
            yield self._times()
        if board.warnings:
            more = f"{board.warnings} warnings, the last: " if board.warnings > 1 else "warning: "
            yield Text(more + _one_line(board.warning), style="bold yellow")
        if board.samples:
            step = "" if board.samples_step is None else f" of step {board.samples_step}"
            yield Text(f"samples{step}", style="dim")
            for sample in board.samples:
                yield self._sample(sample)

    def _title(self) -> Text:
        rule = "-" if self.ascii else "─"
        text = f"{rule * 2} training {_one_line(self.board.name)} "
        if cell_len(text) > self.width - 2:  # the end of a name tells more than its beginning
            keep = max(0, self.width - 16)
            text = f"{rule * 2} training {'~' if self.ascii else '…'}{self.board.name[-keep:]} "
        return Text(text + rule * max(0, self.width - cell_len(text)), style="dim")

    def _progress(self) -> Text:
        board = self.board
        share = board.done / board.total if board.total else 0.0
        head = f"step {board.done}/{board.total}  {share:4.0%} "
        left = board.left()
        passed = duration(board.clock() - board.begun)
        tail = " " + ("" if left is None else f"{duration(left)} left, ") + f"{passed} so far"
        room = self.width - len(head) - len(tail)
        if room < 5:
            tail = "" if left is None else f" {duration(left)} left"
            room = self.width - len(head) - len(tail)
        room = max(0, min(room, 60))
        full, empty = ("#", ".") if self.ascii else ("━", "─")
        filled = round(share * room)
        return Text.assemble((head, "bold"), (full * filled, "green"),
                             (empty * (room - filled), "dim"), tail)

    def _now(self) -> Text:
        board, phase = self.board, self.board.phase
        if phase is None:
            since, what = board.step_begun, f"step {board.done + 1}" \
                if board.done < board.total else "finishing"
        else:
            since = phase.since
            parts = [f"{word} {number}/{of}" for word, number, of in phase.parts if of > 1]
            what = ", ".join([phase.name, *parts])
        return Text.assemble("now     ", (what, "bold"), f"  {duration(board.clock() - since)}")

    def _courses(self) -> Iterator[Text]:
        board = self.board
        tails = ["  " + figure(_last(board.rewards), 3), "  " + figure(_last(board.divergences), 2)]
        if board.evaluation is not None:
            step, value = board.evaluation
            tails[0] += f"  eval {figure(value, 3)}" + (f" (step {step})" if self.wide else "")
        room = max(0, min(self.width - 8 - max(map(len, tails)), 60))
        for label, values, style, tail in zip(
                ("reward", "KL"), (board.rewards, board.divergences), ("green", "yellow"), tails,
                strict=True):
            line = sparkline(values, room, ascii_only=self.ascii)
            yield Text.assemble(f"{label:<8}", (line, style), tail)

    def _speed(self) -> Iterator[Text]:
        row = self.board.row
        speeds = [f"{name} {_count(value)}" for name in ("rollout", "optimize")
                  if (value := _number(row.get(f"tokens_per_second/{name}"))) is not None]
        peak, now = _number(row.get("memory/peak_mib")), self.board.memory()
        if peak is not None and now is not None:
            peak = max(peak, now)  # the row's is of the end of a step, and the next one goes on
        amounts = [f"{_mib(value)}{word}" for value, word in ((now, ""), (peak, " peak"))
                   if value is not None]
        memory = "memory  " + ", ".join(amounts)
        if self.wide:
            text = f"speed   {'  '.join(speeds)} tokens/s"
            if amounts and len(text) + 3 + len(memory) <= self.width:
                text, amounts = f"{text}   {memory}", []
        else:
            text = f"tok/s   {'  '.join(speeds)}"
        yield Text(text)
        if amounts:
            yield Text(memory)

    def _times(self) -> Text:
        row = self.board.row
        total = _number(row.get("time/step")) or 0.0
        digits = 2 if total < 10 else 1
        parts = [f"{name if self.wide else name[:2]} {value:.{digits if self.wide else 1}f}"
                 for name in _PHASES
                 if (value := _number(row.get(f"time/{name}"))) is not None]
        whole = f"{total:.{digits}f}: " if self.wide else ""
        return Text(f"seconds {whole}{' '.join(parts)}")

    def _sample(self, sample: Sample) -> Text:
        value = _number(sample.score)
        score = f"{'none' if value is None else f'{value:.2f}':>6}  "
        prompt, response = _one_line(sample.prompt), _one_line(sample.response)
        bar = " | " if self.ascii else " │ "
        room = self.width - len(score) - len(bar)
        most = max(room // 3, room - cell_len(response))
        if cell_len(prompt) > most:  # what a response follows is a prompt's end
            mark = "~" if self.ascii else "…"
            short = Text(prompt[::-1])
            short.truncate(max(1, most - 1), overflow="crop")
            prompt = mark + short.plain[::-1]
        return Text.assemble((score, "cyan"), (prompt, "dim"), (bar, "dim"), response)


def _one_line(text: str) -> str:
    return clean(text).replace("\t", " ").strip()
