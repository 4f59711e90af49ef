"""A run's folder: paths of its parts, and which process may write to it."""

import fcntl
import json
import os
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ppocli.config import config_yaml, schema
from ppocli.errors import CheckpointError, DiskError, RunGoneError
from ppocli.runs import atomic, retention

LOCK = ".lock"
_OWNER_WAIT_SECONDS = 2.0  # a process that has just got the lock needs a moment to write its name


class RunFolder:
    """Paths of the parts of a run. Naming one creates nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        """the resolved configuration"""
        self.metrics = path / "metrics.jsonl"
        """one JSON object a step"""
        self.samples = path / "samples.jsonl"
        """one JSON object a logged response"""
        self.summary = path / "summary.json"
        """the results, one JSON object"""
        self.events = path / "events"
        """TensorBoard's event files"""
        self.log = path / "ppocli.log"
        """everything that was printed"""
        self.checkpoints = path / "checkpoints"
        """step folders"""
        self.nonfinite_dump = path / "nonfinite-dump"
        """rollouts on which the policy stopped being finite, one folder a step"""
        self.model = path / "model"
        """the trained policy, a plain Hugging Face folder"""


def probe_writable(folder: Path) -> None:
    """Create ``folder`` if missing and try to write, sync, rename and delete in it, as a run does.

    Raises:
        DiskError: it can't be created or written, or it is a file.
    """
    fix = "choose another folder"
    probe = folder / f"{atomic.TEMPORARY_PREFIX}{secrets.token_hex(8)}"
    try:
        with atomic.disk_errors(folder):
            for part in (folder, *folder.absolute().parents):
                if os.path.lexists(part) and not part.is_dir():
                    raise DiskError(f"{folder} can't be a folder: {part} is a file.",
                                    where=str(folder), fix=fix)
            atomic.make_dirs(folder)
            atomic.write_atomic(probe, b"probe")
            probe.unlink(missing_ok=True)  # another run that is starting may have deleted it
    except OSError as error:
        raise DiskError(f"{folder} can't be written: {error.strerror or error}.",
                        where=str(folder), fix=fix) from error


def new_folder(base: Path, name: str) -> Path:
    """Make ``base/name``, or ``base/name-2``, ... if that exists; two callers never share a folder.

    Raises:
        DiskError: ``base`` can't be written.
    """
    folder, number = base / name, 1
    with atomic.disk_errors(folder):
        base.mkdir(parents=True, exist_ok=True)
        while True:
            with suppress(FileExistsError):
                folder.mkdir()
                return folder
            number += 1
            folder = base / f"{name}-{number}"


def gone(path: Path) -> RunGoneError:
    """The error of a run whose folder, or a part of it, was moved or deleted."""
    return RunGoneError(f"{path}, or a part of it, was moved or deleted while the run wrote there.",
                        where=str(path), fix="go on with what is left where it lies now: "
                        "ppocli resume FOLDER")


def refuse_links(run_dir: Path) -> None:
    """Refuse a run folder whose parts are links: in a run from somebody else they could lead
    anywhere, and other people's files would be written or deleted.

    The folder itself may be a link, or lie below one. ``checkpoints/latest`` and ``best`` are our
    own links.

    Raises:
        CheckpointError: names a link, a device, a pipe or a socket.
    """
    for pattern in ("*", "checkpoints/*", "trackers/**/*", "events/**/*"):  # ** follows no links
        for path in sorted(run_dir.glob(pattern)):
            # what is replaced or deleted itself, whatever it leads to: models, temporary names
            if path.name.startswith("model") or (path.name.startswith(".") and path.name != LOCK
                                                 ) or path.name in retention.POINTERS:
                continue
            with suppress(FileNotFoundError):  # a step that the run, if it goes on, has just pruned
                mode = path.lstat().st_mode
                if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                    raise CheckpointError(
                        f"{path} is a link, or neither a file nor a folder; nothing is written in "
                        "a run's folder that could land elsewhere.", where=str(run_dir),
                        fix="remove it, or put what it stands for in its place; the run's folder "
                        "may itself be a link")


