"""Where a run's time goes: wall and CPU seconds by phase, without gaps."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

PHASES = ("startup", "rollout", "reward", "scoring", "optimize", "gather", "other", "eval",
          "between", "saving")
"""in the order in which they are shown; ``other`` is the rest of a step, ``between`` the time
between steps that is neither an evaluation nor a checkpoint"""
_AROUND = ("startup", "between", "saving")
"""phases that are neither a step nor an evaluation"""


@dataclass(frozen=True, slots=True)
class Moment:
    """A point in time: ``perf_counter``, and the CPU seconds of all threads of this process."""

    wall: float
    cpu: float

    @staticmethod
    def now() -> Moment:
        """This moment."""
        return Moment(time.perf_counter(), time.process_time())

    @staticmethod
    def of_process_start() -> Moment:
        """When this process was started; this moment where the system doesn't tell."""
        now = Moment.now()
        try:
            # field 22 of proc_pid_stat(5), in ticks since the machine started; the second field,
            # the program's name, may hold spaces
            fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
            started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
            age = time.clock_gettime(time.CLOCK_BOOTTIME) - started
        except (OSError, ValueError, IndexError, AttributeError):
            return now
        return Moment(now.wall - max(age, 0.0), 0.0)


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds by phase."""

    seconds: dict[str, float]
    """on the wall"""
    cpu_seconds: dict[str, float]
    """of all threads of this process"""

    def figures(self, tokens: Mapping[str, int]) -> dict[str, float]:
        """Wall time, CPU time and throughput of each phase of a step, and the sums of times. Tokens
        of phases that took no time here (responses that came from elsewhere) are left out."""
        figures: dict[str, float] = {}
        for kind, spent in (("time", self.seconds), ("cpu", self.cpu_seconds)):
            seconds = {name: value for name, value in of_training(spent).items() if name != "eval"}
            figures |= {f"{kind}/{name}": value for name, value in seconds.items()}
            figures[f"{kind}/step"] = sum(seconds.values())
        return figures | {f"tokens_per_second/{name}": count / max(self.seconds[name], 1e-9)
                          for name, count in tokens.items() if name in self.seconds}


@dataclass(slots=True)
class PhaseClock:
    """Adds up wall and CPU time by phase; on a GPU it waits for the device at each mark.

    Every moment since ``last`` was first set is booked to some phase.
    """

    device: torch.device
    last: Moment = field(default_factory=Moment.now)
    tell: Callable[[str], None] = lambda name: None
    """hears of each mark"""
    seconds: dict[str, float] = field(default_factory=dict)
    cpu_seconds: dict[str, float] = field(default_factory=dict)

    def mark(self, name: str) -> None:
        """Book the time since the last mark to ``name``."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize(self.device)
        now = Moment.now()
        self.seconds[name] = self.seconds.get(name, 0.0) + now.wall - self.last.wall
        self.cpu_seconds[name] = self.cpu_seconds.get(name, 0.0) + now.cpu - self.last.cpu
        self.last = now
        self.tell(name)

    def take(self) -> Spent:
        """What was booked since it was last taken."""
        spent = Spent(self.seconds, self.cpu_seconds)
        self.seconds, self.cpu_seconds = {}, {}
        return spent


def of_training(seconds: Mapping[str, float]) -> dict[str, float]:
    """The seconds of steps and evaluations, by phase."""
    return {name: value for name, value in seconds.items() if name not in _AROUND}


def profile(seconds: Mapping[str, float], cpu_seconds: Mapping[str, float],
            tokens: Mapping[str, int]) -> dict[str, Any]:
    """The totals, and of each phase its seconds, its share of all wall seconds, and its throughput
    where it has tokens; plain JSON types."""
    total, phases = sum(seconds.values()), {}
    for name in (name for name in dict.fromkeys((*PHASES, *seconds)) if name in seconds):
        count = tokens.get(name) or None
        phases[name] = {
            "seconds": seconds[name], "cpu_seconds": cpu_seconds.get(name, 0.0),
            "share": seconds[name] / total if total > 0 else 0.0, "tokens": count,
            "tokens_per_second": None if count is None else count / max(seconds[name], 1e-9)}
    return {"seconds": total, "cpu_seconds": sum(cpu_seconds.values()), "phases": phases}


def in_words(seconds: Mapping[str, float], cpu_seconds: Mapping[str, float]) -> str:
    """``41.0 s (optimize 45%, rollout 20%, ...), CPU 39.5 s``, the largest phases first."""
    total = sum(seconds.values())
    parts = sorted(seconds.items(), key=lambda item: item[1], reverse=True)
    shares = ", ".join(f"{name} {value / total:.0%}" for name, value in parts
                       if value >= 0.005 * total)
    return f"{total:.1f} s ({shares}), CPU {sum(cpu_seconds.values()):.1f} s"
