"""What a critic is worth: GAE against RLOO, GRPO and REINFORCE++ at equal samples.

    python benchmarks/critic.py --out docs/critic.md --svg docs/critic.svg
    python benchmarks/critic.py guess_number --estimators critic rloo

Four worlds (``worlds.py``, and the recipe guess_number). All estimators have their advantages
whitened and, but for guess_number, the KL in the loss with one coefficient and estimate, so that
the advantages are what they differ in. Their rate is steered (``ppo.step_kl``), for all with three
lengths of a step, each with a seed of its own: no estimator has a rate that suits it better than
the others, and an interval covers seeds and rates.

The runs follow one another in one process with one thread; each is a line of ``results.jsonl``, and
what is there is not run again.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import fmean

import numpy as np
import worlds
from learning import rows_of
from machine import provenance
from strangers import interval
from tables import marks, table, write_between

import ppocli
from ppocli.publish.curves import Line, Panel, draw

PAIRS = (("0.5", 2), ("1", 4), ("2", 3))
"""lengths of a step, in nats a response, and the seed of each"""
SAME = ("ppo.whiten_advantages=true", "ppo.optimizer.lr=1e-3", "eval.at_start=false",
        "eval.every_steps=null", "checkpoint.every_steps=null", "checkpoint.keep_best=false",
        "hardware.num_threads=1", "hardware.device=cpu")
KL = ("ppo.kl_in=loss", "ppo.kl_estimator=k3+", "ppo.init_kl_coef=0.2")
LOO = ("ppo.advantage=rloo", "ppo.n=4")
ESTIMATORS = {
    "critic": ("GAE, lambda 1", ("ppo.gamma=1", "ppo.lam=1")),
    "reinforce_pp": ("REINFORCE++", ("ppo.advantage=reinforce_pp", "ppo.gamma=1")),
    "critic-lower": ("GAE, lower lambda", ()),
    "critic-untrained": ("lower lambda, values stay 0", ("ppo.vf_coef=0",)),
    "rloo": ("RLOO of 4", ("ppo.advantage=rloo", "ppo.n=4")),
    "grpo": ("GRPO of 4", ("ppo.advantage=grpo", "ppo.n=4")),
    "critic-n4": ("GAE, lambda 1, 4 of each prompt", ("ppo.gamma=1", "ppo.lam=1", "ppo.n=4")),
    "critic-rate": ("GAE, lambda 1, values at a rate of their own", (
        "ppo.gamma=1", "ppo.lam=1", "ppo.optimizer.value_lr=1e-2")),
    "critic-better": ("GAE, lower lambda, values at a rate of their own", (
        "ppo.lam_value=1", "ppo.optimizer.value_lr=1e-2")),
}
"""name -> what it is called, and what is typed for it"""
MAIN = tuple(ESTIMATORS)[:6]
LOWER = ("critic-lower", "critic-better", "critic-untrained")
"""those with the world's lower gamma and lambda"""
WITHOUT = {"critic": "reinforce_pp", "critic-lower": "critic-untrained"}
"""with a critic -> what differs from it in the values alone, which are 0"""


@dataclass(frozen=True, slots=True)
class Task:
    """A world and how long it is trained on."""

    episodes: int
    words: tuple[str, ...]
    lower: tuple[str, ...]
    """gamma and lambda that suit a critic"""


TASKS = {
    "guess_number": Task(5120, ("+recipe=guess_number", "ppo.chunk_size=256"), (
        "ppo.gamma=0.9", "ppo.lam=0.5")),
    "critiques": Task(1024, (*KL, "ppo.num_rollouts=64", "ppo.ppo_epochs=2"), ("ppo.lam=0.95",)),
    "nim": Task(2560, (*KL, "prompts.eval.repeat=256"), (
        "ppo.gae_unit=turn", "ppo.lam=0.5")),
    "sentences": Task(1280, KL, ("ppo.lam=0.95",)),
}


