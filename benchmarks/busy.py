"""How numbers of threads fare beside another process that computes.

    python benchmarks/busy.py --out benchmarks/RESULTS.md
    python benchmarks/busy.py --rounds 1 --only quickstart

The other process multiplies matrices with a thread on every core. Every run is a whole command in a
process of its own, in turn with the others. Seconds on the clock, which is what a person waits for.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import date
from pathlib import Path

from commands import CommandFailedError, run
from fixtures import model_folder, prompt_file
from machine import hardware, versions
from tables import marks, table, write_between
from workloads import TOKENIZER, WORKLOADS

BUILD = Path(__file__).resolve().parents[1] / "build/bench"
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
KINDS: dict[str, dict[str, str]] = {
    "torch's defaults": {"OMP_NUM_THREADS": str(CORES), "OMP_WAIT_POLICY": "ACTIVE",
                         "KMP_BLOCKTIME": "200"},
    "one thread": {"OMP_NUM_THREADS": "1"},
    "ppocli's choice": {},
}
"""environments; the first is how torch computes where nobody sets anything"""
OTHER = "import torch\na = torch.ones(1024, 1024)\nwhile True:\n    a @ a"
SMALL = ("ppo.total_episodes=null", "ppo.num_steps=4", "eval.at_start=false",
         "eval.every_steps=null", "prompts.eval.limit=4", "checkpoint.every_steps=null",
         "hardware.device=cpu", "hardware.num_threads=null")


def commands(build: Path, folder: Path) -> dict[str, tuple[list[str], int]]:
    """What is run, and how many steps its seconds are of."""
    work = WORKLOADS["gpt2"]
    model = model_folder(work.shape, build / "fixtures")
    prompts = prompt_file(work, build / "fixtures")
    train = [sys.executable, "-m", "ppocli", "train", f"output_dir={folder}", "run_name=run"]
    return {
        "quickstart": ([*train, "+recipe=quickstart", *SMALL], 4),
        "ppocli eval": ([sys.executable, "-m", "ppocli", "eval", "builtin:reviews", "--reward",
                         "length", "reward.kwargs.target=16", "--prompts",
                         "builtin:reviews-eval-prompts", "--output", str(folder)], 1),
        "GPT-2 124M": ([*train, *SMALL, "ppo.num_steps=1", f"model.path={model}",
                        f"model.tokenizer_path={model / TOKENIZER}", f"prompts.path={prompts}",
                        "reward.fn=length", "reward.kwargs.target=16",
                        f"ppo.num_rollouts={work.batch}", f"ppo.mini_batch_size={work.mini_batch}",
                        f"generation.max_new_tokens={work.new_tokens}"], 1)}


def environment(kind: Mapping[str, str]) -> dict[str, str]:
    """The variables of a measured process."""
    own = {name: value for name, value in os.environ.items()
           if not name.startswith(("OMP_", "KMP_", "MKL_"))}
    return {**own, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **kind}


@contextmanager
def busy(wanted: bool) -> Iterator[None]:
    """Another process computes meanwhile."""
    if not wanted:
        yield
        return
    with subprocess.Popen([sys.executable, "-c", OTHER],
                          env=environment({"OMP_NUM_THREADS": str(CORES)})) as other:
        time.sleep(3)  # torch loads
        try:
            yield
        finally:
            other.kill()


def seconds_of(name: str, kind: str, folder: Path) -> float:
    """Seconds of a step, without the first where there are several; of an evaluation all.

    Raises:
        SystemExit: the command failed.
    """
    command, steps = commands(BUILD, folder)[name]
    try:
        took = run(command, folder / "log", environment(KINDS[kind]))
    except CommandFailedError as error:
        raise SystemExit(f"{name}, {kind}: {error}") from error
    if name == "ppocli eval":
        return took.wall
    lines = (folder / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [row["time/step"] for row in map(json.loads, lines) if row.get("time/step")]
    return statistics.median(found[1:] if steps > 1 else found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", metavar="NAME")
    parser.add_argument("--out", type=Path, help="write the table into this "
                        f"file, between its lines {' and '.join(marks('busy'))}")
    args = parser.parse_args()
    found: dict[tuple[str, bool, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        names = args.only or list(commands(BUILD, Path(scratch)))
        for number in range(args.rounds):
            for place, (name, wanted, kind) in enumerate(
                    (name, wanted, kind) for name in names for wanted in (False, True)
                    for kind in KINDS):
                folder = Path(scratch) / f"{number}-{place}"
                folder.mkdir()
                with busy(wanted):
                    taken = seconds_of(name, kind, folder)
                found.setdefault((name, wanted, kind), []).append(taken)
                print(f"{name}, {'busy' if wanted else 'quiet'}, {kind}: {taken:.2f} s",
                      file=sys.stderr)
    rows = [[name, "beside another process" if wanted else "alone",
             *(f"{statistics.median(found[name, wanted, kind]):.2f}" for kind in KINDS)]
            for name in names for wanted in (False, True)]
    text = table(["", "", *(f"{kind}, s" for kind in KINDS)], rows) + (
        f"\n\nMedians of {args.rounds} rounds, {date.today():%Y-%m-%d}. {hardware()}. "
        f"{versions()}. Of the trainings a step, of `ppocli eval` the whole command.")
    print(text)
    if args.out:
        write_between(args.out, "busy", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
