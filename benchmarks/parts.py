"""Where the time of an optimize phase goes, by torch's profiler: one phase of a whole run, after
two that warm it up, in this process and with one thread.

    python benchmarks/parts.py --workload gpt2 tiny

The profiler takes some time of its own for each operation, which counts among the last part.
"""

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from fixtures import model_folder, prompt_file
from machine import provenance
from systems import ours
from tables import table
from workloads import WORKLOADS, job_of

import ppocli
from ppocli.distributed.host_memory import settle_freed_memory
from ppocli.training import loop

PARTS = {
    "matrix products of linear layers": ("mkldnn::", "aten::mm", "aten::addmm"),
    "attention": ("aten::bmm", "aten::baddbmm", "aten::_softmax", "aten::_scaled_dot"),
    "optimizer, norm of the gradient": ("aten::_fused_adam", "aten::linalg_vector_norm"),
    "activations and their gradients": ("aten::gelu", "aten::silu", "aten::tanh"),
    "norms of layers": ("aten::native_layer_norm", "aten::rsqrt"),
    "log-probabilities over the vocabulary": ("aten::exp", "aten::amax", "aten::logsumexp",
                                              "aten::_log_softmax"),
    "copies, sums and zeros": ("aten::copy_", "aten::add", "aten::sum", "aten::fill_",
                               "aten::index", "aten::cat", "aten::mul", "aten::sub")}
REST = "other operations, Python, autograd"
WARM_PHASES = 2


def profiled(name: str, build: Path) -> tuple[dict[str, float], float, float]:
    """Seconds by part, of the whole phase under the profiler, and of the one before it."""
    work = replace(WORKLOADS[name], warmup=0, iterations=WARM_PHASES)
    scratch = Path(tempfile.mkdtemp())
    job = job_of(work, model=model_folder(work.shape, build), prompts=prompt_file(work, build),
                 stamps=scratch / "stamps.jsonl", threads=1, seed=0, options={})
    inner, took, parts = loop.optimize, list[float](), dict.fromkeys((*PARTS, REST), 0.0)

    def optimize(*args: Any) -> Any:
        began = time.process_time()
        if len(took) != WARM_PHASES:
            result = inner(*args)
        else:
            torch.ones(2**29)  # stays in the heap: what is noted must not split it for gradients
            began = time.process_time()
            with torch.profiler.profile() as profiler:
                result = inner(*args)
        took.append(time.process_time() - began)
        if len(took) == WARM_PHASES + 1:
            for event in profiler.key_averages():
                parts[next((part for part, names in PARTS.items() if event.key.startswith(names)),
                           REST)] += event.self_cpu_time_total / 1e6
        return result

    loop.optimize = optimize
    try:
        ppocli.train([*ours(job, work.chunk), f"output_dir={scratch}"])
    finally:
        loop.optimize = inner
    return parts, took[WARM_PHASES], took[WARM_PHASES - 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=["gpt2"])
    parser.add_argument("--build", type=Path, default=Path("build/bench/fixtures"))
    args = parser.parse_args()
    settle_freed_memory(sharded=False)
    for name in args.workload:
        parts, under, before = profiled(name, args.build)
        parts[REST] += max(0.0, under - sum(parts.values()))
        total = sum(parts.values())
        print(f"\n{WORKLOADS[name].title}: {before:.2f} s, {under:.2f} s under the profiler\n")
        print(table(["part", "processor s", "share"],
                    [[part, f"{seconds:.2f}", f"{100 * seconds / total:.1f} %"]
                     for part, seconds in sorted(parts.items(), key=lambda one: -one[1])]))
    print("\n" + provenance("one thread"))


if __name__ == "__main__":
    main()
