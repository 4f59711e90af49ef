"""Folders that are made once and kept: whole or absent, however many processes ask at a time."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ppocli.errors import DiskError

log = logging.getLogger(__name__)

MANIFEST = "MANIFEST.json"
_FORMAT = 1  # raise it when what a builder makes of the same settings changes


def cache_root() -> Path:
    """``PPOCLI_CACHE``, else ``$XDG_CACHE_HOME/ppocli``, else ``~/.cache/ppocli``."""
    own = os.environ.get("PPOCLI_CACHE")
    if own:
        return Path(os.path.expanduser(own)).absolute()
    xdg = os.environ.get("XDG_CACHE_HOME")
    base = Path(xdg) if xdg and os.path.isabs(xdg) else Path(os.path.expanduser("~/.cache"))
    return base.absolute() / "ppocli"


def cached_folder(name: str, settings: Any, build: Callable[[Path], object]) -> Path:
    """The cached folder of ``name`` for these settings (a dataclass), built where it is missing.

    ``build`` fills a hidden folder beside the final one, which is hashed, synced to disk and then
    renamed; so a folder under the final name is always whole. Other processes that want the same
    folder wait for the one that builds it. A folder whose files no longer match their hashes is
    built anew.

    Raises:
        DiskError: the cache folder can't be made, locked or written.
    """
    digest = hashlib.sha256(json.dumps([_FORMAT, name, asdict(settings)], sort_keys=True)
                            .encode()).hexdigest()[:16]
    root = cache_root()
    final = root / f"{name}-{digest}"
    if is_whole(final):
        return final
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _lock(root / f".{final.name}.lock"):
            if not is_whole(final):
                _build(final, name, build)
    except OSError as error:
        raise DiskError(f"the cache folder can't be used: {error}", where=str(root),
                        fix="set PPOCLI_CACHE to a local folder that can be written") from error
    return final


def is_whole(folder: Path) -> bool:
    """Whether a cached folder holds every file it was made with, unchanged."""
    try:
        files = json.loads((folder / MANIFEST).read_text())
        return all(_digest(folder / name) == digest for name, digest in files.items())
    except (OSError, ValueError, AttributeError):
        return False


def _build(final: Path, name: str, build: Callable[[Path], object]) -> None:
    """Build under the lock: clear what killed builders left, make, sync, rename."""
    for leftover in final.parent.glob(f".{final.name}.tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    log.info("fitting builtin:%s (once; kept in %s)", name, final)
    staged = Path(tempfile.mkdtemp(prefix=f".{final.name}.tmp-", dir=final.parent))
    try:
        staged.chmod(0o755)  # mkdtemp's 0700 would shut out others who share the cache
        build(staged)
        files = {path.name: _digest(path) for path in sorted(staged.iterdir())}
        (staged / MANIFEST).write_text(json.dumps(files, indent=1) + "\n")
        for path in (*staged.iterdir(), staged):
            _sync(path)
        if final.exists():  # damaged, or it would have been taken
            log.warning("%s is damaged; it is made anew", final)
            # renamed first: a folder that is half deleted must not bear the final name
            broken = Path(tempfile.mkdtemp(prefix=f".{final.name}.tmp-", dir=final.parent))
            final.rename(broken / "damaged")
            shutil.rmtree(broken)
        staged.rename(final)
        _sync(final.parent)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an advisory lock; the system frees it when its process ends, however it ends."""
    with open(path, "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for another process that is making %s", path.name.strip("."))
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
