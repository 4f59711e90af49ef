"""What each of several processes came to, left in files for the process that started them."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ppocli.config.sayable import sayable

OUTCOMES = "PPOCLI_OUTCOMES"
"""environment variable: the folder in which each rank says what it came to"""


def my_rank() -> int:
    """This process's number among those of the run, as its launcher tells it."""
    return int(os.environ.get("RANK", "0"))


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """What a rank came to. Written by the worker, read by the process that started it."""

    rank: int
    code: int
    """the exit code the command should end with"""
    message: str
    """of the error, empty if there was none"""
    trace: str
    """of an exception that nobody expected"""
    at: float
    """seconds since the epoch, to tell which came first"""


def announce() -> int | None:
    """Tell the process that started this rank its pid; returns the number of a signal that came
    before that."""
    folder = os.environ.get(OUTCOMES)
    if not folder:
        return None
    (Path(folder) / f"pid-{my_rank()}").write_text(str(os.getpid()), encoding="utf-8")
    try:
        return int((Path(folder) / "signal").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def hand_on(folder: Path, number: int) -> None:
    """Send a signal to all ranks that have announced themselves, and leave it for the others."""
    (folder / "signal").write_text(str(number), encoding="utf-8")
    for path in folder.glob("pid-*"):
        with suppress(OSError, ValueError):
            os.kill(int(path.read_text(encoding="utf-8")), number)


def write_outcome(outcome: RankOutcome) -> None:
    """Leave a rank's outcome for the process that started it, if there is one."""
    folder = os.environ.get(OUTCOMES)
    if folder:
        path = Path(folder) / f"rank-{outcome.rank}.json"
        told = replace(outcome, message=sayable(outcome.message), trace=sayable(outcome.trace))
        path.write_text(json.dumps(asdict(told)), encoding="utf-8")


def read_outcomes(folder: Path) -> list[RankOutcome]:
    """What the ranks left, the earliest first."""
    found = []
    for path in folder.glob("rank-*.json"):
        try:
            found.append(RankOutcome(**json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError):
            continue
    return sorted(found, key=lambda outcome: outcome.at)
