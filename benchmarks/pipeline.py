"""The whole road offline: SFT, a reward model, PPO; then SFT, PPO and best-of-n side by side.

    python benchmarks/pipeline.py                        # one seed: a minute or two, and a table
    python benchmarks/pipeline.py --seeds 1 2 3 4 5 --out docs/pipeline.md

The three recipes are run as users run them, each in a process of its own. With the first seed PPO
is run again without a KL term (``free``), to be over-optimised, and best-of-n is drawn from the SFT
model. The table says what a policy scores under the learned reward, which it was trained on, and
under the gold one, which labelled the pairs, beside the best of n of the SFT model at the same KL,
chosen by the learned reward. The exit code is 1 if a promise doesn't hold.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from machine import provenance
from tables import marks, table, write_between

from ppocli.evaluation.statistics import best_of_n, best_of_n_kl

ACCURACY, GAIN = 0.80, 0.25
BEST_OF = (1, 2, 4, 8, 16, 32, 64, 128)
FREE = ["run_name=free", "ppo.init_kl_coef=0", "ppo.optimizer.lr=2e-3",
        "ppo.scheduler.name=constant", "ppo.total_episodes=1280"]
SAMPLES = ["--num-samples", str(BEST_OF[-1]), "--limit", "32", "--against", "base"]

Curve = list[dict[str, float]]


def ppocli(words: list[str], folder: Path) -> None:
    """Run one command in ``folder``; it says on stderr how far it is."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "ppocli", "-q", *words], cwd=folder, env=env,
                          stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise SystemExit(f"ppocli {' '.join(words)} failed ({done.returncode})")


def cpu_seconds() -> float:
    """Of all commands that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def walk(seed: int, folder: Path, words: list[str], whole: bool) -> float:
    """Walk the road in ``folder``; returns CPU seconds.

    Args:
        whole: with what the table of over-optimisation needs.
    """
    folder.mkdir(parents=True)
    before, common = cpu_seconds(), [f"seed={seed}", "hardware.device=cpu", *words]
    steps = [["sft", "+recipe=pipeline_sft", *common],
             ["reward-model", "+recipe=pipeline_reward", *common],
             ["train", "+recipe=pipeline_ppo", *common]]
    if whole:
        steps += [["train", "+recipe=pipeline_ppo", *common, *FREE],
                  ["eval", "runs/pipeline-ppo", "--name", "best-of-n", "--show", "0", *SAMPLES]]
    for step in steps:
        print(f"seed {seed}: ppocli {' '.join(step)}", file=sys.stderr, flush=True)
        ppocli(step, folder)
    return cpu_seconds() - before


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def curve(run: Path) -> Curve:
    """What the evaluations of a PPO run found: step, KL and both rewards."""
    return [{"step": row["step"], "kl": row["eval/kl_mean"], "learned": row["eval/reward/learned"],
             "gold": row["eval/reward/gold"]}
            for row in rows_of(run / "metrics.jsonl") if "eval/kl_mean" in row]


def best_curve(samples: Path) -> Curve:
    """Best-of-n of the SFT model, chosen by the learned reward: KL and both rewards, means over
    prompts."""
    scores: dict[int, list[dict[str, float]]] = {}
    for row in rows_of(samples):
        if row["model"] == "against":
            scores.setdefault(row["prompt_index"], []).append(row["rewards"])

    def mean(n: int, name: str) -> float:
        return fmean(best_of_n([one["learned"] for one in rewards], n,
                               [one[name] for one in rewards]) for rewards in scores.values())

    return [{"n": n, "kl": best_of_n_kl(n), **{name: mean(n, name) for name in ("learned", "gold")}}
            for n in BEST_OF]


def at_kl(points: Curve, kl: float, name: str) -> float | None:
    """A reward of best-of-n at a KL, linear between its points; None beyond the last."""
    for low, high in pairwise(points):
        if kl <= high["kl"]:
            share = max(kl - low["kl"], 0.0) / (high["kl"] - low["kl"])
            return (1 - share) * low[name] + share * high[name]
    return None


def shown(value: float | None) -> str:
    return "beyond" if value is None else f"{round(value, 2) + 0.0:.2f}"  # no -0.00


def over_optimisation(folder: Path) -> str:
    """The table of one seed."""
    best = best_curve(folder / "runs/pipeline-ppo/eval/best-of-n/samples.jsonl")
    found = [(f"PPO, step {point['step']}" if point["step"] else "SFT", point)
             for point in curve(folder / "runs/pipeline-ppo")]
    found += [(f"without a KL term, step {point['step']}", point)
              for point in curve(folder / "runs/free") if point["step"]]
    rows = [[name, *(shown(point[key]) for key in ("kl", "learned", "gold")),
             *(shown(at_kl(best, point["kl"], key)) for key in ("learned", "gold"))]
            for name, point in found]
    rows += [[f"best of {point['n']}", shown(point["kl"]), "", "",
              *(shown(point[key]) for key in ("learned", "gold"))] for point in best[1:]]
    return table(["policy", "KL", "learned", "true", "best-of-n: learned", "best-of-n: true"], rows)


def promises(folder: Path) -> tuple[dict[str, float], bool]:
    """The figures of one seed that are promised, and whether they hold."""
    summary = json.loads((folder / "runs/pipeline-reward/summary.json").read_text(encoding="utf-8"))
    first, *_, last = curve(folder / "runs/pipeline-ppo")
    accuracy, gain = summary["eval_after"]["accuracy"], last["gold"] - first["gold"]
    return {"accuracy": accuracy, "true, SFT": first["gold"], "true, PPO": last["gold"],
            "gain": gain, "KL": last["kl"]}, accuracy >= ACCURACY and gain >= GAIN


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--set", nargs="*", default=[], help="more words for every run")
    parser.add_argument("--keep", type=Path, help="a folder to be made for the runs (default: "
                        "runs/pipeline-TIME)")
    parser.add_argument("--out", type=Path, help="write the tables into this file, between its "
                        f"lines {' and '.join(marks('pipeline'))}")
    args = parser.parse_args()
    folder = args.keep or Path("runs") / f"pipeline-{datetime.now():%Y%m%d-%H%M%S}"
    rows, good = [], True
    for seed in args.seeds:
        seconds = walk(seed, folder / f"seed-{seed}", args.set, whole=seed == args.seeds[0])
        found, holds = promises(folder / f"seed-{seed}")
        rows.append([str(seed), *map(shown, found.values()), f"{seconds:.0f}",
                     "yes" if holds else "NO"])
        good &= holds
    text = "\n\n".join([
        over_optimisation(folder / f"seed-{args.seeds[0]}"),
        table(["seed", *found, "CPU seconds", "holds"], rows), provenance("one thread a run")])
    print(text)
    print(f"the runs: {folder}", file=sys.stderr)
    if args.out:
        write_between(args.out, "pipeline", text)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
