"""A critic that is a second adapter on the policy's base, against a critic of its own.

    python benchmarks/value_adapter.py --out benchmarks/RESULTS.md
    python benchmarks/value_adapter.py guess_number --seeds 101 --set ppo.optimizer.value_lr=1e-3

The policy is the same LoRA adapter for both. Every run is a whole ``ppocli train`` in a process of
its own, with one thread; what has finished in ``--keep`` is not run again.
"""

import argparse
import sys
from pathlib import Path
from statistics import fmean

from critic import Result, late, result_of
from frontier import unfinished
from learning import run_recipe
from machine import provenance
from strangers import interval
from tables import marks, table, write_between

KINDS = {"model": "a model of its own", "adapter": "a second adapter"}
"""``model.value.kind`` -> what it is called"""
LORA = ("model.peft.type=lora", "model.peft.r=16", "model.peft.lora_alpha=32",
        "model.peft.target_modules=all-linear", "model.reference.kind=auto",
        "ppo.optimizer.lr=1e-2", "ppo.total_episodes=5120", "prompts.eval.repeat=2048")
RECIPES = {
    "randomwalks_lora": ((), {}),
    "guess_number": (LORA, {"model": ("ppo.optimizer.value_lr=2e-3",),
                            "adapter": ("ppo.optimizer.value_lr=3e-3",)}),
}
"""recipe -> what is typed for all, and for a kind of critic: its learning rate where it isn't the
recipe's"""
SAME = ("eval.every_steps=null", "checkpoint.every_steps=null", "checkpoint.keep_best=false")


def trained(recipe: str, kind: str, seed: int, words: list[str], keep: Path) -> Result:
    """Train once, unless that run is there."""
    run = keep / f"{recipe}-{kind}-{seed}"
    if unfinished(run):
        common, of_kind = RECIPES[recipe]
        run_recipe(recipe, seed, keep, [f"model.value.kind={kind}", *common, *of_kind.get(kind, ()),
                                        *SAME, *words], 1, name=run.name)
    return result_of(run, recipe, kind, "", seed)


def reward(one: Result) -> float:
    """Mean reward of the last quarter of the rollouts."""
    return late([each for _, each in one.curve])


def tables_of(results: dict[str, dict[str, list[Result]]]) -> str:
    """One table; ``results`` are by recipe and kind, in the order of the seeds."""
    rows = []
    for recipe, kinds in results.items():
        base = kinds["model"]
        for kind, runs in kinds.items():
            more = ["", ""] if kind == "model" else [
                interval([figure(one) - figure(other) for one, other in zip(runs, base, strict=True)
                          ], 4) for figure in (reward, lambda one: one.reward)]
            rows.append([
                f"`{recipe}`", KINDS[kind], f"{fmean(map(reward, runs)):.4f}", more[0],
                f"{fmean(one.reward for one in runs):.4f}", more[1],
                f"{fmean(late(one.kls) for one in runs):.2f}",
                f"{fmean(one.length for one in runs):.2f}",
                f"{fmean(late(one.explained) for one in runs):.2f}",
                f"{fmean(one.processor for one in runs):.0f}"])
    return table(["recipe", "critic", "reward", "difference", "evaluated", "difference", "KL, nats",
                  "length kept", "explained", "processor s"], rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=list(RECIPES), metavar="RECIPE",
                        help=f"of {', '.join(RECIPES)} (all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", dest="words")
    parser.add_argument("--keep", type=Path, default=Path("runs/value-adapter"),
                        help="the folder of the runs (%(default)s)")
    parser.add_argument("--out", type=Path, help="write the table into this file, between its "
                        f"lines {' and '.join(marks('value-adapter'))}")
    args = parser.parse_args()
    text = tables_of({recipe: {kind: [
        trained(recipe, kind, seed, args.words, args.keep.absolute()) for seed in args.seeds]
        for kind in KINDS} for recipe in args.recipes})
    text += "\n\n" + provenance(f"seeds {', '.join(map(str, args.seeds))}, one thread a run")
    print(text)
    if args.out:
        write_between(args.out, "value-adapter", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
