"""How far can each kind of training get on the random walks? Its ceiling, without PPO.

    python benchmarks/ceilings.py "" model.num_layers_unfrozen=2 --seeds 1 2 3

Trains with ``ppocli sft`` on every shortest walk from every start, to convergence, and scores the
result as the recipe randomwalks does: 25 walks from each start at temperature 1, and the likeliest
one. What a kind then lacks to 1, it can't express; what PPO lacks to this, PPO did not find.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean

from ppocli.rewards.randomwalks import GOAL, SHORTEST, SUCCESSORS

RATES = (1e-3, 1e-2)
"""learning rates; the better one counts"""
SCORED = ("--reward", "randomwalks", "--prompts", "builtin:randomwalks-prompts",
          "reward.metric_fn=ppocli.rewards.randomwalks:metrics", "generation.max_new_tokens=9")


def shortest_walks(node: str) -> list[str]:
    """Every shortest walk to the goal."""
    nearer = [after for after in SUCCESSORS[node] if SHORTEST[after] < SHORTEST[node]]
    return [node + rest for after in nearer for rest in shortest_walks(after)] or [GOAL]


def write_walks(path: Path, rows_each: int = 42) -> None:
    """Shortest walks as rows for ``ppocli sft``, as many from each start: 1, 2, 3 or 7 different
    ones, which divide 42."""
    walks = {start: shortest_walks(start) for start in SUCCESSORS if start != GOAL}
    path.write_text("".join(
        json.dumps({"prompt": start, "completion": found[place % len(found)][1:]}) + "\n"
        for start, found in walks.items() for place in range(rows_each)), encoding="utf-8")


def ppocli(folder: Path, *words: str) -> str:
    """What a command in a process of its own prints."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "ppocli", *words], cwd=folder, env=env, text=True,
                          capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"ppocli {' '.join(words)} failed ({done.returncode}):\n"
                         f"{done.stderr[-2000:]}")
    return done.stdout


def ceiling(words: list[str], seed: int, folder: Path) -> tuple[float, float]:
    """Optimality of sampled walks and of the likeliest ones, after training with ``words``."""
    return max(_trained(words, seed, rate, folder) for rate in RATES)


def _trained(words: list[str], seed: int, rate: float, folder: Path) -> tuple[float, float]:
    name = f"ceiling-{abs(hash(tuple(words)))}-{seed}-{rate}"
    write_walks(folder / f"{name}.jsonl")
    ppocli(folder, "sft", "model=randomwalks", f"data.path={name}.jsonl", "sft.mini_batch_size=84",
           "sft.num_updates=600", f"sft.optimizer.lr={rate}", "sft.scheduler.name=cosine",
           "eval.every_steps=null", "checkpoint.every_steps=null", f"seed={seed}",
           f"run_name={name}", "hardware.device=cpu", "hardware.num_threads=1", *words)
    return tuple(json.loads(ppocli(folder, "eval", name, *SCORED, *how, "--json"))
                 ["figures"]["metrics/optimality"]
                 for how in (("--num-samples", "25"), ("generation.do_sample=false",)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="+", help="words of a kind, in one argument")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for kind in args.kinds:
            found = [ceiling(kind.split(), seed, Path(scratch)) for seed in args.seeds]
            sampled, greedy = (mean(figure) for figure in zip(*found, strict=True))
            print(f"{sampled:.3f} sampled, {greedy:.3f} greedy: {kind or 'all weights'}",
                  flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
