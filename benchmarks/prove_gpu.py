"""What ppocli does on this machine's GPU: six parts, ten minutes at most, one table.

    make prove-gpu                                       # all parts, the table into RESULTS.md
    python benchmarks/prove_gpu.py                       # the same, printed only
    python benchmarks/prove_gpu.py --only gsm8k trl      # some parts
    python benchmarks/prove_gpu.py --again gsm8k --set ppo.micro_batch_size=32
    python benchmarks/prove_gpu.py --minutes 20          # twice the time for every part
    python benchmarks/prove_gpu.py --rehearse cpu --workload gsm8k-rehearsal \\
        --quickstart ppo.total_episodes=768 ppo.num_rollouts=128 prompts.eval.repeat=1

Each part has its own share of the time, and is reported whatever becomes of the others. What has
been finished on this card with this code isn't run again: a second call goes on with what is
missing. Figures lie in build/prove/prove.json, each part's output beside it.
"""

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from commands import PPOCLI, CommandFailedError, TimeLimitError, environment, run
from compare import Outcome, in_turn, ratio
from fixtures import facts, model_folder, prompt_file
from floor import forward_flops
from machine import gpu, hardware, installed, versions
from prove_report import MARK, PARTS, Result, report, summary, write_report
from systems import SYSTEMS, Places, Process, by_phase, measure, ours, python_of, versions_of
from tables import marks
from workloads import WORKLOADS, Workload, job_of

ROOT = Path(__file__).resolve().parents[1]
PEAK_TFLOPS = {
    ("H200", "NVL"): 835.0, ("H200",): 989.0, ("H100", "NVL"): 835.0, ("H100", "PCIe"): 756.0,
    ("H100",): 989.0, ("B200",): 2250.0, ("A100",): 312.0, ("L40S",): 362.0, ("L4",): 121.0,
    ("A10",): 125.0, ("A6000",): 154.8, ("4090",): 165.2, ("3090",): 71.0}
"""dense bf16 products with fp32 sums, of the makers' data sheets, by words of the card's name"""
VOLATILE = ("time/", "cpu/", "tokens_per_second/", "memory/")
"""beginnings of figures that two equal runs differ in"""
ENOUGH_SECONDS = 10.0
"""below which a part isn't begun"""


class NotHereError(Exception):
    """A part that this machine can't do, and why."""


@dataclass(slots=True)
class Attempt:
    """One part on its way: what it may use, and what it has found so far."""

    args: argparse.Namespace
    name: str
    limit: float
    """seconds"""
    started: float
    result: Result
    said: float = 0.0

    @property
    def left(self) -> float:
        """Seconds."""
        return max(self.limit - (time.perf_counter() - self.started), 1.0)

    @property
    def folder(self) -> Path:
        """Of this part's output."""
        return self.args.build / self.name

    def run(self, command: Sequence[str], *, rows: Path | None = None,
            until: Callable[[], bool] | None = None) -> None:
        """Run a command within the part's limit, with a line of progress every ten seconds.

        Args:
            rows: the figures that it writes, one line a step.
            until: it is killed once this returns true.
        """
        self.result.command = self.result.command or shlex.join(command)
        self.folder.mkdir(parents=True, exist_ok=True)

        def watch(_: float) -> bool:
            seconds = time.perf_counter() - self.started
            if seconds - self.said >= 10:
                self.said = seconds
                found = metrics(rows) if rows else []
                step = f", step {found[-1]['step']}" if found else ""
                progress(f"  {self.name}: {seconds:.0f} of at most {self.limit:.0f} s{step}")
            return until is not None and until()

        run(command, self.folder / "log", environment(self.args.threads), limit=self.left,
            watch=watch)

    def train(self, name: str, *words: str, until: Callable[[], bool] | None = None) -> Path:
        """``ppocli train`` or, with one word, ``resume``, into the part's folder; the run's."""
        run_dir = self.folder / name
        command = ["train", *words, f"run_name={name}", f"output_dir={self.folder}"] if words else \
            ["resume", str(run_dir)]
        self.run([*self.args.ppocli, *command], rows=run_dir / "metrics.jsonl", until=until)
        return run_dir

    @property
    def device(self) -> str:
        """In the words of ``hardware.device``."""
        return self.args.rehearse or "cuda"

    @property
    def simulated(self) -> bool:
        """Whether what passes for a GPU is none."""
        return self.args.rehearse == "cuda"


def progress(line: str) -> None:
    """To standard error: standard output is for the table."""
    print(line, file=sys.stderr, flush=True)


