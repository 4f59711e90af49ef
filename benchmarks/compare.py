"""Systems in turn on the same work, and what their times say: medians, ratios, spread."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from commands import CommandFailedError
from systems import SYSTEMS, Process


@dataclass(frozen=True, slots=True)
class Spread:
    """A median, with the smallest and the largest of its values."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return Spread(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        if self.low == self.high:
            return shown(self.median)
        return f"{shown(self.median)} ({shown(self.low)} to {shown(self.high)})"


def shown(value: float) -> str:
    """Three figures, more only before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """All rounds of one system, or why there are none."""

    rounds: list[Process]
    failed: str | None = None


def in_turn(names: Sequence[str], rounds: int, measure: Callable[[str, int], Process]
            ) -> dict[str, Outcome]:
    """Run each system once a round, each round beginning with another one.

    So a slow moment of the machine meets all of them. A system that fails is not tried again.

    Args:
        measure: runs the system of that name in that round.
    """
    found: dict[str, list[Process]] = {name: [] for name in names}
    failed: dict[str, str] = {}
    for number in range(rounds):
        first = number % len(names)
        for name in [*names[first:], *names[:first]]:
            if name in failed:
                continue
            try:
                took = measure(name, number)
            except CommandFailedError as error:
                failed[name] = str(error)
                print(f"{name} failed: {error}", file=sys.stderr)
                continue
            found[name].append(took)
            print(f"round {number + 1}, {name}: {statistics.median(took.wall):.3f} s an iteration, "
                  f"{statistics.median(took.processor):.3f} s of processor, {took.seconds:.1f} s "
                  "in all", file=sys.stderr, flush=True)
    return {name: Outcome([] if name in failed else found[name], failed.get(name))
            for name in names}


def of_rounds(outcome: Outcome, measure: str) -> list[float]:
    """The median iteration of each round; ``measure`` is ``wall`` or ``processor``."""
    return [statistics.median(getattr(one, measure)) for one in outcome.rounds]


def ratio(slow: Outcome, fast: Outcome, measure: str) -> Spread:
    """How many times as long ``slow`` takes, round by round."""
    pairs = zip(of_rounds(slow, measure), of_rounds(fast, measure), strict=True)
    return Spread.of([one / other for one, other in pairs])


def fastest_peer(outcomes: Mapping[str, Outcome], measure: str) -> str | None:
    """The peer with the smallest median, among those that somebody could train with."""
    peers = [name for name, outcome in outcomes.items()
             if outcome.rounds and name != "ours" and SYSTEMS[name].real]
    return min(peers, default=None,
               key=lambda name: statistics.median(of_rounds(outcomes[name], measure)))
