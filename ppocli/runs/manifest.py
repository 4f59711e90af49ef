"""The manifest that makes a folder a checkpoint: every file with its size and SHA-256.

A step folder is valid if and only if it has its final name and matches its ``MANIFEST.json``. The
manifest finds damage, also a single flipped bit (neither torch nor safetensors would); it is no
signature, so it says nothing about who wrote the files. Nothing here opens a pickle.
"""

import hashlib
import json
import re
import stat
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ppocli.config import size_limited
from ppocli.errors import CheckpointError
from ppocli.runs import atomic, faults
from ppocli.version import __version__

SCHEMA = 1
MANIFEST = "MANIFEST.json"
STATE = "state.json"
PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".pkl", ".pickle", ".distcp", ".ckpt", ".joblib",
                   ".npy", ".npz")
Verify = Literal["full", "size"]


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
        value = size_limited.read_json(path)
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
    try:
        files = {name: _typed(entry, {"size": int, "sha256": str})
                 for name, entry in body["files"].items()}
        manifest = Manifest(files=files, **_typed(body, {
            "ppocli": str, "run_id": str, "step": int, "config_digest": str, "versions": dict}))
    except (KeyError, TypeError, AttributeError):
        raise Invalid(f"{MANIFEST} lacks a field") from None
    for name in files:
        if problem := name_problem(name):
            raise Invalid(f"{name!r} in {MANIFEST} {problem}")
    if STATE not in files:
        raise Invalid(f"{STATE} is missing")
    return manifest


def _typed(values: dict[str, Any], kinds: dict[str, type]) -> dict[str, Any]:
    """The values of the named fields, each checked for its type."""
    typed = {name: values[name] for name in kinds}
    if any(type(value) is not kinds[name] for name, value in typed.items()):
        raise TypeError
    return typed
