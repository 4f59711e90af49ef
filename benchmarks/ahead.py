"""What sampling one step ahead is worth: seconds of a step with a vLLM server on a core of its own.

    python benchmarks/ahead.py --vllm build/vllm/bin/python --out benchmarks/RESULTS.md

The trainer has the first core and the server the second. Three runs of the same settings, each a
whole ``ppocli train``: by ppocli's own loop, which leaves the second core idle; by the server, the
trainer waiting for it; and by the server one step ahead (``rollout.ahead=1``).
"""

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import date
from pathlib import Path

from commands import PPOCLI
from fixtures import model_folder, prompt_file
from machine import hardware, versions
from tables import marks, table, write_between
from workloads import TOKENIZER, WORKLOADS

BUILD = Path(__file__).resolve().parents[1] / "build/bench"
URL = "http://127.0.0.1:8123"
SERVED = ("rollout.engine=vllm", f"rollout.urls=[{URL}]",
          "rollout.server_args=[--enforce-eager,--max-model-len,'128']")
KINDS: dict[str, tuple[str, ...]] = {
    "ppocli's own loop": (),
    "server, waiting": SERVED,
    "server, one step ahead": (*SERVED, "rollout.ahead=1", "ppo.importance.level=token"),
}
WARMUP, STEPS = 2, 6
PARTS = ("rollout", "scoring", "optimize")


def words(build: Path, epochs: int) -> list[str]:
    """Of a run of GPT-2 124M, or of the server for it."""
    work = WORKLOADS["gpt2"]
    model = model_folder(work.shape, build / "fixtures")
    return [f"model.path={model}", f"model.tokenizer_path={model / TOKENIZER}",
            f"prompts.path={prompt_file(work, build / 'fixtures')}", "prompts.eval.limit=4",
            "reward.fn=length", "reward.kwargs.target=16", "ppo.num_rollouts=32",
            "ppo.chunk_size=32", "ppo.mini_batch_size=8", f"ppo.ppo_epochs={epochs}",
            f"ppo.num_steps={WARMUP + STEPS}", "generation.max_new_tokens=64",
            "generation.min_new_tokens=64", "eval.at_start=false", "eval.every_steps=null",
            "checkpoint.every_steps=null", "tracking.trackers=[]", "hardware.device=cpu",
            "hardware.num_threads=1"]


def on_core(number: int, command: Sequence[str], log: Path, **more: str) -> subprocess.Popen[bytes]:
    """A process, and all it starts, on one core."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **more}
    with log.open("wb") as out:
        return subprocess.Popen(["taskset", "-c", str(number), *command], env=env, stdout=out,
                                stderr=out, start_new_session=True)


@contextmanager
def server(python: str, own: Sequence[str], folder: Path) -> Iterator[None]:
    """vLLM on the second core."""
    printed = subprocess.run([PPOCLI, "vllm-command", *own, *SERVED], capture_output=True,
                             text=True, check=True).stdout
    variable, _, *given = shlex.split(printed)
    name, value = variable.split("=")
    process = on_core(1, [python, *given], folder / "vllm.log", VLLM_CPU_KVCACHE_SPACE="2",
                      VLLM_CPU_OMP_THREADS_BIND="nobind", **{name: value})
    try:
        while True:
            if process.poll() is not None:
                raise SystemExit((folder / "vllm.log").read_text(encoding="utf-8")[-3000:])
            with suppress(OSError), urllib.request.urlopen(f"{URL}/health", timeout=5):
                break
            time.sleep(1)
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)


def steps_of(command: Sequence[str], folder: Path) -> list[dict[str, float]]:
    """The rows of the steps that count.

    Raises:
        SystemExit: the run failed.
    """
    process = on_core(0, [*command, f"output_dir={folder}", "run_name=run"], folder / "log")
    if process.wait():
        raise SystemExit((folder / "log").read_text(encoding="utf-8")[-3000:])
    lines = (folder / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row.get("time/step")]
    # nothing is under way for a last step that has no next one
    return rows[WARMUP:-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, metavar="PYTHON", help="that has vLLM")
    parser.add_argument("--epochs", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--out", type=Path, help="write the table into this "
                        f"file, between its lines {' and '.join(marks('ahead'))}")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for epochs in args.epochs:
            own = words(BUILD, epochs)
            for number, (kind, more) in enumerate(KINDS.items()):
                folder = Path(scratch) / f"{epochs}-{number}"
                folder.mkdir()
                command = [PPOCLI, "train", *own, *more]
                if more:
                    with server(args.vllm, own, folder):
                        found = steps_of(command, folder)
                else:
                    found = steps_of(command, folder)
                cells = [statistics.median(row[name] for row in found) for name in
                         ("time/step", *(f"time/{part}" for part in PARTS))]
                rows.append([f"{epochs} epoch{'s' if epochs > 1 else ''}, {kind}",
                             *(f"{cell:.2f}" for cell in cells)])
                print(rows[-1], file=sys.stderr, flush=True)
    text = table(["GPT-2 124M", "step, s", *(f"{part}, s" for part in PARTS)], rows) + (
        f"\n\n32 prompts, 64 new tokens, fp32; medians of {STEPS - 1} steps, "
        f"{date.today():%Y-%m-%d}. {hardware()}. {versions()}.")
    print(text)
    if args.out:
        write_between(args.out, "ahead", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
