"""What a measurement was made on: processor, versions, date, other work."""

import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("ppocli", "torch", "transformers")


def processor() -> str:
    """The processor's name, with the family and model that tell its generation, where Linux does.
    """
    info = Path("/proc/cpuinfo")
    if info.is_file():
        of_first = info.read_text(encoding="utf-8").partition("\n\n")[0]
        facts = {name.strip(): value.strip() for name, _, value in
                 (line.partition(":") for line in of_first.splitlines())}
        if "model name" in facts:
            return f"{facts['model name']} (family {facts.get('cpu family', '?')} model " \
                   f"{facts.get('model', '?')})"
    return platform.processor() or platform.machine()


def hardware() -> str:
    """Processor, number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return f"{processor()}, {len(affinity(0)) if affinity else os.cpu_count()} cores, " \
           f"{platform.system()}"


def gpu() -> str | None:
    """Name and driver of the first GPU; None without one."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    name, _, driver = done.stdout.splitlines()[0].partition(", ")
    return f"{name}, driver {driver}"


def installed(package: str) -> str:
    """The version of a package beside this Python."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "(absent)"


def versions(packages: Sequence[str] = PACKAGES) -> str:
    """Python and packages, in words."""
    return ", ".join([f"Python {platform.python_version()}",
                      *(f"{name} {installed(name)}" for name in packages)])


def other_work(busy: float) -> str:
    """What the load average before the first run says."""
    return (f"Load of the machine before the first run: {busy:.1f} processes"
            + (", so other work ran on it." if busy > 1 else "."))


def provenance(work: str) -> str:
    """When, on what and with which versions tables were made; ``work`` says how it was run."""
    return f"{date.today()}, {processor()}, {work}. {versions()}.\n"
