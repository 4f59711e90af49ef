"""``ppocli sft`` and ``ppocli reward-model`` beside TRL's SFTTrainer and RewardTrainer.

    python benchmarks/supervised.py --out benchmarks/RESULTS.md
    python benchmarks/supervised.py --workload sft-tiny --rounds 1

Both start from the same weights and see the same rows in the same order, in fp32 with the same
numbers of AdamW. Every run is a process of its own, in turn with the other one. What a step takes
is counted from the second one on, loading and saving left out.
"""

import argparse
import json
import multiprocessing
import os
import random
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from commands import PPOCLI, CommandFailedError, environment, run
from compare import Spread, shown
from fixtures import model_folder, words
from machine import hardware, other_work, versions
from systems import PEERS, SYSTEMS, Places, python_of, versions_of
from tables import marks, table, write_between
from workloads import SHAPES, TOKENIZER

ROOT = Path(__file__).resolve().parents[1]
PEER = "experimental"
"""whose environment has the TRL that is measured here"""
MICRO_BATCH = 8
"""rows (pairs) of a pass, TRL's default"""


@dataclass(frozen=True, slots=True)
class Work:
    """One row of the table."""

    title: str
    task: str
    shape: str
    steps: int
    lr: float
    """small, as for a model of real size: where a gradient is all rounding, Adam makes whole steps
    of it, so that weights differ by multiples of the rate while losses agree"""
    batch: int = 16
    prompt_tokens: tuple[int, int] = (8, 32)
    """shortest and longest"""
    answer_tokens: tuple[int, int] = (16, 128)
    """without the token that ends them"""


_TINY, _GPT2 = "4 layers, 256 wide", "GPT-2 124M"
WORKS = {
    "sft-tiny": Work(f"SFT, {_TINY}", "sft", "tiny", 20, 2e-5),
    "sft-tiny-equal": Work(f"SFT, {_TINY}, all rows equally long", "sft", "tiny", 20, 2e-5,
                           prompt_tokens=(20, 20), answer_tokens=(72, 72)),
    "reward-tiny": Work(f"reward model, {_TINY}", "reward_model", "tiny", 20, 2e-5),
    "sft-gpt2": Work(f"SFT, {_GPT2}", "sft", "gpt2", 4, 2e-5, batch=8),
    "reward-gpt2": Work(f"reward model, {_GPT2}", "reward_model", "gpt2", 4, 2e-5, batch=8),
}


@dataclass(frozen=True, slots=True)
class Job:
    """What ``peers/run_trl_supervised.py`` is told, as JSON."""

    task: str
    model: str
    tokenizer: str
    rows: str
    out: str
    """folder for ``peer.json`` and the trained ``model``"""
    batch: int
    micro_batch: int
    steps: int
    lr: float
    max_length: int
    threads: int
    seed: int
    options: Sequence[str] = ()
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    scheduler: str = "linear"
    max_grad_norm: float = 1.0
    center_coef: float = 0.01


@dataclass(frozen=True, slots=True)
class Took:
    """One run."""

    losses: list[float]
    norms: list[float]
    processor: float
    """seconds of all threads for the steps but the first"""
    wall: float
    peak_mib: float


def write_rows(work: Work, path: Path) -> int:
    """One epoch of rows; returns the tokens of all but the first step's."""
    vocabulary, draw = words(SHAPES[work.shape].vocabulary - 1), random.Random(3)

    def text(lengths: tuple[int, int]) -> str:
        return " ".join(draw.choices(vocabulary, k=draw.randint(*lengths)))

    rows: list[dict[str, Any]] = []
    for _ in range(work.batch * work.steps):
        answers = [f" {text(work.answer_tokens)}" for _ in range(2)]
        row = {"prompt": text(work.prompt_tokens)}
        rows.append(row | {"completion": answers[0]} if work.task == "sft" else row | {
            "chosen": answers[0], "rejected": answers[1], "margin": draw.choice([0.0, 0.5, 1.0])})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    texts = [row["prompt"] + row[name] for row in rows[work.batch:]
             for name in ("completion", "chosen", "rejected") if name in row]
    return sum(len(one.split()) + 1 for one in texts)


