"""Measurements of ours alone: cost against size, memory over a long run, the optimize phase against
the machine, and the quickstart."""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from commands import PPOCLI, CommandFailedError, environment, run
from compare import Outcome, Spread, in_turn, of_rounds, ratio, shown
from fixtures import facts, model_folder, prompt_file
from floor import floor_of
from systems import Places, Process, measure
from tables import table
from workloads import WORKLOADS, Workload

LINEAR = 1.05
"""cost may grow so much faster than the work"""
EARLY, LATE = 50, 500
"""steps between which memory must not grow"""
QUICKSTART_SECONDS = 60.0


def growth(name: str, places: Places, *, threads: int, rounds: int, words: Sequence[str]) -> str:
    """What twice the batch, twice the tokens and ten times the steps cost."""
    base = WORKLOADS[name]
    kinds = {
        "as it is": base,
        "batch x 2": replace(base, batch=2 * base.batch),
        "tokens x 2": replace(base, new_tokens=2 * base.new_tokens),
        "steps x 10": replace(base, iterations=10 * base.iterations),
    }
    found = in_kinds(kinds, places, threads=threads, rounds=rounds, words=words)
    plain = found["as it is"]
    lines = []
    for kind, outcome in found.items():
        # an iteration of a longer run costs the same; one of twice the work twice as much
        limit = LINEAR * (1 if kind in ("as it is", "steps x 10") else 2)
        times = ratio(outcome, plain, "processor")
        lines.append([kind, str(Spread.of(of_rounds(outcome, "processor"))),
                      str(Spread.of(of_rounds(outcome, "wall"))), str(times), shown(limit),
                      "yes" if times.median <= limit else "NO"])
    return table(["", "processor s an iteration", "wall s", "times as much", "at most", "holds"],
                 lines) + f"\n\n{base.title}, batch {base.batch}, {base.new_tokens} tokens, " \
        f"{base.iterations} counted iterations, {threads} thread(s), {rounds} round(s)."


def in_kinds(kinds: Mapping[str, Workload], places: Places, *, threads: int, rounds: int,
             words: Sequence[str]) -> dict[str, Outcome]:
    """Ours on several workloads in turn.

    Raises:
        SystemExit: one of them failed.
    """
    found = in_turn(list(kinds), rounds, lambda kind, number: measure(
        "ours", kinds[kind], places, threads=threads, seed=number, words=words))
    for kind, outcome in found.items():
        if outcome.failed:
            raise SystemExit(f"{kind}: {outcome.failed}")
    return found


def memory(places: Places, *, threads: int, words: Sequence[str]) -> str:
    """Resident memory after 50 and after 500 steps of a small workload."""
    work = replace(WORKLOADS["tiny"], batch=16, mini_batch=8, new_tokens=16, epochs=1, warmup=0,
                   iterations=LATE)
    took = _once(work, places, threads, words)
    early, late = (statistics.median(took.resident[at - 5:at + 1]) for at in (EARLY, LATE))
    return table(
        [f"MiB after {EARLY} steps", f"after {LATE}", "growth", "peak of the process"],
        [[f"{early:.1f}", f"{late:.1f}", f"{100 * (late / early - 1):+.2f} %",
          f"{took.peak_mib:.0f}"]]) + \
        f"\n\n{work.title}, batch {work.batch}, {work.new_tokens} tokens, one epoch; medians of " \
        "six steps."


def _once(work: Workload, places: Places, threads: int, words: Sequence[str]) -> Process:
    try:
        return measure("ours", work, places, threads=threads, seed=0, words=words)
    except CommandFailedError as error:
        raise SystemExit(str(error)) from error


