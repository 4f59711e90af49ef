"""Which step folders are checkpoints, which of them stay on the disk, and under which names.

A step folder is valid if and only if it has its final name and matches its ``MANIFEST.json``, which
lists every file with its size and SHA-256. The manifest finds damage, also a single flipped bit
(neither torch nor safetensors would); it is no signature, so it says nothing about who wrote the
files. Nothing here opens a pickle.

``latest`` and ``best`` are links for people, never used for loading; names that start with a dot
are unfinished saves and deletions.
"""

import hashlib
import json
import math
import os
import re
import secrets
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ppocli.errors import CheckpointError, PpocliError
from ppocli.runs import atomic, faults
from ppocli.version import __version__

SCHEMA = 1
MANIFEST = "MANIFEST.json"
STATE = "state.json"
PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".pkl", ".pickle", ".distcp", ".ckpt", ".joblib",
                   ".npy", ".npz")
Verify = Literal["full", "size"]
POINTERS = ("latest", "best")
_DISCARDED = ".discarded-"
STEP = re.compile(r"step-([0-9]+)")


class Invalid(Exception):
    """Why a folder isn't a usable checkpoint, as a phrase: ``policy/model.safetensors is missing``.
    Internal to the checkpoint modules; users see it inside a message or a ``CheckpointError``."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Content of ``MANIFEST.json`` under its names there."""

    ppocli: str
    """the version that wrote it"""
    run_id: str
    step: int
    config_digest: str
    versions: dict[str, str]
    files: dict[str, dict[str, Any]]
    """relative POSIX name -> ``size`` in bytes and hexadecimal ``sha256``"""

    @property
    def total_bytes(self) -> int:
        return sum(entry["size"] for entry in self.files.values())