@dataclass(frozen=True, slots=True)
class Result:
    """What one run came to."""

    world: str
    estimator: str
    step_kl: str
    seed: int
    reward: float
    """of the evaluation after training"""
    kl: float | None
    """nats a response; None without a reference"""
    length: float
    """mean response tokens of the evaluation as a share of the first rollout's, the start's"""
    curve: list[tuple[int, float]]
    """episodes, and the mean reward of the rollout that ends there"""
    explained: list[float]
    """share of the variance of returns that the critic explains, in each step; empty without"""
    processor: float
    """seconds of all steps, evaluations and loading apart"""
    kls: list[float]
    """nats a response of each rollout; empty without a reference"""


def words_of(name: str, keep: Path) -> list[str]:
    """What is typed for a world, whoever estimates."""
    own = [] if name == "guess_number" else worlds.words_of(
        name, worlds.made(name, keep / "worlds"))
    task = TASKS[name]
    return [*task.words[:1], *own, *task.words[1:], *SAME, f"ppo.total_episodes={task.episodes}"]


def trained(name: str, estimator: str, step_kl: str, seed: int, keep: Path) -> Result:
    """Train once."""
    task = TASKS[name]
    typed = (*(task.lower if estimator in LOWER else ()), *ESTIMATORS[estimator][1])
    folder = keep / "runs" / name
    run_name = f"{estimator}-{step_kl}-{seed}"
    shutil.rmtree(folder / run_name, ignore_errors=True)
    run = ppocli.train([*words_of(name, keep), *typed, f"ppo.step_kl={step_kl}", f"seed={seed}",
                        f"output_dir={folder}", f"run_name={run_name}"])
    return result_of(run.run_dir, name, estimator, step_kl, seed)


def result_of(run: Path, name: str, estimator: str, step_kl: str, seed: int) -> Result:
    """Of a finished run."""
    rows = [row for row in rows_of(run / "metrics.jsonl") if "reward/mean" in row]
    after = json.loads((run / "summary.json").read_text())["eval_after"]
    return Result(name, estimator, step_kl, seed, after["reward_mean"], after.get("kl_mean"),
                  after["response_tokens_mean"] / rows[0]["rollout/response_tokens_mean"],
                  [(row["episode"], row["reward/mean"]) for row in rows],
                  [row["val/var_explained"] for row in rows if "val/var_explained" in row],
                  sum(row["cpu/step"] for row in rows),
                  [row["objective/kl"] for row in rows if row["objective/kl"] is not None])


def results_of(keep: Path) -> list[Result]:
    """Of all runs that have ended."""
    path = keep / "results.jsonl"
    return [Result(**json.loads(line)) for line in path.read_text().splitlines()] \
        if path.is_file() else []


def make(keep: Path, plan: Iterable[tuple[str, str, tuple[str, int]]]) -> None:
    """Train, and write a line for each run that ends."""
    for name, estimator, (step_kl, seed) in plan:
        result = trained(name, estimator, step_kl, seed, keep)
        with (keep / "results.jsonl").open("a", encoding="utf-8") as out:
            out.write(json.dumps(asdict(result)) + "\n")


