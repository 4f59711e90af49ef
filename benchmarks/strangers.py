"""PPO's defaults on models, classifiers and prompts that ppocli has never seen.

    python benchmarks/strangers.py
    python benchmarks/strangers.py sentences --rates none 1e-4 --seeds 1 2 --set ppo.lam=1
    python benchmarks/strangers.py docstrings nim sums --svg docs/strangers.svg

Nothing is typed but model, prompts, reward, episodes and seed; and the same with other learning
rates. Every run is a whole ``ppocli train`` in a process of its own, with one thread. The worlds
are made by ``worlds.py``; what has finished in ``--keep`` is not run again.
"""

import argparse
import json
import math
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import worlds
from commands import PPOCLI, environment, run
from frontier import best_of, unfinished
from machine import provenance
from tables import table
from world_models import load_truth

from ppocli.publish.curves import Line, Panel, draw
from ppocli.runs.record import read_run

SMOOTHED = 5
"""steps of which one point of a curve is the mean"""
DEFAULT_RATE = "none"
"""in place of a learning rate: none is typed"""
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306}
"""number of runs -> 97.5 % quantile of Student's distribution for their mean"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run came to, on prompts that it has not seen."""

    reward: float
    before: float
    kl: float
    """nats a response"""
    length: float
    """mean response tokens as a share of the start's"""
    truth: tuple[float, float]
    """by the classifier that no training sees, before and after; NaN where there is none"""


def outcome(run: Path, world: Path) -> Outcome:
    """Of a finished run."""
    summary = json.loads((run / "summary.json").read_text())
    before, after = summary["eval_before"], summary["eval_after"]
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    truth, last = load_truth(world), max(one["step"] for one in samples)
    judged = tuple(math.nan if truth is None else truth.mean(
        [one["prompt"] + one["response"] for one in samples if one["step"] == step])
        for step in (0, last))
    return Outcome(after["reward_mean"], before["reward_mean"], after["kl_mean"],
                   after["response_tokens_mean"] / before["response_tokens_mean"], judged)


def trained(world: Path, seed: int, rate: str, episodes: int, words: list[str], runs: Path
            ) -> Path:
    """The folder of a finished run."""
    name = f"{rate}-{seed}"
    if unfinished(runs / name):
        runs.mkdir(parents=True, exist_ok=True)
        run([PPOCLI, "train", *worlds.words_of(world.name, world),
             f"ppo.total_episodes={episodes}", f"seed={seed}", f"run_name={name}",
             f"output_dir={runs}", "hardware.num_threads=1", "checkpoint.keep_last=1",
             *([] if rate == DEFAULT_RATE else [f"ppo.optimizer.lr={rate}"]), *words],
            runs / "log", environment(1))
    return runs / name


def interval(values: list[float], digits: int) -> str:
    """Mean, and with two to nine runs half the width of its 95 % interval."""
    if len(values) not in STUDENT or math.isnan(fmean(values)):
        return f"{fmean(values):.{digits}f}"
    half = STUDENT[len(values)] * stdev(values) / math.sqrt(len(values))
    return f"{fmean(values):.{digits}f} ± {half:.{digits}f}"


def row(rate: str, outcomes: list[Outcome]) -> list[str]:
    """A line of the table: the runs of one learning rate."""
    return [rate, *(interval([getattr(one, name) for one in outcomes], digits)
                    for name, digits in (("reward", 3), ("kl", 2), ("length", 2))),
            interval([one.truth[1] - one.truth[0] for one in outcomes], 3)]


def verdict(outcomes: dict[str, list[Outcome]]) -> str:
    """How the worst rate compares with the best."""
    gains = {rate: fmean(one.reward - one.before for one in runs)
             for rate, runs in outcomes.items()}
    best, worst = max(gains, key=gains.__getitem__), min(gains, key=gains.__getitem__)
    kls = {rate: fmean(one.kl for one in runs) for rate, runs in outcomes.items()}
    return (f"Worst gain {gains[worst]:.3f} ({worst}), {gains[worst] / gains[best]:.2f} of the "
            f"best ({best}); largest KL {max(kls.values()) / kls[best]:.2f} times the best one's.")


