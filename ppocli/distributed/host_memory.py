"""Host memory: how much the machine or its control group has left, how much a process uses, and
whether freed memory goes back to the system."""

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

    from ppocli.config.schema import HardwareConfig

ASSUMED_DEVICE = "the given"
"""name of a device whose memory the user typed"""


@dataclass(frozen=True, slots=True)
class Room:
    """Free bytes of a device and of this host; None if the system doesn't report them. Without a
    ``device`` the host computes."""

    device: int | None
    host: int | None
    name: str
    """what the device is called"""
    whole_device: int | None = None
    """bytes of the device, free or not"""


def on_cuda(hardware: HardwareConfig) -> bool:
    """Whether a run with these settings computes on a GPU here."""
    import torch

    return hardware.device == "cuda" or (hardware.device == "auto" and torch.cuda.is_available())


def room_here(*, cuda: bool, device: torch.device | None = None) -> Room:
    """Free memory of this machine now.

    Args:
        cuda: whether a GPU computes.
        device: which (default: the first that is visible).
    """
    host = host_room()
    if not cuda:
        return Room(None, host, "this machine")
    import torch

    module = torch.get_device_module(device)
    free, whole = module.mem_get_info(device)
    return Room(int(free), host, module.get_device_name(device), int(whole))


def host_room(root: Path = Path("/")) -> int | None:
    """Available bytes of host memory: the least of the machine's and its control groups'. Cached
    files count as free.

    Args:
        root: where ``proc`` and ``sys`` lie.
    """
    left = [_left(root / "sys/fs/cgroup", *files) for files in _GROUPS]
    sizes = [size for size in (_machine(root), *left) if size is not None]
    return min(sizes) if sizes else None


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
"""files of control groups, versions 2 and 1: limit, usage, statistics; and the name of cached files
in the last"""


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
"""variables by which a user has already chosen how memory is freed"""


def settle_freed_memory(*, sharded: bool) -> None:
    """Choose whether large freed tensors stay with the process. Call it only in a process that was
    started for the run; without glibc nothing happens.

    By default glibc returns large blocks to the system at once. Every update would then allocate
    its gradients anew, and the system would zero hundreds of megabytes page by page.

    Args:
        sharded: whether DeepSpeed allocates and frees flat buffers of all sizes between tensors
            that stay. The heap of a 45M model would grow to 1.5 times what is in use, so every
            large block goes back to the system, including those up to 32 MiB, for which glibc
            raises its threshold once one was freed.
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
    """Make future threads allocate from the main heap, the only one that glibc can return
    completely; without glibc nothing happens."""
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_ARENA_MAX, 1)
