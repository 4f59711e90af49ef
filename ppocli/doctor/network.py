"""Checks of the way to the Hugging Face Hub."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

from ppocli.config.hub import hub_reachable, offline_variable
from ppocli.doctor.checking import Finding, Surroundings
from ppocli.doctor.processes import ask
from ppocli.storage.environment import hub_home, without_credentials

_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def hub(around: Surroundings) -> Finding:
    """Whether the Hub answers within two seconds, or downloads are forbidden."""
    name = offline_variable()
    if name is not None:
        return Finding("ok", f"{name}={os.environ[name]}: nothing is downloaded")
    endpoint = _endpoint()
    if urlsplit(endpoint).scheme not in ("http", "https"):
        return Finding("fail", "HF_ENDPOINT is no http or https address",
                       "unset it, or give an address such as https://huggingface.co")
    shown = without_credentials(endpoint)
    if hub_reachable():
        return Finding("ok", f"{shown} can be reached")
    return Finding("warning", f"{shown} doesn't answer within 2 s: only models and data on this "
                   "machine can be used", "HF_HUB_OFFLINE=1 says so to every library; a mirror is "
                   "set with HF_ENDPOINT, a proxy with HTTPS_PROXY")


def token(around: Surroundings) -> Finding:
    """Whether there is a token for the Hub, and what it may do. It is never shown."""
    place = _token_place()
    if place is None:
        return Finding("ok", "none (public models need none; `hf auth login` sets one)")
    if offline_variable() is not None or not hub_reachable():
        return Finding("ok", f"set ({place}), not tried")
    answer = ask("whoami_probe", seconds=15)
    if answer.facts is None:
        return Finding("warning", f"set ({place}), but the Hub didn't say what it may do: "
                       f"{answer.error}", "try again later")
    if answer.facts.get("refused"):
        return Finding("warning", f"set ({place}), but the Hub refuses it",
                       "hf auth login, or unset HF_TOKEN")
    return Finding("ok", f"set ({place}), role {answer.facts.get('role') or 'unknown'}")


def _token_place() -> str | None:
    """Where huggingface_hub takes a token from."""
    for name in _TOKENS:
        if os.environ.get(name, "").strip():
            return name
    file = Path(os.environ.get("HF_TOKEN_PATH") or hub_home() / "token").expanduser()
    try:
        return "hf auth login" if file.read_text(errors="replace").strip() else None
    except OSError:
        return None
