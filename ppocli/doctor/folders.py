"""Checks of the disk: where runs and downloads go."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ppocli.doctor.checking import Finding, Surroundings
from ppocli.errors import DiskError
from ppocli.storage.atomic import free_bytes
from ppocli.storage.environment import home_shortened, hub_home
from ppocli.storage.run_folder import probe_writable
from ppocli.text import format_bytes

DISK_FAIL, DISK_LOW = 200 * 10**6, 5 * 10**9
"""bytes; a checkpoint takes three times the weights"""


def hub_cache() -> Path:
    """Where models and data sets of the Hub are kept."""
    return Path(os.environ.get("HF_HUB_CACHE") or hub_home() / "hub").expanduser()


def disk(around: Surroundings) -> Finding:
    """Free space where runs and downloads go."""
    places = {"runs": around.folder, "Hub cache": hub_cache()}
    free = {name: free_bytes(path) for name, path in places.items()}
    known = {name: count for name, count in free.items() if count is not None}
    text = ", ".join(f"{name} {format_bytes(count)}" for name, count in known.items()) + " free"
    low = [name for name, count in known.items() if count < DISK_LOW]
    fix = "free some space, or move: output_dir=FOLDER, HF_HOME"
    if any(count < DISK_FAIL for count in known.values()):
        return Finding("fail", text, fix)
    return Finding("warning" if low else "ok", text, fix if low else None)


@contextmanager
def _leaving_nothing(folder: Path) -> Iterator[None]:
    """Remove the folders again that a probe had to make."""
    new = [part for part in (folder.absolute(), *folder.absolute().parents)
           if not os.path.lexists(part)]
    try:
        yield
    finally:
        for part in new:
            with suppress(OSError):
                part.rmdir()


def output(around: Surroundings) -> Finding:
    """Write, sync, rename and delete in the output folder, as a run does."""
    shown = home_shortened(str(around.folder))
    try:
        with _leaving_nothing(around.folder):
            probe_writable(around.folder)
    except DiskError as error:
        return Finding("fail", error.what, "choose another folder: output_dir=FOLDER")
    return Finding("ok", f"{shown}: files can be written, synced and renamed")
