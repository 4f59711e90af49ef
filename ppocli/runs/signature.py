"""Who started a run: a signature in its run.json, made with this user's key, which no run folder
contains.

It covers the run's id and its config.yaml, so that a configuration that somebody else wrote or
changed is recognised. Message authentication: HMAC, RFC 2104.
"""

import hmac
import logging
import os
import secrets
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from ppocli.config.resume_policy import RUN_FILE
from ppocli.errors import DiskError
from ppocli.runs import atomic, run_folder

KEY_VARIABLE = "PPOCLI_KEY_FILE"
_KEY_BYTES = 32
_SIGNED = "signed"
_KEPT = 2
"""signatures in run.json: a kill may leave it ahead of config.yaml by one configuration"""
log = logging.getLogger("ppocli")


def key_path() -> Path:
    """Path of this user's key: ``$PPOCLI_KEY_FILE``, or a file in the user's configuration
    folder."""
    if path := os.environ.get(KEY_VARIABLE):
        return Path(path).expanduser().absolute()
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(home).absolute() / "ppocli/key"


def _read_key(path: Path) -> bytes | None:
    with suppress(OSError), path.open("rb") as file:
        key = file.read(_KEY_BYTES)
        return key if len(key) == _KEY_BYTES else None
    return None


def own_key() -> bytes:
    """This user's key, 32 random bytes that only this user may read; made if there is none.

    Raises:
        DiskError: it can't be made, or what lies there is no key.
    """
    path = key_path()
    if (key := _read_key(path)) is not None:
        return key
    temporary = path.with_name(f"{atomic.TEMPORARY_PREFIX}{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)
        except FileExistsError:  # made by another process meanwhile: that one counts
            pass
        except OSError:  # a file system without hard links
            os.rename(temporary, path)
    except OSError as error:
        raise DiskError(f"{path} can't be made: {error.strerror}", where=str(path)) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    if (key := _read_key(path)) is None:
        raise DiskError(f"{path} is no key: it has fewer than {_KEY_BYTES} bytes", where=str(path))
    return key


def _signature(key: bytes, name: str, content: str) -> str:
    return hmac.new(key, f"ppocli\0{name}\0{content}".encode(), "sha256").hexdigest()


def signed(document: dict[str, Any], name: str, content: str) -> dict[str, Any]:
    """``document`` with this user's signature added; unchanged, with a warning, without a key.

    Args:
        document: the contents of a JSON file.
        name: of what is signed, which the signature covers.
        content: what is signed, or its digest.
    """
    try:
        signature = _signature(own_key(), name, content)
    except DiskError as error:
        _warn_once(error.what)
        return document
    others = document.get(_SIGNED)
    others = [one for one in others if one != signature] if isinstance(others, list) else []
    return {**document, _SIGNED: [*others, signature][-_KEPT:]}


@cache
def _warn_once(what: str) -> None:
    log.warning("this can't be signed as yours: %s. Later commands need --trust before they run "
                "code that it names. To sign it, set %s to the path of a file that can be written",
                what, KEY_VARIABLE)


def is_signed(document: dict[str, Any] | None, name: str, content: str) -> bool:
    """Whether the contents of a JSON file carry this user's signature of ``content``."""
    key, signatures = _read_key(key_path()), (document or {}).get(_SIGNED)
    return key is not None and isinstance(signatures, list) and any(hmac.compare_digest(
        _signature(key, name, content).encode(), str(one).encode()) for one in signatures)


def sign_run(run_json: dict[str, Any], config: Path) -> dict[str, Any]:
    """The contents of a run's run.json, signed for the configuration in the file ``config``."""
    return signed(run_json, str(run_json["run_id"]), atomic.sha256_file(config))


def is_own_run(run_dir: Path) -> bool:
    """Whether this user started or resumed the run with exactly this config.yaml."""
    run_json = atomic.read_json(run_dir / RUN_FILE) or {}
    try:
        digest = atomic.sha256_file(run_folder.RunFolder(run_dir).config)
    except OSError:
        return False
    return is_signed(run_json, str(run_json.get("run_id")), digest)
