"""The words after ``ppocli train``: Hydra's flags told apart from overrides, and made readable.

Hydra takes overrides before flags only, reads ``recipe=x`` and ``+recipe=x`` differently, and has
a grammar in which some plain text needs quotes; here the words become what Hydra expects.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ppocli.config.keys import key_for, schema_keys
from ppocli.config.paths import config_groups
from ppocli.config.quoting import quoted
from ppocli.errors import ConfigError
from ppocli.text import did_you_mean, nearest

_CHOICES = {"--cfg": ("job", "hydra", "all", "deepspeed"),
            "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")}
_SHORT = {"-c": "--cfg", "-p": "--package", "-r": "--run", "-m": "--multirun",
          "-sc": "--shell-completion", "-cp": "--config-path", "-cn": "--config-name",
          "-cd": "--config-dir", "-i": "--info"}
_WITH_VALUE = ("--cfg", "--package", "--config-path", "--config-name", "--config-dir")
_PLAIN = ("--hydra-help", "--resolve", "--run", "--multirun", "--shell-completion")
FLAGS = tuple(sorted((*_WITH_VALUE, *_PLAIN, "--info", "--help", "--version")))
# options of the command line that never come here; misspelt ones do
_OURS = ("--no-progress", "--dry-run")
_BEFORE = ("-q", "--quiet", "-v", "--verbose", "--no-color")
_EXCLUSIVE = ("--cfg", "--run", "--multirun", "--info", "--shell-completion", "--hydra-help")
_OVERRIDE = re.compile(r"(?P<prefix>\+\+|\+|~|)(?P<key>[^=+~\s][^=\s]*)(?:=(?P<value>.*))?",
                       re.DOTALL)
# what YAML or Hydra would turn into a number or a truth value
_NOT_TEXT = re.compile(r"[+-]?(\d[\d_]*(\.\d*)?|\.\d+)(e[+-]?\d+)?|[+-]?(inf|nan)|true|false",
                       re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Words:
    """The command line in parts. ``flags`` are long names; ``config_dirs`` are absolute."""

    overrides: tuple[str, ...]
    flags: tuple[tuple[str, str | None], ...] = ()
    config_dirs: tuple[Path, ...] = ()

    def flag(self, name: str) -> str | None:
        """The value of a flag, an empty text if it has none, None if it wasn't given."""
        return next((value or "" for flag, value in self.flags if flag == name), None)

    @property
    def is_sweep(self) -> bool:
        """Whether these words ask for several jobs."""
        return self.flag("--multirun") is not None or any(
            word.lower().replace(" ", "") == "hydra.mode=multirun" for word in self.overrides)

    @property
    def only_prints(self) -> bool:
        """Whether Hydra prints something instead of running the job."""
        return any(flag in ("--cfg", "--info", "--hydra-help", "--shell-completion")
                   for flag, _ in self.flags)

    def argv(self) -> list[str]:
        """The words in the order and spelling that Hydra takes."""
        parts = list(self.overrides)
        for flag, value in self.flags:
            # config folders go through the search path, a new main folder through hydra.main
            if flag not in ("--config-dir", "--config-path"):
                parts += [flag] if value is None else [flag, value]
        return parts


def split_override(word: str) -> tuple[str, str, str | None]:
    """``+recipe=x`` as ``("+", "recipe", "x")``; the value is None without an ``=``.

    Raises:
        ConfigError: the word is no override.
    """
    match = _OVERRIDE.fullmatch(word)
    if match is None or (match["value"] is None and match["prefix"] != "~"):
        raise ConfigError(f"{word!r} is not a setting", where="command line",
                          fix="write key=value, e.g. ppo.total_episodes=2000; a recipe is "
                              "+recipe=quickstart")
    return match["prefix"], match["key"], match["value"]


