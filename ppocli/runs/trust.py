"""Which code a configuration would run, and whether it may. A run that this user has started may
run all code it names; another run only code that ships with ppocli, unless --trust is typed.
"""

from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

from ppocli.builtin.names import BUILTIN_ENVIRONMENTS, BUILTIN_REWARDS, BUILTIN_STEPS, TOOLS
from ppocli.config import config_yaml, keys, schema, tasks
from ppocli.config.import_guard import TRUST
from ppocli.config.text import printable, short_path
from ppocli.errors import CheckpointError, ConfigError
from ppocli.runs import signature

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
    if needed and not trusts and not signature.is_own_run(run_dir):
        raise CheckpointError(
            f"{short_path(str(run_dir))} is not signed with your key, and this would run code that "
            "its configuration names:\n" + "\n".join(f"  {line}" for line in needed),
            where=short_path(str(run_dir / config_yaml.CONFIG_FILE)),
            fix=f"look at that code, and if you trust it add {TRUST}; for a run that you started "
            f"with another key, {signature.KEY_VARIABLE}=FILE (now {signature.key_path()})")


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
