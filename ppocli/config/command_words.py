"""The words after ``ppocli train``, read once: flags told apart from settings.

Hydra reads ``recipe=x`` and ``+recipe=x`` differently, and has a grammar in which some plain text
needs quotes; here the words become what Hydra expects.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ppocli.builtin.names import config_groups
from ppocli.config import config_yaml, secrets
from ppocli.config.import_guard import TRUST
from ppocli.config.keys import (
    format_foreign_names,
    key_for,
    named_elsewhere,
    schema_keys,
    takes_escapes,
)
from ppocli.config.text import did_you_mean, nearest, pasted
from ppocli.errors import ConfigError

COMMAND_LINE = "command line"
"""the source of typed settings, in messages"""
CHOICES = {"--cfg": ("job", "deepspeed")}
SHORT = {"-c": "--cfg", "-p": "--package", "-m": "--multirun", "-cd": "--config-dir"}
ACCEPT_CHANGES = "--accept-changes"
"""a flag of ppocli: accept a config.yaml that was changed by hand"""
_WITH_VALUE = ("--cfg", "--package", "--config-dir")
_PLAIN = ("--multirun", TRUST, ACCEPT_CHANGES)
# with options of the command line that never come here; misspelt ones do
FLAGS = (*_WITH_VALUE, *_PLAIN, "--help", "--version", "--no-progress", "--dry-run")
_SETTING = re.compile(r"(\+\+|\+|~|)([^=+~\s][^=\s]*)(?:=(.*))?", re.DOTALL)
# what YAML or Hydra would turn into a number or a truth value
_NOT_TEXT = re.compile(r"[+-]?(\d[\d_]*(\.\d*)?|\.\d+)(e[+-]?\d+)?|[+-]?(inf|nan)|true|false",
                       re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: ``+recipe=x`` is ``+``, ``recipe``, ``x``; the value is None without an ``=``.
    The value is in Hydra's override grammar."""

    prefix: str
    key: str
    value: str | None

    def __str__(self) -> str:
        return f"{self.prefix}{self.key}" + ("" if self.value is None else f"={self.value}")


@dataclass(frozen=True, slots=True)
class Words:
    """The parts of a command line. ``flags`` are long names; ``config_dirs`` are absolute."""

    settings: tuple[Setting, ...]
    flags: tuple[tuple[str, str | None], ...] = ()
    config_dirs: tuple[Path, ...] = ()
    typed: tuple[str, ...] = ()
    """all words, unchanged"""

    @property
    def overrides(self) -> list[str]:
        """The settings in Hydra's form."""
        return [str(setting) for setting in self.settings]

    def value(self, key: str) -> str | None:
        """The last value of a key, without quotes; None if it isn't set, or set to nothing."""
        return next((config_yaml.unquoted(setting.value) for setting in reversed(self.settings)
                     if setting.key == key and setting.value), None)

    def flag(self, name: str) -> str | None:
        """The value of a flag, "" for a flag without value, None if it isn't there."""
        return next((value or "" for flag, value in self.flags if flag == name), None)

    def without(self, *names: str) -> Words:
        """A copy without some flags and without the settings of some keys."""
        return replace(self, settings=tuple(s for s in self.settings if s.key not in names),
                       flags=tuple(flag for flag in self.flags if flag[0] not in names))

    def adding(self, *words: str) -> Words:
        """A copy with further settings at the end."""
        return replace(self, settings=(*self.settings, *map(read_setting, words)))

    @property
    def is_sweep(self) -> bool:
        """Whether these words ask for several jobs."""
        return self.flag("--multirun") is not None

    @property
    def of_sweep(self) -> list[str]:
        """The keys of the sweep itself."""
        return [each.key for each in self.settings if each.key.startswith("sweep.")]

    @property
    def only_prints(self) -> bool:
        """Whether the words only print a configuration."""
        return self.flag("--cfg") is not None

    def argv(self) -> list[str]:
        """The words once more, settings first."""
        return [*self.overrides, *(part for flag in self.flags for part in flag if part)]