def write_config(config: schema.TrainConfig, path: Path) -> None:
    """Write a configuration, atomically and durably.

    Raises:
        DiskError: the disk is full, read-only, or refuses.
    """
    atomic.write_atomic(path, config_yaml.config_text(config))


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that writes to a run folder. ``started`` is its start in clock ticks since boot
    (``None`` if the system doesn't report it), which distinguishes it from a later process with the
    same pid."""

    pid: int
    host: str
    boot: str
    started: int | None


@contextmanager
def lock(run_dir: Path, *, reserved_by: int | None = None) -> Iterator[None]:
    """Hold a run folder for this process; created where missing.

    The lock is a POSIX record lock on ``.lock`` (it ends with the process, and forked children
    don't inherit it) and the owner's name in it. A name left by a dead process, by an earlier boot,
    or with a reused pid is replaced. When the lock is released the file stays, empty: deleting it
    would open a race.

    Args:
        run_dir: the folder.
        reserved_by: a process whose name the file may contain, see :func:`reserved`.

    Raises:
        CheckpointError: a live process, perhaps this one, uses the folder; names pid and host.
        DiskError: the folder can't be written.
    """
    descriptor = _take(run_dir, reserved_by)
    try:
        yield
    finally:
        with suppress(OSError):  # the disk fails: the name will soon be a dead process's
            os.ftruncate(descriptor, 0)
        os.close(descriptor)


@contextmanager
def reserved(run_dir: Path) -> Iterator[None]:
    """Keep a run folder for the worker that will :func:`lock` it with ``reserved_by`` this process,
    seconds later, when its libraries are loaded.

    The name in the file alone keeps others out: a record lock could not be handed to a child.

    Raises:
        CheckpointError, DiskError: as :func:`lock`.
    """
    os.close(_take(run_dir))
    try:
        yield
    finally:
        # the worker has emptied it, unless it ended before
        with suppress(OSError), (run_dir / LOCK).open("r+b") as file:
            if _kernel_lock(file.fileno()) and _read_owner(file.read(4096)) == _myself():
                file.truncate(0)


def _take(run_dir: Path, reserved_by: int | None = None) -> int:
    """Take the lock and write this process's name; the descriptor that holds it."""
    path = run_dir / LOCK
    atomic.make_dirs(run_dir)
    with atomic.disk_errors(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        if not _kernel_lock(descriptor):
            raise _locked(run_dir, _wait_for_owner(path))
        # A process doesn't conflict with its own record locks; its name in the file tells.
        owner = _read_owner(os.pread(descriptor, 4096, 0))
        if owner is not None and owner.pid != reserved_by and _is_alive(owner):
            raise _locked(run_dir, owner)
        with atomic.disk_errors(path):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(asdict(_myself())).encode(), 0)
            os.fsync(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def live_owner(run_dir: Path) -> Owner | None:
    """The live process that holds a run folder, according to the name in the lock file: asking the
    kernel would interfere with the lock."""
    with suppress(OSError):
        owner = _read_owner((run_dir / LOCK).read_bytes())
        return owner if owner is not None and _is_alive(owner) else None
    return None


def other_host(run_dir: Path) -> str | None:
    """The machine that a lock file names, if it isn't this one: from here nobody can tell whether
    the process lives."""
    owner = (atomic.read_json(run_dir / LOCK) or {}).get("host")
    return owner if owner != socket.gethostname() else None


def _kernel_lock(descriptor: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return True  # the file system has no locks: only the owner's name counts
    return True


def _locked(run_dir: Path, owner: Owner | None) -> CheckpointError:
    who = "another process" if owner is None else f"process {owner.pid} on {owner.host}"
    return CheckpointError(
        f"{run_dir} is in use by {who}.", where=str(run_dir / LOCK), code="in-use",
        fix="wait for it to end or stop it, or choose another name")


def _wait_for_owner(path: Path) -> Owner | None:
    deadline = time.monotonic() + _OWNER_WAIT_SECONDS
    owner = None
    with suppress(FileNotFoundError):  # it has ended just now
        while (((owner := _read_owner(path.read_bytes())) is None or not _is_alive(owner))
               and time.monotonic() < deadline):  # the name may be that of the previous owner
            time.sleep(0.05)
    return owner


def _read_owner(raw: bytes) -> Owner | None:
    with suppress(ValueError, TypeError, KeyError, OverflowError, RecursionError):
        value = json.loads(raw)
        return Owner(int(value["pid"]), str(value["host"]), str(value["boot"]), value["started"])
    return None


def _myself() -> Owner:
    pid = os.getpid()
    return Owner(pid, socket.gethostname(), _boot_id(), _start_ticks(pid))


def _boot_id() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
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
    import psutil

    return psutil.pid_exists(owner.pid)