def ours(job: Job, more: Sequence[str] = ()) -> Took:
    """One run of ppocli, its folder ``run`` in ``job.out``."""
    of, out = job.task, Path(job.out)
    command = "sft" if of == "sft" else "reward-model"
    given = [
        f"model.path={job.model}", f"model.tokenizer_path={job.tokenizer}",
        f"data.path={job.rows}", "data.shuffle=false", f"data.max_length={job.max_length}",
        f"{of}.num_updates={job.steps}", f"{of}.mini_batch_size={job.batch}",
        f"{of}.micro_batch_size={job.micro_batch}", f"{of}.max_grad_norm={job.max_grad_norm}",
        f"{of}.optimizer.lr={job.lr}", f"{of}.optimizer.betas={list(job.betas)}",
        f"{of}.optimizer.eps={job.eps}", f"{of}.scheduler.name={job.scheduler}",
        *([f"reward_model.center_coef={job.center_coef}"] if of != "sft" else []),
        "eval.at_start=false", "eval.every_steps=null", "checkpoint.every_steps=null",
        "tracking.trackers=[]", f"seed={job.seed}", "hardware.device=cpu",
        "hardware.precision=fp32", f"hardware.num_threads={job.threads}"]
    took = run([PPOCLI, command, *given, *more, "run_name=run", f"output_dir={out}"], out / "log",
               environment(job.threads))
    lines = (out / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    told = json.loads((out / "run/summary.json").read_text(encoding="utf-8"))
    between = told["profile"]["phases"].get("between", {"seconds": 0.0, "cpu_seconds": 0.0})
    return Took([row["loss/total"] for row in rows], [row["policy/grad_norm"] for row in rows],
                sum(row["cpu/step"] for row in rows[1:]) + between["cpu_seconds"],
                sum(row["time/step"] for row in rows[1:]) + between["seconds"], took.peak_mib)


def theirs(job: Job, python: str) -> Took:
    """One run of TRL."""
    out = Path(job.out)
    (out / "job.json").write_text(json.dumps(asdict(job)), encoding="utf-8")
    took = run([python, str(PEERS / "run_trl_supervised.py"), str(out / "job.json")], out / "log",
               environment(job.threads))
    steps = json.loads((out / "peer.json").read_text(encoding="utf-8"))["steps"]
    return Took([one["loss"] for one in steps], [one["grad_norm"] for one in steps],
                sum(one["processor"] for one in steps[1:]), sum(one["wall"] for one in steps[1:]),
                took.peak_mib)


def weights_apart(one: Path, other: Path) -> float:
    """The largest difference between any two weights of two saved models."""
    from safetensors import safe_open

    with safe_open(one, "numpy") as left, safe_open(other, "numpy") as right:
        if set(left.keys()) != set(right.keys()):
            raise SystemExit(f"not the same weights: {set(left.keys()) ^ set(right.keys())}")
        return max(float(abs(left.get_tensor(name) - right.get_tensor(name)).max())
                   for name in left.keys())  # noqa: SIM118


def measure(work: Work, where: Places, args: argparse.Namespace) -> list[str]:
    """The row of a workload."""
    model = model_folder(work.shape, where.fixtures)
    found: dict[str, list[Took]] = {"ours": [], "theirs": []}
    with tempfile.TemporaryDirectory(dir=where.build, prefix="run-") as folder:
        scratch = Path(folder)
        tokens = write_rows(work, scratch / "rows.jsonl")
        job = Job(work.task, str(model), str(model / TOKENIZER), str(scratch / "rows.jsonl"),
                  str(scratch), work.batch, MICRO_BATCH, work.steps, work.lr,
                  SHAPES[work.shape].positions,
                  args.threads, args.seed, args.options)
        start = job.model
        if work.task == "reward_model":  # ours makes the head that both start from
            (scratch / "start").mkdir()
            ours(replace(job, out=str(scratch / "start"), lr=0.0, steps=1))
            start = str(scratch / "start/run/model")
        apart = 0.0
        for number in range(args.rounds):
            outs = {name: scratch / f"{name}-{number}" for name in found}
            for name in sorted(found, reverse=bool(number % 2)):
                outs[name].mkdir()
                one = replace(job, out=str(outs[name]))
                took = ours(one, args.words) if name == "ours" else \
                    theirs(replace(one, model=start), python_of(SYSTEMS[PEER], where))
                found[name].append(took)
                print(f"{work.title}, round {number + 1}, {name}: {took.processor:.1f} s of "
                      f"processor, {took.peak_mib:.0f} MiB", file=sys.stderr, flush=True)
            with multiprocessing.get_context("spawn").Pool(1) as pool:  # this process stays small
                apart = max(apart, pool.apply(weights_apart, tuple(
                    outs[name] / f"{path}model.safetensors"
                    for name, path in (("ours", "run/model/"), ("theirs", "model/")))))
    return row_of(work, found, apart, tokens)


def row_of(work: Work, found: dict[str, list[Took]], apart: float, tokens: int) -> list[str]:
    """The cells of a row."""
    rounds = list(zip(found["ours"], found["theirs"], strict=True))
    losses = max(abs(a - b) for one, other in rounds
                 for a, b in zip(one.losses, other.losses, strict=True))
    norms = max(abs(a / b - 1) for one, other in rounds
                for a, b in zip(one.norms, other.norms, strict=True))
    unit = tokens if work.task == "sft" else work.batch * (work.steps - 1)
    ratio = Spread.of([other.processor / one.processor for one, other in rounds])
    wall = Spread.of([other.wall / one.wall for one, other in rounds])
    cells = [work.title, f"{losses:.1e}", f"{norms:.1e}", f"{apart:.1e}"]
    for runs in found.values():
        cells.append(shown(unit / statistics.median(one.processor for one in runs)))
    cells += [str(ratio), str(wall)]
    cells += [f"{statistics.median(one.peak_mib for one in runs):.0f}" for runs in found.values()]
    return cells


def report(rows: list[list[str]], where: Places, args: argparse.Namespace, busy: float) -> str:
    """The table, with what it was measured on."""
    head = ["workload", "losses apart by", "gradient norms, relative", "weights",
            "ppocli, tokens or pairs a processor second", "TRL", "ratio", "of wall time",
            "ppocli, peak MiB", "TRL"]
    return "\n\n".join([
        table(head, rows), f"`{shlex.join(['python', 'benchmarks/supervised.py', *sys.argv[1:]])}`",
        f"{date.today()}. {hardware()}. {args.threads} thread(s), {args.rounds} round(s). "
        f"{other_work(busy)} ppocli: {versions()}; TRL: {versions_of(PEER, where)}."])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", choices=WORKS, metavar="NAME",
                        default=list(WORKS), help=f"of {', '.join(WORKS)} (all)")
    parser.add_argument("--build", type=Path, default=ROOT / "build",
                        help="folder of fixtures and environments (%(default)s)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--options", nargs="*", default=[], metavar="NAME",
                        choices=["padding_free", "checkpointing"], help="of TRL's run")
    parser.add_argument("--set", nargs="*", default=[], dest="words", metavar="KEY=VALUE",
                        help="more words for ppocli")
    parser.add_argument("--out", type=Path, help="write the table into this file, between its "
                        f"lines {' and '.join(marks('supervised'))}")
    args = parser.parse_args()
    where, busy = Places(args.build.resolve() / "bench", Path(), {}), os.getloadavg()[0]
    where.build.mkdir(parents=True, exist_ok=True)
    try:
        text = report([measure(WORKS[name], where, args) for name in args.workload], where, args,
                      busy)
    except CommandFailedError as error:
        raise SystemExit(str(error)) from error
    print(text)
    if args.out:
        write_between(args.out, "supervised", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