def metrics(path: Path) -> list[dict[str, Any]]:
    """The whole rows of a run's figures so far."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]


# The parts ----------------------------------------------------------------------------------------

def gpu_tests(part: Attempt) -> None:
    """tests/gpu: on how many tests what came out."""
    if part.args.rehearse:
        raise NotHereError("tests/gpu ask CUDA itself")
    log = part.folder / "log"
    try:
        part.run([sys.executable, "-m", "pytest", "-v", "-n", str(min(4, part.args.threads)),
                  "--dist", "worksteal", "-p", "no:cacheprovider", str(ROOT / "tests/gpu")])
    finally:
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        lines = text.splitlines()
        part.result.figures = {
            kind.lower(): sum(f" {kind} tests/" in line for line in lines)
            for kind in ("PASSED", "FAILED", "ERROR", "SKIPPED")}
        part.result.figures["which failed"] = [
            line.partition("tests/gpu/")[2] for line in lines
            if " FAILED tests/" in line or " ERROR tests/" in line]


def quickstart_words(part: Attempt, precision: str) -> list[str]:
    """Words of ``ppocli train``."""
    return ["+recipe=quickstart", f"hardware.device={part.device}",
            f"hardware.precision={precision}", "seed=1", "tracking.trackers=[]",
            *part.args.quickstart]


def quickstart(part: Attempt, precision: str) -> None:
    """The quickstart: reward, KL, seconds."""
    if precision == "bf16" and part.simulated:
        raise NotHereError("the simulated device has no autocast")
    run_dir = part.train("run", *quickstart_words(part, precision))
    told = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    part.result.figures = {
        "reward before": told["eval_before"]["reward_mean"],
        "reward after": told["eval_after"]["reward_mean"],
        "KL, nats a sample": told["eval_after"]["kl_mean"], "steps": told["steps"],
        "seconds of training": sum(told["seconds"].values()),
        "peak MiB": told["peak_memory_mib"]}


def gsm8k(part: Attempt) -> None:
    """The workload shaped like GSM8K: tokens/s, MFU, peak memory."""
    args, work = part.args, WORKLOADS[part.args.workload]
    work = replace(work, device=part.device, precision="fp32" if part.simulated else work.precision)
    fixtures = args.build / "fixtures"
    prompts = prompt_file(work, fixtures)
    if not (fixtures / work.shape).is_dir():
        part.run([sys.executable, str(ROOT / "benchmarks/fixtures.py"), work.shape, str(fixtures)])
        part.result.command = ""
    job = job_of(work, model=model_folder(work.shape, fixtures), prompts=prompts,
                 stamps=part.folder / "stamps.jsonl", threads=args.threads, seed=1, options={})
    rows = part.folder / "run" / "metrics.jsonl"
    try:
        part.train("run", *ours(job, work.chunk), *work.words, *args.words,
                   until=lambda: len(metrics(rows)) >= work.warmup + work.iterations)
    finally:
        counted = [row for row in metrics(rows) if row["step"] > work.warmup]
        if counted:
            part.result.figures = speed_of(work, counted, facts(fixtures / work.shape),
                                           prompts, peak_tflops(args))
    if not counted:
        raise CommandFailedError("no counted step was finished")


def speed_of(work: Workload, rows: Sequence[Mapping[str, Any]], model: Mapping[str, int],
             prompts: Path, peak: float | None) -> dict[str, Any]:
    """Figures of counted steps; ``peak`` in TFLOP/s."""
    texts = prompts.read_text(encoding="utf-8").splitlines()
    prompt = statistics.mean(len(json.loads(text)["prompt"].split()) for text in texts)
    response = statistics.mean(row["rollout/response_tokens_mean"] for row in rows)
    phases = {name.removeprefix("time/"): round(statistics.mean(values), 3)
              for name, values in by_phase(rows, replace(work, warmup=0)).items()
              if name.startswith("time/")}
    step = phases.pop("step")
    policy = work.batch * forward_flops(model, prompt, response)
    critic = work.batch * forward_flops(model, prompt, response, head=False)
    optimize = 3 * work.epochs * (policy + critic)
    rates = {"step": (2 * policy + critic + optimize) / step,
             "optimize": optimize / phases["optimize"]}
    return {
        "steps": len(rows), "seconds a step": step, "seconds by phase": phases,
        "prompt tokens": prompt, "response tokens": response,
        "tokens/s": work.batch * (prompt + response) / step, "samples/s": work.batch / step,
        "TFLOP/s": {name: rate / 1e12 for name, rate in rates.items()}, "peak TFLOP/s": peak,
        "MFU": None if peak is None else {
            name: rate / peak / 1e12 for name, rate in rates.items()},
        "peak MiB": max(row["memory/peak_mib"] for row in rows)}


def peak_tflops(args: argparse.Namespace) -> float | None:
    """Of bf16 products: as typed, else of the card's name; None for a card that isn't listed."""
    if args.peak_tflops is not None:
        return args.peak_tflops
    words = set((gpu() or "").partition(",")[0].replace("-", " ").split())
    return next((peak for names, peak in PEAK_TFLOPS.items() if words.issuperset(names)), None)


def resume(part: Attempt) -> None:
    """The quickstart killed with ``kill -9`` and resumed, against the one that wasn't."""
    precision = "fp32" if part.simulated else "bf16"
    straight = part.args.build / f"quickstart-{precision}" / "run" / "metrics.jsonl"
    wanted = stable(straight)
    if not wanted or wanted[-1]["step"] < 2:
        raise CommandFailedError(f"needs the run of quickstart-{precision}, of two steps or more")
    every = max(wanted[-1]["step"] // 8, 1)
    rows = part.folder / "run" / "metrics.jsonl"
    saved = part.folder / "run" / "checkpoints" / f"step-{every:06d}"

    def late_enough() -> bool:
        return saved.is_dir() and len(metrics(rows)) > every + every // 2
    words = quickstart_words(part, precision)
    part.train("run", *words, f"checkpoint.every_steps={every}", until=late_enough)
    done = metrics(rows)[-1]["step"]
    if done == wanted[-1]["step"]:
        raise CommandFailedError("the run had ended before it could be killed")
    part.train("run")
    found = stable(rows)
    different = [(row["step"], name) for row, other in zip(wanted, found, strict=False)
                 for name in sorted(row.keys() | other.keys()) if row.get(name) != other.get(name)]
    part.result.figures = {"killed after step": done, "rows": len(found),
                           "equal": not different and len(found) == len(wanted),
                           "first differences": different[:5]}
    if not part.result.figures["equal"]:
        raise CommandFailedError(f"{len(found)} rows, {len(wanted)} without the kill; step and "
                                 f"figure of the first differences: {different[:5]}")


def stable(path: Path) -> list[dict[str, Any]]:
    """A run's figures, but for times and memory."""
    return [{name: value for name, value in row.items() if not name.startswith(VOLATILE)}
            for row in metrics(path)]


def beside_trl(part: Attempt) -> None:
    """GPT-2 124M, ours and TRL's classic trainer, one round."""
    if part.args.rehearse:
        raise NotHereError("GPT-2 124M on a GPU is too much for a rehearsal")
    work = replace(WORKLOADS["gpt2-gpu"], iterations=2)
    where = Places(part.args.build, ROOT / "build/peers/trlx-src", {
        "classic": str(ROOT / "build/peers/classic/bin/python")})
    if not Path(python_of(SYSTEMS["classic"], where)).exists():
        raise NotHereError("TRL's environment is not there: make build/peers/classic/.installed")
    part.result.command = (
        "python benchmarks/speed.py peers --workload gpt2-gpu --only ours,classic "
        f"--threads {part.args.threads} --rounds 1 --iterations 2")

    def once(name: str, number: int) -> Process:
        return measure(name, work, where, threads=part.args.threads, seed=number, limit=part.left)

    found = in_turn(["ours", "classic"], 1, once)
    part.result.figures = {SYSTEMS[name].label: {
        "seconds an iteration": statistics.median(one.wall), "peak GPU MiB": one.gpu_mib,
        "samples/s": work.batch / statistics.median(one.wall), "versions": versions_of(name, where)}
        for name, outcome in found.items() for one in outcome.rounds}
    if failed := [name for name, outcome in found.items() if outcome.failed]:
        raise CommandFailedError("; ".join(f"{name}: {found[name].failed}" for name in failed))
    part.result.figures["TRL over ppocli"] = ratio(
        Outcome(found["classic"].rounds), Outcome(found["ours"].rounds), "wall").median


DOES: dict[str, Callable[[Attempt], None]] = {
    "tests": gpu_tests, "quickstart-fp32": lambda part: quickstart(part, "fp32"),
    "quickstart-bf16": lambda part: quickstart(part, "bf16"), "gsm8k": gsm8k, "resume": resume,
    "trl": beside_trl}


# What is kept -------------------------------------------------------------------------------------

def attempted(args: argparse.Namespace, name: str, limit: float) -> Result:
    """One part, whatever comes of it."""
    part = Attempt(args, name, limit, time.perf_counter(), Result("done", limit=round(limit)))
    result = part.result
    shutil.rmtree(part.folder, ignore_errors=True)
    try:
        DOES[name](part)
    except NotHereError as error:
        result.status, result.why = "not here", str(error)
    except TimeLimitError as error:
        result.status, result.why = "out of time", str(error)
    except (CommandFailedError, subprocess.CalledProcessError) as error:
        result.status, result.why = "failed", str(error)
    except Exception as error:  # whatever it is, the other parts are worth having
        result.status, result.why = "failed", f"{type(error).__name__}: {error}"
        traceback.print_exc()
    result.seconds = round(time.perf_counter() - part.started, 1)
    return result


def code_version() -> str:
    """The commit, with a mark if code has changed since; the version where there is no git."""
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True,
                              check=False).stdout.strip()

    commit = git("rev-parse", "--short=12", "HEAD")
    changed = git("status", "--porcelain", "--", "ppocli", "benchmarks/*.py")
    return commit + (" with changes" if changed else "") if commit else installed("ppocli")