def machine_rates(work: Workload, threads: int) -> dict[str, float]:
    """Operations and bytes a second of this machine, see ``floor.rates``."""
    # in a process of its own: this one stays small, see commands.run
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("floor.py")), f"--threads={threads}",
         f"--device={work.device}", f"--precision={work.precision}"],
        env=environment(threads), check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def floor(name: str, places: Places, *, threads: int, rounds: int, words: Sequence[str]) -> str:
    """An iteration against the least that it can take, and the optimize phase against the best rate
    of matrix products that was measured before and after.

    With one thread processor seconds are taken: they leave out the wait for other work.
    """
    iteration, phase = ("processor", "cpu") if threads == 1 and \
        WORKLOADS[name].device == "cpu" else ("wall", "time")
    work = WORKLOADS[name]
    if work.layers_unfrozen != -1:
        raise SystemExit(f"the floor counts workloads that train all layers, not {name}")
    before = machine_rates(work, threads)
    found = in_kinds({name: work}, places, threads=threads, rounds=rounds, words=words)[name]
    after = machine_rates(work, threads)
    best = {key: max(before[key], after[key]) for key in before}
    gemm = max(value for key, value in best.items() if key.startswith("gemm/"))
    prompts = prompt_file(work, places.fixtures).read_text(encoding="utf-8").splitlines()
    least = floor_of(
        work, facts(model_folder(work.shape, places.fixtures)), gemm=gemm, bandwidth=best["copy"],
        prompt_tokens=statistics.mean(len(json.loads(row)["prompt"].split()) for row in prompts),
        new_tokens=statistics.mean(one.tokens for one in found.rounds))
    optimize = [statistics.median(one.phases[f"{phase}/optimize"]) for one in found.rounds]
    share = Spread.of([100 * least.optimize_flops / seconds / gemm for seconds in optimize])
    taken = Spread.of(of_rounds(found, iteration))
    parts = asdict(least)
    lines = [["an iteration", str(taken), f"{least.total:.3g}",
              f"{shown(taken.median / least.total)} times"],
             ["its optimize phase", str(Spread.of(optimize)),
              f"{least.optimize + least.adam:.3g}", f"{share} % of the best rate"]]
    told = ", ".join(f"{key.removeprefix('gemm/')} {value / 1e9:.0f} GFLOP/s"
                     for key, value in best.items() if key != "copy")
    return table(["", f"{iteration} s", "floor s", ""], lines) + \
        f"\n\n{work.title}, {threads} thread(s), {work.precision}, {rounds} round(s). Best " \
        f"rates: {told}; {best['copy'] / 1e9:.0f} GB/s. Floor: " + ", ".join(
            f"{key} {parts[key]:.3g} s" for key in ("generate", "reference", "optimize", "adam"))


def quickstart(places: Places, *, rounds: int, words: Sequence[str]) -> str:
    """Seconds of the quickstart: the whole command, and its training."""
    whole: list[float] = []
    processor: list[float] = []
    told: list[dict[str, float]] = []
    places.build.mkdir(parents=True, exist_ok=True)
    for number in range(rounds):
        with tempfile.TemporaryDirectory(dir=places.build, prefix="run-") as folder:
            command = [PPOCLI, "train", "+recipe=quickstart", f"seed={number}", "run_name=run",
                       f"output_dir={folder}", *words]
            try:
                took = run(command, Path(folder) / "log", environment(1))
            except CommandFailedError as error:
                raise SystemExit(str(error)) from error
            summary: dict[str, Any] = json.loads(
                (Path(folder) / "run/summary.json").read_text(encoding="utf-8"))
        whole.append(took.wall)
        processor.append(took.processor)
        told.append(summary["seconds"])
    training = [sum(seconds.values()) for seconds in told]
    holds = statistics.median(training) < QUICKSTART_SECONDS
    cells = [str(Spread.of(whole)), str(Spread.of(processor)), str(Spread.of(training)),
             str(Spread.of([seconds["eval"] for seconds in told])),
             f"{QUICKSTART_SECONDS:g}", "yes" if holds else "NO"]
    return table(["whole command, wall s", "its processor s", "training with its evaluations, wall "
                  "s", "evaluations alone", "training at most", "holds"], [cells]) + \
        f"\n\n{rounds} round(s), one thread."