def late(values: list[float]) -> float:
    """Mean of the last quarter."""
    return fmean(values[-(len(values) // 4):])


def at_kl(one: Result, level: float) -> float:
    """The mean reward of rollouts where their KL reaches a level, both averaged over three."""
    kls, rewards = (np.convolve(values, np.ones(3) / 3, "valid")
                    for values in (one.kls, [reward for _, reward in one.curve]))
    return float(np.interp(level, np.maximum.accumulate(kls), rewards))


Runs = dict[tuple[str, int], Result]
"""of one estimator in one world, by length of a step and seed"""


def _reward(one: Result) -> float:
    return late([reward for _, reward in one.curve])


def _more(runs: Runs, base: Runs) -> str:
    """How much more reward than the runs of ``base`` with the same length of a step and seed."""
    differences = [_reward(runs[pair]) - _reward(base[pair]) for pair in runs if pair in base]
    return interval(differences, 3) if len(differences) > 2 else ""


def _row(estimator: str, of_world: dict[str, Runs], level: float) -> list[str]:
    """A line of a world's table; ``level`` is a KL that all runs reach, 0 without a reference."""
    runs = of_world[estimator]
    found = list(runs.values())
    explained = [late(one.explained) for one in found if one.explained]
    return [ESTIMATORS[estimator][0],
            *(f"{_reward(runs[pair]):.3f}" if pair in runs else "" for pair in PAIRS),
            f"{fmean(one.reward for one in found):.3f}",
            _more(runs, of_world.get("rloo", {})) if estimator != "rloo" else "",
            _more(runs, of_world.get(WITHOUT.get(estimator, ""), {})),
            *((f"{fmean(late(one.kls) for one in found):.1f}",
               f"{fmean(at_kl(one, level) for one in found):.3f}") if level else ()),
            f"{fmean(one.length for one in found):.2f}",
            f"{fmean(explained):.2f}" if explained and estimator != "critic-untrained" else "",
            f"{fmean(one.processor for one in found):.0f}"]


def tables_of(found: list[Result]) -> str:
    """A table of each world."""
    texts = []
    for name, task in TASKS.items():
        if not (of_world := [one for one in found if one.world == name]):
            continue
        runs = {estimator: {(one.step_kl, one.seed): one for one in of_world
                            if one.estimator == estimator} for estimator in ESTIMATORS}
        level = min((late(one.kls) for one in of_world if one.kls), default=0.0)
        head = ["", *(f"step {step}, seed {seed}" for step, seed in PAIRS), "evaluated",
                "more than RLOO", "more than without values",
                *(("KL, nats", f"reward at {level:.1f} nats") if level else ()),
                "length kept", "explained", "processor s"]
        before = fmean(one.curve[0][1] for one in of_world)
        lower = " ".join(task.lower)
        texts.append(f"**{name}**, {task.episodes} episodes, reward before {before:.3f}; lower "
                     f"lambda: `{lower}`\n\n" + table(head, [
                         _row(estimator, runs, level) for estimator in MAIN if runs[estimator]]))
    return "\n\n".join(texts)


def panels_of(found: list[Result]) -> list[Panel]:
    """Mean reward of the rollouts over episodes, one panel for each world, of the estimators that
    have all runs."""
    panels = []
    for name in TASKS:
        lines = []
        for estimator in MAIN:
            curves = [one.curve for one in found if (one.world, one.estimator) == (name, estimator)
                      and (one.step_kl, one.seed) in PAIRS]
            if len(curves) == len(PAIRS):
                lines.append(Line(ESTIMATORS[estimator][0], [
                    (points[0][0], fmean(reward for _, reward in points))
                    for points in zip(*curves, strict=True)], run=MAIN.index(estimator)))
        if lines:
            panels.append(Panel(f"{name}: reward", lines, "episodes"))
    return panels


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(TASKS), metavar="WORLD",
                        help=f"of {', '.join(TASKS)} (all)")
    parser.add_argument("--estimators", nargs="+", default=list(MAIN), choices=ESTIMATORS)
    parser.add_argument("--keep", type=Path, default=Path("runs/critic"),
                        help="the folder of worlds, runs and results.jsonl (%(default)s)")
    parser.add_argument("--tables", action="store_true", help="make no run")
    parser.add_argument("--out", type=Path, help="write the tables into this file, between its "
                        f"lines {' and '.join(marks('critic'))}")
    parser.add_argument("--svg", type=Path, help="write a picture of them")
    args = parser.parse_args()
    keep = args.keep.absolute()
    found = results_of(keep)
    if not args.tables:
        there = {(one.world, one.estimator, one.step_kl, one.seed) for one in found}
        make(keep, (one for one in product(args.names, args.estimators, PAIRS)
                    if (*one[:2], *one[2]) not in there))
        found = results_of(keep)
    text = tables_of(found)
    print(text)
    if args.svg:
        args.svg.write_bytes(draw(panels_of(found)))
    if args.out:
        lengths = ", ".join(f"{step} with seed {seed}" for step, seed in PAIRS)
        write_between(args.out, "critic", f"{text}\n\n" + provenance(
            f"one thread a run, other work on the machine; `ppo.step_kl` {lengths}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
