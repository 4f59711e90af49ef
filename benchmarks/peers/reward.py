"""The reward of the benchmarks: cheap, and the clock of every system alike.

It is called once an iteration, when all responses of a rollout are there; the time between two
calls is that of one whole iteration, whatever a system does in it and in which order. Each call
appends a line to a file: seconds of wall and processor time, memory, samples, tokens. It imports
no library, so that it runs in every environment.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

EOS = "<|endoftext|>"


def score(outputs: list[str], stamps: str, new_tokens: int, **_: Any) -> list[float]:
    """Ten times the share of the letter a among all letters of each response.

    Args:
        outputs: responses; each word is one token.
        stamps: the file that tells of the call.
        new_tokens: of the longest response; a shorter one has ended with a token that is not shown.
    """
    texts = [text.replace(EOS, "") for text in outputs]
    tokens = [min(len(text.split()) + 1, new_tokens) for text in texts]
    stamp = {"wall": time.perf_counter(), "processor": time.process_time(), "mib": resident_mib(),
             "samples": len(texts), "tokens": sum(tokens), "gpu_mib": gpu_mib()}
    with Path(stamps).open("a", encoding="utf-8") as file:
        file.write(json.dumps(stamp) + "\n")
    return [10.0 * text.count("a") / max(sum(map(str.isalpha, text)), 1) for text in texts]


def resident_mib() -> float:
    """Memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096 / 2**20


def gpu_mib() -> float | None:
    """Peak of torch's allocator so far; None where no GPU is in use."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return float(torch.cuda.max_memory_allocated()) / 2**20
