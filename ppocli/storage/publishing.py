"""Folders that appear whole."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from ppocli.errors import DiskError
from ppocli.storage import faults
from ppocli.storage.atomic import (
    disk_errors,
    disk_fix,
    disk_reason,
    disk_sentence,
    fsync_dir,
    fsync_file,
    fsync_folders,
    make_dirs,
    remove_tree,
    rename_durable,
    share,
    walk_files,
)


def publish_folder(write: Callable[[Path], None], target: Path) -> None:
    """Make ``target`` a folder with what ``write`` puts into the empty folder it is given.

    Readers see the old folder or the whole new one; in the instant between two renames, neither,
    and :func:`repair_published` (called here first, and by whoever opens the run) ends that. A link
    at ``target`` is replaced; what it points to is left alone.

    Raises:
        DiskError: the disk refused; the old ``target`` is still there.
        ValueError: ``write`` left a link or something that is no plain file.
    """
    make_dirs(target.parent)
    repair_published(target)
    nonce = secrets.token_hex(4)
    staging, old = (target.with_name(f".{kind}-{target.name}-{nonce}")
                    for kind in ("staging", "replaced"))
    try:
        staging.mkdir()
        write(staging)
        names = walk_files(staging)
        share(staging, names)
        for name in names:
            fsync_file(staging / name)
        fsync_folders(staging)
        faults.point("export.before_rename")
        if os.path.lexists(target):
            rename_durable(target, old)
            faults.point("export.between_renames")
        rename_durable(staging, target)
    except BaseException as error:
        reason = disk_reason(error, target.parent)
        shutil.rmtree(staging, ignore_errors=True)
        _restore(old, target)
        if reason is None or not isinstance(error, Exception):
            raise
        raise DiskError(disk_sentence(reason, str(target), target.parent, None),
                        where=str(target), fix=disk_fix(reason)) from error
    if os.path.lexists(old):
        with disk_errors(old):
            remove_tree(old)


def repair_published(target: Path) -> list[str]:
    """Undo a :func:`publish_folder` that was killed: put the old folder back where the new one
    isn't there yet, and delete the leftovers. The lock of the run folder, or of ``target``,
    must be held.

    Returns:
        One line for each unfinished folder: ``skipped .staging-model-1f2e3d4c: incomplete``.
    """
    said = []
    for old in _leftovers("replaced", target):
        _restore(old, target)
        if os.path.lexists(old):
            with disk_errors(old):
                remove_tree(old)
    for staging in _leftovers("staging", target):
        said.append(f"skipped {staging.name}: incomplete")
        with disk_errors(staging):
            remove_tree(staging)
    return said


def _leftovers(kind: str, target: Path) -> list[Path]:
    """What lies there under a temporary name of ``target``, not of a neighbour ``target-2``."""
    name = re.compile(rf"\.{kind}-{re.escape(target.name)}-[0-9a-f]{{8}}")
    return sorted(path for path in target.parent.glob(f".{kind}-*") if name.fullmatch(path.name))


def _restore(old: Path, target: Path) -> None:
    if os.path.lexists(old) and not os.path.lexists(target):
        os.rename(old, target)
        fsync_dir(target.parent)
