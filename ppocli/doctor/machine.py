"""Checks of the machine: Python, memory, shared memory, processor."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata

from packaging.specifiers import SpecifierSet

from ppocli.doctor.checking import Finding, Surroundings
from ppocli.storage.environment import usable_cores
from ppocli.text import counted

MEMORY_FAIL, MEMORY_LOW = 0.5, 2.0
"""GiB; torch and transformers alone take 0.4"""
SHARED_MEMORY_LOW = 256 * 2**20
"""bytes; a container gets 64 MiB unless told otherwise, which NCCL and data loaders exceed"""


def python(around: Surroundings) -> Finding:
    """The interpreter's version against the one that ppocli was made for."""
    try:
        wanted = metadata.metadata("ppocli").json.get("requires_python")
    except metadata.PackageNotFoundError:
        wanted = None
    here = platform.python_version()
    if wanted is None:
        return Finding("warning", f"{here}; ppocli isn't installed as a package, so nothing says "
                       "which versions it takes", "pip install ppocli")
    if not SpecifierSet(str(wanted)).contains(here, prereleases=True):
        return Finding("fail", f"{here} is outside {wanted}",
                       "make a virtual environment with another Python")
    return Finding("ok", here)


def memory(around: Surroundings) -> Finding:
    """What may still be taken of the machine's memory, and of the control group's."""
    try:
        text = (around.root / "proc/meminfo").read_text()
    except OSError:
        return Finding("ok", "the system doesn't tell")
    figures = {name: int(kib) / 2**20
               for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
    free, total = figures.get("MemAvailable", 0.0), figures.get("MemTotal", 0.0)
    group = around.root / "sys/fs/cgroup"
    limited = ""
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        if limit / 2**30 < total:
            free, total, limited = min(free, (limit - used) / 2**30), limit / 2**30, " (container)"
    except (OSError, ValueError):
        pass  # no control group, or "max"
    text = f"{free:.1f} of {total:.1f} GiB free{limited}"
    if free < MEMORY_FAIL:
        return Finding("fail", text, "end other programs, or give the container more memory")
    if free < MEMORY_LOW:
        return Finding("warning", text, "enough for tiny models only")
    return Finding("ok", text)


def shared_memory(around: Surroundings) -> Finding:
    """The size of /dev/shm, over which processes of one machine talk."""
    try:
        found = os.statvfs(around.root / "dev/shm")
    except OSError:
        return Finding("warning", "there is no /dev/shm", "runs with several processes need it: "
                       "docker run --ipc=host")
    size = found.f_blocks * found.f_frsize
    text = f"/dev/shm has {size / 2**20:.0f} MiB"
    if size < SHARED_MEMORY_LOW:
        return Finding("warning", text, "for runs with several processes: docker run "
                       "--shm-size=1g, or --ipc=host")
    return Finding("ok", text)


def threads(around: Surroundings) -> Finding:
    """Threads that torch computes with against cores that it may use."""
    cores = usable_cores(around.root)
    given = os.environ.get("OMP_NUM_THREADS")
    fix = f"export OMP_NUM_THREADS={cores}, or hardware.num_threads={cores}"
    if given and not re.fullmatch(r"\s*[1-9]\d*(\s*,\s*[1-9]\d*)*\s*", given):
        return Finding("warning", f"OMP_NUM_THREADS={given[:40]!a} is no number of threads", fix)
    facts = around.torch.facts
    count = facts["threads"] if facts else int(given.split(",")[0]) if given else cores
    text = (f"{counted(count, 'thread')} on {counted(cores, 'usable core')}")
    if count > cores:
        return Finding("warning", f"{text}: they wait for each other", fix)
    return Finding("ok", text)
