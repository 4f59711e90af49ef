"""What each of several processes came to, left in files for the process that started them."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ppocli.config.secrets import safe_text
from ppocli.parallel.launchers import my_rank

OUTCOMES = "PPOCLI_OUTCOMES"
"""environment variable: the folder in which each rank says what it came to"""
NODE_FAILED = ".node-failed"
"""a file in the run folder, which all nodes share: one of them has failed"""
_LIFELINE = "lifeline"


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
    phase: str = ""
    """where it was, as ``step 3, optimize``"""
    lost: bool = False
    """whether all it has to say is that another rank is gone or doesn't answer"""
    retry: dict[str, int] = field(default_factory=dict)
    """settings with which all ranks can start again: memory ran out"""


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


def open_lifelines(folder: Path) -> int:
    """Something that each rank can hold, and that breaks when this process ends, however it does.

    Returns:
        a file descriptor that has to stay open.
    """
    os.mkfifo(folder / _LIFELINE)
    return os.open(folder / _LIFELINE, os.O_RDWR | os.O_CLOEXEC)


def hold_lifeline() -> int | None:
    """What breaks when the process that started this rank ends, for ``stop_when_closed``."""
    folder = os.environ.get(OUTCOMES)
    return os.open(Path(folder) / _LIFELINE, os.O_RDONLY | os.O_CLOEXEC) if folder else None


def note_phase(phase: str) -> None:
    """Leave word of where this rank is, should it say nothing any more."""
    folder = os.environ.get(OUTCOMES)
    if folder:
        (Path(folder) / f"phase-{my_rank()}").write_text(phase, encoding="utf-8")


def read_phase(folder: Path, rank: int) -> str:
    """Where a rank was last; empty if that isn't known."""
    try:
        return (folder / f"phase-{rank}").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def my_phase() -> str:
    """Where this process is in its run; empty if nobody here has started it, who would keep a file
    of its phases."""
    return read_phase(Path(os.environ.get(OUTCOMES, "")), my_rank())


def hand_on(folder: Path, number: int) -> None:
    """Send a signal to all ranks that have announced themselves, and leave it for the others."""
    (folder / "signal").write_text(str(number), encoding="utf-8")
    for path in folder.glob("pid-*"):
        send(folder, int(path.name.removeprefix("pid-")), number)


def asked_to_stop(folder: Path) -> bool:
    """Whether a signal has come for the ranks."""
    return (folder / "signal").exists()


def send(folder: Path, rank: int, number: int) -> bool:
    """Send a signal to one rank; false if it isn't there."""
    try:
        os.kill(int((folder / f"pid-{rank}").read_text(encoding="utf-8")), number)
    except (OSError, ValueError):
        return False
    return True


def write_outcome(outcome: RankOutcome) -> None:
    """Leave a rank's outcome for the process that started it, if there is one."""
    folder = os.environ.get(OUTCOMES)
    if folder:
        path = Path(folder) / f"rank-{outcome.rank}.json"
        told = replace(outcome, message=safe_text(outcome.message), trace=safe_text(outcome.trace))
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
