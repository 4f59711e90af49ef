"""Files and folders that are whole or absent: write, fsync, rename, fsync the folder.

Everything durable in a run folder goes through here, so that a kill or a power cut leaves either
the old content or the new one. Failures of the disk become :class:`DiskError`.
"""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from ppocli.config.text import format_bytes
from ppocli.errors import DiskError, PpocliError
from ppocli.runs import faults

TEMPORARY_PREFIX = ".tmp-"
STAGING = ".staging-"
"""prefix of a folder that is being written"""
REPLACED = ".replaced-"
"""prefix of a folder that is being replaced"""
_NEARLY_FULL = 1 << 20  # free bytes below which an unexplained write error counts as a full disk

_REFUSALS = {
    "Disk full": ([errno.ENOSPC], "free some space"),
    "Disk quota exceeded": ([errno.EDQUOT], "free some space or raise the quota"),
    "Read-only disk": ([errno.EROFS], "choose a writable folder"),
    "No permission": ([errno.EACCES, errno.EPERM],
                      "make the folder writable, or choose another one"),
    "File size limit reached": ([errno.EFBIG], "raise the limit (ulimit -f)"),
    "Disk failure (input/output error)": ([errno.EIO], "check the disk"),
    "Not a folder": ([errno.ENOTDIR], "choose a folder that isn't below a file"),
    "Won't follow a link": ([errno.ELOOP], "look where the link leads, and remove it"),
    "Path too long": ([errno.ENAMETOOLONG], "choose a shorter path"),
}
"""the system's error numbers of a disk that refuses, and what a user can do"""
_REASONS = {number: reason for reason, (numbers, _) in _REFUSALS.items() for number in numbers}


def disk_reason(error: BaseException, folder: Path | None = None) -> str | None:
    """Why the disk refused, or ``None`` when ``error`` isn't the disk's.

    Libraries report a full disk in their own ways: torch raises ``RuntimeError`` naming
    ``inline_container``, safetensors a ``SafetensorError`` with "(os error 28)". With ``folder``,
    an unexplained I/O-like error on a disk with less than 1 MiB free counts as "Disk full".
    """
    # not __context__: that may be whatever an outer frame happens to be handling
    if reason := _reason_of_one(error) or (error.__cause__ and _reason_of_one(error.__cause__)):
        return reason
    is_safetensors = type(error).__name__ == "SafetensorError"
    if folder is not None and (is_safetensors or isinstance(error, (OSError, RuntimeError))):
        free = free_bytes(folder)
        return "Disk full" if free is not None and free < _NEARLY_FULL else None
    return None


def _reason_of_one(error: BaseException) -> str | None:
    if isinstance(error, OSError) and error.errno is not None:
        return _REASONS.get(error.errno)
    if isinstance(error, PpocliError) or not isinstance(error, Exception):
        return None
    text = str(error).lower()
    if match := re.search(r"os error (\d+)", text):
        return _REASONS.get(int(match.group(1)))
    if "no space left" in text or "inline_container" in text:
        return "Disk full"
    return "Disk quota exceeded" if "disk quota" in text else None


def free_bytes(path: Path) -> int | None:
    """Free bytes for an ordinary user on the disk of ``path`` (or its nearest existing parent)."""
    for candidate in (path, *path.absolute().parents):
        with suppress(OSError):
            return shutil.disk_usage(candidate).free
    return None


