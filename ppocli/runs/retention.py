"""Which checkpoints stay on the disk, and under which names.

``step-000120`` folders belong to the run; ``superseded/`` holds later steps after a resume from an
earlier one; ``latest`` and ``best`` are links for people, never used for loading; names that start
with a dot are unfinished saves and deletions. Files in use are locked, and not deleted.
"""

import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from ppocli.errors import PpocliError
from ppocli.runs import atomic, faults
from ppocli.runs.manifest import MANIFEST, Invalid, Manifest, check_folder

PRUNED = "pruned.json"
"""in a run's ``checkpoints/``: when the user had them deleted"""
POINTERS = ("latest", "best")
SUPERSEDED = "superseded"
_DISCARDED = ".discarded-"
STEP = re.compile(r"step-([0-9]+)")
_SUPERSEDED_STEP = re.compile(r"step-([0-9]+)(-[0-9a-f]+)?")


class Hold:
    """An open file that is locked as long as this object lives; made by :func:`hold`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __del__(self) -> None:
        os.close(self._descriptor)


def hold(path: Path) -> Hold | None:
    """Protect a file from deletions that check :func:`unused` first; None if it doesn't exist (any
    more)."""
    try:
        held = Hold(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK))
    except OSError:
        return None
    return held if atomic.take(held._descriptor, fcntl.LOCK_SH) else None


@contextmanager
def unused(path: Path) -> Iterator[bool]:
    """Whether no process holds the file, or it doesn't exist; inside the block none can start to
    hold it."""
    try:
        # opened for writing, which locks of network file systems require
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        yield True
        return
    try:
        yield atomic.take(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


def sweep(folder: Path, prefix: str) -> None:
    """Delete the files in ``folder`` with this prefix that no process holds, as far as possible."""
    for path in folder.glob(f"{prefix}*"):
        with unused(path) as stray, suppress(OSError):
            if stray:
                path.unlink()


def step_name(step: int) -> str:
    """``120`` as ``step-000120``; a seventh digit is simply written."""
    return f"step-{step:06d}"


def list_steps(folder: Path) -> list[tuple[int, Path]]:
    """Step folders by number (so 9 < 10 < 1000000), oldest first; nothing is verified."""
    return sorted((int(match[1]), path) for path in _entries(folder)
                  if (match := STEP.fullmatch(path.name)))


def _entries(folder: Path) -> Iterable[Path]:
    return folder.iterdir() if folder.is_dir() else ()


def folder_size(folder: Path) -> int:
    """Bytes of all files below ``folder``, without links and files that vanish meanwhile."""
    total = 0
    for base, _, files in os.walk(folder, followlinks=False):
        for name in files:
            with suppress(OSError):
                entry = os.lstat(os.path.join(base, name))
                total += 0 if stat.S_ISLNK(entry.st_mode) else entry.st_size
    return total


def prune(folder: Path, keep_last: int, *keep_steps: int | None) -> list[str]:
    """Delete old checkpoints; to be called after a save has returned.

    The newest ``keep_last`` valid ones stay (at least one), and ``keep_steps``. An invalid folder
    never counts as kept: it stays for inspection if it is newer than the oldest kept one, and is
    deleted otherwise. Superseded steps are deleted once the run is past them. A checkpoint that is
    being read (by an evaluation) stays until a later call. A failure is a warning, and links are
    left alone.

    Args:
        folder: the run's ``checkpoints/``.
        keep_last: how many of the newest stay, >= 1.
        keep_steps: steps that stay besides (``None``: no such step).

    Returns:
        what couldn't be deleted, and why.
    """
    faults.point("prune.before")
    valid = [manifest.step for manifest in sound_steps(folder)]
    if not valid:
        return []
    kept = {*valid[-keep_last:], *keep_steps}
    oldest_kept = valid[-keep_last:][0]
    doomed = [path for step, path in list_steps(folder) if step not in kept and step < oldest_kept]
    past = folder / SUPERSEDED
    if past.is_dir() and not past.is_symlink():
        doomed += [path for path in sorted(past.iterdir())
                   if (match := _SUPERSEDED_STEP.fullmatch(path.name))
                   and int(match[1]) <= valid[-1]]
    warnings: list[str] = []
    for path in doomed:
        if path.is_symlink():
            warnings.append(f"{path.name} is a link and was left alone")
            continue
        try:
            with unused(path / MANIFEST) as unread:
                if unread:
                    discard(path)
        except OSError as error:
            warnings.append(f"{path.name} could not be deleted: {error.strerror or error}")
    return warnings


def sound_steps(folder: Path) -> list[Manifest]:
    """The manifests of step folders whose files are there in their sizes, oldest first."""
    manifests = []
    for step, path in list_steps(folder):
        with suppress(Invalid, OSError, PpocliError):
            manifests.append(check_folder(path, step=step, verify="size"))
    return manifests


def note_removed(folder: Path) -> None:
    """Remember in a run's ``checkpoints/`` that the user had checkpoints deleted.

    Raises:
        DiskError: the disk refuses.
    """
    atomic.write_json_atomic(folder / PRUNED, {"time": f"{datetime.now():%Y-%m-%d %H:%M:%S}"})


def removed_at(folder: Path) -> str | None:
    """When the user last had checkpoints of a run deleted, in local time; None for never."""
    return (atomic.read_json(folder / PRUNED) or {}).get("time")


def discard(path: Path) -> None:
    """Rename a path, so that a kill leaves no half-deleted step, then delete it (of a link only the
    link).

    Raises:
        OSError: it couldn't be moved or deleted.
    """
    # a name may have 255 bytes
    renamed = path.with_name(f"{_DISCARDED}{path.name[:50]}-{secrets.token_hex(4)}")
    atomic.rename_durable(path, renamed)
    atomic.remove_tree(renamed)


def leftovers(folder: Path) -> list[Path]:
    """Leftovers of interrupted saves, deletions and atomic writes in ``folder``."""
    starts = (atomic.STAGING, _DISCARDED, atomic.TEMPORARY_PREFIX)
    return sorted(path for path in _entries(folder) if path.name.startswith(starts))


def make_room(folder: Path) -> None:
    """Delete superseded steps and leftovers of interrupted saves, which nothing loads. The run
    folder's lock is held, so no staging folder belongs to another process."""
    for path in (folder / SUPERSEDED, *leftovers(folder)):
        shutil.rmtree(path, ignore_errors=True)


