"""Which code a configuration would run, and whether it may. A run that this user has started may
run all code it names; another run only code that ships with ppocli, unless --trust is typed.

Who started a run is told by a signature in its run.json, made with this user's key, which no run
folder contains. It covers the run's id and its config.yaml, so that a configuration that somebody
else wrote or changed is recognised. Message authentication: HMAC, RFC 2104.
"""

import hmac
import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

from ppocli.builtin.names import BUILTIN_ENVIRONMENTS, BUILTIN_REWARDS, BUILTIN_STEPS, TOOLS
from ppocli.config import config_yaml, keys, schema, tasks
from ppocli.config.import_guard import TRUST
from ppocli.config.resume_policy import RUN_FILE
from ppocli.config.text import printable, short_path
from ppocli.errors import CheckpointError, ConfigError, DiskError
from ppocli.runs import atomic, run_folder

log = logging.getLogger("ppocli")
REMOTE = "trust_remote_code"
_OURS = frozenset({*BUILTIN_REWARDS, *BUILTIN_REWARDS.values(), *BUILTIN_STEPS,
                   *BUILTIN_STEPS.values(), *BUILTIN_ENVIRONMENTS, *BUILTIN_ENVIRONMENTS.values(),
                   TOOLS, *tasks.OUR_ENGINES, *tasks.DATA_TASKS,
                   "ppocli.rewards.randomwalks:metrics", config_yaml.PYTHON_OBJECT})


def import_paths(config: schema.TrainConfig) -> list[tuple[str, str | None]]:
    """(key, path) of everything that a configuration names by an import path or a built-in name,
    ordered by key: the schema says which keys hold code."""
    code = [(name, attrgetter(name)(config)) for name, key in keys.schema_keys().items()
            if key.metadata["holds"] == "code"]
    return [*((name, path) for name, value in code
              for path in (value if isinstance(value, list) else [value])),
            *((f"{key}.fn", path) for key, path, _ in schema.rewards_of(config.reward)[1:])]


def code_of(config: schema.TrainConfig) -> Iterator[tuple[str, str]]:
    """(key, path) of all code that would run and doesn't ship with ppocli; for code in a model's
    repository the path is the key itself."""
    for key, path in import_paths(config):
        if path and path not in _OURS and (keys.is_import_path(path) or key != "tracking.trackers"):
            yield key, path
    if config.rollout.launch and config.rollout.python:
        yield "rollout.python", config.rollout.python
    if config.model.trust_remote_code:
        yield (key := f"model.{REMOTE}"), key
    for key, _, kwargs in schema.rewards_of(config.reward):
        if isinstance(kwargs, dict) and kwargs.get(REMOTE):
            yield (name := f"{key}.kwargs.{REMOTE}"), name


def check_run(run_dir: Path, config: schema.TrainConfig, parts: tuple[str, ...], *, trusts: bool,
              typed: frozenset[str] = frozenset()) -> None:
    """Refuse code that the configuration of somebody else's run names.

    Args:
        config: the run's, words on the command line included.
        parts: prefixes of the keys whose code is going to run.
        trusts: ``--trust`` was typed.
        typed: texts of the command line, and keys that it sets to true.

    Raises:
        CheckpointError: names key, file or object, and what to type.
    """
    needed = [printable(f"{key}: " + (path if path != key else "Python files that come with the "
                                      "model")) for key, path in code_of(config)
              if key.startswith(parts) and path not in typed]
    if needed and not trusts and not is_own_run(run_dir):
        raise CheckpointError(
            f"{short_path(str(run_dir))} is not signed with your key, and this would run code that "
            "its configuration names:\n" + "\n".join(f"  {line}" for line in needed),
            where=short_path(str(run_dir / config_yaml.CONFIG_FILE)),
            fix=f"look at that code, and if you trust it add {TRUST}; for a run that you started "
            f"with another key, {KEY_VARIABLE}=FILE (now {key_path()})")


def named_by_files(config: schema.TrainConfig, typed: frozenset[str]) -> tuple[str, ...]:
    """Import paths that recipes and config groups name, as opposed to the command line, for
    :func:`ppocli.config.import_guard.limit`.

    Args:
        config: as it was composed.

    Returns:
        such paths, those of files absolute.

    Raises:
        ConfigError: they name a program.
    """
    program = config.rollout.python
    if program is not None and program not in typed:
        raise ConfigError(f"A recipe or a config group names {program}, which would be run.",
                          where="rollout.python", fix="if you trust it, type it: "
                          f"rollout.python={program}")
    absolute = import_paths(config_yaml.with_absolute_paths(config))
    return tuple(new for (_, old), (_, new) in zip(import_paths(config), absolute, strict=True)
                 if new and new not in _OURS and not {old, new} & typed)


# The signature ------------------------------------------------------------------------------------

KEY_VARIABLE = "PPOCLI_KEY_FILE"
_KEY_BYTES = 32
_SIGNED = "signed"
_KEPT = 2
"""signatures in run.json: a kill may leave it ahead of config.yaml by one configuration"""


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
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileExistsError):  # made by another process meanwhile: that one counts
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_bytes(_KEY_BYTES))
    except OSError as error:
        raise DiskError(f"{path} can't be made: {error.strerror}", where=str(path)) from error
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
