"""Faults on request, for tests of what a run survives.

Off unless the environment variable ``PPOCLI_FAULTS`` is set when this module is imported. It lists
``POINT[>ROWS][@N[+]][#RANK]:ACTION`` separated by commas; the fault fires each time the point is
passed, only the ``N``-th time (``@N``), or from the ``N``-th time on (``@N+``); with ``>ROWS`` only
where a pass has more rows, as a memory of that size would; with ``#RANK`` in that one of several
processes alone::

    PPOCLI_FAULTS=save.before_rename:kill9
    PPOCLI_FAULTS=rollout.token@7:term,optimize.minibatch@3:nan
    PPOCLI_FAULTS=optimize.forward>4@2+#1:oom

Actions: ``kill9``, ``term``, ``int`` (signals to this process), ``raise`` (``RuntimeError``),
``sleep`` or ``sleep=SECONDS`` (default 60), ``enospc`` (``OSError``), ``oom``
(``torch.OutOfMemoryError``), ``nan`` (``point`` returns true: the caller poisons its tensor).
"""

import errno
import os
import re
import signal
import time
from collections import Counter
from dataclasses import dataclass

_ENTRY = re.compile(r"(?P<point>[a-z_.]+)(>(?P<rows>[0-9]+))?(@(?P<nth>[1-9][0-9]*)(?P<on>\+)?)?"
                    r"(#(?P<rank>[0-9]+))?"
                    r":(?P<action>kill9|term|int|raise|sleep|enospc|oom|nan)"
                    r"(=(?P<seconds>[0-9]+(\.[0-9]+)?))?")
_SIGNALS = {"kill9": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT}


@dataclass(frozen=True, slots=True)
class Fault:
    """One entry: what happens on passes ``first`` to ``last`` (counted from 1) of ``point``."""

    point: str
    action: str
    first: int
    last: float
    seconds: float
    rank: int | None = None
    """the only rank that it happens in; None: in all"""
    rows: int = -1
    """it happens where a pass has more of them"""


def parse(text: str) -> tuple[Fault, ...]:
    """Read the value of ``PPOCLI_FAULTS``."""
    faults = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        match = _ENTRY.fullmatch(entry)
        assert match is not None, f"{entry!r} is not a fault"
        first = int(match["nth"] or 1)
        last = float(first) if match["nth"] and not match["on"] else float("inf")
        faults.append(
            Fault(match["point"], match["action"], first, last, float(match["seconds"] or 60),
                  None if match["rank"] is None else int(match["rank"]), int(match["rows"] or -1)))
    return tuple(faults)


class Point:
    """A function that counts passes, by name, and fires those of ``faults`` that concern
    ``rank``."""

    def __init__(self, faults: tuple[Fault, ...], rank: int = 0) -> None:
        self._faults = [fault for fault in faults if fault.rank in (None, rank)]
        self._passes: Counter[str] = Counter()

    def __call__(self, name: str, rows: int = 0) -> bool:
        """Fire what is planned for a pass of so many rows; true asks the caller to make a NaN."""
        return bool(self._faults) and self._pass(name, rows)

    def _pass(self, name: str, rows: int) -> bool:
        self._passes[name] += 1
        poisons = [_fire(fault) for fault in self._faults if fault.point == name
                   and rows > fault.rows and fault.first <= self._passes[name] <= fault.last]
        return any(poisons)


def _fire(fault: Fault) -> bool:
    if fault.action in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[fault.action])
    elif fault.action == "sleep":
        time.sleep(fault.seconds)
    elif fault.action == "raise":
        raise RuntimeError(f"injected fault at {fault.point}")
    elif fault.action == "enospc":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), fault.point)
    elif fault.action == "oom":
        import torch

        raise torch.OutOfMemoryError(f"injected out-of-memory at {fault.point}")
    return fault.action == "nan"


_planned = parse(os.environ.get("PPOCLI_FAULTS", ""))
point = Point(_planned, int(os.environ.get("RANK", "0")) if _planned else 0)