def kept_of(args: argparse.Namespace, card: str) -> dict[str, Any]:
    """What earlier calls have found on this card with this code and these arguments."""
    now = {"card": card, "code": code_version(), "workload": args.workload,
           "words": [args.quickstart, args.words]}
    path = args.build / "prove.json"
    if path.is_file():
        told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if {name: told.get(name) for name in now} == now:
            return told
        progress(f"{path} is of another card, code or words: all parts are run")
    return {**now, "date": str(date.today()), "hardware": hardware(),
            "versions": versions(("torch", "transformers")), "parts": {}}


def parser() -> argparse.ArgumentParser:
    """Options."""
    made = argparse.ArgumentParser(description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
    names = {"choices": PARTS, "metavar": "PART", "nargs": "+"}
    made.add_argument("--only", default=list(PARTS), **names, help=f"of {', '.join(PARTS)} (all)")
    made.add_argument("--again", default=[], **names, help="run these though they are finished")
    made.add_argument("--minutes", type=float, default=10.0, help="for all parts (%(default)g)")
    made.add_argument("--out", type=Path, metavar="FILE",
                      help=f"write the table between this file's lines {' and '.join(marks(MARK))} "
                      "too, or append it with them")
    made.add_argument("--build", type=Path, default=ROOT / "build/prove",
                      help="folder of figures, models and runs (%(default)s)")
    made.add_argument("--peak-tflops", type=float, metavar="N",
                      help="of the card's dense products in bf16, for MFU; of "
                      + ", ".join(" ".join(words) for words in PEAK_TFLOPS) + " it is known")
    made.add_argument("--threads", type=int, default=min(8, os.cpu_count() or 1),
                      help="of the host (%(default)s)")
    made.add_argument("--set", nargs="+", default=[], dest="words", metavar="KEY=VALUE",
                      help="more words for the workload shaped like GSM8K")
    made.add_argument("--quickstart", nargs="+", default=[], metavar="KEY=VALUE",
                      help="more words for the quickstart")
    made.add_argument("--workload", default="gsm8k-gpu", choices=["gsm8k-gpu", "gsm8k-rehearsal"],
                      help="the other one is small (%(default)s)")
    made.add_argument("--rehearse", choices=["cpu", "cuda"],
                      help="try this script without a GPU: on the CPU, or on a device that passes "
                      "for a GPU")
    made.add_argument("--ppocli", type=shlex.split, default=[PPOCLI], metavar="COMMAND",
                      help="in place of the installed command")
    return made


def main() -> int:
    args = parser().parse_args()
    args.build = args.build.resolve()
    card = gpu() if args.rehearse is None else f"No GPU: a rehearsal with device {args.rehearse}"
    if card is None:
        raise SystemExit("there is no GPU here (nvidia-smi finds none); --rehearse cpu tries this "
                         "script without one")
    args.build.mkdir(parents=True, exist_ok=True)
    kept = kept_of(args, card)
    parts, end = kept["parts"], time.perf_counter() + 60 * args.minutes
    todo = [name for name in PARTS if name in args.only and (
        name in args.again or parts.get(name, {}).get("status") not in ("done", "not here"))]
    progress(f"{card}: {len(todo)} parts, {args.minutes:g} minutes at most")
    for number, name in enumerate(todo, 1):
        title, share = PARTS[name]
        limit = min(60 * args.minutes * share, end - time.perf_counter())
        if limit < ENOUGH_SECONDS * min(args.minutes / 10, 1.0):
            result = Result("out of time", why="no time was left; the next call goes on with it")
        else:
            progress(f"[{number}/{len(todo)}] {title}, at most {limit:.0f} s")
            result = attempted(args, name, limit)
        parts[name] = asdict(result)
        kept["parts"] = parts = {each: parts[each] for each in PARTS if each in parts}
        (args.build / "prove.json").write_text(json.dumps(kept, indent=1), encoding="utf-8")
        progress(f"  {summary(name, result)} ({result.seconds:.0f} s)")
    text = report(kept)
    print(text)
    if args.out is not None:
        write_report(args.out, text)
    progress(f"figures: {args.build / 'prove.json'}")
    return 0 if all(one["status"] in ("done", "not here") for one in parts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
