"""What a check is, and how a list of them is run so that none can hang the others."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from time import monotonic
from typing import Literal

from ppocli.doctor.processes import Answer, ask

Verdict = Literal["ok", "warning", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check came to, in words, and what to do about it."""

    verdict: Verdict
    text: str
    fix: str | None = None


@dataclass(frozen=True)
class Surroundings:
    """What checks look at. ``root`` is where /proc, /sys and /dev lie."""

    folder: Path
    """the output folder, which need not exist"""
    root: Path = Path("/")

    @cached_property
    def torch(self) -> Answer:
        """What a process of its own says about torch: a broken one may crash or hang there."""
        return ask("torch_probe", seconds=60)


@dataclass(frozen=True, slots=True)
class Check:
    """A named question. It is given up after ``seconds``."""

    name: str
    run: Callable[[Surroundings], Finding]
    seconds: float = 10.0


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the doctor's answer."""

    name: str
    verdict: Verdict
    text: str
    fix: str | None
    seconds: float


def run_checks(checks: Sequence[Check], around: Surroundings, *,
               begin: Callable[[str], None] = lambda name: None) -> Iterator[Result]:
    """Run checks one after another, each within its time.

    Args:
        begin: told the name of each check before it runs.
    """
    for check in checks:
        begin(check.name)
        started = monotonic()
        found = _within(check, around)
        yield Result(check.name, found.verdict, found.text, found.fix,
                     round(monotonic() - started, 2))


def _within(check: Check, around: Surroundings) -> Finding:
    answers: queue.SimpleQueue[Finding] = queue.SimpleQueue()

    def work() -> None:
        try:
            answers.put(check.run(around))
        except Exception as error:  # a machine that breaks a check must not keep the others back
            answers.put(Finding("fail", f"the check broke: {type(error).__name__}: {error}",
                                "report it with the output of: ppocli env"))

    # a call into a dead network or file system can't be interrupted, only left behind
    threading.Thread(target=work, name=f"doctor-{check.name}", daemon=True).start()
    try:
        return answers.get(timeout=check.seconds)
    except queue.Empty:
        return Finding("fail", f"no answer within {check.seconds:g} s",
                       "something hangs: a network file system, a driver or a lock")
