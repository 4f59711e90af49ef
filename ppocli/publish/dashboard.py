"""The state of a run's live view, and the lines it shows at any width.

The training loop or a reader of a run's folder supplies metrics rows, samples and phases. Each line
is one row of the terminal, cut at its width; a low terminal loses lines from the end.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from ppocli.config import tasks
from ppocli.config.text import BLOCKS, clean, figure, finite_number, sparkline
from ppocli.runs.episode import POLICY, Sample

RECENT = 8
"""steps whose mean duration gives the remaining time"""
SAMPLES = 4
"""samples that the view has room for"""
_WIDE = 60
"""maximum width of curves in columns"""
_TO_ASCII = str.maketrans("─━│…⏎" + BLOCKS, "-#|~/" + "_.-=+*#@")
_PHASES = ("rollout", "reward", "scoring", "optimize")
_NEXT = {"rollout": "reward", "reward": "scoring", "scoring": "rollout"}
"""phase of a chunk: the one after it"""


@dataclass(frozen=True, slots=True)
class Phase:
    """What a run is doing: ``name``, progress as (word, number, total), and since when."""

    name: str
    parts: tuple[tuple[str, int, int], ...]
    since: float


@dataclass
class Dashboard:
    """What the live view shows of one run. One thread writes it and another draws it: every value
    is replaced whole or only grows."""

    name: str
    memory: Callable[[], float | None] = lambda: None
    """returns the MiB in use; called for each drawing"""
    clock: Callable[[], float] = monotonic
    total: int = 0
    row: Mapping[str, Any] = field(default_factory=dict)
    curves: dict[str, list[float | None]] = field(default_factory=dict)
    """label -> value of each step: of PPO reward and KL"""
    evaluation: tuple[int, str, float | None] | None = None
    """step of the newest evaluation, name of its main figure ("" for the reward), and its value"""
    seconds: tuple[float, ...] = ()
    """of the last ``RECENT`` steps, evaluations included"""
    phase: Phase | None = None
    samples: tuple[Sample, ...] = ()
    samples_step: int = 0
    warnings: list[str] = field(default_factory=list)
    begun: float = 0.0
    """when the run was started or resumed"""
    step_begun: float = 0.0

    def begin(self, total: int, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        """Start, or start again, with the rows recorded so far."""
        self.total, self.begun = total, self.clock()
        self.row, self.curves, self.seconds = {}, {}, ()
        self.evaluation = None
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
            self.evaluation = (int(row["step"]), label, finite_number(row[name]))
        self.step_begun = self.clock()
        self.phase = None

    def enter(self, name: str, *parts: tuple[str, int, int]) -> None:
        """A phase begins or progresses; ``parts`` are (word, number, total)."""
        old = self.phase
        since = old.since if old is not None and old.name == name else self.clock()
        self.phase = Phase(name, parts, since)

    def marked(self, name: str) -> None:
        """A phase of one chunk of the rollout has ended: the next one begins."""
        if self.phase is None or name not in _NEXT:
            return
        parts = self.phase.parts
        if name == "scoring":
            parts = tuple((word, number + 1, of) for word, number, of in parts)
            if not parts or parts[0][1] > parts[0][2]:
                return
        self.enter(_NEXT[name], *parts)

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

    def lines(self, width: int, height: int, *, ascii_only: bool = False) -> list[Text]:
        """At most ``height`` lines of at most ``width`` cells."""
        lines = [self._title(width), self._progress(width), self._now()]
        if self.curves:
            lines += [*self._curves(width), *self._speed(width), self._times()]
        if count := len(self.warnings):
            more = f"{count} warnings, the last: " if count > 1 else "warning: "
            lines.append(Text(more + _one_line(self.warnings[-1]), style="bold yellow"))
        if self.samples:
            lines += [Text(f"samples of step {self.samples_step}", style="dim"),
                      *(_sample_line(sample, width, self._figure("reward/mean"))
                        for sample in self.samples)]
        for line in lines:
            line.no_wrap = True
            line.truncate(width, overflow="ellipsis")
            if ascii_only:
                line.plain = line.plain.translate(_TO_ASCII).encode("ascii", "replace").decode()
        return lines[:max(1, height)]

    def _title(self, width: int) -> Text:
        text = f"── training {_end_of(_one_line(self.name), max(1, width - 15))} "
        return Text(text + "─" * (width - cell_len(text)), style="dim")

    def _progress(self, width: int) -> Text:
        share = self.done / self.total if self.total else 0.0
        head = f"step {self.done}/{self.total}  {share:4.0%} "
        left = self.left()
        times = [] if left is None else [f"{duration(left)} left"]
        tail = " " + ", ".join([*times, f"{duration(self.clock() - self.begun)} so far"])
        if width - len(head) - len(tail) < 5:
            tail = " " + "".join(times)
        room = max(0, min(width - len(head) - len(tail), _WIDE))
        filled = round(share * room)
        return Text.assemble((head, "bold"), ("━" * filled, "green"),
                             ("─" * (room - filled), "dim"), tail)

    def _now(self) -> Text:
        if (phase := self.phase) is None:
            what = f"step {self.done + 1}" if self.done < self.total else "finishing"
            since = self.step_begun
        else:
            parts = [f"{word} {number}/{of}" for word, number, of in phase.parts if of > 1]
            what, since = ", ".join([phase.name, *parts]), phase.since
        return Text.assemble("now     ", (what, "bold"), f"  {duration(self.clock() - since)}")

    def _curves(self, width: int) -> Iterator[Text]:
        tails = [f"  {figure(_last(values), digits)}"
                 for values, digits in zip(self.curves.values(), (3, 2), strict=True)]
        if self.evaluation is not None:
            step, label, value = self.evaluation
            tails[0] += f"  eval {label}{' ' if label else ''}{figure(value, 3)} (step {step})"
        room = min(width - 8 - max(map(len, tails)), _WIDE)
        for (label, values), colour, tail in zip(self.curves.items(), ("green", "yellow"), tails,
                                                 strict=True):
            yield Text.assemble(f"{label:8}", (sparkline(values, room), colour), tail)

    def _speed(self, width: int) -> list[Text]:
        speeds = "  ".join(f"{name} {_count(value)}" for name in ("rollout", "optimize")
                           if (value := self._figure(f"tokens_per_second/{name}")) is not None)
        text = f"speed   {speeds} tokens/s"
        now, peak = self.memory(), self._figure("memory/peak_mib")
        if peak is not None and now is not None:
            peak = max(peak, now)  # the row's peak is of the end of a step
        amounts = ", ".join(f"{_mib(value)}{word}" for value, word in ((now, ""), (peak, " peak"))
                            if value is not None)
        if not amounts:
            return [Text(text)]
        both = f"{text}   memory  {amounts}"
        return [Text(both)] if len(both) <= width else [Text(text), Text(f"memory  {amounts}")]

    def _times(self) -> Text:
        total = self._figure("time/step") or 0.0
        digits = 2 if total < 10 else 1
        parts = [f"{name} {value:.{digits}f}" for name in _PHASES
                 if (value := self._figure(f"time/{name}")) is not None]
        return Text(f"seconds {total:.{digits}f}: {' '.join(parts)}")

    def _figure(self, name: str) -> float | None:
        return finite_number(self.row.get(name))


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


def _last(values: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)


def duration(seconds: float) -> str:
    """``0:07``, ``12:05``, ``3:20:00``, ``2 d 04:00``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24:02d}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _count(value: float) -> str:
    """A speed in few characters: ``870``, ``9.8k``, ``14k``, ``1.2M``."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.{1 if value < 10 * size else 0}f}{unit}"
    return f"{value:.0f}"


def _mib(value: float) -> str:
    return f"{value / 1024:.1f} GiB" if value >= 10_000 else f"{value:.0f} MiB"
