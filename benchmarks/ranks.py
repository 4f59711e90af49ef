"""The same training by one process and by several: seconds of each phase.

    python benchmarks/ranks.py --out benchmarks/RESULTS.md
    python benchmarks/ranks.py --rounds 5 --set model.path=./lm

Every run is a whole ``ppocli train`` in processes of their own, in turn with the others, so that a
slow moment of the machine meets all of them. Processor seconds are of all processes of a run, from
start to end; seconds of phases are medians over the steps of all rounds, without each run's first.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from commands import CommandFailedError, environment, run
from machine import PACKAGES, hardware, other_work, versions
from tables import marks, write_between

KINDS = {"one process": ["hardware=cpu"], "DDP, 2": ["hardware=ddp"],
         "ZeRO 2, 2": ["hardware=zero2"], "ZeRO 3, 2": ["hardware=zero3"]}
PHASES = ("rollout", "reward", "scoring", "gather", "optimize", "step")
WORK = ("+recipe=quickstart", "ppo.total_episodes=null", "ppo.num_steps=6", "ppo.num_rollouts=64",
        "ppo.mini_batch_size=32", "ppo.micro_batch_size=16", "eval.at_start=false",
        "eval.every_steps=null", "checkpoint.every_steps=null", "prompts.eval.limit=4",
        "hardware.device=cpu", "hardware.num_threads=1")


@dataclass(slots=True)
class Measured:
    """What the rounds of one kind took."""

    phases: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in PHASES})
    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)


def train(name: str, words: Sequence[str], folder: Path) -> tuple[list[dict], float, float]:
    """Train once; returns metrics rows, wall seconds and processor seconds of all its processes."""
    command = [sys.executable, "-m", "ppocli", "train", *words, f"run_name={name}",
               f"output_dir={folder}"]
    try:
        took = run(command, folder / f"{name}.log", environment(1))
    except CommandFailedError as error:
        raise SystemExit(f"{name}: {error}") from error
    lines = (folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines], took.wall, took.processor


def measure(rounds: int, more: Sequence[str]) -> dict[str, Measured]:
    """All kinds, ``rounds`` times in turn."""
    found = {kind: Measured() for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for place, (kind, words) in enumerate(KINDS.items()):
                rows, wall, processor = train(f"{number}-{place}", [*WORK, *words, *more],
                                              Path(folder))
                one = found[kind]
                one.wall.append(wall)
                one.processor.append(processor)
                for row in rows[1:]:
                    for phase in PHASES:
                        one.phases[phase].append(row.get(f"time/{phase}", 0.0))
                print(f"{kind}: {wall:.1f} s", file=sys.stderr)
    return found


def report(found: dict[str, Measured], more: Sequence[str], busy: float) -> str:
    """The table, with what it was measured on."""
    lines = ["| | " + " | ".join(f"{phase} s" for phase in PHASES)
             + " | whole run s | its processor s |", "|---" * (len(PHASES) + 3) + "|"]
    for kind, one in found.items():
        phases = " | ".join(f"{statistics.median(one.phases[phase]):.3f}" for phase in PHASES)
        lines.append(f"| {kind} | {phases} | {statistics.median(one.wall):.1f} "
                     f"| {statistics.median(one.processor):.1f} |")
    rounds = len(next(iter(found.values())).wall)
    packages = (*PACKAGES, "accelerate", "deepspeed")
    lines += ["", f"Medians of {rounds} rounds, {date.today():%Y-%m-%d}. {hardware()}. "
              f"{versions(packages)}. {other_work(busy)}", "",
              "Each run: `ppocli train " + " ".join([*WORK, *more]) + "`"]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", nargs="*", default=[], dest="more", metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, help="write the table into this "
                        f"file, between its lines {' and '.join(marks('ranks'))}")
    args = parser.parse_args()
    busy = os.getloadavg()[0]
    text = report(measure(args.rounds, args.more), args.more, busy)
    print(text)
    if args.out:
        write_between(args.out, "ranks", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
