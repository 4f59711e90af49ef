"""Memory of the process: what is freed is kept for what is taken next."""

from __future__ import annotations

import ctypes
import logging
import os
import sys

log = logging.getLogger("ppocli")

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX of glibc's malloc.h
_OTHERS = ("LD_PRELOAD", "GLIBC_TUNABLES", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_",
           "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")
"""who sets one of these has chosen"""


def keep_freed_memory() -> None:
    """Make large tensors come from the heap and stay there when they are freed.

    glibc hands large blocks back to the system at once, and every update takes its gradients anew:
    the system then fills hundreds of megabytes with zeros, page by page. For a process of its own
    only; without glibc nothing happens.
    """
    if not sys.platform.startswith("linux") or any(name in os.environ for name in _OTHERS):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        log.debug("no mallopt: memory is handed back to the system as it is freed")
        return
    mallopt(_MMAP_MAX, 0)
    mallopt(_TRIM_THRESHOLD, 2**31 - 1)
