"""Secrets: no key holds one, so that ``config.yaml`` can be kept, shown and published, and texts of
other people's code, such as exceptions, are cleaned of them."""

import os
import re
from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import parse_qsl, urlsplit

from ppocli.config.keys import schema_keys
from ppocli.config.text import parts_of, printable
from ppocli.errors import ConfigError

_SECRET_NAME = re.compile(
    r"(^|[_\-.])(token|secret|password|passwd|pwd|credentials?|bearer|auth|"
    r"(api|access|private|secret|auth|hub|hf|wandb|openai)[_-]?key|apikey)$", re.IGNORECASE)
_SECRET_CAMEL = re.compile(r"(apiKey|accessKey|[a-z](Token|Secret|Password))$")
_SECRET_VALUE = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|"
    r"github_pat_[A-Za-z0-9_]{20,}|AKIA[0-9A-Z]{16}|xox[abprs]-[A-Za-z0-9-]{10,})")
_URL_PASSWORD = re.compile(r"(\b[a-z][a-z0-9+.-]*://[^/\s:@]+:)[^@/\s]+@", re.IGNORECASE)
_ADDRESS = re.compile(r"https?://([^\s/@]*@)?(\w[\w.-]*|\[[\da-f:]+\])(:\d+)?([/?]|\Z)",
                      re.IGNORECASE)
_ENVIRONMENT = re.compile(r"\$\{\s*(oc\.env|env|oc\.decode)\s*:", re.IGNORECASE)
MASK = "***"
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""the form of the name of an environment variable"""
_SHORTEST = 8
"""minimum length of a secret; shorter values would hide ordinary words"""
SENT: set[str] = set()
"""values of variables that a configuration sends as headers, whatever their names"""
_REMEDY = ("leave it out: tokens come from the environment (HF_TOKEN) or from `hf auth login`, "
           "never from the configuration, which is written to disk")


def looks_secret(name: str) -> bool:
    """Whether a dotted key is named like a token, password or API key.

    Names of the schema (``stop_token_ids``, ``response tokens`` and the like) never are.
    """
    return name not in schema_keys() and any(
        _SECRET_NAME.search(part) or _SECRET_CAMEL.search(part) for part in name.split("."))


def why_no_url(url: object) -> str:
    """The problem with a server's address, which must not contain a secret; "" if there is none."""
    if not isinstance(url, str) or not _ADDRESS.match(url):
        return "no address"
    parts = urlsplit(url)
    if parts.password or any(looks_secret(name) for name, _ in parse_qsl(parts.query)):
        return "a secret"
    return ""


@lru_cache(maxsize=4)
def secret_values(environment: frozenset[tuple[str, str]]) -> frozenset[str]:
    """Values among (name, value) of environment variables whose names are those of tokens,
    passwords or API keys."""
    # a path, of the working folder (PWD) or of a file of credentials, is none itself
    return frozenset(value for name, value in environment
                     if looks_secret(name) and not os.path.exists(value))


def hide_secrets(text: str, further: Iterable[str] = ()) -> str:
    """``text`` with ``further`` secrets, those of this process's environment, passwords in URLs and
    what looks like a token replaced by ``***``."""
    values = secret_values(frozenset(os.environ.items())) | SENT
    for value in sorted(values.union(further), key=len, reverse=True):
        if len(value) >= _SHORTEST:
            text = text.replace(value, MASK)
    return _URL_PASSWORD.sub(rf"\1{MASK}@", _SECRET_VALUE.sub(MASK, text))


def safe_text(text: str) -> str:
    """Other people's text without secrets, and with control characters escaped."""
    return printable(hide_secrets(text))


def refuse_secrets(entries: Iterable[tuple[str, object, str]]) -> None:
    """Refuse entries (key, value, source) that hold, or would read, a secret.

    Raises:
        ConfigError: names the key and the source; the value is never shown.
    """
    for name, value, source in entries:
        # texts of prompts.items are prose, their mapping keys are column names
        for part, inner in parts_of(name, value):
            text = inner if isinstance(inner, str) else ""
            if looks_secret(part):
                raise ConfigError(f"{part} looks like a secret and was refused (value not shown)",
                                  where=source, fix=_REMEDY)
            if _ENVIRONMENT.search(text):
                raise ConfigError(f"{part} reads an environment variable; its value could be a "
                                  "secret and would be written to disk", where=source,
                                  fix="write the value itself; " + _REMEDY)
            if _SECRET_VALUE.search(text) or (name.startswith("reward.")
                                              and _URL_PASSWORD.search(text)):
                raise ConfigError(f"the value of {part} looks like a secret and was refused "
                                  "(value not shown)", where=source, fix=_REMEDY)
