"""What a run ran on: versions, machine, variables. Written to a run's ``env.json``, printed by
``ppocli env``. No host name, no user name, no secrets."""

import os
import platform
import re
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from ppocli.config.secrets import looks_secret
from ppocli.runs import atomic
from ppocli.version import __version__

ENV_FILE = "env.json"
EXAMPLES = "examples"
"""key of what a run that trains on a data set found there"""
PRODUCTS = "linear_layers"
"""key of whose products a run's linear layers take"""
THREADS = "num_threads"
"""key of how many threads of a CPU each process computes with"""
LOWER = "lower_is_better"
"""key of the figures of which less is better to a run's task"""
PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "hydra-core", "omegaconf",
            "datasets", "tokenizers", "safetensors", "huggingface-hub", "typer", "rich", "numpy",
            "pyarrow")
"""distributions whose absence is news"""
OPTIONAL = ("matplotlib", "playwright", "peft", "wandb", "trackio", "mlflow", "optuna",
            "hydra-optuna-sweeper", "hydra-joblib-launcher", "hydra-submitit-launcher",
            "flash-attn", "bitsandbytes")
"""distributions that are named where they are present"""
_PREFIXES = ("HF_", "HUGGINGFACE_", "HUGGING_FACE_", "TRANSFORMERS_", "PPOCLI_", "ACCELERATE_",
             "DS_", "CUDA_", "NCCL_", "GLOO_", "OMP_", "MKL_", "TORCH_", "PYTORCH_")
_NAMES = ("TOKENIZERS_PARALLELISM", "XDG_CACHE_HOME", "NO_COLOR", "DO_NOT_TRACK", "WORLD_SIZE",
          "RANK", "LOCAL_RANK")
_FLAG = re.compile(r"[+-]?\d{1,6}(,\d{1,6})*|true|false|on|off|yes|no", re.IGNORECASE)


def describe() -> dict[str, Any]:
    """The facts, in plain JSON types; a fact that the system doesn't tell is None."""
    import psutil

    return {
        "ppocli": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "platform": platform.platform(),
        "cpu": {"model": cpu_model(), "vendor": cpu_vendor(), "cores": os.cpu_count(),
                "usable_cores": usable_cores()},
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "nvidia_driver": nvidia_driver(), "torch": _torch(),
        "packages": {name: installed_version(name) for name in PACKAGES}
        | {name: version for name in OPTIONAL
           if (version := installed_version(name)) is not None},
        "variables": variables()}


def installed_version(name: str) -> str | None:
    """The version of an installed distribution, without importing it."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that this process may use: its affinity, and the quota of its control group.

    Args:
        root: where ``sys/fs/cgroup`` lies.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (
        os.cpu_count() or 1)
    with suppress(OSError, ValueError):
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
        return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
    return cores


def nvidia_driver() -> str | None:
    """The version of the NVIDIA driver; ``unknown`` where only its device tells of it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "unknown" if Path("/dev/nvidiactl").exists() else None
    version = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return version[0] if version else "unknown"


def variables() -> dict[str, str]:
    """The variables that matter here and are set: flags and numbers by value, the rest as "set"."""
    return {name: value if _FLAG.fullmatch(value) and not looks_secret(name) else "set"
            for name, value in sorted(os.environ.items())
            if name.startswith(_PREFIXES) or name in _NAMES}


def hub_home() -> Path:
    """The folder of the Hugging Face libraries: ``HF_HOME``, else in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or Path(cache) / "huggingface").expanduser()


def cpu_model() -> str | None:
    """The processor as it calls itself."""
    return _cpuinfo("model name|Model") or platform.processor() or platform.machine() or None


def cpu_vendor() -> str | None:
    """``GenuineIntel``, ``AuthenticAMD``, ...; None where the system doesn't tell, as on ARM."""
    return _cpuinfo("vendor_id")


def _cpuinfo(names: str) -> str | None:
    with suppress(OSError):
        line = re.search(rf"^(?:{names})\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(),
                         re.MULTILINE)
        return line[1].strip() if line else None
    return None


def _torch() -> dict[str, Any]:
    """What only torch itself can tell. A broken installation is a fact like others."""
    try:
        import torch

        gpus = [torch.cuda.get_device_properties(index)
                for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
        return {"version": torch.__version__, "cuda": torch.version.cuda,
                "hip": torch.version.hip, "threads": torch.get_num_threads(),
                "cpu_capability": torch.backends.cpu.get_cpu_capability(),
                "gpus": [{"name": gpu.name, "memory_gib": round(gpu.total_memory / 2**30, 1),
                          "capability": f"{gpu.major}.{gpu.minor}"} for gpu in gpus]}
    except Exception as error:  # a broken installation raises whatever its loader does
        return {"error": " ".join([type(error).__name__, *str(error).splitlines()[:1]])}


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How a run computes, which its roundings depend on, for those who compute what it has
    computed; None where nothing says so."""

    products: str | None = None
    """whose products linear layers take, as of :mod:`ppocli.distributed.onednn`"""
    threads: int | None = None


def arithmetic_of(run_dir: Path | None) -> Arithmetic:
    """What a run has recorded."""
    facts = {} if run_dir is None else atomic.read_json(run_dir / ENV_FILE) or {}
    products, threads = facts.get(PRODUCTS), facts.get(THREADS)
    return Arithmetic(products if isinstance(products, str) else None,
                      threads if isinstance(threads, int) and threads > 0 else None)


def lower_is_better(run_dir: Path) -> frozenset[str] | None:
    """Figures of evaluations of which less is better, as the task of a run has them; None where
    that isn't known."""
    names = (atomic.read_json(run_dir / ENV_FILE) or {}).get(LOWER)
    return frozenset(map(str, names)) if isinstance(names, list) else None


def examples_of(run_dir: Path) -> int | None:
    """How many examples a run on a data set has noted; None where it hasn't (yet)."""
    count = (atomic.read_json(run_dir / ENV_FILE) or {}).get(EXAMPLES)
    return count if isinstance(count, int) else None
