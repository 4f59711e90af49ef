"""The least that a workload can take on a machine: its multiplications over the best rate, and the
optimizer's memory traffic over the bandwidth.

    python benchmarks/floor.py --threads 1 --precision fp32    # rates of this machine, as JSON

Counted are a rollout, one pass of the reference, and ``epochs`` times a forward and a backward pass
of twice its cost; old log-probabilities and values come out of the rollout, padding costs nothing.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from workloads import Workload

ROWS, WIDTH = 704, 768
"""of the products that are timed on a CPU: tokens of a minibatch times GPT-2's MLP"""
ADAM_WORDS = 7
"""of a parameter in a step: weight and two moments read and written, the gradient read"""


@dataclass(frozen=True, slots=True)
class Floor:
    """Seconds by part, and the products of the optimize phase."""

    generate: float
    reference: float
    optimize: float
    adam: float
    optimize_flops: float

    @property
    def total(self) -> float:
        """Seconds of one iteration."""
        return self.generate + self.reference + self.optimize + self.adam


def forward_flops(facts: Mapping[str, int], prompt_tokens: float, new_tokens: float, *,
                  head: bool = True) -> float:
    """Floating-point operations of a model's pass over one sample: products with weights, causal
    attention, and with ``head`` the output layer where response tokens are predicted."""
    length = prompt_tokens + new_tokens - 1  # the last token is never fed
    attention = facts["layers"] * 4 * facts["width"] * length / 2  # QK' and AV, causal
    return (length * (2 * facts["body"] + attention)
            + (new_tokens * 2 * facts["head"] if head else 0.0))


def floor_of(work: Workload, facts: Mapping[str, int], *, prompt_tokens: float, new_tokens: float,
             gemm: float, bandwidth: float) -> Floor:
    """The floor of a workload that trains all layers.

    Args:
        facts: of the model, see ``fixtures.facts``.
        prompt_tokens, new_tokens: means of a sample.
        gemm: floating-point operations a second.
        bandwidth: bytes a second.
    """
    forward = work.batch * forward_flops(facts, prompt_tokens, new_tokens)
    word = 2 if work.precision == "bf16" else 4
    weights_read = new_tokens * (facts["body"] + facts["head"]) * word
    updates = work.epochs * (work.batch // work.mini_batch)
    optimize = work.epochs * 3 * forward
    return Floor(generate=max(forward / gemm, weights_read / bandwidth), reference=forward / gemm,
                 optimize=optimize / gemm,
                 adam=updates * ADAM_WORDS * facts["parameters"] * 4 / bandwidth,
                 optimize_flops=optimize)


def shortest(work: Callable[[], object], clock: Callable[[], float], times: int = 40,
             budget: float = 3.0) -> float:
    """Seconds by ``clock`` of the fastest of many runs: what is wanted is a ceiling."""
    for _ in range(2):
        work()
    found: list[float] = []
    end = time.perf_counter() + budget
    while len(found) < times and time.perf_counter() < end:
        started = clock()
        work()
        found.append(clock() - started)
    return min(found)


def rates(device: str, precision: str, threads: int) -> dict[str, float]:
    """Best rates of matrix products by the library that makes them, and of copying.

    One thread is timed by the processor's seconds, which leave out the wait for other work.
    """
    import torch

    torch.set_num_threads(threads)
    clock = time.process_time if device == "cpu" and threads == 1 else time.perf_counter

    def waiting(work: Callable[[], Any]) -> Callable[[], None]:
        def done() -> None:
            work()
            if device == "cuda":
                torch.cuda.synchronize()
        return done

    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    rows, width, inner = (ROWS, WIDTH, 4 * WIDTH) if device == "cpu" else (8192, 8192, 8192)
    x = torch.randn(rows, width, device=device, dtype=dtype)
    w = torch.randn(inner, width, device=device, dtype=dtype)
    flops = 2 * rows * width * inner
    found = {"gemm/torch": flops / shortest(
        waiting(lambda: torch.nn.functional.linear(x, w)), clock)}
    if device == "cpu" and torch.backends.mkldnn.is_available():
        linear = torch.ops.mkldnn._linear_pointwise
        found["gemm/onednn"] = flops / shortest(lambda: linear(x, w, None, "none", [], ""), clock)
    source = torch.randn(2**26, device=device)
    target = torch.empty_like(source)
    found["copy"] = 2 * source.numel() * 4 / shortest(
        waiting(lambda: target.copy_(source)), clock)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    args = parser.parse_args()
    print(json.dumps(rates(args.device, args.precision, args.threads)))


if __name__ == "__main__":
    main()
