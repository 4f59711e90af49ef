"""A run's folder: where things lie, who may write to it, and folders that appear whole."""

from __future__ import annotations

import fcntl
import json
import math
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ppocli.engine import faults
from ppocli.engine.atomic import (
    TEMPORARY_PREFIX,
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
    walk_files,
    write_atomic,
    write_json_atomic,
)
from ppocli.errors import CheckpointError, DiskError

LOCK = ".lock"
_OWNER_WAIT_SECONDS = 2.0  # a process that has just got the lock needs a moment to write its name


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Where the parts of a run lie. Nothing is created by naming it."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One JSON object a step."""
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """One JSON object a logged response."""
        return self.path / "samples.jsonl"

    @property
    def summary(self) -> Path:
        """What came out, one JSON object."""
        return self.path / "summary.json"

    @property
    def events(self) -> Path:
        """TensorBoard's event files."""
        return self.path / "events"

    @property
    def log(self) -> Path:
        """Everything that was said."""
        return self.path / "ppocli.log"

    @property
    def checkpoints(self) -> Path:
        """Step folders."""
        return self.path / "checkpoints"

    @property
    def nonfinite_dump(self) -> Path:
        """Rollouts on which the policy stopped being finite, one folder a step."""
        return self.path / "nonfinite-dump"

    @property
    def model(self) -> Path:
        """The trained policy, a plain Hugging Face folder."""
        return self.path / "model"


def probe_writable(folder: Path) -> None:
    """Create ``folder`` where missing and try what a run does there: write, sync, rename, delete.

    Raises:
        DiskError: it can't be created or written, or it is a file.
    """
    fix = "choose another output_dir or run_name"
    probe = folder / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
    try:
        with disk_errors(folder):
            for part in (folder, *folder.absolute().parents):
                if os.path.lexists(part) and not part.is_dir():
                    raise DiskError(f"{folder} can't be a folder: {part} is a file.",
                                    where=str(folder), fix=fix)
            make_dirs(folder)
            write_atomic(probe, b"probe")
            probe.unlink()
    except OSError as error:
        raise DiskError(f"{folder} can't be written: {error.strerror or error}.",
                        where=str(folder), fix=fix) from error


def finite_or_null(value: Any) -> Any:
    """``value`` with NaN and infinities, which JSON hasn't, turned to ``None``, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite_or_null(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_or_null(item) for item in value]
    return value


def write_summary(run: RunFolder, summary: dict[str, Any]) -> None:
    """Replace ``summary.json``, atomically; NaN and infinities become null.

    Raises:
        DiskError: the disk is full, read-only, or refuses.
    """
    write_json_atomic(run.summary, finite_or_null(summary))


@dataclass(frozen=True, slots=True)
class Owner:
    """Who writes in a run folder. ``started`` is the process's start in clock ticks since boot
    (``None`` where the system doesn't tell), which tells a recycled pid from the one meant."""

    pid: int
    host: str
    boot: str
    started: int | None


@contextmanager
def lock(run_dir: Path) -> Iterator[None]:
    """Hold a run folder for this process; created where missing.

    The lock is a POSIX record lock on ``.lock`` (it ends with the process, and forked children
    don't inherit it) and the owner's name in it. A name left by a dead process, an earlier boot, or
    a pid that is now someone else's is taken over. The file stays, empty, when the lock is given
    back: deleting it would open a race.

    Raises:
        CheckpointError: a live process, this one included, works in the folder; names pid and host.
        DiskError: the folder can't be written.
    """
    make_dirs(run_dir)
    path = run_dir / LOCK
    with disk_errors(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if not _kernel_lock(descriptor):
            raise _locked(run_dir, _wait_for_owner(path))
        # A process doesn't conflict with its own record locks; its name in the file tells.
        owner = _read_owner(os.pread(descriptor, 4096, 0))
        if owner is not None and _is_alive(owner):
            raise _locked(run_dir, owner)
        with disk_errors(path):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(asdict(_myself())).encode(), 0)
            os.fsync(descriptor)
        try:
            yield
        finally:
            with suppress(OSError):  # a dying disk: the name left there is a dead process's soon
                os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def live_owner(run_dir: Path) -> Owner | None:
    """The live process that holds a run folder, told by the name in the lock file alone: asking
    the kernel would take part in the locking."""
    try:
        owner = _read_owner((run_dir / LOCK).read_bytes())
    except OSError:
        return None
    return owner if owner is not None and _is_alive(owner) else None


def _kernel_lock(descriptor: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return True  # a file system without locks: the owner's name alone has to do
    return True


def _locked(run_dir: Path, owner: Owner | None) -> CheckpointError:
    who = "another process" if owner is None else f"process {owner.pid} on {owner.host}"
    return CheckpointError(f"{run_dir} is in use by {who}.", where=str(run_dir / LOCK),
                           fix="wait for it to end or stop it, or choose another run_name")


def _wait_for_owner(path: Path) -> Owner | None:
    deadline = time.monotonic() + _OWNER_WAIT_SECONDS
    while (owner := _read_owner(path.read_bytes())) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return owner


def _read_owner(raw: bytes) -> Owner | None:
    try:
        value = json.loads(raw)
        return Owner(int(value["pid"]), str(value["host"]), str(value["boot"]), value["started"])
    except (ValueError, TypeError, KeyError):
        return None


def _myself() -> Owner:
    pid = os.getpid()
    return Owner(pid, socket.gethostname(), _boot_id(), _start_ticks(pid))


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _start_ticks(pid: int) -> int | None:
    """Field 22 of ``/proc/PID/stat``; ``None`` for a dead process, a zombie, or without /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2:].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _is_alive(owner: Owner) -> bool:
    """Whether the owner still runs on this machine and boot."""
    if owner.host != socket.gethostname() or owner.boot != _boot_id():
        return False
    if owner.started is not None:
        return _start_ticks(owner.pid) == owner.started
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


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
        for name in walk_files(staging):
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
    isn't there yet, and delete the leftovers. The run folder's lock must be held.

    Returns:
        One line for each unfinished folder: ``skipped .staging-model-1f2e3d4c: incomplete``.
    """
    said = []
    for old in sorted(target.parent.glob(f".replaced-{target.name}-*")):
        _restore(old, target)
        if os.path.lexists(old):
            with disk_errors(old):
                remove_tree(old)
    for staging in sorted(target.parent.glob(f".staging-{target.name}-*")):
        said.append(f"skipped {staging.name}: incomplete")
        with disk_errors(staging):
            remove_tree(staging)
    return said


def _restore(old: Path, target: Path) -> None:
    if os.path.lexists(old) and not os.path.lexists(target):
        os.rename(old, target)
        fsync_dir(target.parent)