def clean_staging(folder: Path) -> list[str]:
    """Clean up after interrupted saves. To be called at the start, before the search for the newest
    checkpoint, with the run folder's lock held.

    Returns:
        One line for each broken save: ``skipped .staging-000130-1f2e3d4c: incomplete``, and one for
        anything that couldn't be deleted.
    """
    messages = []
    try:
        atomic.put_back(folder)
    except OSError as error:
        messages.append(f"{error.filename} could not be deleted: {error.strerror or error}")
    for path in [*leftovers(folder), *leftovers(folder / SUPERSEDED)]:
        if path.name.startswith(atomic.STAGING):
            messages.append(f"skipped {path.name}: incomplete")
        try:
            atomic.remove_tree(path)
        except OSError as error:
            messages.append(f"{path.name} could not be deleted: {error.strerror or error}")
    return messages


def supersede(folder: Path, step: int) -> list[int]:
    """Before a run resumes from ``step``, move the folders of later steps to ``superseded/``.

    They would otherwise count as newer states of the resumed run.

    Returns:
        The steps moved, oldest first.

    Raises:
        DiskError: the disk refuses.
    """
    later = [(number, path) for number, path in list_steps(folder) if number > step]
    if not later:
        return []
    past = folder / SUPERSEDED
    atomic.make_dirs(past)
    with atomic.disk_errors(past):
        for _, path in later:
            target = past / path.name
            if os.path.lexists(target):
                target = past / f"{path.name}-{secrets.token_hex(4)}"
            atomic.rename_durable(path, target)
    return [number for number, _ in later]


def update_pointers(folder: Path, *, latest: int | None, best: int | None) -> list[str]:
    """Point the relative links ``latest`` and ``best`` at their step folders, for people's use.

    Nothing depends on them, so a failure (a disk without links) is a warning, which is returned.
    None, or a step that isn't there, removes the link.
    """
    warnings = []
    for name, step in zip(POINTERS, (latest, best), strict=True):
        link = folder / name
        temporary = folder / f"{atomic.TEMPORARY_PREFIX}{secrets.token_hex(4)}"
        try:
            if step is None or not (folder / step_name(step)).is_dir():
                link.unlink(missing_ok=True)
                continue
            temporary.symlink_to(step_name(step), target_is_directory=True)
            os.replace(temporary, link)
            atomic.fsync_dir(folder)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            warnings.append(f"link {name} could not be written: {error.strerror or error}")
    return warnings