def reward_over_kl(paths: list[Path]) -> list[tuple[float, float]]:
    """The most reward that rollouts have had within a KL to the start: mean over runs.

    Each run's ``(KL, reward)``, smoothed over steps and sorted by KL, is interpolated linearly at
    the same values of KL, up to the smallest of the runs' largest.
    """
    curves = []
    for path in paths:
        points = np.array([(row["objective/kl"], row["reward/mean"]) for row in read_run(path).rows
                           if "objective/kl" in row])
        smooth = np.stack([np.convolve(one, np.ones(SMOOTHED) / SMOOTHED, "valid")
                           for one in points.T])
        kl, reward = smooth[:, np.argsort(smooth[0])]
        curves.append((kl, np.maximum.accumulate(reward)))
    kls = np.linspace(max(kl[0] for kl, _ in curves), min(kl[-1] for kl, _ in curves), 40)
    rewards = np.mean([np.interp(kls, kl, reward) for kl, reward in curves], axis=0)
    return list(zip(kls.tolist(), rewards.tolist(), strict=True))


def panel(name: str, runs: dict[str, list[Path]], best: list[tuple[int, float, float]]) -> Panel:
    """Reward over KL of one world: a curve for each rate, and best-of-n of the start."""
    lines = [Line("no rate" if rate == DEFAULT_RATE else f"lr {rate}", reward_over_kl(paths))
             for rate, paths in runs.items()]
    frontier = Line("best-of-n of the start", [(kl, reward) for _, kl, reward in best], "dots")
    return Panel(f"{name}: reward over KL", [*lines, frontier],
                 "KL to the start, nats a response")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(worlds.WORLDS), metavar="WORLD",
                        help=f"of {', '.join(worlds.WORLDS)} (all)")
    parser.add_argument("--rates", nargs="+", default=[DEFAULT_RATE, "1e-4", "3e-4", "1e-3"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--episodes", type=int, default=5120)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", dest="words")
    parser.add_argument("--limit", type=int, default=64, help="prompts of best-of-n (%(default)s)")
    parser.add_argument("--keep", type=Path, default=Path("runs/strangers"),
                        help="the folder of worlds and runs (%(default)s)")
    parser.add_argument("--svg", type=Path, help="write a picture of reward over KL")
    parser.add_argument("--again", action="store_true", help="make the runs anew")
    args = parser.parse_args()
    keep, panels = args.keep.absolute(), []
    for name in args.names:
        world, runs = worlds.made(name, keep / "worlds"), keep / name
        if args.again:
            shutil.rmtree(runs, ignore_errors=True)
        paths = {rate: [trained(world, seed, rate, args.episodes, args.words, runs)
                        for seed in args.seeds] for rate in args.rates}
        outcomes = {rate: [outcome(path, world) for path in made] for rate, made in paths.items()}
        rows = [row(rate, found) for rate, found in outcomes.items()]
        best = best_of(paths[args.rates[0]][0], runs, args.limit)
        rows += [[f"best of {n}", f"{reward:.3f}", f"{kl:.2f}", "", ""] for n, kl, reward in best]
        panels.append(panel(name, paths, best))
        before = fmean(one.before for found in outcomes.values() for one in found)
        print(f"**{name}**, {args.episodes} episodes, reward before {before:.3f}; "
              f"{(world / 'facts.json').read_text()}\n")
        print(table(["rate", "reward", "KL, nats", "length kept", "truth gained"], rows))
        print(f"\n{verdict(outcomes)}\n", flush=True)
    if args.svg:
        args.svg.write_bytes(draw(panels))
    print(provenance(f"seeds {args.seeds}, one thread a run; words: {' '.join(args.words) or '-'}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
