"""How the doctor asks, so that no answer keeps the others back: each check has its time, and what
may crash is asked in a process of its own, ``python -m ppocli.doctor_probes PROBE [ARGUMENT ...]``,
which prints facts as JSON in its last line."""

import importlib
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from time import monotonic
from typing import Any, Literal

from ppocli.daemon import in_daemon
from ppocli.text import error_line, first_line

Verdict = Literal["ok", "warning", "fail"]
SECONDS: Mapping[str, float] = {"output": 20, "token": 20, "torch": 70, "deepspeed": 70, "gloo": 40}
"""after which a check is given up; 10 for those that aren't named"""

SIZE = 256
TOLERANCE = 1e-2
"""of entries of size 1 or so; far above the rounding of TF32, far below a wrong product"""
MEETING = timedelta(seconds=20)
"""how long processes wait for each other"""


def ask(probe: str, *arguments: str, seconds: float) -> dict[str, Any]:
    """The facts that a probe tells within ``seconds``, or why there are none, as ``error``."""
    # -P: nothing of the current folder; behind all else, this very ppocli
    command = [sys.executable, "-P", "-m", "ppocli.doctor_probes", probe, *arguments]
    paths = [os.environ.get("PYTHONPATH"), str(Path(__file__).resolve().parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    try:
        done = subprocess.run(command, env=environment, text=True, errors="replace", check=False,
                              stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {seconds:g} s"}
    except OSError as error:
        return {"error": f"no process could be started: {error.strerror or error}"}
    for line in reversed(done.stdout.splitlines()):
        with suppress(ValueError):
            facts = json.loads(line)
            if isinstance(facts, dict):
                return facts
    if done.returncode < 0:
        return {"error": f"the process was ended by {signal.Signals(-done.returncode).name}"}
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return {"error": said[-1].strip() if said else f"exit code {done.returncode}"}


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check came to, in words, and what to do about it."""

    verdict: Verdict
    text: str
    fix: str | None = None


@dataclass(frozen=True)
class Surroundings:
    """What checks look at. ``root`` is where /proc, /sys and /dev lie."""

    folder: Path
    """the output folder, which need not exist"""
    root: Path = Path("/")

    @cached_property
    def torch(self) -> dict[str, Any]:
        """What a process of its own says about torch: a broken one may crash or hang there."""
        return ask("torch", seconds=60)


Check = Callable[[Surroundings], Finding]


def run_checks(checks: Sequence[Check], around: Surroundings, *,
               begin: Callable[[str], None] = lambda name: None
               ) -> Iterator[tuple[str, Finding, float]]:
    """Run checks one after another, each within its time (:data:`SECONDS`).

    Args:
        begin: told the name of each check before it runs.

    Yields:
        the name of each, what it came to, and the seconds it took.
    """
    for check in checks:
        begin(check.__name__)
        started = monotonic()
        found = _within(check, around, SECONDS.get(check.__name__, 10.0))
        yield check.__name__, found, round(monotonic() - started, 2)


def _within(check: Check, around: Surroundings, seconds: float) -> Finding:
    # a call into a dead network or file system can't be interrupted, only left behind
    future = in_daemon(lambda: check(around), f"doctor-{check.__name__}")
    if not wait([future], seconds).done:
        return Finding("fail", f"no answer within {seconds:g} s",
                       "something hangs: a network file system, a driver or a lock")
    try:
        return future.result()
    except Exception as error:  # a machine that breaks a check must not keep the others back
        return Finding("fail", f"the check broke: {error_line(error)}",
                       "report it with the output of: ppocli env")


# The probes --------------------------------------------------------------------------------------

def torch_facts() -> dict[str, Any]:
    """torch, its devices, and a product on each."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        import torch

        available = torch.cuda.is_available()
        count = torch.cuda.device_count() if available else 0
        devices = [_device(name) for name in ("cpu", *(f"cuda:{i}" for i in range(count)))]
    reasons = [str(w.message).splitlines()[0] for w in said if "CUDA" in str(w.message)]
    return {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip,
            "available": available, "reason": reasons[0] if reasons else None,
            "threads": torch.get_num_threads(), "devices": devices}


def _device(name: str) -> dict[str, Any]:
    import torch

    from ppocli.parallel.onednn import bf16_gain

    facts: dict[str, Any] = {"device": name}
    try:
        if name == "cpu":
            facts["bf16_gain"] = bf16_gain()
        else:
            properties = torch.cuda.get_device_properties(name)
            free, total = torch.cuda.mem_get_info(name)
            facts |= {"name": properties.name, "free_gib": free / 2**30, "total_gib": total / 2**30}
            with torch.cuda.device(name):
                facts["bf16"] = torch.cuda.is_bf16_supported(including_emulation=False)
        # largest difference of a matrix product there to the same in float64 on the CPU
        generator = torch.Generator().manual_seed(0)
        a, b = (torch.randn(SIZE, SIZE, generator=generator) / SIZE**0.25 for _ in range(2))
        found = (a.to(name) @ b.to(name)).cpu().double()
        facts["product_error"] = float((found - a.double() @ b.double()).abs().max())
    except Exception as error:  # drivers raise what they like; the text is the finding
        facts["error"] = first_line(error)
    return facts


def gloo_facts(meeting: str, rank: str, size: str) -> dict[str, Any]:
    """The sum of the numbers 1 to ``size``, added up by processes that meet at a file, of which
    this is one."""
    import torch
    import torch.distributed as dist

    try:
        dist.init_process_group("gloo", init_method=Path(meeting).as_uri(), rank=int(rank),
                                world_size=int(size), timeout=MEETING)
        number = torch.tensor([int(rank) + 1.0])
        dist.all_reduce(number)
        dist.destroy_process_group()
    except (RuntimeError, ValueError, OSError) as error:
        return {"error": first_line(error)}
    return {"sum": float(number)}


def import_facts(name: str) -> dict[str, Any]:
    """The version of a module, once it is imported."""
    try:
        return {"version": str(getattr(importlib.import_module(name), "__version__", "unknown"))}
    except Exception as error:  # whatever an installation raises is the finding
        return {"error": error_line(error)}


def token_facts() -> dict[str, Any]:
    """What the Hub says of the token, without naming it or its owner."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        token = (HfApi().whoami().get("auth") or {}).get("accessToken") or {}
    except HfHubHTTPError as error:
        code = getattr(error.response, "status_code", None)
        return {"refused": True} if code in (401, 403) else {"error": f"HTTP status {code}"}
    except Exception as error:  # httpx's errors are of several families; their texts may hold URLs
        return {"error": type(error).__name__}
    return {"role": token.get("role")}


PROBES: dict[str, Callable[..., dict[str, Any]]] = {
    "torch": torch_facts, "gloo": gloo_facts, "import": import_facts, "token": token_facts}

if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(PROBES[sys.argv[1]](*sys.argv[2:])) + "\n")
    sys.stdout.flush()
