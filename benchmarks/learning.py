"""Does it learn? Runs the offline recipes over several seeds and writes the tables.

    python benchmarks/learning.py                       # both recipes, five seeds each
    python benchmarks/learning.py randomwalks --seeds 1 2 --set ppo.optimizer.lr=2e-4

Every run is a whole ``ppocli train`` in a process of its own. The tables say what each seed
reached and whether it holds the project's promise; the exit code is 1 if one does not.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from machine import provenance
from tables import marks, write_between

BY_EPISODES = 2500
"""randomwalks must have reached its level by then"""
REACH, FLOOR = 0.95, 0.93
SENTENCE_END = (".", "!", "?")


def run_recipe(recipe: str, seed: int, folder: Path, settings: list[str], threads: int, *,
               name: str | None = None, cwd: Path | None = None) -> Path:
    """Train once, ``cwd`` being the current folder; returns the run folder."""
    name = name or f"{recipe}-{seed}"
    words = [f"+recipe={recipe}", f"seed={seed}", f"run_name={name}", f"output_dir={folder}",
             "hardware.device=cpu", f"hardware.num_threads={threads}", *settings]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run([sys.executable, "-m", "ppocli", "train", *words], env=env, text=True,
                          capture_output=True, check=False, cwd=cwd)
    if done.returncode:
        raise SystemExit(f"{recipe} seed {seed} failed ({done.returncode}):\n{done.stderr[-2000:]}")
    return folder / name


def rows_of(path: Path) -> list[dict]:
    """The rows of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def randomwalks_row(run: Path) -> tuple[dict[str, float], bool]:
    """Optimality along the run, and whether the promise holds at every evaluation."""
    rows = rows_of(run / "metrics.jsonl")
    curve = {row["episode"]: row["eval/metrics/optimality"] for row in rows
             if "eval/metrics/optimality" in row}
    reached = [e for e, value in curve.items() if value >= REACH]
    first = reached[0] if reached else None
    lowest = min((v for e, v in curve.items() if first is not None and e >= first), default=0.0)
    found = {str(e): v for e, v in curve.items() if e % 512 == 0 or e == max(curve)}
    late = min(v for e, v in curve.items() if e >= min(BY_EPISODES, max(curve)))
    found[f"{REACH} at"] = float(first) if first is not None else float("nan")
    found["lowest after that"] = lowest
    found[f"lowest from {BY_EPISODES}"] = late
    # the stricter of two readings decides: never under the floor from the moment it is reached
    return found, first is not None and first <= BY_EPISODES and min(lowest, late) >= FLOOR


def repeats_4gram(text: str, times: int = 3) -> bool:
    """Whether some 4 words in a row occur ``times`` times."""
    words = text.split()
    grams = Counter(tuple(words[i:i + 4]) for i in range(len(words) - 3))
    return bool(grams) and max(grams.values()) >= times


def quickstart_row(run: Path) -> tuple[dict[str, float], bool]:
    """Figures before and after, and whether the promise holds."""
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    before, after = summary["eval_before"], summary["eval_after"]
    rows = rows_of(run / "samples.jsonl")
    samples = [r for r in rows if r["kind"] == "eval" and r["step"] == summary["steps"]]
    ended = [r["response"].rstrip().endswith(SENTENCE_END) or not r["finished"] for r in samples]
    found = {
        "reward before": before["reward_mean"], "reward after": after["reward_mean"],
        "kl after": after["kl_mean"],
        "length kept": after["response_tokens_mean"] / before["response_tokens_mean"],
        "distinct-2 kept": after["distinct_2"] / before["distinct_2"],
        "well ended": sum(ended) / len(ended),
        "repeating": float(sum(repeats_4gram(r["prompt"] + r["response"]) for r in samples)),
        "processor seconds": summary["profile"]["cpu_seconds"],
    }
    holds = (found["reward before"] <= 0.6 and found["reward after"] >= 0.95
             and found["kl after"] <= 2 and found["length kept"] >= 0.7
             and found["distinct-2 kept"] >= 0.5 and found["well ended"] >= 0.9
             and found["repeating"] == 0)
    return found, holds


def _shown(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.3f}"


def table(recipe: str, runs: dict[int, Path]) -> tuple[list[str], bool]:
    """Markdown lines of one recipe's table, and whether every seed holds."""
    judge = quickstart_row if recipe == "quickstart" else randomwalks_row
    rows = {seed: judge(run) for seed, run in runs.items()}
    names = list(next(iter(rows.values()))[0])
    cells = {s: [_shown(found[n]) for n in names] for s, (found, _) in rows.items()}
    lines = [f"| seed | {' | '.join(names)} | holds |", "|---" * (len(names) + 2) + "|"]
    lines += [f"| {s} | {' | '.join(row)} | {'yes' if rows[s][1] else 'NO'} |"
              for s, row in cells.items()]
    return lines, all(holds for _, holds in rows.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=["quickstart", "randomwalks"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--set", nargs="*", default=[], help="more words for every run")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side, one thread each")
    parser.add_argument("--out", type=Path, help="write the tables into this file, between its "
                        f"lines {' and '.join(marks('learning'))}")
    parser.add_argument("--keep", type=Path, help="keep the run folders here")
    args = parser.parse_args()
    extra = {"randomwalks": ["ppo.total_episodes=5000", "eval.every_steps=1"]}
    good, texts = True, []
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or Path(scratch)
        for recipe in args.recipes:
            words = extra.get(recipe, []) + args.set
            with ThreadPoolExecutor(args.jobs) as pool:
                done = pool.map(lambda seed, recipe=recipe, words=words: run_recipe(
                    recipe, seed, folder, words, 1), args.seeds)
                runs = dict(zip(args.seeds, done, strict=True))
            lines, holds = table(recipe, runs)
            good &= holds
            text = "\n".join([f"### {recipe}", "", *lines, ""])
            print(text, flush=True)
            texts.append(text)
    if args.out:
        write_between(args.out, "learning", "\n".join([*texts, provenance("one thread a run")]))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