def name_problem(name: str) -> str | None:
    """Why ``name`` may not stand in a manifest, or ``None``: plain relative POSIX names only."""
    if any(ord(char) < 32 or char in "\\\x7f" for char in name):
        return "has a backslash or a control character"
    if name.startswith("/") or re.match(r"[A-Za-z]:", name):
        return "is absolute"
    if any(part in ("", ".", "..") for part in name.split("/")):
        return "leaves its folder or isn't plain"
    if name.lower().endswith(PICKLE_SUFFIXES):
        return "may hold a pickle, which is never loaded"
    if name == MANIFEST:
        return "is the manifest itself"
    return None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``MANIFEST.json`` of the files that are in ``folder``, with a digest over all its other
    fields.

    Args:
        manifest: of no files yet.
    """
    files = {}
    for name in atomic.walk_files(folder):
        faults.point("save.open")
        path = folder / name
        files[name] = {"size": path.stat().st_size, "sha256": atomic.sha256_file(path)}
    body = {"schema": SCHEMA, **asdict(replace(manifest, files=files))}
    faults.point("save.before_manifest")
    atomic.write_json_atomic(folder / MANIFEST, body | {"digest": _digest(body)})


def _digest(body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def check_folder(folder: Path, *, step: int | None = None, run_id: str | None = None,
                 verify: Verify = "full") -> Manifest:
    """Verify a step folder against its manifest, names first, content last.

    Args:
        folder: the step folder; a link is refused.
        step: the step its name promises (``None``: any).
        run_id: the run it must belong to (``None``: any).
        verify: ``full`` hashes every file, ``size`` compares sizes and hashes ``state.json`` alone.

    Raises:
        Invalid: the folder doesn't match; the message says which file and why.
        CheckpointError: it was written by a newer ppocli, in a schema this one can't read.
    """
    if folder.is_symlink():
        raise Invalid("the folder is a link")
    if not folder.is_dir():
        raise Invalid("it is not a folder")
    manifest = _parse(read_object(folder, MANIFEST), folder)
    if step is not None and manifest.step != step:
        raise Invalid(f"{MANIFEST} is of step {manifest.step}")
    if run_id is not None and manifest.run_id != run_id:
        raise Invalid(f"it belongs to run {manifest.run_id!r}, not {run_id!r}")
    try:
        present = set(atomic.walk_files(folder)) - {MANIFEST}
    except ValueError as error:
        raise Invalid(str(error)) from None
    for name in sorted(present - set(manifest.files)):
        raise Invalid(f"{name} is not in {MANIFEST}")
    for name in sorted(set(manifest.files) - present):
        raise Invalid(f"{name} is missing")
    for name, entry in manifest.files.items():
        if (size := (folder / name).stat().st_size) != entry["size"]:
            raise Invalid(f"{name} has {size} bytes, not {entry['size']}")
    for name, entry in manifest.files.items():
        if (verify == "full" or name == STATE) \
                and atomic.sha256_file(folder / name) != entry["sha256"]:
            raise Invalid(f"{name} hash mismatch")
    return manifest


def read_object(folder: Path, name: str) -> dict[str, Any]:
    """Read a JSON object from a plain file in ``folder``.

    Raises:
        Invalid: it is missing, a link, not a plain file, or not a JSON object.
    """
    path = folder / name
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise Invalid(f"{name} is not a plain file")
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise Invalid(f"{name} is missing") from None
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise Invalid(f"{name} is damaged")
    return value


def _parse(body: dict[str, Any], folder: Path) -> Manifest:
    if body.pop("digest", None) != _digest(body):
        raise Invalid(f"{MANIFEST} is damaged")
    schema, version = body.get("schema"), body.get("ppocli")
    if isinstance(schema, int) and schema > SCHEMA:
        raise CheckpointError(
            f"{folder.name} was written by ppocli {version}, this is {__version__}",
            where=str(folder), fix=f"install ppocli {version} or newer")
    if schema != SCHEMA:
        raise Invalid(f"{MANIFEST} has the unknown schema {schema!r}")
    del body["schema"]
    try:
        manifest = Manifest(**body)
        names = [name for name, entry in manifest.files.items() if {"size", "sha256"} == {*entry}]
    except (TypeError, AttributeError):
        names = []
    if not names or len(names) < len(manifest.files):
        raise Invalid(f"{MANIFEST} lacks a field")
    for name in names:
        if problem := name_problem(name):
            raise Invalid(f"{name!r} in {MANIFEST} {problem}")
    if STATE not in names:
        raise Invalid(f"{STATE} is missing")
    return manifest


# Which stay ---------------------------------------------------------------------------------------

def step_name(step: int) -> str:
    """``120`` as ``step-000120``; a seventh digit is simply written."""
    return f"step-{step:06d}"


def list_steps(folder: Path) -> list[tuple[int, Path]]:
    """Step folders by number (so 9 < 10 < 1000000), oldest first; nothing is verified."""
    return sorted((int(match[1]), path) for path in _entries(folder)
                  if (match := STEP.fullmatch(path.name)))


def _entries(folder: Path) -> Iterable[Path]:
    return folder.iterdir() if folder.is_dir() else ()


def prune(folder: Path, keep_last: int, *keep_steps: int | None, newest: float = math.inf
          ) -> list[str]:
    """Delete old checkpoints; to be called after a save has returned.

    The newest ``keep_last`` valid ones stay (at least one), and ``keep_steps``. An invalid folder
    never counts as kept: it stays for inspection if it is newer than the oldest kept one, and is
    deleted otherwise. A failure is a warning, and links are left alone.

    Args:
        folder: the run's ``checkpoints/``.
        keep_last: how many of the newest stay, >= 1.
        keep_steps: steps that stay besides (``None``: no such step).
        newest: the step that the run is at; later ones, which it couldn't load, don't count.

    Returns:
        what couldn't be deleted, and why.
    """
    faults.point("prune.before")
    valid = [manifest.step for manifest in sound_steps(folder) if manifest.step <= newest]
    if not valid:
        return []
    kept = {*valid[-keep_last:], *keep_steps}
    oldest_kept = valid[-keep_last:][0]
    doomed = [path for step, path in list_steps(folder) if step not in kept and step < oldest_kept]
    warnings: list[str] = []
    for path in doomed:
        if path.is_symlink():
            warnings.append(f"{path.name} is a link and was left alone")
            continue
        try:
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


def clean_staging(folder: Path) -> list[str]:
    """Clean up after interrupted saves. To be called at the start, before the search for the newest
    checkpoint, with the run folder's lock held.

    Returns:
        One line for each broken save: ``skipped .staging-step-000130-1f2e3d4c: incomplete``, and
        one for anything that couldn't be deleted.
    """
    messages = []
    try:
        atomic.put_back(folder)
    except OSError as error:
        messages.append(f"{error.filename} could not be deleted: {error.strerror or error}")
    for path in leftovers(folder):
        if path.name.startswith(atomic.STAGING):
            messages.append(f"skipped {path.name}: incomplete")
        try:
            atomic.remove_tree(path)
        except OSError as error:
            messages.append(f"{path.name} could not be deleted: {error.strerror or error}")
    return messages


def update_pointers(folder: Path, *, latest: int | None, best: int | None) -> list[str]:
    """Point the relative links ``latest`` and ``best`` at their step folders, for people's use.

    Nothing depends on them, so a failure (a disk without links) is a warning, which is returned.
    None, or a step that isn't there, removes the link.
    """
    temporary = folder / f"{atomic.TEMPORARY_PREFIX}{secrets.token_hex(4)}"
    try:
        for name, step in zip(POINTERS, (latest, best), strict=True):
            if step is None or not (folder / step_name(step)).is_dir():
                (folder / name).unlink(missing_ok=True)
                continue
            temporary.symlink_to(step_name(step), target_is_directory=True)
            os.replace(temporary, folder / name)
        if folder.is_dir():
            atomic.fsync_dir(folder)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        return [f"links in {folder} could not be written: {error.strerror or error}"]
    return []
