"""Files that must not be deleted while somebody uses them: shared locks that end with the process,
``kill -9`` included, and that network file systems carry to other machines.

They are those of ``flock``. A file system that has none protects nothing: deleting goes on there.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class Hold:
    """An open file that is locked as long as this object lives; made by :func:`hold`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __del__(self) -> None:
        os.close(self._descriptor)


def hold(path: Path) -> Hold | None:
    """Keep a file from whoever asks :func:`unused` before deleting it; None where it isn't there
    (any more)."""
    try:
        held = Hold(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK))
    except OSError:
        return None
    return held if take(held._descriptor, fcntl.LOCK_SH) else None


def take(descriptor: int, kind: int) -> bool:
    """Lock an open file without waiting, ``LOCK_SH`` or ``LOCK_EX``; false where another open file
    is in the way."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without these locks
    return True


@contextmanager
def unused(path: Path) -> Iterator[bool]:
    """Whether nobody holds the file, or it isn't there; inside the block nobody comes to."""
    try:
        # for writing: locks of network file systems ask for it
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        yield True
        return
    try:
        yield take(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


def sweep(folder: Path, prefix: str) -> None:
    """Delete the files in ``folder`` that begin so and that nobody holds, as far as that goes."""
    for path in folder.glob(f"{prefix}*"):
        with unused(path) as stray, suppress(OSError):
            if stray:
                path.unlink()
