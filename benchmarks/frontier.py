"""What reward a recipe's training buys with how much KL, over coefficients, beside best-of-n.

    python benchmarks/frontier.py --out docs/less-kl.md --svg docs/frontier.svg
    python benchmarks/frontier.py randomwalks --coefs 0.05 0.02 --seeds 1 2

Every run is a whole ``ppocli train`` in a process of its own, which differs from the recipe in
``ppo.init_kl_coef`` and the seed alone. Best-of-n is drawn from the model that each seed started
from, by ``ppocli eval --frontier``, and its KL is the bound ``log n - (n-1)/n``. What has finished
in ``--keep`` is not run again.
"""

import argparse
import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from learning import run_recipe
from machine import provenance
from pipeline import ppocli
from tables import marks, table, write_between

from ppocli.publish.curves import Line, Panel, draw


@dataclass(frozen=True, slots=True)
class Work:
    """A recipe and the coefficients that span its frontier."""

    recipe: str
    coefs: tuple[float, ...]
    before: tuple[tuple[str, str], ...] = ()
    """commands, and the runs of theirs that the recipe builds on"""


WORKS = {
    "quickstart": Work("quickstart", (0.2, 0.1, 0.05, 0.02)),
    "randomwalks": Work("randomwalks", (0.2, 0.08, 0.02)),
    "pipeline": Work("pipeline_ppo", (0.4, 0.2, 0.1), (
        ("sft", "pipeline-sft"), ("reward-model", "pipeline-reward"))),
}


@dataclass(frozen=True, slots=True)
class Bought:
    """What one run came to."""

    kl: float
    reward: float
    length: float
    """mean response tokens as a share of the start's"""


def bought(run: Path) -> Bought:
    """Of a finished run."""
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    before, after = summary["eval_before"], summary["eval_after"]
    length = after["response_tokens_mean"] / before["response_tokens_mean"]
    return Bought(after["kl_mean"], after["reward_mean"], length)


def best_of(run: Path, folder: Path, limit: int) -> list[tuple[int, float, float]]:
    """(n, KL, reward) of best-of-n of the model that a run started from."""
    told = folder / "best-of-n/eval.json"
    if not told.exists():
        ppocli(["eval", str(run), "--frontier", "--limit", str(limit), "--show", "0",
                "--name", "best-of-n", "--output", str(folder)], folder)
    found = json.loads(told.read_text(encoding="utf-8"))["frontier"]
    return [(point["n"], point["kl"], point["reward"]) for point in found["points"]]


def best_of_seeds(places: list[Path], run: str, limit: int) -> list[tuple[int, float, float]]:
    """The mean over seeds: each may have a reward model of its own."""
    found = [best_of(place / run, place, limit) for place in places]
    return [(points[0][0], points[0][1], fmean(reward for _, _, reward in points))
            for points in zip(*found, strict=True)]


def unfinished(run: Path) -> bool:
    """Whether a run has still to be made; what is left of one that was cut off is removed."""
    finished = (run / "summary.json").exists()
    if not finished:
        shutil.rmtree(run, ignore_errors=True)
    return not finished


def measured(work: Work, seeds: list[int], words: list[str], folder: Path, jobs: int
             ) -> dict[float, list[Bought]]:
    """Coefficient -> what each seed's run came to."""
    def one(at: tuple[float, int]) -> Bought:
        coef, seed = at
        place = folder / f"seed-{seed}"
        run = place / f"runs/at-{coef}"
        if unfinished(run):
            run_recipe(work.recipe, seed, place / "runs", [f"ppo.init_kl_coef={coef}", *words], 1,
                       name=run.name, cwd=place)
        print(f"{work.recipe} seed {seed} coefficient {coef}: {bought(run)}", file=sys.stderr,
              flush=True)
        return bought(run)

    for seed in seeds:
        place = folder / f"seed-{seed}"
        place.mkdir(parents=True, exist_ok=True)
        for command, name in work.before:
            if unfinished(place / "runs" / name):
                ppocli([command, f"+recipe={name.replace('-', '_')}", f"seed={seed}",
                        "hardware.device=cpu"], place)
    with ThreadPoolExecutor(jobs) as pool:
        found = list(pool.map(one, [(coef, seed) for coef in work.coefs for seed in seeds]))
    size = len(seeds)
    return {coef: found[i * size:(i + 1) * size] for i, coef in enumerate(work.coefs)}


def _range(values: list[float], digits: int) -> str:
    return f"{fmean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def rows_of(found: dict[float, list[Bought]], best: list[tuple[int, float, float]]
            ) -> list[list[str]]:
    """The rows of one table."""
    rows = [[f"training, coefficient {coef:g}", _range([run.kl for run in runs], 2),
             _range([run.reward for run in runs], 3), _range([run.length for run in runs], 2)]
            for coef, runs in found.items()]
    return rows + [[f"best of {n}", f"{kl:.2f}", f"{reward:.3f}", ""]
                   for n, kl, reward in best if n > 1]


def panel(name: str, found: dict[float, list[Bought]], best: list[tuple[int, float, float]]
          ) -> Panel:
    """Reward over KL."""
    mean = sorted((fmean(run.kl for run in runs), fmean(run.reward for run in runs))
                  for runs in found.values())
    dots = [(run.kl, run.reward) for runs in found.values() for run in runs]
    lines = [Line("training, mean over seeds", mean), Line("each run", dots, "scatter"),
             Line("best-of-n of the start", [(kl, reward) for _, kl, reward in best])]
    return Panel(f"{name}: reward over KL", lines, "KL to the start, nats a response")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="*", default=list(WORKS), metavar="NAME",
                        help=f"of {', '.join(WORKS)} (all)")
    parser.add_argument("--coefs", nargs="+", type=float, help="in place of the usual ones")
    parser.add_argument("--seeds", nargs="+", type=int, default=[101, 102, 103, 104, 105])
    parser.add_argument("--set", nargs="*", default=[], help="more words for every run")
    parser.add_argument("--limit", type=int, default=32, help="prompts of best-of-n (%(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side, one thread each")
    parser.add_argument("--out", type=Path, help="write the tables into this file, between its "
                        f"lines {' and '.join(marks('frontier'))}")
    parser.add_argument("--svg", type=Path, help="write a picture of them")
    parser.add_argument("--keep", type=Path, default=Path("runs/frontier"),
                        help="the runs' folder (%(default)s)")
    args = parser.parse_args()
    texts, panels = [], []
    for name in args.works:
        work = WORKS[name]
        if args.coefs:
            work = Work(work.recipe, tuple(args.coefs), work.before)
        folder = args.keep.absolute() / name
        found = measured(work, args.seeds, args.set, folder, args.jobs)
        best = best_of_seeds([folder / f"seed-{seed}" for seed in args.seeds],
                             f"runs/at-{work.coefs[0]}", args.limit)
        text = table(["", "KL, nats", "reward", "length kept"], rows_of(found, best))
        print(f"{name}\n\n{text}\n", flush=True)
        texts.append(f"**{name}**\n\n{text}")
        panels.append(panel(name, found, best))
    if args.svg:
        args.svg.write_bytes(draw(panels))
    if args.out:
        seeds = f"seeds {', '.join(map(str, args.seeds))}; one thread a run"
        write_between(args.out, "frontier", "\n\n".join([*texts, provenance(seeds)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
