"""An adapter's folder: the files of PEFT, and which base it belongs to. Reads JSON only."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ppocli.errors import InputError

T = TypeVar("T")

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
BASE = "base_model.json"
"""which model an adapter belongs to, beside the files that PEFT knows"""


@dataclass(frozen=True, slots=True)
class BaseIdentity:
    """The frozen model under an adapter."""

    path: str
    """as it was configured: a folder, a Hub name or a built-in"""
    revision: str | None
    storage: str
    """the type its weights were held in; the digest is of these"""
    digest: str


def is_adapter(folder: str | Path) -> bool:
    """Whether a folder holds an adapter instead of a model."""
    return (Path(folder) / CONFIG).is_file() and not (Path(folder) / "config.json").is_file()


def named_base(folder: Path) -> tuple[str, str | None, BaseIdentity | None]:
    """Path and revision of the base that an adapter's folder names, and all that is known of it.

    Raises:
        InputError: it names none.
    """
    if (folder / BASE).is_file():
        known = _read(folder / BASE, lambda fields: BaseIdentity(**fields))
        return known.path, known.revision, known
    path, revision = _read(folder / CONFIG, lambda fields: (
        fields.get("base_model_name_or_path"), fields.get("revision")))
    if not isinstance(path, str) or not path:
        raise InputError(f"The adapter in {folder} does not name its base.",
                         where=str(folder / CONFIG),
                         fix='give "base_model_name_or_path" there a folder or a Hub name')
    return path, revision, None


def _read(path: Path, taken: Callable[[Any], T]) -> T:
    try:
        return taken(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{path} can't be read: {error}", where=str(path),
                         fix="copy the folder again") from error
