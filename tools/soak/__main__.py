"""The command of the suites."""

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from tools.soak.cases import Tally, play

SUITES: dict[str, tuple[str, int]] = {
    "kills": ("one_run", 1000), "folders": ("one_folder", 1000), "rewards": ("one_reward", 300),
    "servers": ("one_server", 500), "disks": ("one_disk", 60)}
"""the function that plays a case, and how many cases (of kills: how many kills) are enough"""


def main(words: Sequence[str]) -> int:
    """Play suites, or write what they came to."""
    parser = argparse.ArgumentParser(prog="python -m tools.soak", description=__doc__)
    parser.add_argument("suite", choices=[*SUITES, "all", "write"])
    parser.add_argument("--cases", type=int, help="how many are enough (of kills: how many kills)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="play this one alone")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/RESULTS.md"))
    given = parser.parse_args(words)
    if given.suite == "write":
        import_module("tools.soak.results").write(given.out)
        return 0
    failed = 0
    for name in SUITES if given.suite == "all" else [given.suite]:
        function, usual = SUITES[name]
        cases = range(given.case, given.case + 1) if given.case is not None else range(10**9)
        tally = play(name, getattr(import_module(f"tools.soak.{name}"), function), seed=given.seed,
                     cases=cases, enough=_enough(name, given.cases or usual))
        failed += len(tally.failed)
    return min(failed, 1)


def _enough(name: str, number: int) -> Callable[[Tally], bool]:
    if name == "kills":
        return lambda tally: tally.outcomes["kills"] >= number
    return lambda tally: tally.cases >= number


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
