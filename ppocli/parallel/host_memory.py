"""Memory of the host: how much the machine, or its control group, can still give, what a process
holds, and how it keeps what it frees."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ASSUMED_DEVICE = "the given"
"""name of a device that isn't here"""


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that a device and this host can still give; None where the system doesn't tell. A
    ``device`` that is None computes on the host."""

    device: int | None
    host: int | None
    name: str
    """what the device is called"""


def room_here(*, cuda: bool, device: torch.device | None = None) -> Room:
    """What is there now.

    Args:
        cuda: whether a GPU computes.
        device: which (default: the first that is visible).
    """
    host = host_room()
    if not cuda:
        return Room(None, host, "this machine")
    import torch

    module = torch.get_device_module(device)
    free, _ = module.mem_get_info(device)
    return Room(int(free), host, module.get_device_name(device))


def host_room(root: Path = Path("/")) -> int | None:
    """Bytes that may still be taken of the machine's memory, and of the control group's; cached
    files count as free.

    Args:
        root: where ``proc`` and ``sys`` lie.
    """
    left = [_left(root / "sys/fs/cgroup", *files) for files in _GROUPS]
    sizes = [size for size in (_machine(root), *left) if size is not None]
    return min(sizes) if sizes else None


def resident_mib(pid: int) -> float | None:
    """The memory that a process holds now, in MiB; None where the system doesn't tell."""
    with suppress(OSError, ValueError, IndexError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return None


def _machine(root: Path) -> int | None:
    with suppress(OSError):
        match = re.search(r"^MemAvailable:\s+(\d+) kB", (root / "proc/meminfo").read_text(),
                          re.MULTILINE)
        return int(match[1]) * 1024 if match else None
    with suppress(ValueError, OSError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


_GROUPS = (("memory.max", "memory.current", "memory.stat", "inactive_file"),
           ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat",
            "total_inactive_file"))
"""of version 2 and version 1 control groups: the files with the limit, what is used and what for,
and what the last one calls cached files"""


def _left(group: Path, limit: str, used: str, stat: str, cached: str) -> int | None:
    with suppress(OSError, ValueError):  # no such group, or "max"
        most, now = int((group / limit).read_text()), int((group / used).read_text())
        match = re.search(rf"^{cached} (\d+)$", (group / stat).read_text(), re.MULTILINE)
        return max(most - now + (int(match[1]) if match else 0), 0)
    return None


log = logging.getLogger("ppocli")

# of glibc's malloc.h, there with M_ before them
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -3, -4, -8
_OTHERS = ("LD_PRELOAD", "GLIBC_TUNABLES", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_",
           "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")
"""who sets one of these has chosen"""


def settle_freed_memory(*, sharded: bool) -> None:
    """Whether large tensors that are freed stay with the process. For a process of its own only;
    without glibc nothing happens.

    Kept, they come from the heap: glibc hands large blocks back to the system at once, every
    update takes its gradients anew, and the system then fills hundreds of megabytes with zeros,
    page by page.

    Args:
        sharded: whether DeepSpeed takes and frees flat buffers of all sizes between the tensors
            that stay, so that a heap of a 45M model would grow to half as much again as is in use.
            There every large block goes back to the system: also those for which glibc raises its
            threshold, up to 32 MiB, as soon as one was freed.
    """
    if not sys.platform.startswith("linux") or any(name in os.environ for name in _OTHERS):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        log.debug("no mallopt: memory is handed back to the system as it is freed")
        return
    for option, value in ((_MMAP_THRESHOLD, 2**20), (_TRIM_THRESHOLD, 2**26)) if sharded else (
            (_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1)):
        mallopt(option, value)


def share_one_heap() -> None:
    """Let all threads to come take their memory from one heap, the only one that glibc can give
    back whole; without glibc nothing happens."""
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_ARENA_MAX, 1)


def give_back_memory() -> None:
    """Hand what is free in the heap back to the system; without glibc nothing happens."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