def disk_refused(reason: str, path: Path, needed: str | None = None, *, doing: str | None = None
                 ) -> DiskError:
    """The error of a :func:`disk_reason`: ``Disk full writing step 130 (needs 214 MB, 3 MB free).``

    Args:
        path: what was written.
        needed: how much that takes, where known.
        doing: words for ``path``.
    """
    free = free_bytes(path.parent)
    facts = [f"needs {needed}"] if needed else []
    facts += [f"{format_bytes(free)} free"] if free is not None else []
    return DiskError(f"{reason} writing {doing or path}"
                     + (f" ({', '.join(facts)})." if facts else "."),
                     where=str(path), fix=_REFUSALS[reason][1])


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn the disk's ``OSError`` inside the block into a :class:`DiskError` naming ``path``, the
    file or folder being written."""
    try:
        yield
    except OSError as error:
        if (reason := disk_reason(error)) is None:
            raise
        raise disk_refused(reason, path) from error


def fsync_dir(path: Path) -> None:
    """Force the names in a folder (creations, renames, deletions) to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems can't sync a folder and have no weaker request to offer.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def sha256_file(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def open_atomic(path: Path) -> Iterator[BinaryIO]:
    """A binary file that replaces ``path`` when the block ends, durably; on an exception it's gone.

    The temporary file lies in the same folder and has the permissions the umask gives.

    Args:
        path: the file to write; a link there is replaced, not followed.

    Raises:
        DiskError: the disk is full, read-only, or refuses.
    """
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}")
    with disk_errors(path):
        try:
            with temporary.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
                os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        fsync_dir(path.parent)