def read_words(words: Sequence[str], environment_dirs: str = "") -> Words:
    """Tell flags from overrides and check the flags.

    Args:
        words: the command line after the command's name, in any order.
        environment_dirs: the value of ``PPOCLI_CONFIG_DIR``, folders joined as in ``PATH``.

    Raises:
        ConfigError: an unknown flag, a flag without its value, or flags that exclude each other.
    """
    overrides: list[str] = []
    flags: list[tuple[str, str | None]] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--" or not word.startswith("-") or _looks_like_override(word):
            overrides += [] if word == "--" else [normalised(word)]
            continue
        name, equals, attached = word.partition("=")
        name = _SHORT.get(name, name)
        value = attached if equals else None
        if name in _WITH_VALUE and value is None:
            value = rest.pop(0) if rest and not rest[0].startswith("-") else None
            if value is None:
                raise ConfigError(f"{word} needs a value", where="command line",
                                  fix=f"e.g. {word} {_CHOICES.get(name, ('NAME',))[0]}")
        elif name == "--info" and value is None and rest and rest[0] in _CHOICES["--info"]:
            value = rest.pop(0)
        _check_flag(word, name, value)
        flags.append((name, value))
    _check_together([flag for flag, _ in flags])
    given = [value for flag, value in flags if flag == "--config-dir" and value]
    return Words(tuple(overrides), tuple(flags),
                 tuple(_config_dir(folder, "--config-dir") for folder in given)
                 + tuple(_config_dir(folder, "PPOCLI_CONFIG_DIR")
                         for folder in environment_dirs.split(":") if folder))


def _looks_like_override(word: str) -> bool:
    name, equals, _ = word.partition("=")
    return bool(equals) and not name.startswith("--") and name not in _SHORT


def _check_flag(word: str, name: str, value: str | None) -> None:
    if name not in FLAGS:
        shown = word.partition("=")[0]
        keys = nearest(shown.lstrip("-").replace("-", "_"), list(schema_keys()), count=1)
        hint = (f"settings are written without dashes, e.g. {keys[0]}=..." if keys
                else "see `ppocli train --help`")
        if shown in _BEFORE:
            hint = f"it stands before the command: ppocli {shown} train ..."
        raise ConfigError(f"unknown option {shown}{did_you_mean(shown, (*FLAGS, *_OURS))}",
                          where="command line", fix=hint)
    if name in _PLAIN and value is not None:
        raise ConfigError(f"{name} takes no value", where="command line")
    if name in _CHOICES and value is not None and value not in _CHOICES[name]:
        raise ConfigError(f"{name} {value}: must be one of {', '.join(_CHOICES[name])}"
                          + did_you_mean(value, _CHOICES[name]), where="command line")


def _check_together(flags: list[str]) -> None:
    modes = [flag for flag in dict.fromkeys(flags) if flag in _EXCLUSIVE]
    if len(modes) > 1:
        raise ConfigError(f"{' and '.join(modes)} exclude each other", where="command line",
                          fix="give one of them")
    if "--resolve" in flags and "--cfg" not in flags:
        raise ConfigError("--resolve belongs to --cfg", where="command line",
                          fix="ppocli train --cfg job --resolve ...")
    if "--package" in flags and "--cfg" not in flags:
        raise ConfigError("--package belongs to --cfg", where="command line",
                          fix="ppocli train --cfg job --package ppo ...")


def _config_dir(folder: str, source: str) -> Path:
    path = Path(folder).expanduser().absolute()
    if not path.is_dir():
        raise ConfigError(f"config folder {folder} does not exist", where=source,
                          fix="give an existing folder with recipes or config groups")
    return path


def normalised(word: str) -> str:
    """The override as Hydra reads it rightly: ``recipe=x`` as ``+recipe=x``, text kept text.

    A value for a text key that Hydra's grammar would turn into a number (a commit ``12e4567``) or
    can't read at all (a path with umlauts or brackets, a template with braces) is quoted.
    """
    match = _OVERRIDE.fullmatch(word)
    if match is None or match["value"] is None or match["key"] == "resume":
        return word
    prefix, key, value = match["prefix"], match["key"], match["value"]
    if key == "recipe" and prefix == "":
        prefix = "+"
    if key in config_groups() and value == "null":
        return f"~{key}"
    schema_key = key_for(key)
    if schema_key is not None and schema_key.kind != "list":
        is_text = schema_key.kind == "scalar" and schema_key.item is str
        takes_text = is_text or (schema_key.kind == "mapping" and key != schema_key.name)
        if (is_text and _NOT_TEXT.fullmatch(value)) or (takes_text and not _readable(value)):
            value = quoted(value)
    elif key.startswith("hydra.") and key.endswith(".dir") and not _readable(value):
        value = quoted(value)
    return f"{prefix}{key}={value}"


def _readable(value: str) -> bool:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        OverridesParser.create().parse_override(f"x={value}")
    except HydraException:
        return False
    return True