def read_words(words: Sequence[str]) -> Words:
    """Tell flags from settings and check the flags.

    Args:
        words: the command line after the command's name, in any order.

    Raises:
        ConfigError: an unknown flag, one without its value, a word that is no setting, or a secret.
    """
    settings: list[Setting] = []
    flags: list[tuple[str, str | None]] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, attached = word.partition("=")
        if word == "--" or not word.startswith("-") or (equals and name[:2] != "--"
                                                        and name not in SHORT):
            settings += [] if word == "--" else [read_setting(word)]
            continue
        name, value = SHORT.get(name, name), attached if equals else None
        if name not in (*_WITH_VALUE, *_PLAIN) or (name in _PLAIN and equals):
            raise _unknown_flag(word, rest[0] if rest and value is None else value, words)
        if name in _WITH_VALUE:
            value = rest.pop(0) if value is None and rest and rest[0][:1] != "-" else value
            choices = CHOICES.get(name, (value,))
            if value is None or value not in choices:
                raise ConfigError(f"{word} needs a value" if value is None else
                                  f"{name} {value}: must be one of {', '.join(map(str, choices))}",
                                  where=COMMAND_LINE, fix=f"e.g. {name} {choices[0] or 'NAME'}")
        flags.append((name, value))
    secrets.refuse_secrets((setting.key, setting.value, COMMAND_LINE) for setting in settings)
    return Words(tuple(settings), tuple(flags), tuple(
        _config_dir(value or "") for flag, value in flags if flag == "--config-dir"), tuple(words))


def given_words(settings: Sequence[str] | Mapping[str, Any]) -> list[str]:
    """Settings from Python, a list of words or a nested mapping, as words.

    Raises:
        ConfigError: one text, or a list that has other items than texts.
    """
    return (config_yaml.mapping_words(settings) if isinstance(settings, Mapping)
            else list_of_texts(settings, "overrides"))


def list_of_texts(values: Sequence[str], name: str) -> list[str]:
    """``values``, if it is a list of texts; one text would be taken letter by letter.

    Raises:
        ConfigError: it is one text, or not all items are texts.
    """
    if isinstance(values, str) or not all(isinstance(value, str) for value in values):
        raise ConfigError(f"{name}={values!r} is no list of texts.", where=name,
                          fix=f"{name}=[{values!r}]" if isinstance(values, str) else None)
    return list(values)


def _unknown_flag(word: str, value: str | None, words: Sequence[str]) -> ConfigError:
    """The error for an unknown option, which most often stands for a setting of ppocli or of
    another library."""
    shown = word.partition("=")[0]
    name = shown.lstrip("-").replace("-", "_")
    secrets.refuse_secrets([(name, value, COMMAND_LINE)])
    task = next((each.partition("=")[2] for each in words if each.startswith("task=")), None)
    elsewhere = named_elsewhere(name, task)
    keys = list(elsewhere) or nearest(name, list(schema_keys()), count=1)
    example = "..." if value is None or value.startswith("-") or "=" in value else value
    return ConfigError(f"unknown option {shown}" + (
        format_foreign_names(elsewhere) or did_you_mean(shown, FLAGS)), where=COMMAND_LINE,
        fix=f"settings are written without dashes: {pasted(f'{keys[0]}={example}')}" if keys else
        "see `ppocli train --help`")


def _config_dir(folder: str) -> Path:
    path = Path(folder).expanduser().absolute()
    if not path.is_dir():
        raise ConfigError(f"config folder {folder} does not exist", where="--config-dir",
                          fix="give an existing folder with recipes or config groups")
    return path


def read_setting(word: str) -> Setting:
    """A setting in the form that Hydra reads correctly: ``recipe=x`` as ``+recipe=x``, texts as
    texts.

    A value for a text key that Hydra's grammar would turn into a number (a commit ``12e4567``) or
    can't read at all (a path with umlauts or brackets, a template with braces) is quoted.

    Raises:
        ConfigError: the word is no setting.
    """
    if (match := _SETTING.fullmatch(word)) is None or (match[3] is None and match[1] != "~"):
        raise ConfigError(f"{word!r} is not a setting", where=COMMAND_LINE, fix="write key=value, "
                          "e.g. ppo.total_episodes=2000; a recipe is +recipe=quickstart")
    prefix, key, value = match.groups()
    if value is None or key == "resume":
        return Setting(prefix, key, value)
    if key in config_groups() and value == "null":
        return Setting("~", key, None)
    schema_key = key_for(key)
    is_text = schema_key is not None and schema_key.item is str and (
        schema_key.kind == "scalar" or (schema_key.kind == "sweep" and value[:1] != "["))
    takes_text = is_text or (schema_key is not None and schema_key.kind == "mapping"
                             and key != schema_key.name) or (
        key.startswith("hydra.") and key.endswith(".dir"))
    # outside of quotes Hydra drops one of two backslashes
    changed = is_text and (_NOT_TEXT.fullmatch(value) or (
        "\\" in value and value[:1] not in "'\"" and takes_escapes(key)))
    if changed or (takes_text and not _readable(value)):
        value = config_yaml.quoted(value)
    return Setting("+" if key == "recipe" and prefix == "" else prefix, key, value)


def _readable(value: str) -> bool:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        OverridesParser.create().parse_override(f"x={value}")
    except HydraException:
        return False
    return True
