"""How long the command takes to answer, against a bare Python.

    python benchmarks/startup.py --runs 11 --out benchmarks/RESULTS.md

Each command runs in a process of its own, in turn with the others, so that a slow moment of the
machine meets all of them. The exit code is 1 if a median is further from the bare Python's than
its target.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

from commands import PPOCLI
from machine import hardware, versions

COMMANDS: dict[str, tuple[list[str], float | None]] = {
    "python -c pass": ([sys.executable, "-c", "pass"], None),
    "ppocli --help": ([PPOCLI, "--help"], 0.5),
    "ppocli train --help": ([PPOCLI, "train", "--help"], 0.5),
    "ppocli train --cfg job +recipe=quickstart":
        ([PPOCLI, "train", "--cfg", "job", "+recipe=quickstart"], 1.0),
}
"""what is run, and how many seconds more than the bare Python it may take"""


def seconds_of(command: list[str], folder: Path) -> float:
    """Wall time of one run that must succeed."""
    started = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL,
                   stdin=subprocess.DEVNULL)
    return time.perf_counter() - started


def measure(runs: int) -> dict[str, list[float]]:
    """Seconds of every run; a first, unmeasured round writes byte code and warms the disk cache."""
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(runs + 1):
            for name, (command, _) in COMMANDS.items():
                taken = seconds_of(command, Path(folder))
                if number:
                    seconds[name].append(taken)
    return seconds


def report(seconds: dict[str, list[float]]) -> tuple[str, bool]:
    """Markdown, and whether every target is met."""
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    bare = next(iter(medians.values()))
    lines = ["| command | median s | fastest s | slowest s | more than bare Python | target |",
             "|---|---|---|---|---|---|"]
    good = True
    for name, (_, target) in COMMANDS.items():
        more = medians[name] - bare
        good &= target is None or more <= target
        shown = ("", "") if target is None else (f"+{more:.2f} s", f"at most +{target:g} s")
        lines.append(f"| `{name}` | {medians[name]:.3f} | {min(seconds[name]):.3f} "
                     f"| {max(seconds[name]):.3f} | {shown[0]} | {shown[1]} |")
    runs = len(next(iter(seconds.values())))
    lines += ["", f"{runs} runs each, {date.today():%Y-%m-%d}. {hardware()}. "
              f"{versions(('ppocli', 'typer', 'hydra-core'))}."]
    return "\n".join(lines), good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=11)
    parser.add_argument("--out", type=Path, help="append the table to this file")
    args = parser.parse_args()
    text, good = report(measure(args.runs))
    print(text)
    if args.out:
        with args.out.open("a", encoding="utf-8") as file:
            file.write(f"\n{text}\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
