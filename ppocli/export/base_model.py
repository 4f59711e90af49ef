"""What is known of the model that a training started from: its Hub name and its license."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ppocli.builtin.names import BUILTIN_PREFIX
from ppocli.export.trained_card import hub_name, shown_model

_LICENSE_KEYS = ("license", "license_name", "license_link")
_OWN_LICENSE = "apache-2.0"
"""of the models that ship with ppocli, which is under it"""


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The model that was fine-tuned."""

    shown: str
    """its name; of a folder the last part"""
    hub_name: str | None
    license: dict[str, str]
    """``license`` and, for one that is not on the Hub's list, ``license_name`` and
    ``license_link``; empty when not known"""


def describe_base(model: str, revision: str | None, *, network: bool) -> BaseModel:
    """Describe ``model.path``; its license is what its README.md, else its config.json says.

    Args:
        network: ask the Hub for the README of a Hub model that isn't in the local cache.
    """
    name = hub_name(model)
    if model.startswith(BUILTIN_PREFIX):
        return BaseModel(model, None, {"license": _OWN_LICENSE})
    folder = Path(model).expanduser()
    if name is None:
        return BaseModel(shown_model(model), None,
                         _license(folder / "README.md", folder / "config.json"))
    return BaseModel(name, name, _license(_cached(name, "README.md", revision, network),
                                          _cached(name, "config.json", revision, False)))


def split_card(text: str) -> tuple[dict[str, Any], str]:
    """The metadata on top of a model card and the text below it; broken metadata count as none."""
    lines = text.removeprefix("\ufeff").splitlines(keepends=True)
    if not lines or lines[0].strip() != "---":
        return {}, text
    end = next((i for i, line in enumerate(lines[1:], 1) if line.strip() == "---"), None)
    if end is None:
        return {}, text
    try:
        data = yaml.safe_load("".join(lines[1:end]))
    except yaml.YAMLError:
        data = None
    return data if isinstance(data, dict) else {}, "".join(lines[end + 1:])


def _license(readme: Path | None, config: Path | None) -> dict[str, str]:
    found: dict[str, Any] = {}
    if readme is not None and readme.is_file():
        found = split_card(readme.read_text(encoding="utf-8", errors="replace"))[0]
    if not found.get("license") and config is not None and config.is_file():
        try:
            value = json.loads(config.read_text(encoding="utf-8"))
        except ValueError:
            value = None
        found = value if isinstance(value, dict) else {}
    if not isinstance(found.get("license"), str):
        return {}
    return {key: found[key] for key in _LICENSE_KEYS if isinstance(found.get(key), str)}


def _cached(name: str, file: str, revision: str | None, network: bool) -> Path | None:
    """A file of a Hub model: from the cache, else, where allowed and possible, from the Hub."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    from ppocli.config.hub import hub_reachable

    try:
        path = try_to_load_from_cache(name, file, revision=revision)
        if isinstance(path, str):
            return Path(path)
        if network and hub_reachable():
            return Path(hf_hub_download(name, file, revision=revision))
    except HFValidationError:
        return None
    except Exception:  # nothing that can go wrong on the way there is a reason not to export
        return None
    return None