def write_atomic(path: Path, data: bytes | str) -> None:
    """Replace ``path`` by ``data`` (text as UTF-8): readers see the old file or the whole new one.

    Raises:
        DiskError: the disk is full, read-only, or refuses.
    """
    with open_atomic(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def write_json_atomic(path: Path, value: Any) -> None:
    """Write ``value`` as strict, indented JSON, atomically.

    There is no newline at the end, so that a file cut by one byte is no longer JSON.

    Raises:
        ValueError: a float is NaN or infinite.
        DiskError: the disk is full, read-only, or refuses.
    """
    write_atomic(path, json.dumps(value, indent=2, allow_nan=False))


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None where there is none that can be read."""
    with suppress(OSError, ValueError, RecursionError):
        value = json.loads(path.read_bytes())
        return value if isinstance(value, dict) else None
    return None


def sweep(folder: Path) -> None:
    """Delete half-written files that a kill left in a folder, as far as possible. Nobody else may
    be writing there."""
    for stray in folder.glob(f"{TEMPORARY_PREFIX}*"):
        with suppress(OSError):
            stray.unlink()


def make_dirs(path: Path) -> None:
    """Create ``path`` and its parents where missing, and make their names durable.

    Raises:
        DiskError: the disk is full, read-only, or refuses.
    """
    with disk_errors(path):
        missing = [folder for folder in (path, *path.parents) if not folder.is_dir()]
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            fsync_dir(folder.parent)


def rename_durable(source: Path, target: Path) -> None:
    """Rename within a folder: after it returns, the new name survives a power cut."""
    os.rename(source, target)
    fsync_dir(target.parent)


def walk_files(folder: Path) -> list[str]:
    """Relative POSIX names of all files below ``folder``, sorted.

    Raises:
        ValueError: something below is a link, a device, a pipe or a socket; the message names it.
    """
    names = []
    for base, folders, files in os.walk(folder, followlinks=False):
        for name in (*folders, *files):
            path = Path(base, name)
            mode = path.lstat().st_mode
            relative = path.relative_to(folder).as_posix()
            if stat.S_ISLNK(mode):
                raise ValueError(f"{relative} is a link")
            if stat.S_ISREG(mode):
                names.append(relative)
            elif not stat.S_ISDIR(mode):
                raise ValueError(f"{relative} is not a plain file")
    return sorted(names)


def folder_size(folder: Path) -> int:
    """Bytes of all files below ``folder``, without links and files that vanish meanwhile."""
    total = 0
    for base, _, files in os.walk(folder, followlinks=False):
        for name in files:
            with suppress(OSError):
                entry = os.lstat(os.path.join(base, name))
                total += 0 if stat.S_ISLNK(entry.st_mode) else entry.st_size
    return total


def sync_tree(folder: Path) -> None:
    """Sync a new folder and everything below it to the disk.

    Its files get the permissions that the umask gives new files: safetensors makes its files
    readable by their owner only.

    Raises:
        ValueError: as :func:`walk_files`.
    """
    permissions = stat.S_IMODE(folder.stat().st_mode) & 0o666
    for name in walk_files(folder):
        path = folder / name
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode | permissions != mode:
            with suppress(OSError):  # some file systems have no permissions to set
                path.chmod(mode | permissions)
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    for base, _, _ in os.walk(folder, topdown=False, followlinks=False):
        fsync_dir(Path(base))


def remove_tree(path: Path) -> None:
    """Delete a folder and what it holds; of a link, only the link itself.

    Raises:
        OSError: something couldn't be deleted.
    """
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path)


def publish_folder(write: Callable[[Path], None], target: Path, phase: str = "export",
                   usual: Callable[[], int] = int, doing: str | None = None) -> None:
    """Make ``target`` a folder with what ``write`` puts into the empty folder it is given.

    Readers see the old folder or the whole new one; in the instant between two renames, neither,
    and :func:`repair_published` (called here first, and by whoever opens the run) ends that. A link
    at ``target`` is replaced; what it points to is left alone.

    Args:
        phase: prefix of the points where a fault may be injected.
        usual: asked how many bytes such a folder has when the disk is full; 0 if unknown.
        doing: as of :func:`disk_refused`.

    Raises:
        DiskError: the disk refused; the old ``target`` is still there.
        ValueError: ``write`` left a link or something that is no plain file.
    """
    make_dirs(target.parent)
    repair_published(target)
    staging = target.with_name(f"{STAGING}{target.name}-{secrets.token_hex(4)}")
    try:
        staging.mkdir()
        write(staging)
        sync_tree(staging)
        _put_in_place(staging, target, phase)
    except BaseException as error:
        reason, staged = disk_reason(error, target.parent), folder_size(staging)
        shutil.rmtree(staging, ignore_errors=True)
        if not os.path.lexists(target):
            put_back(target.parent, target.name)
        if reason is None or not isinstance(error, Exception):
            raise
        size = usual()
        needed = ("" if size else "more than ") + format_bytes(max(size, staged))
        raise disk_refused(reason, target, needed, doing=doing) from error
    with disk_errors(target):
        put_back(target.parent, target.name)


def _put_in_place(staging: Path, target: Path, phase: str) -> None:
    """Rename a folder to ``target``, and an existing target to a name that :func:`put_back`
    knows."""
    faults.point(f"{phase}.before_rename")
    if os.path.lexists(target):
        nonce = staging.name.rpartition("-")[2]
        rename_durable(target, target.with_name(f"{REPLACED}{target.name}-{nonce}"))
        faults.point(f"{phase}.between_renames")
    rename_durable(staging, target)


def put_back(folder: Path, name: str | None = None) -> None:
    """Where a folder was being replaced: put the old one back if the new one isn't there, delete
    it otherwise.

    Args:
        folder: in which it lies.
        name: its name; None: whichever.

    Raises:
        OSError: something couldn't be renamed or deleted.
    """
    for old in _temporaries(folder, REPLACED, name):
        target = folder / old.name.removeprefix(REPLACED).rpartition("-")[0]
        if os.path.lexists(target):
            remove_tree(old)
        else:
            rename_durable(old, target)


def repair_published(target: Path) -> list[str]:
    """Undo a :func:`publish_folder` that was killed: put the old folder back where the new one
    isn't there yet, and delete the leftovers. The lock of the run folder, or of ``target``,
    must be held.

    Returns:
        One line for each unfinished folder: ``skipped .staging-model-1f2e3d4c: incomplete``.
    """
    unfinished = _temporaries(target.parent, STAGING, target.name)
    with disk_errors(target):
        put_back(target.parent, target.name)
        for staging in unfinished:
            remove_tree(staging)
    return [f"skipped {staging.name}: incomplete" for staging in unfinished]


def _temporaries(folder: Path, prefix: str, name: str | None) -> list[Path]:
    """Paths in ``folder`` with a temporary name of ``name``, not of a neighbour ``name-2``."""
    middle = ".+" if name is None else re.escape(name)
    pattern = re.compile(f"{re.escape(prefix)}{middle}-[0-9a-f]+")
    return sorted(path for path in folder.glob(f"{prefix}*") if pattern.fullmatch(path.name))
